"""Tasks: splits, templates, both adapters, and mistakes that are found before a process starts."""

import codecs
import json
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.check_export import held_out_problems

from leeway.actors.sandbox import cut_network_error
from leeway.actors.tasks import TaskError, check_task, functions, held_out, load_reward, load_task
from leeway.actors.tasks.config import FileTask, ReasoningGymTask
from leeway.actors.tasks.prompts import file_problems
from leeway.actors.tasks.task import Task, json_safe
from leeway.launch.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def gym(**changes):
    values = {"type": "reasoning_gym", "name": "chain_sum", "params": SUMS, "num_train": 300, "num_heldout": 60}
    return ReasoningGymTask(**{**values, **changes})


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        "def exact(completions, answer, **columns):\n"
        "    return [float(one == right) for one, right in zip(completions, answer)]\n"
        "async def short(prompts, completions):\n"
        "    return [None if len(one) > 3 else 0.25 for one in completions]\n"
        "def needs(completions, anwser):\n"
        "    return []\n"
    )
    return path


@pytest.fixture
def file_task(tmp_path, rewards):
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{a} + 1 ?", "answer": str(a + 1), "level": {"digits": 1}} for a in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "question": " 0 +1 ? "}, rows[1]]))
    return FileTask(type="file", path=str(path), rewards=(f"{rewards}:exact", f"{rewards}:short"))


def test_seeds_and_templates_do_not_move_questions_between_splits():
    one = load_task(gym(params={**SUMS, "seed": 1}))
    two = load_task(gym(params={**SUMS, "seed": 2}, template="{metadata[expression]:compact}="))
    heldout = {problem.question for task in (one, two) for problem in task.heldout}
    train = {problem.question for task in (one, two) for problem in task.train}
    assert not heldout & train
    assert all(held_out(question) for question in heldout)
    assert sum(held_out(str(n)) for n in range(4000)) / 4000 == pytest.approx(0.125, abs=0.03)


@pytest.mark.process
def test_prompts_are_distinct_and_the_same_in_every_process():
    task = load_task(gym())
    assert len({problem.text for problem in task.train}) == 300
    code = (
        "import sys; from leeway.actors.tasks import check_task;"
        "from leeway.actors.tasks.config import ReasoningGymTask;"
        f"facts = check_task(ReasoningGymTask.model_validate_json({gym().model_dump_json()!r}));"
        "print(facts.fingerprint, [name for name in ('torch', 'vllm', 'ray') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == f"{task.facts().fingerprint} []"


def test_chain_sum_with_a_template_is_scored_by_its_dataset():
    task = load_task(gym(template="{metadata[expression]:compact}="))
    problem = task.prompt(0)
    assert problem.text == "".join(problem.columns["metadata"]["expression"].split()) + "="
    (score,) = task.rewards
    assert score.name == "chain_sum"
    assert load_reward(score)([problem, problem], [f" {problem.columns['answer']} ", "no"])[0] == 1.0
    tagged = load_reward(load_task(gym(answer_tag="answer")).rewards[0])
    values = tagged([problem] * 2, [f"so <answer>{problem.columns['answer']}</answer>", problem.columns["answer"]])
    assert values[0] == 1.0
    assert values[1] < 1.0


def test_a_file_task_is_split_deduplicated_and_scored_with_its_columns(file_task):
    task = load_task(file_task)
    assert len(task.train) + len(task.heldout) == 61
    assert task.rows == "62 read, 61 used, 1 duplicate, 0 skipped", "rows that differ only in white space are distinct"
    assert all(held_out(problem.question) for problem in task.heldout)
    exact, short = task.rewards
    assert (exact.name, short.name) == ("exact", "short")
    problem = task.prompt(0)
    assert load_reward(exact)([problem, problem], [problem.columns["answer"], "x"]) == [1.0, 0.0]
    facts = check_task(file_task)
    assert (facts.fingerprint, facts.column_digests) == (task.facts().fingerprint, task.column_digests())


def test_column_digests_identify_the_changed_column_and_ignore_key_order(tmp_path, file_task):
    def digests(**more) -> dict:
        rows = [{"question": f"{n}+1", "answer": str(n + 1), "meta": {"a": n, "b": 0}} for n in range(20)]
        rows[7] |= more
        (tmp_path / "digested.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        task = file_task.model_copy(update={"path": str(tmp_path / "digested.jsonl")})
        return check_task(task).column_digests

    before = digests()
    assert digests(meta={"b": 0, "a": 7}) == before
    for more in ({"answer": "8 "}, {"answer": 8}, {"meta": {"a": 7, "b": 1}}):
        (name,) = more
        assert {each for each, digest in digests(**more).items() if digest != before[each]} == {name}


def test_a_reward_file_may_define_a_dataclass_and_import_sibling_modules(tmp_path, file_task, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_rewards.py").write_text("def worth(grade): return grade.value / 4\n")
    path = tmp_path / "graded.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from beside_rewards import worth\n"
        "@dataclass\n"
        "class Grade:\n"
        "    value: int\n"
        "def graded(completions):\n"
        "    return [worth(Grade(len(one))) for one in completions]\n"
    )
    (graded,) = load_task(file_task.model_copy(update={"rewards": (f"{path}:graded",)})).rewards
    assert load_reward(graded)([None], ["abc"]) == [0.75]


def test_a_failed_import_of_a_reward_file_leaves_no_module_behind(tmp_path, file_task, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "broken.py"
    path.write_text("def reward(completions): return [0.0 for _ in completions]\nraise RuntimeError('no licence')\n")
    config = file_task.model_copy(update={"rewards": (f"{path}:reward",)})
    for _ in range(2):
        with pytest.raises(TaskError, match=r"importing .*broken.py failed: RuntimeError: no licence"):
            load_reward(load_task(config).rewards[0])


def test_rows_of_a_separate_heldout_parquet_file_are_never_used_for_training(tmp_path, file_task):
    for name, numbers in (("train", range(20)), ("test", range(15, 25))):
        table = pa.table({"question": [f"{n}+1" for n in numbers], "answer": [str(n + 1) for n in numbers]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    config = file_task.model_copy(
        update={"path": str(tmp_path / "train.parquet"), "heldout_path": str(tmp_path / "test.parquet")}
    )
    task = load_task(config)
    assert [problem.question for problem in task.train] == [f"{n}+1" for n in range(15)]
    assert len(task.heldout) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "chainsum"}, "did you mean 'chain_sum'"),
        ({"params": {"min_term": 2}}, "task.params.min_term.*did you mean 'min_terms'"),
        ({"params": {"min_terms": 0}}, "min_terms must be positive"),
        ({"params": {"size": 3}}, "set task.num_train"),
        ({"params": {"max_terms": 1, "min_terms": 1, "max_digits": 1}}, "has only 10 distinct questions"),
        ({"template": "{metadata[expresion]}="}, "did you mean 'expression'"),
        ({"template": "{question.__class__}"}, "is not a template field"),
        ({"template": "Add:"}, "names no column"),
        ({"template": "{question"}, "cannot be parsed"),
        ({"rewards": ("nowhere.py:f",)}, "no file .*nowhere.py"),
        ({"rewards": ("exactly",)}, "not of the form FILE.py:FUNCTION.*did you mean 'exact'"),
    ],
)
def test_a_mistake_in_a_gym_task_is_found_before_a_process_starts(changes, message):
    with pytest.raises(TaskError, match=message):
        check_task(gym(**changes))


def test_a_mistake_in_a_file_task_is_found_without_running_the_reward_file(tmp_path, rewards, file_task):
    for changes, message in (
        ({"path": "nowhere.jsonl"}, "task.path: .*nowhere.jsonl does not exist"),
        ({"template": "{qestion}"}, "did you mean 'question'"),
        ({"template": "{levle[digits]}"}, "did you mean 'level'"),
        ({"rewards": ()}, "task.rewards is empty"),
        ({"rewards": (f"{rewards}:exat",)}, "defines no 'exat'.*did you mean 'exact'"),
        ({"rewards": (f"{rewards}:needs",)}, "needs an argument 'anwser'.*did you mean 'answer'"),
        ({"rewards": (f"{rewards}:exact", f"{rewards}:exact")}, "twice"),
        ({"num_train": 500}, "only 61 distinct questions"),
    ):
        with pytest.raises(TaskError, match=message):
            check_task(file_task.model_copy(update=changes))
    (tmp_path / "heavy.py").write_text("raise SystemExit('was run')\ndef reward(completions): ...\n")
    check_task(file_task.model_copy(update={"rewards": (f"{tmp_path / 'heavy.py'}:reward",)}))
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n{"question": }\n')
    with pytest.raises(TaskError, match=r"bad.jsonl, line 2 is not JSON"):
        check_task(file_task.model_copy(update={"path": str(tmp_path / "bad.jsonl")}))


def test_the_error_for_long_prompts_has_their_count_and_the_longest_length(file_task, monkeypatch):
    monkeypatch.setattr("leeway.actors.tasks.prompts.HELDOUT_SHARE", 0.5)

    class Letters:
        def encode(self, texts):
            return [list(text.encode()) for text in texts]

    class Nothing(Letters):
        def encode(self, texts):
            return [[] for _ in texts]

    def task(codec):
        split, _ = file_problems(file_task, None, codec)
        return Task(split.train, split.heldout, (), split.rows, split.store)

    split = task(Letters())
    lengths = [len(problem.text) for problem in (*split.train, *split.heldout)]
    assert sorted(set(lengths)) == [7, 8], "the prompts contain numbers of one or two digits"
    with pytest.raises(TaskError, match=rf"^{lengths.count(8)} of the task's 61 prompts are longer .* = 7; .* has 8"):
        split.check_lengths(7)
    with pytest.raises(TaskError, match=r"max_prompt_tokens = 8, shorten"):
        split.check_lengths(5)
    with pytest.raises(
        TaskError, match=r"^61 of the task's 61 prompts have no tokens; the first is training prompt 0 "
    ):
        task(Nothing()).check_lengths(5)
    split.check_lengths(8)
    for half in (split.train, split.heldout):
        assert [problem.token_ids for problem in half] == Letters().encode([problem.text for problem in half])


def test_check_task_finds_prompts_with_too_many_tokens():
    config = gym(template="{metadata[expression]:compact}=")
    known = {"model_folder": EXAMPLES / "demo_model", "vocab_size": 16}
    found = check_task(config, **known, max_prompt_tokens=8)
    assert found == replace(check_task(config), end_of_turn=(1, "<eos>", "tokenizer"))
    with pytest.raises(TaskError, match=r"^360 of the task's 360 prompts are longer than .* = 3"):
        check_task(config, **known, max_prompt_tokens=3)
    with pytest.raises(TaskError, match=r"token 15 for a prompt, but the model has a vocabulary of 15"):
        check_task(config, **{**known, "vocab_size": 15}, max_prompt_tokens=8)


def test_check_task_samples_prompts_and_always_includes_the_longest(file_task, monkeypatch):
    class Letters:
        seen: ClassVar[list[str]] = []

        def encode(self, texts):
            self.seen += texts
            return [list(text.encode()) for text in texts]

    monkeypatch.setattr("leeway.actors.tasks.prompts.HELDOUT_SHARE", 0.5)
    task = load_task(file_task)
    for key, value in (("MAX_CHECKED_PROMPTS", 8), ("MAX_CHECKED_BYTES", 20)):
        monkeypatch.setattr(f"leeway.actors.tasks.task.{key}", value)
        Letters.seen.clear()
        task.check_prompts(Letters(), 8, 256)
        assert 1 < len(Letters.seen) <= 8
        assert len(Letters.seen[0]) == 8
    assert sum(map(len, Letters.seen)) <= 20
    with pytest.raises(TaskError, match=r"^2 of the 2 checked among the task's 61 prompts .* = 7; .* has 8"):
        task.check_prompts(Letters(), 7, 256)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("import no_such_library", "importing .*reward.py failed: ModuleNotFoundError: No module named 'no_such_lib"),
        ("import sys\nsys.exit('no licence')", "reward.py exited the process with status 1: no licence"),
        ("import os\nprint('out', flush=True)\nos._exit(3)", r"importing .*reward.py exited the process with status 3"),
        ("import os\nos.abort()", r"importing .*reward.py ended the process with status -6"),
        ("import time\ntime.sleep(60)", r"timed out after 2 s"),
        ("print('\"a word\"')", None),
    ],
)
@pytest.mark.process
def test_a_reward_file_is_imported_in_a_separate_process(tmp_path, file_task, start, message):
    path = tmp_path / "reward.py"
    path.write_text(f"{start}\ndef reward(completions): return [0.0 for _ in completions]\n")
    config = file_task.model_copy(update={"rewards": (f"{path}:reward",)})
    with nullcontext() if message is None else pytest.raises(TaskError, match=message):
        check_task(config, import_limit_s=2.0 if "sleep" in start else 60.0)


@pytest.mark.process
def test_a_reward_file_that_needs_the_network_fails_if_rewards_have_none(tmp_path, file_task):
    if why := cut_network_error():
        pytest.skip(why)
    path = tmp_path / "reward.py"
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)\n"
        path.write_text(f"{code}def reward(completions): return [0.0 for _ in completions]\n")
        config = file_task.model_copy(update={"rewards": (f"{path}:reward",)})
        check_task(config, import_limit_s=60.0)
        with pytest.raises(TaskError, match=r"importing .*reward.py failed: ConnectionRefusedError"):
            check_task(config.model_copy(update={"reward_network": False}), import_limit_s=60.0)


@pytest.mark.process
def test_a_kernel_that_cannot_cut_the_network_is_an_error_before_start(file_task, monkeypatch):
    monkeypatch.setattr(functions, "cut_network_error", lambda: "Operation not permitted (unshare)")
    check_task(file_task, import_limit_s=60.0)
    with pytest.raises(TaskError, match=r"reward_network = false, but .* \(Operation not permitted .*user namespaces"):
        check_task(file_task.model_copy(update={"reward_network": False}), import_limit_s=60.0)


def test_a_byte_order_mark_is_ignored(tmp_path, file_task):
    path = Path(file_task.path)
    before = check_task(file_task)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert check_task(file_task) == before


@pytest.mark.parametrize("own_file", [False, True])
def test_the_held_out_split_of_a_large_file_is_bounded(tmp_path, file_task, monkeypatch, own_file):
    monkeypatch.setattr("leeway.actors.tasks.prompts.MAX_HELDOUT", 5)
    monkeypatch.setattr("leeway.actors.tasks.prompts.HELDOUT_SHARE", 0.5)
    changes = {}
    if own_file:
        rows = [{"question": f"{a} + 1 ?", "answer": str(a + 1)} for a in range(50, 90)]
        (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = {"heldout_path": str(tmp_path / "test.jsonl")}
    task = load_task(file_task.model_copy(update=changes))
    assert len(task.heldout) == 5
    assert own_file or not any(held_out(problem.question) for problem in task.train), (
        "no held-out row may be in the training split"
    )
    assert len(load_task(file_task.model_copy(update={**changes, "num_heldout": 7})).heldout) == 7


def test_the_file_task_example_scores_its_own_rows():
    from leeway.launch.config import load_config

    config = load_config(EXAMPLES / "file.toml")
    task = load_task(config.task)
    rows = [json.loads(line) for line in (EXAMPLES / "file_rows.jsonl").read_text().splitlines()]
    assert len(task.train) + len(task.heldout) == len(rows)
    problem = task.prompt(0)
    answer = problem.columns["answer"]
    answers = [answer, f"{int(answer) + 10}", ""]
    totals = [sum(load_reward(reward)([problem], [text])[0] for reward in task.rewards) for text in answers]
    assert totals == [config.task.correct_at, 0.2, 0.0]
    check_task(
        config.task,
        model_folder=EXAMPLES / "demo_model",
        max_prompt_tokens=config.actors.max_prompt_tokens,
        vocab_size=16,
    )


def test_the_error_for_a_rejected_system_turn_names_the_config_keys(tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(EXAMPLES / "demo_model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    model = {"model_folder": tmp_path / "model", "max_prompt_tokens": 512, "vocab_size": 18}
    config = gym(num_train=8, num_heldout=2, template="{metadata[expression]:compact}=", chat=True)
    check_task(config, **model)
    with pytest.raises(TaskError, match=r"rejects .* system, user: System role not supported.*task\.system_prompt"):
        check_task(config.model_copy(update={"system_prompt": "1"}), **model)


ENDED = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}+<end>{% endif %}{% endfor %}"
NO_ANSWERS = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}<end>"


BY_TEMPLATE, BY_TOKENIZER = (16, "<end>", "chat template"), (1, "<eos>", "tokenizer")


@pytest.mark.parametrize(("template", "end"), [(ENDED, BY_TEMPLATE), (NO_ANSWERS, BY_TOKENIZER)])
def test_the_end_of_turn_comes_from_the_template_or_else_the_tokenizer(tmp_path, template, end):
    from transformers import AutoTokenizer

    shutil.copytree(EXAMPLES / "demo_model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<end>"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    model = {"model_folder": tmp_path / "model", "max_prompt_tokens": 512, "vocab_size": 17}
    config = gym(num_train=8, num_heldout=2, template="{metadata[expression]:compact}=", chat=True)
    assert check_task(config, **model).end_of_turn == end
    assert check_task(config.model_copy(update={"chat": False}), **model).end_of_turn == BY_TOKENIZER


TURNS = "{% for m in messages %}[{{ m.role }}]HEAD{{ m.content }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}[assistant]STARTS{% endif %}"
LAST_ALONE = "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"


@pytest.mark.parametrize(
    ("head", "starts", "found"),
    [
        ("", "", ""),
        ("", "<think>\n", "<think>"),
        ("", "First, ", "First,"),
        (LAST_ALONE, "", ""),
        (LAST_ALONE, "<think></think>", "<think></think>"),
        ("{% if m.role == 'assistant' %}<reasoning>{% endif %}", "<reasoning>", "<reasoning>"),
        ("{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}", "<answer>", "<answer>"),
    ],
)
@pytest.mark.parametrize("system_prompt", [None, "1"])
def test_answer_text_that_a_template_adds_to_the_prompt_is_detected(tmp_path, head, starts, found, system_prompt):
    from transformers import AutoTokenizer

    from leeway.actors.tasks.chat import PromptCodec

    shutil.copytree(EXAMPLES / "demo_model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TURNS.replace("HEAD", head) + ASKS.replace("STARTS", starts)
    tokenizer.save_pretrained(tmp_path / "model")
    codec = PromptCodec(tmp_path / "model", chat=True, system_prompt=system_prompt)
    assert codec.answer_start("a question that ends with <think>") == found


def test_answer_text_at_the_end_of_a_plain_prompt_is_detected():
    from leeway.actors.tasks.chat import PromptCodec

    codec = PromptCodec(EXAMPLES / "demo_model", chat=False, system_prompt=None)
    assert codec.answer_start("1+1=? <Think>\n") == "<Think>"
    assert codec.answer_start("write <answer> around it") == ""


TWO_OF_THEM = {
    "datasets": [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "gcd", "weight": 2, "config": {}}]
}


@pytest.mark.parametrize("name", ["acre", "gsm_symbolic", "list_functions", "word_ladder", "composite"])
def test_composite_datasets_and_those_that_draw_all_items_at_once_are_streamed(name):
    """Drawing all 2**31 items of one of the first three datasets would exhaust the memory."""
    params = TWO_OF_THEM if name == "composite" else {}
    task = load_task(gym(name=name, params=params, num_train=8, num_heldout=2))
    (reward,) = map(load_reward, task.rewards)
    answers = [problem.columns["answer"] for problem in task.train]
    assert reward(task.train, answers) == [1.0] * 8


@pytest.mark.parametrize("answer", ["2 x 3", "It is 2 \N{MULTIPLICATION SIGN} 3"])
def test_an_answer_that_a_dataset_cannot_parse_is_wrong(answer):
    task = load_task(gym(name="prime_factorization", params={}, num_train=2, num_heldout=1))
    (reward,) = map(load_reward, task.rewards)
    assert reward(task.train, [answer, task.train[1].columns["answer"]]) == [0.0, 1.0]


@pytest.mark.parametrize("answer", ["nan", "N a N", "nan+1i"])
def test_nan_is_a_wrong_complex_number(answer):
    task = load_task(gym(name="complex_arithmetic", params={}, num_train=2, num_heldout=1))
    (reward,) = map(load_reward, task.rewards)
    assert reward(task.train, [answer, task.train[1].columns["answer"]]) == [0.0, 1.0]


def test_a_prompt_excludes_an_end_of_sequence_token_added_by_the_tokenizer(tmp_path):
    from tokenizers import processors
    from transformers import AutoTokenizer

    from leeway.actors.tasks.chat import PromptCodec

    shutil.copytree(EXAMPLES / "demo_model", tmp_path / "model")
    plain = PromptCodec(tmp_path / "model", chat=False, system_prompt=None).encode(["1+2=", "2="])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    around = processors.TemplateProcessing(single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = around
    tokenizer.save_pretrained(tmp_path / "model")
    codec = PromptCodec(tmp_path / "model", chat=False, system_prompt=None)
    assert codec.encode(["1+2=", "2="]) == [[0, *ids] for ids in plain]


def test_columns_are_converted_to_json():
    assert json_safe({"a": (1, 2), ("k",): 1, "s": {3}}) == {"a": [1, 2], "s": [3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_weights": {"exact": 0.0}}, "weights of all rewards sum to 0"),
        ({"rewards": ("exact", "math"), "reward_weights": {"math": -1.0}}, "weights of all rewards sum to 0"),
        ({"reward_weights": {"math": 1.0}}, "reward_weights names 'math', but rewards has only exact"),
        ({"informative_rewards": ("math",)}, "informative_rewards names 'math', but rewards has only exact"),
        ({"overlong_penalty": {"from": 6, "to": 6}}, "overlong_penalty needs two numbers of tokens"),
        ({"overlong_penalty": {"from": 6}}, "overlong_penalty needs two numbers of tokens"),
        ({"stop": ("",)}, "at least 1 character"),
    ],
)
def test_weights_limits_and_stops_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        FileTask(**{"type": "file", "path": "rows.jsonl", "rewards": ("exact",), **changes})


def test_a_long_answer_loses_reward_linearly_between_two_limits():
    config = FileTask(type="file", path="r.jsonl", rewards=("exact",), overlong_penalty={"from": 512, "to": 640})
    found = [config.length_penalty(number) for number in (0, 512, 513, 576, 640, 641, 9999)]
    assert found == [0.0, 0.0, -1 / 128, -0.5, -1.0, -1.0, -1.0]


def test_prompts_are_encoded_plain_or_as_chat_and_decoding_drops_special_tokens(tmp_path):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from leeway.actors.tasks.chat import PromptCodec

    words = {token: number for number, token in enumerate(["<eos>", "<unk>", "1", "2", "+", "=", "U", "S", "A"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path)
    codec = PromptCodec(tmp_path, chat=False, system_prompt=None)
    assert codec.encode(["1+2=", "2="]) == [[2, 4, 3, 5], [3, 5]]
    assert codec.decode([2, 3, 0]) == "12"
    with pytest.raises(TaskError, match="has no chat template"):
        PromptCodec(tmp_path, chat=True, system_prompt=None)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'S' if m.role == 'system' else 'U' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    codec = PromptCodec(tmp_path, chat=True, system_prompt="1")
    assert codec.encode(["2="]) == [[7, 2, 6, 3, 5, 8]]
    assert codec.end_of_turn() == (0, "<eos>", "tokenizer"), "the template appends nothing to an answer"
    with pytest.raises(TaskError, match="does not exist"):
        PromptCodec(tmp_path / "none", chat=False, system_prompt=None)


def test_the_script_that_checks_an_export_evaluates_the_held_out_problems_of_the_demo():
    heldout = load_task(load_config(EXAMPLES / "demo.toml").task).heldout
    assert [prompt for prompt, _ in held_out_problems()] == [problem.text for problem in heldout]
