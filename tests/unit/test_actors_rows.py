"""Rows of files: value conversion, duplicates, the train and held-out split, and the memory that rows take."""

import codecs
import datetime
import json
import shutil
import unicodedata
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leeway.actors.tasks import TaskError, check_task, held_out, load_encoded, load_reward, load_task
from leeway.actors.tasks.config import FileTask, ReasoningGymTask
from leeway.actors.tasks.gym import gym_problems
from leeway.actors.tasks.prompts import Template
from leeway.launch.checks import check
from leeway.launch.config import load_config, to_toml

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo_model"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return `write(rows, **changes)`, which makes a task of rows that are objects, a table or raw bytes."""
    monkeypatch.setattr("leeway.actors.tasks.prompts.HELDOUT_SHARE", 0.3)

    def written(rows, name="rows", **changes):
        path = tmp_path / f"{name}.{'parquet' if isinstance(rows, pa.Table) else 'jsonl'}"
        if isinstance(rows, pa.Table):
            pq.write_table(rows, path)
        else:
            text = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(text)
        values = {"type": "file", "path": str(path), "rewards": ("exact",), **changes}
        return FileTask(**values)

    return written


def all_problems(task):
    return [*task.train, *task.heldout]


def table(num=20, **columns):
    """Return a table of distinct questions, with columns that repeat the given values."""
    repeated = {name: pa.concat_arrays([values] * num) for name, values in columns.items()}
    length = next(iter(map(len, repeated.values())), num)
    questions = pa.array([f"{n} + 1" for n in range(length)])
    return pa.table({"question": questions, "answer": pa.array([str(n) for n in range(length)]), **repeated})


# --- values -------------------------------------------------------------------------------------------


NS = 1_700_000_000_123_456_789
ODD = {
    "date": (pa.array([datetime.date(2024, 2, 29)]), "2024-02-29"),
    "ns": (pa.array([NS], pa.timestamp("ns")), "2023-11-14 22:13:20.123456"),
    "zone": (pa.array([NS], pa.timestamp("ns", "UTC")), "2023-11-14 22:13:20.123456+00:00"),
    "duration": (pa.array([NS], pa.duration("ns")), "19675 days, 22:13:20.123456"),
    "time": (pa.array([123_456_789_123], pa.time64("ns")), "00:02:03.456789"),
    "text": (pa.array([b"caf\xc3\xa9"], pa.binary()), "caf\u00e9"),
    "bytes": (pa.array([b"\xff\x00"], pa.large_binary()), "\\xff\x00"),
    "large": (pa.array(["a"], pa.large_string()), "a"),
    "dictionary": (pa.array(["red"]).dictionary_encode(), "red"),
    "times": (pa.array([[NS]], pa.large_list(pa.timestamp("ns"))), ["2023-11-14 22:13:20.123456"]),
    "prices": (pa.array([[Decimal("1.50"), Decimal(2)]], pa.list_(pa.decimal128(9, 2))), [1.5, 2.0]),
    "struct": (pa.array([{"at": NS, "n": None}], pa.struct([("at", pa.timestamp("ns")), ("n", pa.int8())])),
               {"at": "2023-11-14 22:13:20.123456", "n": None}),
    "map": (pa.array([[("k", NS)]], pa.map_(pa.string(), pa.timestamp("ns"))), [["k", "2023-11-14 22:13:20.123456"]]),
    "null": (pa.array([None], pa.null()), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_parquet_values_become_json_values_as_python_prints_them(write, kind):
    values, expected = ODD[kind]
    problem = all_problems(load_task(write(table(value=values))))[0]
    assert problem.columns["value"] == expected


@pytest.mark.parametrize(
    ("value", "scale", "kept"),
    [("46.00", 2, 46.0), ("-0.10", 2, -0.1), ("46", 0, 46), ("12345678901234567890.25", 2, "12345678901234567890.25")],
)
def test_a_decimal_is_a_number_if_a_float_is_exact_and_is_printed_unchanged(write, value, scale, kept):
    rows = table(price=pa.array([Decimal(value)], pa.decimal256(40, scale)))
    problem = all_problems(load_task(write(rows, template="{question} {price}")))[0]
    assert (problem.columns["price"], type(problem.columns["price"])) == (kept, type(kept))
    assert problem.text.endswith(f" {value}")


def test_a_whole_decimal_matches_an_integer_answer(write):
    answers = pa.array([Decimal(n) for n in range(20)], pa.decimal128(10, 2))
    task = load_task(write(table(20).set_column(1, "answer", answers)))
    problem = all_problems(task)[0]
    assert load_reward(task.rewards[0])([problem], [problem.question.split()[0]]) == [1.0]


def test_an_unreadable_column_is_an_error_only_if_the_task_reads_it(write):
    odd = table(when=pa.array([2**62], pa.timestamp("ms")))
    check_task(write(odd))
    with pytest.raises(TaskError, match=r"task.path: .*rows.parquet is not a readable Parquet file"):
        check_task(write(odd, template="{question} {when}"))


@pytest.mark.parametrize("template", ["{context}{question}", "{context!r}{question}", "{context:>3}{question}",
                                      "{context:.2f}{question}", "{context[a][b]}{question}"])  # fmt: skip
def test_a_null_is_rendered_as_empty_text(write, template):
    rows = [{"question": f"{n}+1", "answer": "1", "context": None} for n in range(20)]
    assert sorted(each.text for each in all_problems(load_task(write(rows, template=template)))) == sorted(
        row["question"] for row in rows
    )
    nulls = table(context=pa.array([None], pa.float64() if "f}" in template else pa.string()))
    assert not any("None" in each.text for each in all_problems(load_task(write(nulls, template=template))))


@pytest.mark.parametrize("value", [[1, None], {"a": {"b": None}}])
def test_a_null_inside_a_rendered_value_is_an_error_of_its_row(write, value):
    rows = [{"question": f"{n}", "answer": "1", "context": value if n == 7 else [1]} for n in range(20)]
    with pytest.raises(TaskError, match=r"row 8: .* contains a null"):
        load_task(write(rows, template="{context} {question}"))


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_row_without_a_prompt_is_an_error_with_its_number(write, text):
    rows = [{"question": f"{n}" if n != 4 else text, "answer": "1"} for n in range(9)]
    with pytest.raises(TaskError, match=r"row 5: the prompt is empty"):
        load_task(write(rows, template="{question}"))
    with pytest.raises(TaskError, match=r"row 5: 'question' must be non-empty text"):
        load_task(write(rows))
    rows[4]["question"] = None
    with pytest.raises(TaskError, match=r"row 5"):
        load_task(write(rows, template="{question}"))


def test_columns_may_mix_types_and_hold_the_json_extensions_of_python(write):
    mixed = [1, "1", None, True, 1.5, [1, "a"], {"a": {"b": []}}, float("nan"), float("inf"), 10**30]
    rows = [{"question": f"{n} ?", "answer": mixed[n % 10], **({"more": n} if n % 3 else {})} for n in range(40)]
    for each in all_problems(load_task(write(rows))):
        n = int(each.question.split()[0])
        assert repr(each.columns["answer"]) == repr(mixed[n % 10])
        assert ("more" in each.columns) == bool(n % 3)


def test_byte_order_marks_blank_lines_and_crlf_are_ignored(write):
    rows = [{"question": f"{n}", "answer": "1"} for n in range(20)]
    text = "\r\n\r\n".join(map(json.dumps, rows)).encode()
    assert check_task(write(codecs.BOM_UTF8 + text)).rows == check_task(write(rows)).rows
    for nothing in (b"", b"\r\n\n", codecs.BOM_UTF8):
        with pytest.raises(TaskError, match="has no rows"):
            check_task(write(nothing))


# --- duplicates and splits ------------------------------------------------------------------------------


def test_duplicates_share_their_whole_prompt_and_are_counted(write):
    rows = [{"question": "What?", "context": f"{n // 2}", "answer": "1"} for n in range(40)]
    task = load_task(write(rows, template="{context} {question}", num_train=5))
    assert {each.text for each in task.train} < {f"{n} What?" for n in range(20)}
    num_heldout = len(task.heldout)
    assert task.rows == f"40 read, {5 + num_heldout} used, 20 duplicate, {15 - num_heldout} skipped"
    other = [{**row, "question": row["question"] * (1 + n % 2)} for n, row in enumerate(rows)]
    facts = check_task(write(other, template="{context} {question}"))
    assert facts.rows == "40 read, 40 used, 0 duplicate, 0 skipped"


def test_unicode_forms_of_one_text_are_one_row_in_one_split(write):
    words = [f"na\u00efve \u00e9 {n}" for n in range(60)]
    rows = [{"question": unicodedata.normalize(form, word), "answer": "1"} for word in words for form in ("NFD", "NFC")]
    task = load_task(write(rows))
    assert task.rows == "120 read, 60 used, 60 duplicate, 0 skipped"
    assert {held_out(unicodedata.normalize("NFC", each.question)) for each in task.heldout} == {True}
    assert task.train[0].text == unicodedata.normalize("NFD", task.train[0].text), (
        "the first of two duplicate rows is kept"
    )


def test_white_space_and_case_distinguish_rows(write):
    rows = [{"question": each, "answer": "1"} for n in range(20) for each in (f"a {n}", f"A {n}", f"a  {n}")]
    assert check_task(write(rows)).rows == "60 read, 60 used, 0 duplicate, 0 skipped"


@pytest.mark.parametrize("order", [1, -1])
def test_a_prompt_that_falls_in_both_splits_is_never_used_for_training(write, order):
    rows = [{"question": each, "answer": "1"} for n in range(80) for each in (f"{n}+1", f"{n} + 1")[::order]]
    task = load_task(write(rows, template="{question:compact}"))
    assert task.rows == "160 read, 80 used, 80 duplicate, 0 skipped"
    heldout = {each.text for each in task.heldout}
    assert heldout == {f"{n}+1" for n in range(80) if held_out(f"{n}+1") or held_out(f"{n} + 1")}
    assert not heldout & {each.text for each in task.train}
    few = load_task(write(rows, template="{question:compact}", num_train=10, num_heldout=2))
    assert (len(few.train), len(few.heldout)) == (10, 2)
    assert not heldout & {each.text for each in few.train}, (
        "a held-out row is never trained on, even if the held-out split is full"
    )


def test_a_row_in_both_files_is_held_out(write):
    rows = [{"question": f"{n}", "answer": "1"} for n in range(30)]
    task = load_task(write(rows, heldout_path=write(rows[5:9], "held").path))
    assert [each.question for each in task.heldout] == ["5", "6", "7", "8"]
    assert task.rows == "34 read, 30 used, 4 duplicate, 0 skipped"


def test_template_text_around_the_columns_does_not_change_the_split(write):
    rows = [{"question": f"{n} ?", "context": f"{n % 7}", "answer": "1", "meta": {"n": n}} for n in range(60)]

    def heldout(template):
        return [each.index for each in load_task(write(rows, template=template)).heldout]

    assert heldout("{context} {question}") == heldout("Read this: {context}\n\nNow: {question:compact} !")
    assert heldout("{question}") == heldout("{question}=") == heldout(None)
    assert heldout("{question}") != heldout("{context} {question}"), "a template with another column changes the split"
    assert heldout("{meta[n]} {question}"), "the split uses the JSON text of a nested column"


def test_a_template_selects_the_prompt_column(write, tmp_path):
    rows = [{"prompt": f"{n}+1", "answer": "1"} for n in range(30)]
    assert load_task(write(rows, template="{prompt}=")).train[0].text.endswith("+1=")
    config = tmp_path / "config.toml"
    rows_path = write(rows).path
    config.write_text(
        f'[model]\npath = "{DEMO}"\n[task]\ntype = "file"\npath = "{rows_path}"\ntemplate = "{{prompt}}"\n'
        'rewards = "exact"\n[algorithm]\ntype = "trajectory_balance"\n[actors]\n'
        "max_prompt_tokens = 8\nmax_new_tokens = 8\n"
    )
    made = load_config(config, ["--actors.eval_every", "5"])
    assert made.task.rewards == ("exact",)
    plan = check(made, tmp_path / "runs" / "one")
    assert "rows       30 read, 30 used, 0 duplicate, 0 skipped" in plan.describe()
    config.write_text(to_toml(made))
    assert load_config(config) == made, "the written config must read back as the same config"


def test_a_single_reward_may_be_a_string_with_a_path_relative_to_the_config(tmp_path):
    shutil.copy(EXAMPLES / "file.toml", tmp_path)
    text = (tmp_path / "file.toml").read_text()
    (tmp_path / "one.py").write_text("def exact(completions):\n    return [1.0 for _ in completions]\n")
    start, _, rest = text.partition("rewards = [")
    (tmp_path / "file.toml").write_text(f'{start}rewards = "one.py:exact" # {rest}')
    assert load_config(tmp_path / "file.toml").task.rewards == (f"{tmp_path / 'one.py'}:exact",)


def test_dataset_questions_are_counted_by_prompt_and_split_by_question():
    config = ReasoningGymTask(
        type="reasoning_gym", name="chain_sum", num_train=40, num_heldout=6,
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        template="{metadata[expression]:compact}=",
    )  # fmt: skip
    split = gym_problems(config)
    assert split.rows.startswith(f"{split.num_read} read, 46 used, {split.num_read - split.num_distinct} duplicate")
    assert all(held_out(each.question) for each in split.heldout)
    assert not any(held_out(each.question) for each in split.train)


# --- memory of a process ---------------------------------------------------------------------------------


def test_each_sample_of_a_group_has_its_own_copy_of_the_columns(write, tmp_path):
    (tmp_path / "takes.py").write_text(
        "def takes(completions, right, **columns):\n"
        "    found = [float(bool(each['all']) and each['all'].pop() == '4') for each in right]\n"
        "    for each in right: each.clear()\n"
        "    return found\n"
    )
    rows = [{"question": f"{n}", "right": {"all": ["4"]}} for n in range(20)]
    task = load_task(write(rows, rewards=(f"{tmp_path / 'takes.py'}:takes",)))
    problem = task.train[0]
    (takes,) = map(load_reward, task.rewards)
    assert takes([problem] * 8, ["4"] * 8) == takes([problem] * 8, ["4"] * 8) == [1.0] * 8
    assert problem.columns == task.train[0].columns == rows[problem.index - 1]


REWARDS = """
def named(completions, answer): ...
def optional(completions, *, level=0): ...
def reads_prompts(prompts, completions): ...
def everything(completions, **columns): ...
@staticmethod
def decorated(completions): ...
assigned = lambda completions, answer: ...
"""


@pytest.mark.parametrize(
    ("reward", "columns"),
    [("named", {"answer"}), ("optional", {"level"}), ("reads_prompts", {"question"}), ("everything", None),
     ("decorated", None), ("assigned", None)],
)  # fmt: skip
def test_an_actor_keeps_only_columns_that_rewards_read(write, tmp_path, reward, columns):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n} + 1", "answer": "1", "level": n, "other": "x" * 9} for n in range(30)]
    config = write(rows, rewards=(f"{tmp_path / 'rewards.py'}:{reward}",), template="{question:compact}=")
    task, codec = load_encoded(config, DEMO, 8)
    for problem, whole in zip(all_problems(task), all_problems(load_task(config)), strict=True):
        kept = whole.columns if columns is None else {name: whole.columns[name] for name in columns}
        assert (problem.columns, problem.text, problem.index) == (kept, whole.text, whole.index)
        assert problem.token_ids == codec.encode([whole.text])[0]
    assert task.facts().fingerprint == load_task(config).facts().fingerprint == check_task(config).fingerprint


JUDGE = {"type": "judge", "endpoint": "http://h/v1", "model": "m", "prompt": "{meta[right]} {completion}"}


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({"rewards": ("exact",)}, {"answer"}),
        ({"rewards": ("right",), "reward_rules": {"right": {"type": "exact", "column": "meta[right]"}}}, {"meta"}),
        ({"rewards": ("form",), "reward_rules": {"form": {"type": "regex", "pattern": "a"}}}, set()),
        ({"rewards": ("code",)}, {"question", "answer", "meta", "tests"}),
        ({"rewards": ("judge",), "reward_models": {"judge": JUDGE}}, {"meta"}),
    ],
)  # fmt: skip
def test_an_actor_keeps_only_columns_that_rules_and_models_read(write, changes, columns):
    rows = [{"question": f"{n}+1", "answer": "1", "meta": {"right": "1"}, "tests": "assert f()"} for n in range(20)]
    task, _ = load_encoded(write(rows, **changes), DEMO, 8)
    assert task.train[0].columns.keys() == columns


def test_a_prompt_that_kept_columns_cannot_render_is_stored(write, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = table(price=pa.array([Decimal("1.50")], pa.decimal128(9, 2)))
    config = write(rows, rewards=(f"{tmp_path / 'rewards.py'}:reads_prompts",), template="{question:compact}+{price}")
    problem = load_task(config).train[0]
    assert (problem.text[-5:], problem.columns["price"]) == ("+1.50", 1.5)
    config = config.model_copy(update={"template": "{question:compact}"})
    assert load_encoded(config, DEMO, 8)[0].train[0].text == load_task(config).train[0].text


def test_a_process_stores_only_tokens_and_columns_that_rewards_read(write):
    rows = [{"question": f"{n} " + "12+34 " * 50, "answer": str(n), "other": "x" * 1000} for n in range(500)]
    store = load_encoded(write(rows, num_heldout=100), DEMO, 400)[0].train.store
    num_bytes = sum(
        value.buffer_info()[1] * value.itemsize if hasattr(value, "buffer_info") else len(value)
        for value in vars(store).values()
        if hasattr(value, "__len__")
    )
    read = 4 * len(store.ids) + sum(len(row["answer"]) for row in rows)
    assert num_bytes < 1.2 * read
    assert not [value for value in vars(store).values() if isinstance(value, list | dict | set) and len(value) > 9]


def test_a_short_prompt_with_many_tokens_is_found_before_start(write, tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "\u732b"}, "content": "11111"}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [{"question": f"{n:05d}+123", "answer": "1"} for n in range(600)]
    rows[321]["question"] = "\u732b" * 5
    known = {"model_folder": tmp_path / "model", "max_prompt_tokens": 20, "vocab_size": 16}
    with pytest.raises(TaskError, match=r"^1 of the task's 600 prompts .* has 25 tokens"):
        check_task(write(rows), **known)


def test_the_prompts_with_the_most_bytes_are_checked(write, tmp_path, monkeypatch):
    monkeypatch.setattr("leeway.actors.tasks.task.MAX_CHECKED_PROMPTS", 5)
    rows = [{"question": f"{n:05d}+12345", "answer": "1"} for n in range(600)]
    rows[321]["question"] = "\u732b" * 5  # 15 bytes, but fewer characters than any other question
    with pytest.raises(TaskError, match=r"^5 of the 5 checked among .* has 11 tokens"):
        check_task(write(rows), model_folder=DEMO, max_prompt_tokens=4, vocab_size=16)


def test_a_format_width_from_another_column_is_kept_for_the_prompt(write, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"question": f"{n}+1", "answer": "1", "width": 6} for n in range(20)]
    config = write(rows, rewards=(f"{tmp_path / 'rewards.py'}:reads_prompts",), template="{question:1>{width}}")
    assert load_encoded(config, DEMO, 8)[0].train[0].text == load_task(config).train[0].text
    assert Template("{question:1>{width}}").columns == ["question", "width"]
