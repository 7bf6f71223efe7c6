"""Two stages as real processes against the real buffer service, with an actor that makes tokens up."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from buffer.client import BufferClient, decode_draw
from buffer.config import BufferConfig, RunFacts
from buffer.service import BufferService
from buffer.trajectory import Trajectory, VersionSpan
from launch.metrics import METRICS
from weight_sync.staleness import PolicyVersion, StalenessConfig
from weight_sync.store import WeightStore

GROUP_SIZE, GROUPS_PER_STEP, VOCABULARY = 4, 3, 32


def make_model(folder: Path, tied: bool) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


class MadeUpActor:
    """Leases like an actor; samples tokens uniformly, rewards small token ids."""

    def __init__(self, address: str) -> None:
        self._client = BufferClient(address, run_id="test", role="actor", name="actor-0", config=BufferConfig())
        self._stop = threading.Event()
        self._random = np.random.default_rng(0)
        self.reward_factor = 1.0
        self.paused = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._client.connect()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(20)
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            grant = self._client.lease(4).result(60)
            if not grant.leases or self.paused.is_set():
                time.sleep(0.01)
            for lease in grant.leases if not self.paused.is_set() else ():
                for index in lease.sample_indices:
                    self._client.push(self._sample(lease, index, PolicyVersion(*grant.newest)))

    def _sample(self, lease, index, version) -> Trajectory:
        length = int(self._random.integers(2, 8))
        tokens = self._random.integers(0, VOCABULARY, 4 + length).astype(np.int32)
        now_s = time.time()
        return Trajectory(
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            group_id=lease.group_id,
            sample_index=index,
            prompt_id=lease.prompt_id,
            token_ids=tokens,
            prompt_length=4,
            logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
            spans=(VersionSpan(version, 0, length),),
            reward=self.reward_factor * float((tokens[4:] < 8).mean()),
            finish_reason="stop",
            started_s=now_s,
            finished_s=now_s,
        )


def load_metadata(checkpoint: Path) -> set[str]:
    """Names of the tensors of a checkpoint."""
    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


class Run:
    """A run folder, its buffer service and the stages started in it."""

    def __init__(self, folder: Path, tied: bool = False, updates_per_step: int = 1) -> None:
        self.folder = folder
        make_model(folder / "model", tied)
        facts = RunFacts(
            run_id="test",
            seed=0,
            num_prompts=64,
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            updates_per_step=updates_per_step,
            vocab_size=VOCABULARY,
            max_tokens=16,
            staleness=StalenessConfig(),
        )
        self._stop = threading.Event()
        service = BufferService(BufferConfig(), facts, folder / "buffer")
        self.address = service.bind()
        self._thread = threading.Thread(target=service.serve, args=(self._stop,), daemon=True)
        self._thread.start()
        self._processes: list[subprocess.Popen] = []

    def start(self, algorithm=None, **config) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        orders = {
            "config": {
                "num_stages": 2,
                "groups_per_step": GROUPS_PER_STEP,
                "token_budget": 64,
                "learning_rate": 1e-2,
                "collective_timeout_s": 30,
                **config,
            },
            "rendezvous": f"tcp://127.0.0.1:{port}",
            "model_path": str(self.folder / "model"),
            "buffer_address": self.address,
            "run_folder": str(self.folder),
            "algorithm": algorithm or {"type": "trajectory_balance"},
        }
        path = self.folder / "orders.json"
        path.write_text(json.dumps(orders))
        for ready in self.folder.glob("ready-*"):
            ready.unlink()
        script = Path(__file__).with_name("learner_stage_process.py")
        started = []
        for rank in range(2):
            with (self.folder / f"stage-{rank}.log").open("w") as log:
                command = [sys.executable, "-W", "error::UserWarning:learner", str(script), str(path), str(rank)]
                started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        self._processes += started
        return started

    def log(self, rank: int) -> str:
        return (self.folder / f"stage-{rank}.log").read_text()

    def finish(self, processes) -> list[int]:
        return [process.wait(90) for process in processes]

    def reports(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "reports-1.jsonl").read_text().splitlines()]

    def wait_until(self, condition, what: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not happen; {self.log(0)[-2000:]} {self.log(1)[-2000:]}"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(30)
        self._stop.set()
        self._thread.join(20)


@pytest.fixture
def start_run(tmp_path):
    runs = []

    def start(**kwargs) -> Run:
        runs.append(Run(tmp_path, **kwargs))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_a_run_trains_publishes_exports_and_resumes_where_it_stopped(start_run):
    run = start_run(tied=True)
    with MadeUpActor(run.address):
        assert run.finish(run.start(num_steps=5, checkpoint_every=2)) == [0, 0], run.log(0) + run.log(1)
        reports = run.reports()
        assert [report["step"] for report in reports] == [1, 2, 3, 4, 5]
        assert reports[0]["mismatch/lag0_tokens"] == reports[0]["batch/completion_tokens"]
        assert all(report["lag/token_max"] <= 4 and report["grad_norm"] > 0 for report in reports)
        store = WeightStore(run.folder / "weights")
        first = store.newest()
        assert first.version == 5
        # tied weights stay one tensor on two stages, step after step
        files = [load_file(file) for file in sorted(store.version_folder(first).glob("*.safetensors"))]
        tensors = {name: tensor for file in files for name, tensor in file.items()}
        assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        start = load_file(run.folder / "model" / "model.safetensors")
        assert not torch.equal(start["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
        model = AutoModelForCausalLM.from_pretrained(run.folder / "export")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, tensors[name], rtol=0, atol=0)
        assert (run.folder / "export" / "tokenizer_config.json").exists()

        assert run.finish(run.start(num_steps=8, checkpoint_every=2)) == [0, 0], run.log(0) + run.log(1)
    assert [report["step"] for report in run.reports()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.newest() == PolicyVersion(first.incarnation + 1, 8)
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_after_a_kill_training_resumes_from_the_checkpoint_before(start_run):
    run = start_run()
    with MadeUpActor(run.address):
        processes = run.start(num_steps=100_000, checkpoint_every=3)
        checkpoints = run.folder / "checkpoints"
        run.wait_until(lambda: checkpoints.exists() and list(checkpoints.glob("step-*")), "a checkpoint")
        processes[0].kill()
        # the lead notices a dead neighbour by itself, and says whom it lost
        assert processes[1].wait(60) != 0
        assert "StageLost" in run.log(1)
        newest = max(int(path.name.split("-")[1]) for path in checkpoints.glob("step-*"))
        (run.folder / "reports-1.jsonl").unlink()
        assert run.finish(run.start(num_steps=newest + 2)) == [0, 0], run.log(0) + run.log(1)
        assert [report["step"] for report in run.reports()] == [newest + 1, newest + 2]


def test_a_requested_stop_ends_with_a_checkpoint_of_the_last_step(start_run):
    run = start_run()
    with MadeUpActor(run.address):
        processes = run.start(num_steps=100_000, checkpoint_every=100_000)
        store = WeightStore(run.folder / "weights")
        run.wait_until(lambda: (newest := store.newest()) is not None and newest.version >= 2, "version 2")
        processes[1].terminate()
        assert run.finish(processes) == [0, 0], run.log(0) + run.log(1)
    last = run.reports()[-1]["step"]
    assert (run.folder / "checkpoints" / f"step-{last:08d}").exists()
    assert store.newest().version == last


def test_a_learner_without_batches_says_who_owes_them(start_run):
    run = start_run()
    processes = run.start(num_steps=3, batch_timeout_s=2)
    assert all(code != 0 for code in run.finish(processes))
    assert "NoBatch: no batch for step 1 within learner.batch_timeout_s = 2 s" in run.log(1)
    assert "LeadFailed: stage 1 gave up: no batch for step 1" in run.log(0)


def test_steps_without_a_finite_loss_change_nothing_and_the_third_stops_the_run(start_run):
    run = start_run()
    with MadeUpActor(run.address) as actor:
        actor.reward_factor = 1e38
        processes = run.start(num_steps=10)
        assert all(code != 0 for code in run.finish(processes))
    assert all("TrainingDiverged: steps 1, 2, 3 had no finite loss" in run.log(rank) for rank in (0, 1))
    assert [(report["version"], report["skipped"]) for report in run.reports()] == [(0, True)] * 3
    assert len(list((run.folder / "bad_batches").glob("step-*.arrow"))) == 3


def test_several_updates_per_step_are_several_versions_and_a_critic_is_checkpointed_but_never_published(start_run):
    run = start_run(tied=True, updates_per_step=4)
    algorithm = {"type": "off_policy_ppo", "baseline": "critic", "critic": "model"}
    options = {"num_minibatches": 2, "num_epochs": 2, "checkpoint_every": 2}
    with MadeUpActor(run.address):
        assert run.finish(run.start(algorithm, num_steps=3, **options)) == [0, 0], run.log(0) + run.log(1)
        store = WeightStore(run.folder / "weights")
        first = store.newest()
        assert run.finish(run.start(algorithm, num_steps=5, **options)) == [0, 0], run.log(0) + run.log(1)
    reports = run.reports()
    assert [(report["step"], report["version"]) for report in reports] == [(n, 4 * n) for n in range(1, 6)]
    assert all(report["updates/taken"] == 4 and report["lag/token_max"] <= 4 for report in reports)
    assert all(report.keys() <= METRICS.keys() for report in reports)
    checkpoint = load_metadata(run.folder / "checkpoints" / "step-00000005")
    assert {"critic.value_head.weight", "critic.optimizer.exp_avg.value_head.weight"} <= checkpoint
    newest = store.newest()
    assert (first.version, newest) == (12, PolicyVersion(first.incarnation + 1, 20))
    manifest = store.manifest(newest)
    # versions between the updates of a step are published too
    assert PolicyVersion.parse(manifest.parent).version == 19
    start = load_file(run.folder / "model" / "model.safetensors")
    published = {entry.name for entry in manifest.tensors}
    assert published == start.keys() | {"lm_head.weight"}
    assert load_file(run.folder / "export" / "model-00001-of-00002.safetensors").keys() <= start.keys()
    assert load_file(run.folder / "export" / "model-00002-of-00002.safetensors").keys() <= start.keys()


def test_a_reward_that_the_loss_cannot_use_stops_every_stage_with_the_name_of_the_sample(start_run):
    run = start_run()
    with MadeUpActor(run.address) as actor:
        actor.reward_factor = 1e60
        assert all(code != 0 for code in run.finish(run.start(num_steps=10)))
    said = [re.search(r"BadSample: (step 1: sample \d of group \d+ .*)", run.log(rank))[1] for rank in (0, 1)]
    assert said[0] == re.sub(r", record \d+", "", said[1])
    assert "and must be finite" in said[0]
    assert ", record " in said[1]
    assert not run.reports()
    kept = run.folder / "bad_batches" / "step-1.arrow"
    assert str(kept) in said[0]
    sample, group = map(int, re.search(r"sample (\d) of group (\d+) ", said[0]).groups())
    named = [row for row in decode_draw(kept.read_bytes()) if (row.group_id, row.sample_index) == (group, sample)]
    assert len(named) == 1
    assert named[0].reward > 1e38
