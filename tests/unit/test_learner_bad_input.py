"""Unusable samples are reported by name; steps without a finite update are stored and counted."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.learner.batch import StepBatch
from leeway.learner.optimizer import UpdateResult
from leeway.learner.report import BadBatches, BadSample, TrainingDiverged, check_samples
from leeway.learner.step import StepResult, Update
from tests.world.learner import build, make_rows

BALANCE, PPO = TrajectoryBalanceConfig(corrections=[]).needs, OffPolicyPPOConfig().needs
RECORDS = list(range(100, 112))


def batch(**changes) -> StepBatch:
    """Return a batch of twelve samples whose eighth (sample 1 of group 2) has `changes`."""
    rows = make_rows(0, actor="actor-3")
    rows[7] = replace(rows[7], **changes)
    return build(rows, 0, 4096)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("needs", [BALANCE, PPO], ids=["balance", "ppo"])
def test_a_reward_not_finite_in_float32_raises_an_error_that_names_the_sample(needs, reward):
    expected = r"^sample 1 of group 2 \(prompt 2, actor 'actor-3', reward .*, record 107\) cannot be trained on"
    with pytest.raises(BadSample, match=expected) as caught:
        check_samples(batch(reward=float(reward)), needs, RECORDS)
    assert "but must be finite" in str(caught.value)
    with pytest.raises(BadSample, match=r"sample 1 of group 2 \(prompt 2, actor 'actor-3', reward [^,]*\)"):
        check_samples(batch(reward=float(reward)), needs, None)
    check_samples(batch(), needs, RECORDS)


@pytest.mark.parametrize("logprob", [np.nan, -np.inf])
def test_a_missing_behaviour_logprob_raises_an_error_only_if_the_loss_reads_it(logprob):
    logprobs = make_rows(0)[7].logprobs
    logprobs[-1] = logprob
    with pytest.raises(BadSample, match=r"sample 1 of group 2 .* this loss needs a finite value"):
        check_samples(batch(logprobs=logprobs), PPO, RECORDS)
    check_samples(batch(logprobs=logprobs), BALANCE, RECORDS)


def result(*kinds: str) -> StepResult:
    """Return a step result with one update per letter: "t" is a taken update, "n" a non-finite update."""
    updates = tuple(Update(batch(), UpdateResult(kind == "t", (1.0,), 1e-3, 1.0), {}) for kind in "".join(kinds))
    return StepResult(sum(update.result.taken for update in updates), updates, {})


def test_three_steps_in_a_row_without_a_finite_update_end_the_run_and_are_stored(tmp_path):
    bad = BadBatches(tmp_path / "bad_batches")
    bad.record(1, result("n"), b"one")
    bad.record(2, result("tt"), b"two")  # a taken step resets the count
    bad.record(3, result("nn"), b"three")
    bad.record(4, result("n"), b"four")
    with pytest.raises(TrainingDiverged, match=r"steps 3, 4, 5 had no finite loss or gradient"):
        bad.record(5, result("n"), b"five")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "bad_batches").iterdir()}
    assert kept == {
        "step-1.arrow": b"one",
        "step-3.arrow": b"three",
        "step-4.arrow": b"four",
        "step-5.arrow": b"five",
    }


def test_a_step_with_one_non_finite_update_is_stored_but_never_ends_the_run(tmp_path):
    bad = BadBatches(tmp_path)
    for step in range(1, 6):
        bad.record(step, result("tn"), b"draw")
    assert len(list(tmp_path.iterdir())) == 5


def test_a_bad_batch_that_does_not_fit_on_the_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    BadBatches(tmp_path).record(1, result("n"), b"draw")
    assert caplog.messages[0].endswith("; the batch could not be saved: [Errno 28] No space left on device")


def test_stages_other_than_the_lead_count_bad_steps_but_store_nothing(tmp_path):
    bad = BadBatches(tmp_path)
    bad.record(1, result("n"), None)
    bad.record(2, result("n"), None)
    with pytest.raises(TrainingDiverged):
        bad.record(3, result("n"), None)
    assert not list(tmp_path.iterdir())
