"""A step batch built from Arrow columns is bit-identical to a batch built trajectory by trajectory."""

import hashlib
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leeway.buffer.schema import Trajectory, VersionSpan, encode, read_stream
from leeway.common.staleness import PolicyVersion, effective_version
from leeway.learner import stage as stage_file
from leeway.learner.batch import Leaves, StepBatch, lag0_by_actor, lag_by_actor
from leeway.learner.config import LearnerConfig
from leeway.learner.packing import PackingRule, pack
from leeway.learner.stage import Stage
from tests.world.run_context import run_context

RULE = PackingRule(64, num_replicas=2, min_micro_batches=2)
RESUMED_AT = {0: 0, 1: 4, 2: 3}
VERSION = 9


def random_rows(seed: int) -> list[Trajectory]:
    """Return groups of three samples; a sample has one to four versions, and some samples have reference scores."""
    random = np.random.default_rng(seed)
    rows = []
    for group in random.permutation(12):
        for index in range(3):
            prompt, length = int(random.integers(1, 9)), int(random.integers(1, 40))
            cuts = sorted({0, length, *random.integers(1, length + 1, 3).tolist()})
            versions = sorted((int(random.integers(3)), int(random.integers(VERSION))) for _ in cuts[1:])
            rows.append(
                Trajectory(
                    lease_id=1,
                    attempt=1,
                    group_id=int(group) + 1,
                    sample_index=index,
                    prompt_id=int(group) % 5,
                    token_ids=random.integers(0, 1000, prompt + length).astype(np.int32),
                    prompt_length=prompt,
                    logprobs=-random.random(length).astype(np.float32),
                    spans=tuple(
                        VersionSpan(PolicyVersion(*version), start, end)
                        for version, start, end in zip(versions, cuts, cuts[1:], strict=False)
                    ),
                    reward=float(random.normal()),
                    finish_reason=str(random.choice(["stop", "length"])),
                    columns={"answer": "42"},
                    reference_logprobs=-random.random(length).astype(np.float32) if random.random() < 0.5 else None,
                    actor=f"actor-{random.integers(3)}",
                )
            )
    return rows


class OneByOne:
    """Reference implementation that computes the batch trajectory by trajectory."""

    def __init__(self, rows: list[Trajectory]) -> None:
        self.rows = rows
        self.spans = [span for row in rows for span in row.spans]
        lengths = [row.num_completion_tokens for row in rows]
        keys = [row.group_id for row in rows]
        sampled_T = self._of_tokens(span.version.version for span in self.spans)
        self.counted_T = self._of_tokens(effective_version(span.version, RESUMED_AT) for span in self.spans)
        self.abandoned_T = self.counted_T < sampled_T
        self.sequence_T = np.repeat(np.arange(len(rows)), lengths)
        self.group_B = np.array([sorted(set(keys)).index(key) for key in keys])
        self.prompt_B = np.array([row.prompt_id for row in rows])
        self.single_version_B = np.array([len({span.version for span in row.spans}) == 1 for row in rows])
        self.packed = pack([row.token_ids for row in rows], [row.prompt_length for row in rows], RULE, self.group_B)
        self.logprobs_T = np.concatenate([row.logprobs for row in rows])
        self.actor_T = np.repeat([row.actor for row in rows], lengths)

    def _of_tokens(self, values) -> np.ndarray:
        return np.repeat(np.array(list(values), np.int64), [span.end - span.start for span in self.spans])


def equal(one: object, other: object) -> bool:
    """Return whether values and dtypes are equal bit by bit; recurse into tuples and dataclasses."""
    if isinstance(other, np.ndarray | torch.Tensor):
        return one.dtype == other.dtype and np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    if isinstance(other, str):
        return one == other
    if isinstance(other, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(other))


def check_same(batch: StepBatch, expected: OneByOne, version: int) -> None:
    """Assert that all fields that a step reads are equal."""
    for name in ("sequence_T", "group_B", "prompt_B", "counted_T", "abandoned_T", "single_version_B", "packed"):
        assert equal(getattr(batch, name), getattr(expected, name)), name
    assert batch.unscored().tolist() == [i for i, row in enumerate(expected.rows) if row.reference_logprobs is None]
    leaves = Leaves(torch.zeros(len(expected.logprobs_T), dtype=torch.float64))
    inputs = batch.loss_inputs(leaves, leaves, leaves.logprobs_T)
    assert equal(inputs.behaviour_logprobs_T, torch.tensor(expected.logprobs_T).double())
    assert equal(inputs.rewards_B, torch.tensor([row.reward for row in expected.rows], dtype=torch.float64))
    assert inputs.finished_B.tolist() == [row.finish_reason == "stop" for row in expected.rows]
    prompts, numbers = np.unique(expected.prompt_B, return_inverse=True)
    assert (inputs.num_prompts, inputs.prompt_B.tolist()) == (len(prompts), numbers.tolist())

    lag_T = version - expected.counted_T
    mismatch_T = np.abs(expected.logprobs_T.astype(np.float64))
    fresh_T = (lag_T == 0) & expected.single_version_B[expected.sequence_T] & ~expected.abandoned_T
    by_actor = {actor: expected.actor_T == actor for actor in sorted(set(expected.actor_T.tolist()))}
    assert lag_by_actor([batch]) == {actor: Counter(lag_T[where_T].tolist()) for actor, where_T in by_actor.items()}
    assert lag0_by_actor(batch, leaves.logprobs_T) == {
        actor: (mismatch_T[where_T & fresh_T].mean(), (where_T & fresh_T).sum())
        for actor, where_T in by_actor.items()
        if (where_T & fresh_T).any()
    }


GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "step_batch.json").read_text())
"""Digests of the batches of `random_rows`, recorded when batches were built from single trajectories."""


def digest(value: object) -> str:
    """Hash all arrays of a field with their names, dtypes and shapes."""
    sums = hashlib.sha256()

    def add(name: str, part: object) -> None:
        if isinstance(part, np.ndarray):
            sums.update(f"{name} {part.dtype.str} {part.shape} ".encode())
            sums.update(np.ascontiguousarray(part).tobytes())
        elif isinstance(part, tuple):
            for i, each in enumerate(part):
                add(f"{name}.{i}", each)
        elif not isinstance(part, str):
            for field in fields(part):
                add(f"{name}.{field.name}", getattr(part, field.name))

    add("", value)
    return sums.hexdigest()


@pytest.mark.parametrize("seed", GOLDEN)
def test_the_batch_matches_the_recorded_digests(seed):
    batch = StepBatch.build(read_stream(encode(random_rows(int(seed)), "run")), VERSION, RESUMED_AT, RULE)
    assert {name: digest(getattr(batch, name)) for name in GOLDEN[seed]} == GOLDEN[seed]


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_from_columns_and_its_parts_equal_those_from_single_trajectories(seed):
    rows = random_rows(seed)
    batch = StepBatch.build(read_stream(encode(rows, "run")), VERSION, RESUMED_AT, RULE)
    expected = OneByOne(rows)
    check_same(batch, expected, VERSION)

    random = np.random.default_rng([seed, 1])
    sequences = np.flatnonzero(np.isin(batch.group_B, random.permutation(batch.num_groups)[:5]))
    part = OneByOne([rows[i] for i in sequences])
    check_same(batch.part(sequences, VERSION + 1), part, VERSION + 1)
    assert equal(batch.pack(sequences), part.packed)


class Restarted:
    """Fake coordinator whose buffer starts the third learner incarnation."""

    incarnation, resumed_at = 2, RESUMED_AT

    def __init__(self, *_: object) -> None: ...

    begin = __init__


def test_a_token_has_the_same_lag_on_every_rank_after_restarts(tmp_path, monkeypatch):
    context, rows = run_context(tmp_path, learner=LearnerConfig(num_stages=2, num_replicas=2)), random_rows(0)
    monkeypatch.setattr(stage_file, "Coordinator", Restarted)
    sent = []

    def lags_on(rank: int) -> list[int]:
        pending = list(sent)

        def broadcast(tensor, src, group):
            assert group == "the group with the startup timeout"
            if rank == src:
                sent.append(tensor.clone())
            else:
                assert tensor.shape == pending[0].shape
                tensor.copy_(pending.pop(0))

        monkeypatch.setattr(stage_file.dist, "broadcast", broadcast)
        stage = Stage(context, rank, "")
        stage._channel = None
        stage._ranks = SimpleNamespace(group="the group with the startup timeout")
        stage._begin_incarnation(deadline=0.0)
        assert stage._progress.incarnation == 2
        built = StepBatch.build(read_stream(encode(rows, "run")), stage._progress.version, stage._resumed_at, RULE)
        return built.lag_T.tolist()

    expected = (-OneByOne(rows).counted_T).tolist()
    assert [lags_on(rank) for rank in (1, 0, 3)] == [expected] * 3, "the coordinator is rank 1"
