"""What a learner does where weights cannot be written, or where it is given tokens past the bound."""

import time

import pytest

from common.staleness import PolicyVersion
from tests.faults.learner_run import LearnerRun, MadeUpActor, record
from tests.unit.published import read
from weight_sync.store import WeightStore

NUM_STEPS = 30


@pytest.fixture
def run(tmp_path):
    """A run whose steps are all recorded, under so wide a bound that admission does not matter."""
    record(tmp_path / "recorded", NUM_STEPS)
    run = LearnerRun(tmp_path / "run", recorded=tmp_path / "recorded")
    yield run
    run.close()


@pytest.mark.fault(6, "no room in the weights folder for one of two stages, then there is")
@pytest.mark.parametrize("rank", [0, 1])
def test_training_goes_on_while_no_version_can_be_written_and_the_last_one_is_published(run, rank, show):
    freed = run.folder / "freed"
    store = WeightStore(run.folder / "weights")
    ranks = run.start(None, {"full_disk": {"rank": rank, "until": str(freed)}}, num_steps=NUM_STEPS)
    run.wait_until(lambda: run.step == NUM_STEPS, "the last step")
    assert store.newest() is None, "a version without all of its parts exists"
    assert [one.exit_code for one in ranks] == [None, None], "it ended without publishing its last version"
    freed.touch()
    assert run.finish(ranks) == [0, 0], run.logs()
    assert store.newest() == PolicyVersion(1, NUM_STEPS)
    assert read(store.folder, PolicyVersion(1, NUM_STEPS)), "every tensor checked"
    # two were taken before the disk was known to be full, and the last one at the end
    assert set(store.committed()) <= {PolicyVersion(1, version) for version in (0, 1, NUM_STEPS)}
    show(f"{NUM_STEPS} steps trained without room for weights; with room again the last version is published")


@pytest.mark.fault(6, "no room in the weights folder for longer than PUBLISH_TIMEOUT_S")
def test_a_disk_that_stays_full_ends_the_learner_with_the_reason_and_a_checkpoint(run, show):
    run.constants["learner.stage.PUBLISH_TIMEOUT_S"] = 2.0
    hooks = {"full_disk": {"rank": 1, "until": str(run.folder / "never")}, "slow_steps": 0.2}
    hooks["late_limit"] = str(run.checkpoints)
    began_s = time.monotonic()
    assert all(code != 0 for code in run.finish(run.start(None, hooks, num_steps=NUM_STEPS, checkpoint_every=2)))
    said = f"publishing to {run.folder / 'weights'} failed"
    assert f"PublishFailed: {said}" in run.log(1)
    assert "No space left on device" in run.log(1)
    assert "StageLost" in run.log(0) or f"gave up: {said}" in run.log(0)
    assert run.steps_saved(), "what was trained is lost"
    show(f"the learner ends after {time.monotonic() - began_s:.0f} s with folder and reason, checkpoints kept")


@pytest.mark.fault(6, "the same, where every version is published whatever happens", control=True)
def test_a_learner_that_published_every_version_would_stand_still(run, show):
    hooks = {"full_disk": {"rank": 1, "until": str(run.folder / "freed")}, "publish_regardless": True}
    run.start(None, hooks, num_steps=NUM_STEPS)
    run.wait_until(lambda: run.step >= 1, "the first step")
    time.sleep(5)
    assert run.step <= 3
    show(f"{run.step} of {NUM_STEPS} steps after 5 s")


def test_a_version_that_was_left_out_is_made_up_for_while_admission_waits_for_it(tmp_path):
    """Four versions a step, and room for two: the last of a step is left out, and no group is leased without it."""
    run = LearnerRun(tmp_path / "bounded", updates_per_step=4)
    try:
        with MadeUpActor(run.address):
            run.train(None, {"slow_disk": {"rank": 0, "seconds": 0.3}}, num_steps=4, num_epochs=4)
        store = WeightStore(run.folder / "weights")
        assert store.newest() == PolicyVersion(0, 16)
        assert run.step == 4
    finally:
        run.close()


def test_a_learner_that_is_given_tokens_past_the_bound_refuses_them_and_says_so_on_every_rank(run):
    run.weight_sync["max_lag"] = 4  # the buffer of this run believes in another
    assert all(code != 0 for code in run.finish(run.start(num_steps=NUM_STEPS)))
    assert run.step == 5, "the draws of versions 0 to 4 are within the bound"
    said = "the update at version 5 was given tokens with a lag of 5 versions, and max_lag = 4"
    assert f"StaleTokens: {said}" in run.log(1)
    assert f"CoordinatorFailed: the coordinator, rank 1, gave up: {said}" in run.log(0)
