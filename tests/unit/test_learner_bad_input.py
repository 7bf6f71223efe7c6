"""Samples that no loss can use are named, and steps that cannot be taken are kept and counted."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from algorithms.off_policy_ppo import OffPolicyPPOConfig
from algorithms.trajectory_balance import TrajectoryBalanceConfig
from learner.batch import StepBatch
from learner.optimizer import UpdateResult
from learner.report import BadBatches, BadSample, TrainingDiverged, check_samples
from learner.step import StepResult, Update
from tests.world.learner import build, make_rows

BALANCE, PPO = TrajectoryBalanceConfig(corrections=[]).needs, OffPolicyPPOConfig().needs
RECORDS = list(range(100, 112))


def batch(**changes) -> StepBatch:
    """Twelve samples, of which the eighth (sample 1 of group 2) is changed."""
    rows = make_rows(0, actor="actor-3")
    rows[7] = replace(rows[7], **changes)
    return build(rows, 0, 4096)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("needs", [BALANCE, PPO], ids=["balance", "ppo"])
def test_a_reward_that_is_not_finite_in_float32_is_an_error_that_names_the_trajectory(needs, reward):
    expected = r"^sample 1 of group 2 \(prompt 2, actor 'actor-3', reward .*, record 107\) cannot be trained on"
    with pytest.raises(BadSample, match=expected) as caught:
        check_samples(batch(reward=float(reward)), needs, RECORDS)
    assert "and must be finite" in str(caught.value)
    with pytest.raises(BadSample, match=r"sample 1 of group 2 \(prompt 2, actor 'actor-3', reward [^,]*\)"):
        check_samples(batch(reward=float(reward)), needs, None)
    check_samples(batch(), needs, RECORDS)


@pytest.mark.parametrize("logprob", [np.nan, -np.inf])
def test_a_missing_behaviour_log_probability_is_an_error_only_where_the_loss_weighs_by_it(logprob):
    logprobs = make_rows(0)[7].logprobs
    logprobs[-1] = logprob
    with pytest.raises(BadSample, match=r"sample 1 of group 2 .* this loss reads it"):
        check_samples(batch(logprobs=logprobs), PPO, RECORDS)
    check_samples(batch(logprobs=logprobs), BALANCE, RECORDS)


def result(*kinds: str) -> StepResult:
    """A step whose updates went so: t taken, n not finite."""
    updates = tuple(Update(batch(), UpdateResult(kind == "t", (1.0,), 1e-3, 1.0), {}) for kind in "".join(kinds))
    return StepResult(sum(update.result.taken for update in updates), updates, {})


def test_the_third_step_in_a_row_without_a_finite_update_ends_the_run_and_all_are_kept(tmp_path):
    bad = BadBatches(tmp_path / "bad_batches")
    bad.note(1, result("n"), b"one")
    bad.note(2, result("tt"), b"two")  # a step that is taken ends the row
    bad.note(3, result("nn"), b"three")
    bad.note(4, result("n"), b"four")
    with pytest.raises(TrainingDiverged, match=r"steps 3, 4, 5 had no finite loss or gradient"):
        bad.note(5, result("n"), b"five")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "bad_batches").iterdir()}
    assert kept == {
        "step-1.arrow": b"one",
        "step-3.arrow": b"three",
        "step-4.arrow": b"four",
        "step-5.arrow": b"five",
    }


def test_a_step_with_one_non_finite_update_among_others_is_kept_and_does_not_count_as_lost(tmp_path):
    bad = BadBatches(tmp_path)
    for step in range(1, 6):
        bad.note(step, result("tn"), b"draw")
    assert len(list(tmp_path.iterdir())) == 5


def test_a_draw_that_the_disk_has_no_room_for_costs_no_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    BadBatches(tmp_path).note(1, result("n"), b"draw")
    assert caplog.messages[0].endswith("; the draw is not kept: [Errno 28] No space left on device")


def test_other_stages_than_the_lead_count_and_keep_nothing(tmp_path):
    bad = BadBatches(tmp_path)
    bad.note(1, result("n"), None)
    bad.note(2, result("n"), None)
    with pytest.raises(TrainingDiverged):
        bad.note(3, result("n"), None)
    assert not list(tmp_path.iterdir())
