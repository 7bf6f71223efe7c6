"""Parquet exports contain all stored samples and are never partial."""

import re
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.errors import StoreError
from leeway.buffer.offline import inspect as inspecting
from leeway.buffer.offline.inspect import STATE, TEXT, Inspection, export, newest_trained, version_bounds
from leeway.buffer.rows import SPAN
from leeway.buffer.store import Store
from leeway.buffer.tables import Tries
from leeway.launch.api import Run
from leeway.launch.run_folder import RunFolder
from tests.world.buffer import Actor, InProcessBuffer, facts

PAGE = Path(__file__).parents[2] / "docs" / "buffer.md"


@pytest.fixture
def run(tmp_path):
    """Create a finished store with two steps of two groups, all sampled at version 0, and four unused groups."""
    buffer = InProcessBuffer(tmp_path / "run" / "buffer", facts())
    buffer.begin()
    actor = Actor(buffer)
    for number, lease in enumerate(actor.lease()):
        actor.work(lease, reward=number / 4, num_completion_tokens=2 + number)
    first, _ = buffer.draw(1, 0)
    scores = [np.full(tokens, -0.25, np.float32) for tokens in (2, 2, 3, 3)]
    buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(first.record_ids, scores))
    buffer.finish(1, 1)
    buffer.draw(2, 1)
    buffer.finish(2, 2)
    buffer.close()
    return tmp_path / "run"


def exported(folder, out):
    with Inspection.open(folder) as inspection:
        return export(inspection, out)


def damage(folder, number, table="records"):
    with lmdb.open(str(folder), max_dbs=64, map_size=2**26) as env:
        rows = env.open_db(table.encode(), create=False)
        with env.begin(write=True) as txn:
            key = number.to_bytes(8, "big")
            value = bytearray(txn.get(key, db=rows))
            value[-1] ^= 1
            txn.put(key, bytes(value), db=rows)


def test_every_stored_trajectory_is_exported_with_its_state(run, tmp_path):
    out = tmp_path / "out.parquet"
    done = exported(run, out)
    table = pq.read_table(out)
    assert table.schema.names == [*schema.SCHEMA.names, *STATE.names, *TEXT.names]
    assert (done.num_rows, done.num_groups, table.num_rows) == (16, 8, 16)
    rows = table.to_pylist()
    assert [(row["state"], row["trained_step"], row["trained_version"], row["lag"]) for row in rows[::2]] == [
        *[("trained", 1, 0, 0)] * 2,
        *[("trained", 2, 1, 1)] * 2,
        *[("waiting", None, None, None)] * 4,
    ]
    assert [row["uses"] for row in rows[::2]] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert [row["reward"] for row in rows[::2]] == [number / 4 for number in range(8)]
    assert [len(row["logprobs"]) for row in rows[::2]] == list(range(2, 10))
    assert [row["reference_logprobs"] for row in rows[:5:2]] == [[-0.25] * 2, [-0.25] * 3, None]
    assert {row["group_phase"] for row in rows} == {"closed", "ready"}
    assert table.schema.metadata[b"run_id"] == b"r"


def words(token_ids):
    return " ".join(map(str, token_ids))


def test_an_export_has_the_text_of_prompt_and_completion_or_null_without_a_tokenizer(run, tmp_path):
    with Inspection.open(run) as inspection:
        export(inspection, tmp_path / "out.parquet", words)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == 16
    for row in rows:
        assert f"{row['prompt']} {row['completion']}" == words(row["token_ids"])
        assert row["prompt"] == words(row["token_ids"][: row["prompt_length"]])
    texts = Run(RunFolder(run)).samples(["completion", "prompt"])  # the folder has no tokenizer
    assert (texts.column_names, texts["prompt"].null_count) == (["completion", "prompt"], 16)


def test_the_newest_trained_samples_are_one_of_each_group_of_the_last_step(run):
    with Inspection.open(run) as inspection:
        found = newest_trained(inspection, 8, words)
        assert newest_trained(inspection, 1, words) == found[:1]
    assert [(row["trained_step"], row["reward"], row["lag"]) for row in found] == [(2, 0.5, 1), (2, 0.75, 1)]
    assert list(found[0]) == ["prompt", "completion", "reward", "lag", "trained_step"]
    assert all(row["prompt"] and row["completion"] for row in found)


def test_the_training_step_of_a_sample_is_known_after_a_durable_checkpoint(run, tmp_path):
    exported(run, tmp_path / "before.parquet")
    buffer = InProcessBuffer(run / "buffer", facts())
    buffer.ask(p.CheckpointDurable(2, 0), p.Done)
    assert buffer.store.read(lambda tx: tx.draws.count) == 0
    buffer.close()
    exported(run, tmp_path / "after.parquet")
    columns = ["record_id", "trained_step", "trained_version", "lag"]
    before, after = (pq.read_table(tmp_path / f"{name}.parquet", columns=columns) for name in ("before", "after"))
    assert after.equals(before)
    assert after["lag"].null_count == 8


def test_small_transactions_and_small_row_groups_do_not_change_the_export(run, tmp_path, monkeypatch):
    exported(run, tmp_path / "whole.parquet")
    monkeypatch.setattr(inspecting, "READ_S", 0.0)
    transactions = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda store, look: transactions.append(look) or read(store, look))
    monkeypatch.setattr("leeway.buffer.offline.inspect.ROW_GROUP_ROWS", 3)
    exported(run, tmp_path / "pieces.parquet")
    assert len(transactions) > 8
    assert pq.ParquetFile(tmp_path / "pieces.parquet").metadata.num_row_groups == 4
    assert pq.read_table(tmp_path / "pieces.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_a_damaged_block_is_omitted_and_its_records_are_reported(run, tmp_path):
    damage(run / "buffer", 3)
    done = exported(run, tmp_path / "out.parquet")
    assert done.num_rows == 14
    assert [each[:22] for each in done.damaged] == ["record 3 of group 2: t", "record 4 of group 2: t"]
    assert 3 not in pq.read_table(tmp_path / "out.parquet")["record_id"].to_pylist()
    with pytest.warns(UserWarning, match="left out: record [34] of group 2"):
        assert len(Run(RunFolder(run)).samples(["record_id"])) == 14


def test_samples_with_damaged_scores_or_success_counts_are_exported_without_them(run, tmp_path):
    store = Store(run / "buffer", facts())
    prompt = store.read(lambda tx: tx.groups.require(1).prompt_id)
    store.write(lambda tx: tx.tries.put(Tries(1.0, 1.0, 0), prompt))
    store.close()
    damage(run / "buffer", prompt, "tries")
    damage(run / "buffer", 3, "scores")
    done = exported(run, tmp_path / "out.parquet")
    assert done.num_rows == 16
    named = [
        f"the success counts of prompt {prompt}: the store's table",
        "the scores of record 3 of group 2: the store's table",
    ]
    assert [each.partition(" 'tries'")[0].partition(" 'scores'")[0] for each in done.damaged] == named
    scores = pq.read_table(tmp_path / "out.parquet")["reference_logprobs"].to_pylist()
    assert scores[:5] == [[-0.25] * 2, [-0.25] * 2, None, [-0.25] * 3, None]


def test_a_failed_export_leaves_no_partial_file_and_keeps_the_old_one(run, tmp_path, monkeypatch):
    out = tmp_path / "out.parquet"
    out.write_bytes(b"an older export")

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("leeway.buffer.offline.inspect.pq.ParquetWriter.write_table", fail)
    with pytest.raises(StoreError, match=r"out.parquet cannot be written \(No space left"):
        exported(run, out)
    assert out.read_bytes() == b"an older export"
    assert [path.name for path in tmp_path.glob("out*")] == ["out.parquet"]


def test_an_export_keeps_the_partial_files_of_other_processes(run, tmp_path):
    out, theirs = tmp_path / "out.parquet", tmp_path / "out.parquet.1.partial"
    for other in (theirs, tmp_path / "out.parquet.partial"):
        other.write_bytes(b"half of it")
    exported(run, out)
    assert theirs.read_bytes() == (tmp_path / "out.parquet.partial").read_bytes() == b"half of it"
    assert len(list(tmp_path.glob("out*"))) == 3


def test_the_effective_version_of_a_token_uses_the_restarts_known_at_its_training_step():
    first = {"incarnation": 0, "version": 5, "start": 0, "end": 2}
    last = {"incarnation": 1, "version": 4, "start": 2, "end": 3}
    spans = pa.array([[first, last]], pa.list_(SPAN))
    assert version_bounds(spans, [{0: 0}]) == ([5], [4])
    assert version_bounds(spans, [{0: 0, 1: 3}]) == ([3], [4])
    assert version_bounds(spans, [{0: 0, 1: 3, 2: 2}]) == ([2], [2])


@pytest.mark.parametrize("library", ["pandas", "polars", "duckdb"])
@pytest.mark.filterwarnings("default")
def test_other_libraries_read_the_export(run, tmp_path, library):
    package = pytest.importorskip(library)
    out = tmp_path / "out.parquet"
    exported(run, out)
    if library == "duckdb":
        found = package.sql(f"select sum(lag), sum(len(token_ids)), min(spans[1].version) from '{out}'").fetchall()[0]
    else:
        frame = package.read_parquet(out)
        found = (frame["lag"].sum(), sum(map(len, frame["token_ids"])), frame["spans"][0][0]["version"])
    assert tuple(map(int, found)) == (4, 136, 0)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.filterwarnings("default")
def test_the_examples_of_the_docs_page_run_unchanged_or_name_their_package(run, tmp_path, monkeypatch, capsys, number):
    about = PAGE.read_text().partition("## How to read an export")[2]
    example = re.findall(r"```python\n(.*?)```", about, re.DOTALL)[number]
    monkeypatch.chdir(tmp_path)
    exported(run, Path("samples.parquet"))
    for package, required in re.findall(r"^import (\w+)[^#\n]*(?:# pip install (\w+))?$", example, re.MULTILINE):
        if required:
            assert required == package
            pytest.importorskip(package)
    exec(compile(example, str(PAGE), "exec"), {})
    output = capsys.readouterr().out
    assert "mean" in output
    assert "0.125" in output, "mean reward of the first two groups, whose tokens have lag 0"
