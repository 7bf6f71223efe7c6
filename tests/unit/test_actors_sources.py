"""Sources of rows: CSV, folders of shards, data sets of the Hub, filters, and prompts over the limit."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leeway.actors.tasks import TaskError, check_task, load_encoded, load_task, sources
from leeway.actors.tasks.config import FileTask
from leeway.actors.tasks.sources import files_of, read_rows
from leeway.launch.config import load_config
from leeway.launch.resources import PROMPT_BYTES, _of_prompts
from tests.unit.test_actors_rows import DEMO, all_problems

COMMIT = "a" * 40


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr("leeway.actors.tasks.prompts.HELDOUT_SHARE", 0.3)

    def made(path, **changes):
        return FileTask(**{"type": "file", "path": str(path), "rewards": ("exact",), **changes})

    return made


def sums(numbers):
    return [{"question": f"{number}+1=", "answer": str(number + 1)} for number in numbers]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(config):
    return sorted(int(each.columns["answer"]) for each in all_problems(load_task(config)))


# --- CSV ----------------------------------------------------------------------------------------------


def test_values_of_a_csv_file_are_unchanged_text(tmp_path, task):
    path = tmp_path / "rows.csv"
    lines = [f'"What, {number}?\nSay ""it""",00{number},{number}.00,' for number in range(20)]
    path.write_bytes("\r\n".join(["\ufeffquestion,answer,price,empty", *lines]).encode())
    task = load_task(task(path))
    assert len(all_problems(task)) == 20
    for problem in all_problems(task):
        number = problem.index - 1
        assert problem.text == f'What, {number}?\nSay "it"'
        values = {"answer": f"00{number}", "price": f"{number}.00", "empty": ""}
        assert dict(problem.columns) == {"question": problem.text, **values}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("question,answer\n1,2\n", r"row 1 has no column 'prompt', which is the prompt; known: answer, question"),
        ("prompt,answer\n1,2,3\n", "rows.csv is not a readable CSV file: .*Expected 2 columns, got 3"),
        ("", "rows.csv is not a readable CSV file: Empty CSV file"),
        (b"prompt\n\xff\xfe\n", "rows.csv is not a readable CSV file: .*invalid UTF8"),
    ],
)
def test_a_csv_file_without_the_column_or_damaged_is_an_error(tmp_path, task, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskError, match=message):
        load_task(task(path, question_column="prompt"))


# --- folders ------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_order_of_its_shards(tmp_path, task):
    write_jsonl(tmp_path / "train-00001-of-00003.jsonl", sums(range(10, 20)))
    pq.write_table(pa.Table.from_pylist(sums(range(10))), tmp_path / "train-00000-of-00003.parquet")
    (tmp_path / "train-00002-of-00003.csv").write_text("question,answer\n20+1=,21\n")
    (tmp_path / "README.md").write_text("# about")
    (tmp_path / ".hidden.jsonl").write_text("not JSON")
    rows = list(read_rows(str(tmp_path), "task.path", ["question"], None, {}))
    assert [int(row["answer"]) for _, _, row in rows] == list(range(1, 22))
    assert rows[10][:2] == (f"{tmp_path / 'train-00001-of-00003.jsonl'}, row 1", 1)
    assert answers(task(tmp_path)) == list(range(1, 22))


def test_a_folder_with_shards_of_two_splits_needs_a_pattern(tmp_path, task):
    for split, numbers in (("train", range(20)), ("test", range(90, 95))):
        write_jsonl(tmp_path / f"{split}-00000-of-00001.jsonl", sums(numbers))
    with pytest.raises(TaskError, match=r"has shards of 2 splits \(test, train\); .* such as .*/train-\*"):
        load_task(task(tmp_path))
    assert answers(task(tmp_path / "train-*")) == list(range(1, 21))
    found = load_task(task(tmp_path / "train-*", heldout_path=str(tmp_path / "test-*")))
    assert [each.text for each in found.heldout] == [f"{number}+1=" for number in range(90, 95)]


def test_a_source_without_readable_files_is_an_error(tmp_path):
    with pytest.raises(TaskError, match=r"has no \.jsonl, \.ndjson, \.parquet or \.csv file"):
        files_of(str(tmp_path), "task.path")
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(TaskError, match=r"rows.txt ends in '.txt'; give a .jsonl"):
        files_of(str(tmp_path / "*"), "task.path")
    with pytest.raises(TaskError, match=r"none does not exist; give a .jsonl.*, or a folder of such files"):
        files_of(str(tmp_path / "none"), "task.path")


def test_the_memory_of_prompts_counts_every_shard(tmp_path, task, monkeypatch):
    monkeypatch.setattr("leeway.launch.resources.LARGE_BYTES", 0)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(b"x" * 100)
    assert _of_prompts(task(tmp_path), 2) == {"prompts": 3 * PROMPT_BYTES * 300}
    assert _of_prompts(task("hf://org/sums"), 2) == {}


# --- the Hub ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make the cache that the library `datasets` has after a download of org/sums, and take the network away."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    sources._hub_data.cache_clear()
    folder = tmp_path / "org___sums" / "default" / "0.0.0" / COMMIT
    folder.mkdir(parents=True)
    features = datasets.Features({"question": datasets.Value("string"), "answer": datasets.Value("string")})
    splits = {}
    for split, numbers in (("train", range(20)), ("test", range(90, 95))):
        with ArrowWriter(path=str(folder / f"sums-{split}.arrow"), features=features) as writer:
            for row in sums(numbers):
                writer.write(row)
            writer.finalize()
        splits[split] = datasets.SplitInfo(split, num_examples=len(numbers), num_bytes=100, dataset_name="sums")
    info = datasets.DatasetInfo(
        features=features, builder_name="parquet", dataset_name="sums", config_name="default", version="0.0.0",
        splits=datasets.SplitDict(splits),
    )  # fmt: skip
    info.write_to_directory(str(folder))


@pytest.mark.usefixtures("hub")
def test_a_data_set_of_the_hub_is_read_from_the_offline_cache(task):
    config = task(f"hf://org/sums?revision={COMMIT}", heldout_path="hf://org/sums?split=test")
    found = load_task(config)
    assert [each.text for each in found.train] == [f"{number}+1=" for number in range(20)]
    assert [each.text for each in found.heldout] == [f"{number}+1=" for number in range(90, 95)]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"hf://org/sums?revision={'b' * 40}", f"the cache has revision {COMMIT} instead"),
        ("hf://org/none", "hf://org/none cannot be loaded: Couldn't reach 'org/none' on the Hub"),
        ("hf://org/sums?split=tset", "cannot be loaded: Unknown split"),
        ("hf://org/sums?splt=test", "has no option 'splt'; known: name, revision, split; did you mean 'split'"),
    ],
)
def test_a_data_set_that_the_cache_lacks_is_an_error(task, source, message):
    with pytest.raises(TaskError, match=message):
        load_task(task(source))


def test_without_the_library_the_error_has_the_pip_command(task, monkeypatch):
    sources._hub_data.cache_clear()
    monkeypatch.setattr(sources, "find_spec", lambda _: None)
    with pytest.raises(TaskError, match=r"needs the library datasets, .*: pip install 'datasets>=5.2,<6'$"):
        load_task(task("hf://org/sums"))


def test_paths_in_a_config_are_resolved_but_not_addresses_of_the_hub(tmp_path):
    text = (
        '[model]\npath = "model"\n[task]\ntype = "file"\npath = "hf://org/sums?split=train"\nrewards = ["exact"]\n'
        'filter = "keep.py:keep"\nchat_template = "mine.jinja"\n[algorithm]\ntype = "online_dpo"\n'
    )
    (tmp_path / "run.toml").write_text(text)
    found = load_config(tmp_path / "run.toml").task
    assert found.path == "hf://org/sums?split=train"
    assert (found.filter, found.chat_template) == (f"{tmp_path}/keep.py:keep", f"{tmp_path}/mine.jinja")


# --- filters and long prompts ---------------------------------------------------------------------------


def filtered(tmp_path, task, body):
    (tmp_path / "keep.py").write_text(f"import numpy\ndef keep(row):\n    {body}\n")
    rows = [{**row, "level": number} for number, row in enumerate(sums(range(20)))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return task(tmp_path / "rows.parquet", filter=f"{tmp_path / 'keep.py'}:keep")


@pytest.mark.parametrize("body", ["return row['level'] >= 5", "return numpy.bool_(row.pop('level') >= 5)"])
def test_a_filter_reads_any_column_and_its_rows_are_counted(tmp_path, task, body):
    folder = tmp_path / str(len(body))  # a user file is imported once per process
    folder.mkdir()
    config = filtered(folder, task, body)
    assert check_task(config).rows == "15 read, 15 used, 0 duplicate, 0 skipped, 5 removed by task.filter"
    assert answers(config) == list(range(6, 21))
    assert load_encoded(config, DEMO, 8)[0].facts().fingerprint == check_task(config).fingerprint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['levle'] > 5", r"task.filter = '.*', line 3 raised KeyError: 'levle' \(at .*, row 1\)"),
        ("return row['level']", r"task.filter = '.*' returned 0 at .*, row 1; return True to keep the row, else False"),
        ("return False", "has no rows that task.filter keeps"),
    ],
)
def test_a_filter_that_fails_or_returns_no_bool_is_an_error(tmp_path, task, body, message):
    folder = tmp_path / str(len(body))
    folder.mkdir()
    with pytest.raises(TaskError, match=message):
        check_task(filtered(folder, task, body))
    with pytest.raises(TaskError, match="does not define 'kep'"):
        check_task(task(folder / "rows.parquet", filter=f"{folder / 'keep.py'}:kep"))


def test_long_prompts_are_skipped_with_a_count_or_refused(tmp_path, task):
    path = write_jsonl(tmp_path / "rows.jsonl", sums([*range(100, 130), *range(10, 40)]))
    known = {"model_folder": DEMO, "max_prompt_tokens": 5, "vocab_size": 16}
    with pytest.raises(TaskError, match=r'^30 of the task\'s 60 prompts are longer .*task.on_long_prompt = "skip"'):
        check_task(task(path), **known)
    config = task(path, on_long_prompt="skip")
    facts = check_task(config, **known)
    assert facts.rows == "60 read, 30 used, 0 duplicate, 0 skipped, 30 too long"
    loaded, _ = load_encoded(config, DEMO, 5)
    assert loaded.facts().fingerprint == facts.fingerprint, "actors and the command must skip the same prompts"
    assert sorted(each.index for each in all_problems(loaded)) == list(range(31, 61))
    few, _ = load_encoded(task(path, on_long_prompt="skip", num_train=10, num_heldout=2), DEMO, 5)
    assert (len(few.train), len(few.heldout)) == (10, 2), "skipped prompts must not count as training prompts"
    with pytest.raises(TaskError, match=r"only 0 distinct questions that fit actors.max_prompt_tokens"):
        check_task(config, **{**known, "max_prompt_tokens": 3})
