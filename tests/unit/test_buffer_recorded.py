"""Loading recorded samples into the buffer of another run changes neither the samples nor the source run."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, StoreError
from leeway.buffer.offline import recorded as recording
from leeway.buffer.offline.inspect import Inspection, export, verify
from leeway.buffer.offline.recorded import RECORDED_VERSION, BadRows, Recorded, load_samples, survey
from leeway.buffer.store import Store, own
from leeway.common.staleness import PolicyVersion
from leeway.launch.offline import num_steps_of
from leeway.learner.batch import StepBatch, lag0_by_actor
from leeway.learner.packing import PackingRule
from tests.world.buffer import Actor, InProcessBuffer, facts

KEPT = [name for name in schema.SCHEMA.names if name != "reference_logprobs"]
"""Columns that are copied. Scores are not copied, because each run has its own reference model."""
RULE = PackingRule(token_budget=64)
OFFLINE = {"max_lag": "unbounded", "run_id": "offline"}


@pytest.fixture
def source(tmp_path):
    """Create a finished run with trained, waiting, unrewarded, scored and unfinished samples and a learner restart."""
    buffer = InProcessBuffer(tmp_path / "run" / "buffer", facts())
    buffer.begin()
    actor = Actor(buffer)
    leases = actor.lease()
    for number, lease in enumerate(leases[:-2]):
        actor.work(lease, reward=number / 4, num_completion_tokens=2 + number)
    reply, _ = buffer.draw(1, 0)
    buffer.finish(1, 1)
    scores = [np.full(tokens, -0.25, np.float32) for tokens in (2, 2, 3, 3)]
    buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(reply.record_ids, scores))
    buffer.publish(1)
    actor.work(leases[-2], reward=None)
    buffer.begin(1, 1, session="again")
    actor.work(leases[-1], [1], version=PolicyVersion(1, 1))
    buffer.close()
    return tmp_path / "run"


def table_of(run: Path, out: Path) -> pa.Table:
    with Inspection.open(run) as inspection:
        export(inspection, out)
    return pq.read_table(out)


def filled(path: Path, folder: Path, config: BufferConfig | None = None, **changes) -> InProcessBuffer:
    """Return the buffer of a run that trains on recorded samples, before its learner begins."""
    config = config or BufferConfig(source=str(path))
    with Recorded.open(path) as recorded:
        found = survey(recorded)
        values = {**OFFLINE, "num_prompts": found.num_prompts, "group_size": found.group_size, **changes}
        assert load_samples(folder, facts(**values), config, recorded, found.newest) == found.num_samples
    return InProcessBuffer(folder, facts(**values), config)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files except the table of readers, in which every reader registers."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock.mdb"}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(prompt=(3, 4), completion=(5, 6, 1), **fields) -> dict:
    return {"prompt_ids": list(prompt), "completion_ids": list(completion), "reward": 1.0, **fields}


# --- a run ------------------------------------------------------------------------------------------------


def test_every_sample_of_a_run_is_loaded_unchanged_and_the_run_is_not_modified(source, tmp_path):
    before = files_of(source)
    buffer = filled(source, tmp_path / "new" / "buffer")
    assert buffer.faults() == []
    ledger = buffer.status().ledger
    assert ledger["gap"] == 0
    assert (ledger["issued"], ledger["committed"], ledger["failed"], ledger["in_flight"]) == (15, 15, 0, 0)
    assert (ledger["waiting"], ledger["filtered"]) == (12, 3), (
        "two samples have no reward, and one is the only sample of its group"
    )
    buffer.close()
    assert files_of(source) == before
    theirs, ours = (table_of(run, tmp_path / "t.parquet") for run in (source, tmp_path / "new"))
    assert ours.num_rows == 15
    assert ours.select(KEPT).equals(theirs.select(KEPT))
    assert theirs["reference_logprobs"].null_count == 11
    assert ours["reference_logprobs"].null_count == 15, "scores of the source's reference model are not copied"
    assert set(ours["trained_step"].to_pylist()) == {None}, "this run has not trained on them"


def test_recorded_tokens_are_older_than_all_versions_and_no_lease_is_granted(source, tmp_path):
    buffer = filled(source, tmp_path / "new")
    reply = buffer.begin(session="a learner")
    buffer.publish(0, reply.incarnation)
    assert Actor(buffer, "evaluator").lease() == []
    draw, rows = buffer.draw(1, 0, incarnation=reply.incarnation)
    assert draw.ready
    assert "recorded samples" in buffer.store.read(lambda tx: buffer.core.leases.closed_because(tx))
    trajectories = schema.to_batch(rows, "offline")
    batch = StepBatch.build(trajectories, 0, reply.resumed_at, RULE)
    assert set(batch.lag_T) == {0 - RECORDED_VERSION} == {1}
    other_weights_T = torch.full((len(batch.sequence_T),), -9.0)
    assert lag0_by_actor(batch, other_weights_T) == {}, "recorded tokens are excluded from the mismatch of lag 0"
    buffer.finish(1, 1, incarnation=reply.incarnation)
    again = buffer.begin(1, 1, session="after a restart")
    assert set(StepBatch.build(trajectories, 1, again.resumed_at, RULE).lag_T) == {2}
    assert buffer.faults() == []
    buffer.close()


def test_a_live_run_is_rejected(source):
    lock = own(source / "buffer")
    with pytest.raises(StoreError, match="is being written by a live run: wait until it ends, or train on a file"):
        Recorded.open(source).__enter__()
    os.close(lock)


# --- replay -----------------------------------------------------------------------------------------------


def test_replay_samplers_work_with_recorded_samples(tmp_path):
    rows = [row((3, prompt), reward=float(i == 0 and prompt == 7)) for prompt in range(10) for i in range(2)]
    config = BufferConfig(sampler="prioritised", max_uses="unlimited")
    buffer = filled(write(tmp_path / "s.jsonl", *rows), tmp_path / "new", config, groups_per_step=1)
    incarnation = buffer.begin(session="learner").incarnation
    drawn = []
    for step in range(1, 60):
        drawn.append(buffer.draw(step, step - 1, incarnation=incarnation)[1][0].prompt_id)
        buffer.finish(step, step, incarnation=incarnation)
    assert drawn.count(7) > 30, "prompt 7 has a weight of 0.51, and each of the other nine prompts has 0.01"
    assert len(set(drawn)) > 1
    buffer.close()


def test_no_recorded_sample_that_may_be_used_again_is_evicted(tmp_path):
    path = write(tmp_path / "s.jsonl", *[row((3, prompt), [5] * 4000) for prompt in range(60) for _ in range(2)])
    config = BufferConfig(source=str(path), sampler="uniform", max_uses=4, capacity_trajectories=60)
    buffer = filled(path, tmp_path / "new", config, groups_per_step=2, max_tokens=8192)
    incarnation = buffer.begin(session="learner").incarnation
    for step in range(1, num_steps_of(60, 2, 4) + 1):
        assert buffer.draw(step, step - 1, incarnation=incarnation)[0].ready
        buffer.finish(step, step, incarnation=incarnation)
        buffer.ask(p.CheckpointDurable(step, incarnation), p.Done)
    assert buffer.status().ledger["evicted_unused"] == 0
    assert buffer.status().num_records < 120, "groups that were used `max_uses` times may be evicted"
    buffer.close()


def test_a_step_that_lacks_recorded_groups_is_refused_immediately(tmp_path):
    path = write(tmp_path / "s.jsonl", *[row((3, prompt)) for prompt in range(3) for _ in range(2)])
    config = BufferConfig(source=str(path), sampler="uniform", max_uses="unlimited")
    buffer = filled(path, tmp_path / "new", config, groups_per_step=2)
    incarnation = buffer.begin(session="learner").incarnation
    assert buffer.draw(1, 0, incarnation=incarnation)[0].ready
    assert not buffer.draw(2, 1, incarnation=incarnation)[0].ready, "the first step may still return its groups"
    buffer.finish(1, 0, incarnation=incarnation, skipped=True)
    with pytest.raises(
        BufferRefused, match=r"step 2 has 1 of 2 groups.*4 samples are filtered.* learner.num_steps = 1 to end"
    ):
        buffer.draw(2, 0, incarnation=incarnation)
    buffer.close()


@given(num_groups=st.integers(1, 12), groups_per_step=st.integers(1, 4), max_uses=st.integers(1, 4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_number_of_steps_is_possible_for_any_order_of_groups(num_groups, groups_per_step, max_uses, data):
    left = dict.fromkeys(range(num_groups), max_uses)
    for _ in range(num_steps_of(num_groups, groups_per_step, max_uses)):
        available = sorted(left)
        assert len(available) >= groups_per_step
        for group in data.draw(st.permutations(available))[:groups_per_step]:
            left[group] -= 1
            if not left[group]:
                del left[group]
    if max_uses == 1:
        assert len(left) < groups_per_step, "the remaining groups are enough for another step"


# --- files ------------------------------------------------------------------------------------------------


def test_an_export_is_loaded_exactly(source, tmp_path):
    out = tmp_path / "out.parquet"
    theirs = table_of(source, out)
    buffer = filled(out, tmp_path / "new" / "buffer")
    assert buffer.faults() == []
    buffer.close()
    assert table_of(tmp_path / "new", tmp_path / "again.parquet").select(KEPT).equals(theirs.select(KEPT))


def test_a_shuffled_export_loads_the_same_samples(source, tmp_path):
    theirs = table_of(source, tmp_path / "out.parquet")
    mixed = theirs.take(np.random.default_rng(0).permutation(theirs.num_rows))
    pq.write_table(mixed, tmp_path / "mixed.parquet")
    buffer = filled(tmp_path / "mixed.parquet", tmp_path / "new" / "buffer")
    buffer.close()
    assert table_of(tmp_path / "new", tmp_path / "again.parquet").select(KEPT).equals(theirs.select(KEPT))


SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "prompt_ids": st.sampled_from([[1], [2, 3], [2, 4]]),
            "completion_ids": st.lists(st.integers(0, 9), min_size=1, max_size=4),
            "reward": st.none() | st.floats(-5, 5, width=32),
            "finished": st.booleans(),
            "logprob": st.none() | st.floats(-5, 0, width=32),
            "is_named": st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(samples=SAMPLES, part_rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_of_a_file_is_a_sample_of_its_group(tmp_path_factory, monkeypatch, samples, part_rows):
    monkeypatch.setattr(recording, "PART_ROWS", part_rows)
    folder = tmp_path_factory.mktemp("rows")
    rows = []
    for sample in samples:
        logprob, is_named = sample.pop("logprob"), sample.pop("is_named")
        unknown = logprob is None
        each = {
            **sample,
            "logprobs": None if unknown else [logprob] * len(sample["completion_ids"]),
            "group": f"of {sample['prompt_ids']}" if is_named else None,
        }
        rows.append(each)
    buffer = filled(write(folder / "samples.jsonl", *rows), folder / "new" / "buffer")
    assert buffer.faults() == []
    assert buffer.status().ledger["issued"] == len(rows)
    buffer.close()
    found = table_of(folder / "new", folder / "out.parquet").sort_by("seq").to_pylist()
    groups = {}
    for each, stored in zip(rows, found, strict=True):
        assert stored["token_ids"] == each["prompt_ids"] + each["completion_ids"]
        assert stored["prompt_length"] == len(each["prompt_ids"])
        assert (stored["reward"], stored["finish_reason"]) == (each["reward"], "stop" if each["finished"] else "length")
        logprobs = each["logprobs"] or [np.nan] * len(each["completion_ids"])
        assert np.array_equal(stored["logprobs"], logprobs, equal_nan=True)
        groups.setdefault(stored["group_id"], set()).add((tuple(each["prompt_ids"]), each["group"]))
    assert all(len(keys) == 1 for keys in groups.values())
    assert len({key for keys in groups.values() for key in keys}) == len(groups), "a group is split"


GOOD = row()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"prompt_ids": [1]}, "row 2: Object missing required field `completion_ids`"),
        (row(logprob=[-1.0] * 3), "row 2: Object contains unknown field `logprob`; did you mean 'logprobs'?"),
        (row(completion=[]), "row 2: Expected `array` of length >= 1 - at `$.completion_ids`"),
        (row(prompt=[-1]), "row 2: Expected `int` >= 0 - at `$.prompt_ids[0]`"),
        (row(prompt=[2**31]), "row 2: Expected `int` <= 2147483647 - at `$.prompt_ids[0]`"),
        (row(logprobs=[-1.0]), "row 2: 1 logprobs for 3 completion_ids"),
        (row(logprobs=[-1.0, 0.5, -1.0]), "row 2: logprob above 0"),
        (row(reward="good"), "row 2: Expected `float | null`, got `str` - at `$.reward`"),
        (row(reward=1e200), "row 2: reward out of range"),
        (row(completion=[99]), "row 2: token outside the vocabulary of 64"),
        (row(completion=[1] * 40), "row 2: longer than max_tokens = 32"),
        (row((8,), group="a"), "row 2: group 'a' has another prompt in an earlier row"),
    ],
)
def test_an_unusable_row_is_reported_with_its_reason(tmp_path, bad, reason):
    path = write(tmp_path / "s.jsonl", row(group="a"), bad, row(group="a"))
    with pytest.raises(StoreError) as error, Recorded.open(path) as recorded:
        survey(recorded, vocab_size=64, max_tokens=32)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_the_first_of_many_bad_rows_are_listed_and_all_are_counted(tmp_path):
    path = write(tmp_path / "s.jsonl", *[row(logprobs=[-1.0])] * 30, row())
    with pytest.raises(BadRows, match=r"30 of 31 samples .* row 20: .*; and 10 others$"), Recorded.open(path):
        pass


def test_a_modified_export_is_validated_like_the_rows_of_a_run(source, tmp_path):
    rows = table_of(source, tmp_path / "out.parquet").to_pylist()
    for change, reason in (
        ({"sample_index": rows[1]["sample_index"]}, "row 2: its group has this sample_index already"),
        ({"prompt_id": rows[0]["prompt_id"] + 1}, "row 1: its group has another prompt|row 2: its group has another"),
        ({"run_id": "another"}, "another run"),
        ({"spans": []}, "row 1: spans do not cover the completion"),
        ({"logprobs": [0.5, -1.0]}, "row 1: logprob above 0"),
        ({"reward": float("inf")}, "row 1: reward not finite"),
    ):
        changed = [{**rows[0], **change}, *rows[1:]]
        pq.write_table(pa.Table.from_pylist(changed, schema=schema.SCHEMA), tmp_path / "changed.parquet")
        with pytest.raises(BadRows, match=reason), Recorded.open(tmp_path / "changed.parquet") as recorded:
            survey(recorded)


@pytest.mark.parametrize("column", ["attempt", "token_ids", "spans", "reward_parts"])
def test_an_export_that_lacks_a_value_is_rejected_with_its_row_and_column(source, tmp_path, column):
    rows = table_of(source, tmp_path / "out.parquet").select(schema.SCHEMA.names).to_pylist()
    optional = pa.schema([field.with_nullable(True) for field in schema.SCHEMA])
    changed = [rows[0], {**rows[1], column: None}, *rows[2:]]
    pq.write_table(pa.Table.from_pylist(changed, schema=optional), tmp_path / "changed.parquet")
    with pytest.raises(BadRows, match=rf"1 of {len(rows)} samples .* row 2: {column} is null"):
        Recorded.open(tmp_path / "changed.parquet").__enter__()


@pytest.mark.parametrize(
    "name", ["nothing.jsonl", "samples.csv", "folder", "broken.parquet", "rows.parquet", "empty.jsonl"]
)
def test_an_invalid_source_is_rejected_by_name(tmp_path, name):
    (tmp_path / "samples.csv").write_text("a,b\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    pq.write_table(pa.Table.from_pylist([row()]), tmp_path / "rows.parquet")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(StoreError) as error, Recorded.open(tmp_path / name) as recorded:
        survey(recorded)
    assert name in str(error.value)


def test_a_loaded_store_can_be_opened_read_only(tmp_path):
    filled(write(tmp_path / "s.jsonl", row(), row()), tmp_path / "new").close()
    store = Store(tmp_path / "new", None)
    assert store.read(verify)["faults"] == []
    store.close()
