"""Several teachers with their own prompts: checks of the config, and the context of each process."""

import json
from pathlib import Path

import pytest

from leeway.actors.tasks import Problem, TaskError, check_task, load_task
from leeway.actors.tasks.prompts import teachers_of
from leeway.launch.checks import Plan, check, check_fetched
from leeway.launch.cli import main
from leeway.launch.config import load_config, to_toml
from leeway.launch.errors import ConfigError, ExitStatus
from leeway.launch.resources import stage_need
from tests.unit.made_up_run import context
from tests.unit.small_models import Model

STUDENT = Path(__file__).parents[2] / "examples" / "demo_model"
CONFIG = f"""
[model]
path = "{STUDENT}"
[model.teachers]
math = "{STUDENT}"
code = "{STUDENT}"
[task]
type = "file"
path = "questions.jsonl"
template = "{{question}}="
rewards = ["exact"]
teacher_column = "domain"
[algorithm]
type = "distillation"
[actors]
max_prompt_tokens = 8
max_new_tokens = 8
[tracking]
to = []
"""


def rows() -> list[dict[str, object]]:
    """Return sums; a sum with an odd first number has the domain "code"."""
    return [
        {"question": f"{a}+{b}", "answer": str(a + b), "domain": "code" if a % 2 else "math"}
        for a in range(10, 40)
        for b in range(10, 14)
    ]


@pytest.fixture
def write(tmp_path):
    """`write((old, new), ..., rows=rows())` writes the config with replaced text, and a file with the rows."""

    def written(*replaced: tuple[str, str], rows=rows()) -> Path:  # noqa: B008 -- never changed
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
        text = CONFIG
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "config.toml").write_text(text)
        return tmp_path / "config.toml"

    return written


def plan(path: Path, *overrides: str) -> Plan:
    return check(load_config(path, overrides), path.parent / "runs" / "one")


def test_every_process_receives_the_teachers_and_the_teacher_of_each_prompt(write, tmp_path, capsys):
    other = Model("llama", tied=False).save(tmp_path / "other", vocab_size=16, max_position_embeddings=64)
    path = write((f'code = "{STUDENT}"', 'code = "other"'))
    made = plan(path)
    received = context(made)
    assert received.reference_paths == (STUDENT, other), "a path is relative to the file that names it"
    train = load_task(made.config.task).train
    assert received.teacher_of_prompt == bytes(problem.columns["domain"] == "code" for problem in train)
    assert len(received.teacher_of_prompt) == received.facts.num_prompts
    assert main(["train", str(path), "--run.dir", str(tmp_path / "runs"), "--dry-run"]) == ExitStatus.OK
    num_code = sum(received.teacher_of_prompt)
    line = f"teachers   math for {len(train) - num_code} prompts, code for {num_code} prompts\n"
    assert line in capsys.readouterr().out


def test_without_teachers_one_reference_scores_all_prompts(write):
    path = write(
        (f'[model.teachers]\nmath = "{STUDENT}"\ncode = "{STUDENT}"\n', ""), ('teacher_column = "domain"\n', "")
    )
    received = context(plan(path, "--model.reference_path", str(STUDENT)))
    assert (received.reference_paths, received.teacher_of_prompt) == ((STUDENT,), b"")
    model_itself = context(plan(path, "--algorithm.type", "trajectory_balance"))
    assert model_itself.reference_paths == (model_itself.model_path,)


def with_row(**changes: object) -> list[dict[str, object]]:
    return [{**row, **changes} if row["question"] == "12+11" else row for row in rows()]


LONE = f'[model.teachers]\nmath = "{STUDENT}"\ncode = "{STUDENT}"\n'


@pytest.mark.parametrize(
    ("replaced", "data", "expected"),
    [
        ([], with_row(domain="maths"), "'domain' is 'maths' in row 10 ('12+11'), but model.teachers has no teacher"),
        ([], with_row(domain="maths"), "known: code, math; did you mean 'math'?"),
        ([], with_row(domain=None), "is null in row 10"),
        ([], with_row(domain=7), "is 7 in row 10"),
        ([('"domain"', '"domains"')], rows(), "task.teacher_column = 'domains' is not in row"),
        ([('"domain"', '"domains"')], rows(), "known: answer, domain, question; did you mean 'domain'?"),
        ([('"domain"', '"domain[source]"')], rows(), "task.teacher_column = 'domain[source]' is null in row"),
        ([], [{**row, "domain": "math"} for row in rows()], "model.teachers.code has no prompts"),
        ([('"distillation"', '"off_policy_ppo"')], rows(), "model.teachers.math has no effect: algorithm.type = "),
        ([('teacher_column = "domain"\n', "")], rows(), "model.teachers has math, code, but no prompt is assigned"),
        ([(LONE, "")], rows(), "task.teacher_column = 'domain', but there are no teachers"),
        ([(LONE, ""), ('teacher_column = "domain"\n', "")], rows(), "there is no teacher"),
        (
            [("[model.teachers]", f'reference_path = "{STUDENT}"\n[model.teachers]')],
            rows(),
            "model.reference_path scores all prompts, but each teacher scores only its own: set one of the two keys",
        ),
        ([(f'math = "{STUDENT}"', 'math = "nowhere"')], rows(), "model.teachers.math: model "),
        ([(f'math = "{STUDENT}"', 'math = "other"')], rows(), "model.teachers.math has a vocabulary of 48 tokens, but"),
        ([(f'math = "{STUDENT}"', "math = 3")], rows(), "model.teachers.math = 3: input should be a valid string"),
    ],
)
def test_invalid_teachers_are_one_sentence_and_status_2(write, tmp_path, capsys, replaced, data, expected):
    Model("llama", tied=True).save(tmp_path / "other", max_position_embeddings=64)
    capsys.readouterr()  # discards the output of saving the model
    status = main(["train", str(write(*replaced, rows=data)), "--run.dir", str(tmp_path / "runs")])
    error = capsys.readouterr().err
    assert (status, expected in error, error.count("\n")) == (ExitStatus.WRONG_INPUT, True, 1), error
    assert not (tmp_path / "runs").exists()


def test_recorded_samples_have_no_teachers(write, tmp_path):
    samples = {"prompt_ids": [3, 12], "completion_ids": [4, 1], "logprobs": [-0.5, -0.25], "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text(json.dumps(samples))
    recorded = ("--buffer.source", str(tmp_path / "samples.jsonl"), "--weight_sync.max_lag", "unbounded")
    with pytest.raises(ConfigError, match=r"model\.teachers score the prompts of \[task\], but the recorded"):
        plan(write(), *recorded)


def test_a_model_fetched_later_is_checked_against_its_teachers(write, tmp_path):
    made = plan(write((f'path = "{STUDENT}"\n[model', 'path = "some/body"\n[model')))
    assert made.model is None
    assert check_fetched(made, STUDENT).model.vocab_size == 16
    later = Model("llama", tied=True).save(tmp_path / "later", max_position_embeddings=64)
    for file in STUDENT.glob("tokenizer*"):
        (later / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="has a vocabulary of 16 tokens, but the model has 48"):
        check_fetched(made, later)


def test_a_teacher_may_have_any_name_and_the_resolved_config_keeps_its_folder(write, tmp_path):
    odd = [{**row, "domain": "a.b/c d" if row["domain"] == "code" else "math"} for row in rows()]
    (tmp_path / "code").symlink_to(STUDENT)
    path = write((f'code = "{STUDENT}"', '"a.b/c d" = "code"'), rows=odd)
    config = plan(path).config
    assert config.model.teachers == {"math": str(STUDENT), "a.b/c d": str(tmp_path / "code")}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "elsewhere" / "config.toml") == config


def test_prompts_with_other_teachers_are_another_task(write):
    def fingerprint(data) -> str:
        config = load_config(write(rows=data))
        return check_task(config.task, teachers=tuple(config.model.teachers)).fingerprint

    assert fingerprint(rows()) == fingerprint(rows())
    swapped = [{**row, "domain": "math" if row["domain"] == "code" else "code"} for row in rows()]
    assert fingerprint(rows()) != fingerprint(swapped)


def test_the_teacher_column_may_be_nested_and_must_be_text():
    def problem(**columns: object) -> Problem:
        return Problem("q", "q", columns)

    found = teachers_of([problem(meta={"source": name}) for name in "bab"], "meta[source]", ["a", "b"])
    assert found == bytes([1, 0, 1])
    with pytest.raises(TaskError, match="is 1 in row 0"):
        teachers_of([problem(meta={"source": 1})], "meta[source]", ["1"])


def test_the_need_of_a_stage_counts_every_teacher_by_its_own_size(write, tmp_path):
    Model("llama", tied=True).save(tmp_path / "large", vocab_size=16, hidden_size=512, max_position_embeddings=64)
    large = (f'code = "{STUDENT}"', 'code = "large"')

    def reference(path: Path) -> int:
        need = stage_need(load_config(path, ["--learner.gpus", "1", "--learner.num_stages", "1"]))
        return need.parts["reference"]

    twice, mixed = reference(write()), reference(write(large))
    only = (f'math = "{STUDENT}"\ncode = "{STUDENT}"', 'code = "large"')
    assert mixed == twice // 2 + reference(write(only))
    assert mixed > 2 * twice
    gone = (f'code = "{STUDENT}"', 'code = "nowhere"')
    assert stage_need(load_config(write(gone), ["--learner.gpus", "1"])) is None
