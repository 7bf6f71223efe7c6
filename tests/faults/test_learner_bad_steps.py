"""Steps without a finite loss or gradient are skipped on all ranks and counted; three in a row end the run."""

import pytest
from tests.faults.learner_run import GROUP_SIZE, GROUPS_PER_STEP, LearnerRun, RandomActor, record

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.store import WeightStore

SAMPLES = GROUP_SIZE * GROUPS_PER_STEP
REPLICAS = {"num_replicas": 2, "num_stages": 2}


@pytest.fixture
def start_run(tmp_path):
    """Return `start_run(num_steps)`, which makes a run with `num_steps` recorded steps (0: an empty buffer)."""
    runs = []

    def start(num_steps: int = 0) -> LearnerRun:
        if num_steps:
            record(tmp_path / "recorded", num_steps)
        runs.append(LearnerRun(tmp_path / "run", recorded=tmp_path / "recorded" if num_steps else None))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def num_bad_tensors(run: LearnerRun) -> int:
    return sum(not tensor.isfinite().all() for tensor in run.newest_state().values())


@pytest.mark.fault(25, "a NaN gradient on one of 2 x 2 ranks")
def test_a_nan_gradient_on_one_rank_skips_the_step_on_all_ranks_and_keeps_its_batch(start_run, show):
    run = start_run(6)
    run.train(None, {"nan_gradient": {"rank": 0, "updates": [3]}}, num_steps=6, **REPLICAS)
    reports = run.reports()
    assert [(report["version"], report["skipped"]) for report in reports] == [
        *((1, False), (2, False), (2, True), (3, False), (4, False), (5, False))
    ]
    assert [path.name for path in (run.folder / "bad_batches").iterdir()] == ["step-3.arrow"]
    assert [report["buffer/filtered"] for report in reports][3:] == [SAMPLES] * 3
    assert reports[-1]["buffer/trained"] == 4 * SAMPLES
    assert num_bad_tensors(run) == 0
    assert WeightStore(run.folder / "weights").newest() == PolicyVersion(1, 5)
    show("step skipped, version stays, its samples filtered and kept, no tensor of any rank touched")


@pytest.mark.fault(25, "non-finite updates are applied", control=True)
def test_a_nan_gradient_corrupts_the_weights_if_the_update_is_taken(start_run, show):
    run = start_run(6)
    run.train(None, {"nan_gradient": {"rank": 0, "updates": [3]}, "take_every_update": True}, num_steps=3, **REPLICAS)
    num_bad = num_bad_tensors(run)
    assert num_bad
    show(f"{num_bad} of {len(run.newest_state())} tensors are no longer finite")


@pytest.mark.fault(25, "NaN gradients three steps in a row, with a restart in between")
def test_the_third_non_finite_step_in_a_row_ends_the_run_across_a_restart(start_run, show):
    run = start_run(6)
    run.train(None, {"nan_gradient": {"rank": 1, "updates": [3, 4]}}, num_steps=4)
    assert all(run.finish(run.start(None, {"nan_gradient": {"rank": 0, "updates": [1]}}, num_steps=6)))
    assert all("TrainingDiverged: steps 3, 4, 5 had no finite loss" in run.log(rank) for rank in (0, 1))
    assert len(list((run.folder / "bad_batches").glob("step-*.arrow"))) == 3
    show("the run ends on all ranks at the version of step 2")


@pytest.mark.fault(25, "rewards so large that the loss is infinite")
def test_steps_without_a_finite_loss_change_nothing_and_the_third_ends_the_run(start_run, show):
    run = start_run()
    with RandomActor(run.address) as actor:
        actor.reward_factor = 1e38
        ranks = run.start(num_steps=10)
        assert all(code != 0 for code in run.finish(ranks))
    assert all("TrainingDiverged: steps 1, 2, 3 had no finite loss" in run.log(rank) for rank in (0, 1))
    assert [(report["version"], report["skipped"]) for report in run.reports()] == [(0, True)] * 3
    assert len(list((run.folder / "bad_batches").glob("step-*.arrow"))) == 3
    show("three steps skipped, then the run ends on all ranks")
