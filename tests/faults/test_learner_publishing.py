"""A learner whose weights cannot be written, or that receives tokens past the lag bound."""

import time

import pytest
from tests.faults.learner_run import LearnerRun, RandomActor, record
from tests.unit.published import read

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.store import WeightStore

NUM_STEPS = 30


@pytest.fixture
def run(tmp_path):
    """Yield a run whose steps are all recorded, with a lag bound so large that admission never closes."""
    record(tmp_path / "recorded", NUM_STEPS)
    run = LearnerRun(tmp_path / "run", recorded=tmp_path / "recorded")
    yield run
    run.close()


@pytest.mark.fault(6, "no space in the weights folder for one of two stages, then freed")
@pytest.mark.parametrize("rank", [0, 1])
def test_training_continues_while_no_version_can_be_written_and_publishes_the_last(run, rank, show):
    freed = run.folder / "freed"
    store = WeightStore(run.folder / "weights")
    ranks = run.start(None, {"full_disk": {"rank": rank, "until": str(freed)}}, num_steps=NUM_STEPS)
    run.wait_until(lambda: run.step == NUM_STEPS, "the last step")
    assert store.newest() is None, "a version without all of its parts exists"
    assert [one.exit_code for one in ranks] == [None, None], "a stage exited before it published the last version"
    freed.touch()
    assert run.finish(ranks) == [0, 0], run.logs()
    assert store.newest() == PolicyVersion(1, NUM_STEPS)
    assert read(store.folder, PolicyVersion(1, NUM_STEPS)), "`read` checks every tensor"
    # two writes were started before the disk was found full; the last version is published at the end
    assert set(store.committed()) <= {PolicyVersion(1, version) for version in (0, 1, NUM_STEPS)}
    show(f"{NUM_STEPS} steps trained without room for weights; with room again, the last version is published")


@pytest.mark.fault(6, "no space in the weights folder for longer than PUBLISH_TIMEOUT_S")
def test_a_disk_that_stays_full_ends_the_learner_with_a_reason_and_a_checkpoint(run, show):
    run.constants["leeway.learner.stage.PUBLISH_TIMEOUT_S"] = 2.0
    hooks = {"full_disk": {"rank": 1, "until": str(run.folder / "never")}, "slow_steps": 0.2}
    hooks["clock_from_first_checkpoint"] = str(run.checkpoints)
    began_s = time.monotonic()
    assert all(code != 0 for code in run.finish(run.start(None, hooks, num_steps=NUM_STEPS, checkpoint_every=2)))
    message = f"publishing to {run.folder / 'weights'} failed"
    assert f"PublishFailed: {message}" in run.log(1)
    assert "No space left on device" in run.log(1)
    assert "StageLost" in run.log(0) or f"failed: {message}" in run.log(0)
    assert run.steps_saved(), "no checkpoint was kept"
    show(f"the learner exits after {time.monotonic() - began_s:.0f} s with folder and reason, checkpoints kept")


@pytest.mark.fault(6, "every version is published, even while earlier ones are unwritten", control=True)
def test_a_learner_that_publishes_every_version_stalls(run, show):
    hooks = {"full_disk": {"rank": 1, "until": str(run.folder / "freed")}, "publish_regardless": True}
    run.start(None, hooks, num_steps=NUM_STEPS)
    run.wait_until(lambda: run.step >= 1, "the first step")
    time.sleep(5)
    assert run.step <= 3
    show(f"{run.step} of {NUM_STEPS} steps after 5 s")


def test_a_skipped_version_is_published_while_admission_waits_for_it(tmp_path):
    """A step makes four versions. Two wait to be written, so the last is skipped, but admission waits for the last."""
    run = LearnerRun(tmp_path / "bounded", updates_per_step=4)
    try:
        with RandomActor(run.address):
            run.train(None, {"slow_disk": {"rank": 0, "seconds": 0.3}}, num_steps=4, num_epochs=4)
        store = WeightStore(run.folder / "weights")
        assert store.newest() == PolicyVersion(0, 16)
        assert run.step == 4
    finally:
        run.close()


def test_tokens_past_the_lag_bound_are_refused_and_reported_on_every_rank(run):
    run.weight_sync["max_lag"] = 4  # the buffer of this run has another bound
    assert all(code != 0 for code in run.finish(run.start(num_steps=NUM_STEPS)))
    assert run.step == 5, "the draws of versions 0 to 4 are within the bound"
    message = "the update at version 5 received tokens with a lag of 5 versions, but max_lag = 4"
    assert f"StaleTokens: {message}" in run.log(1)
    assert f"CoordinatorFailed: the coordinator (rank 1) failed: {message}" in run.log(0)
