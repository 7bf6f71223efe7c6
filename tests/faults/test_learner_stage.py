"""Two stages as real processes on the real buffer service, with an actor that generates random tokens."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.faults.learner_run import LearnerRun, RandomActor
from tests.trajectories import decode
from tests.world.learner import TABLES
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from leeway.common.staleness import PolicyVersion
from leeway.launch.observe.metrics import METRICS
from leeway.weight_sync.store import WeightStore


def load_metadata(checkpoint: Path) -> set[str]:
    """Return the names of the tensors of a checkpoint."""
    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


@pytest.fixture
def start_run(tmp_path):
    runs = []

    def start(**kwargs) -> LearnerRun:
        runs.append(LearnerRun(tmp_path, **kwargs))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_a_run_trains_publishes_exports_and_resumes_where_it_stopped(start_run):
    run = start_run(tied=True)
    with RandomActor(run.address):
        run.train(num_steps=5, checkpoint_every=2)
        reports = run.reports()
        assert [report["step"] for report in reports] == [1, 2, 3, 4, 5]
        assert reports[0]["mismatch/lag0_tokens"] == reports[0]["batch/completion_tokens"]
        assert all(report["lag/token_max"] <= 4 and report["grad_norm"] > 0 for report in reports)
        store = WeightStore(run.folder / "weights")
        first = store.newest()
        assert first.version == 5
        # after every step, the tied weights on the two stages are equal
        files = [load_file(file) for file in sorted(store.version_folder(first).glob("*.safetensors"))]
        tensors = {name: tensor for file in files for name, tensor in file.items()}
        assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        start = load_file(run.folder / "model" / "model.safetensors")
        assert not torch.equal(start["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
        model = AutoModelForCausalLM.from_pretrained(run.folder / "export")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, tensors[name], rtol=0, atol=0)
        assert (run.folder / "export" / "tokenizer_config.json").exists()

        run.train(num_steps=8, checkpoint_every=2)
    assert [report["step"] for report in run.reports()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.newest() == PolicyVersion(first.incarnation + 1, 8)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_training_resumes_from_the_newest_checkpoint_after_a_kill(start_run):
    run = start_run()
    with RandomActor(run.address):
        ranks = run.start(num_steps=100_000, checkpoint_every=3)
        checkpoints = run.folder / "checkpoints"
        run.wait_until(lambda: checkpoints.exists() and list(checkpoints.glob("step-*")), "a checkpoint")
        ranks[0].kill()
        # the coordinator detects and reports a dead peer
        assert ranks[1].wait(60) != 0
        assert "StageLost" in run.log(1)
        newest = max(int(path.name.split("-")[1]) for path in checkpoints.glob("step-*"))
        (run.folder / "reports.jsonl").unlink()
        run.train(num_steps=newest + 2)
        assert [report["step"] for report in run.reports()] == [newest + 1, newest + 2]


def test_a_requested_stop_ends_with_a_checkpoint_of_the_last_step(start_run):
    run = start_run()
    with RandomActor(run.address):
        ranks = run.start(num_steps=100_000, checkpoint_every=100_000)
        store = WeightStore(run.folder / "weights")
        run.wait_until(lambda: (newest := store.newest()) is not None and newest.version >= 2, "version 2")
        ranks[1].terminate()
        assert run.finish(ranks) == [0, 0], run.log(0) + run.log(1)
    last = run.reports()[-1]["step"]
    assert (run.folder / "checkpoints" / f"step-{last:08d}").exists()
    assert store.newest().version == last


def test_a_learner_without_batches_reports_the_missing_step(start_run):
    run = start_run()
    run.constants["leeway.learner.coordinator.BATCH_TIMEOUT_S"] = 2.0
    ranks = run.start(num_steps=3)
    assert all(code != 0 for code in run.finish(ranks))
    assert "NoBatch: no batch for step 1 within 2 s" in run.log(1)
    assert "CoordinatorFailed: the coordinator (rank 1) failed: no batch for step 1" in run.log(0)


def test_each_update_makes_a_version_and_a_critic_is_saved_but_never_published(start_run):
    run = start_run(tied=True, updates_per_step=4)
    algorithm = {"type": "off_policy_ppo", "baseline": "critic"}
    options = {"num_minibatches": 2, "num_epochs": 2, "checkpoint_every": 2}
    with RandomActor(run.address):
        run.train(algorithm, num_steps=3, **options)
        store = WeightStore(run.folder / "weights")
        first = store.newest()
        # a version is skipped while two earlier versions are being written
        run.train(algorithm, {"flush_before_steps": 60}, num_steps=5, **options)
    reports = run.reports()
    assert [(report["step"], report["version"]) for report in reports] == [(n, 4 * n) for n in range(1, 6)]
    assert all(report["updates/taken"] == 4 and report["lag/token_max"] <= 4 for report in reports)
    assert all(report.keys() - TABLES <= METRICS.keys() for report in reports)
    checkpoint = load_metadata(run.folder / "checkpoints" / "step-00000005")
    assert {"critic.value_head.weight", "critic.optimizer.exp_avg.value_head.weight"} <= checkpoint
    newest = store.newest()
    assert (first.version, newest) == (12, PolicyVersion(first.incarnation + 1, 20))
    manifest = store.manifest(newest)
    # versions between the updates of a step are published too, unless earlier versions are still being written
    assert 16 < PolicyVersion.parse(manifest.parent).version < 20
    start = load_file(run.folder / "model" / "model.safetensors")
    published = {entry.name for entry in manifest.tensors}
    assert published == start.keys() | {"lm_head.weight"}
    assert load_file(run.folder / "export" / "model-00001-of-00002.safetensors").keys() <= start.keys()
    assert load_file(run.folder / "export" / "model-00002-of-00002.safetensors").keys() <= start.keys()


def test_every_nth_version_and_the_last_one_are_published(start_run):
    run = start_run()
    run.weight_sync |= {"publish_every": 2}
    run.constants["leeway.learner.stage.KEPT_VERSIONS"] = 9
    with RandomActor(run.address):
        run.train(hooks={"flush_before_steps": 60}, num_steps=5)
    store = WeightStore(run.folder / "weights")
    assert [version.version for version in store.committed()] == [0, 2, 4, 5]
    assert [report["version"] for report in run.reports()] == [1, 2, 3, 4, 5]


def test_an_unusable_reward_stops_every_stage_and_names_the_sample(start_run):
    run = start_run()
    with RandomActor(run.address) as actor:
        actor.reward_factor = 1e60
        assert all(code != 0 for code in run.finish(run.start(num_steps=10)))
    messages = [re.search(r"BadSample: (step 1: sample \d of group \d+ .*)", run.log(rank))[1] for rank in (0, 1)]
    assert messages[0] == re.sub(r", record \d+", "", messages[1])
    assert "but must be finite" in messages[0]
    assert ", record " in messages[1]
    assert not run.reports()
    kept = run.folder / "bad_batches" / "step-1.arrow"
    assert str(kept) in messages[0]
    sample, group = map(int, re.search(r"sample (\d) of group (\d+) ", messages[0]).groups())
    named = [row for row in decode(kept.read_bytes()) if (row.group_id, row.sample_index) == (group, sample)]
    assert len(named) == 1
    assert named[0].reward > 1e38
