"""A run folder, its buffer service, and the ranks of its learner as processes that tests can kill."""

import contextlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tests.faults.learner_stage_process import run_rank
from tests.world.buffer import InProcessBuffer
from tests.world.files import json_rows
from tests.world.forks import FORKS
from tests.world.ports import free_port
from tests.world.run_context import run_facts
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.schema import Trajectory, VersionSpan
from leeway.buffer.service import BufferService
from leeway.common.run import RunFacts
from leeway.common.staleness import PolicyVersion

ROOT = Path(__file__).parents[2]
GROUP_SIZE, GROUPS_PER_STEP, VOCABULARY = 4, 3, 32
MANY = 1000
"""Lag bound so large that the groups of all steps can be recorded before the first step."""


def make_model(folder: Path, *, tied: bool = False, num_layers: int = 2) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


def new_sample(lease, index: int, version: PolicyVersion, random: np.random.Generator, **fields) -> Trajectory:
    """Return a sample of uniform tokens whose reward is the fraction of small token ids."""
    length = int(random.integers(2, 8))
    tokens = random.integers(0, VOCABULARY, 4 + length).astype(np.int32)
    made = {
        "lease_id": lease.lease_id,
        "attempt": lease.attempt,
        "group_id": lease.group_id,
        "sample_index": index,
        "prompt_id": lease.prompt_id,
        "token_ids": tokens,
        "prompt_length": 4,
        "logprobs": np.full(length, -np.log(VOCABULARY), np.float32),
        "spans": (VersionSpan(version, 0, length),),
        "reward": float((tokens[4:] < 8).mean()),
        "finish_reason": "stop",
        "started_s": time.time(),
        "finished_s": time.time(),
    }
    return Trajectory(**{**made, **fields})


def facts_of(updates_per_step: int = 1, **staleness) -> RunFacts:
    return run_facts(
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        updates_per_step=updates_per_step,
        vocab_size=VOCABULARY,
        **staleness,
    )


def record(folder: Path, num_steps: int, updates_per_step: int = 1) -> None:
    """Fill a buffer with the samples of `num_steps` steps, so that a learner needs no actor."""
    random = np.random.default_rng(0)
    buffer = InProcessBuffer(folder, facts_of(updates_per_step, max_lag=MANY))
    epoch, sequence_number, num_groups = buffer.hello("actor-0").epoch, 0, 0
    buffer.begin()
    while num_groups < num_steps * GROUPS_PER_STEP:
        leases = buffer.lease("actor-0", num_steps * GROUPS_PER_STEP - num_groups, epoch=epoch)
        assert leases, f"admission is closed after {num_groups} groups"
        for lease in leases:
            rows = []
            for index in lease.sample_indices:
                named = {"actor": "actor-0", "epoch": epoch, "seq": sequence_number}
                rows.append(new_sample(lease, index, PolicyVersion(0, 0), random, **named))
                sequence_number += 1
            buffer.push(rows)
            num_groups += 1
    buffer.close()


class RandomActor:
    """An actor that leases groups, samples tokens uniformly and rewards small token ids."""

    def __init__(self, address: str) -> None:
        self._client = BufferClient(address, run_id="test", role="actor", name="actor-0")
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
        self._thread.join(60)
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            grant = self._client.lease(4).result(60)
            if not grant.leases or self.paused.is_set():
                time.sleep(0.01)
            for lease in grant.leases if not self.paused.is_set() else ():
                for index in lease.sample_indices:
                    sample = new_sample(lease, index, PolicyVersion(*grant.newest), self._random)
                    self._client.push(self._rewarded(sample))

    def _rewarded(self, sample: Trajectory) -> Trajectory:
        return replace(sample, reward=sample.reward * self.reward_factor)


class Rank:
    """A process of a learner."""

    def __init__(self, spec: Path, number: int, log: Path, *, as_script: bool) -> None:
        """Start the process.

        Args:
            spec: file with the settings of learner_stage_process.
            number: rank number.
            log: file for its output.
            as_script: start a separate interpreter, as a run does; otherwise fork, which is faster.
        """
        self.number, self.log_path = number, log
        self._process: subprocess.Popen | multiprocessing.process.BaseProcess
        if as_script:
            with log.open("w") as file:
                command = [sys.executable, "-m", "tests.faults.learner_stage_process", str(spec), str(number)]
                self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        else:
            self._process = FORKS.Process(target=run_rank, args=(spec, number, log))
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout_s: float = 60) -> int | None:
        """Wait for the process; return its exit code, or None after a timeout."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        else:
            self._process.join(timeout_s)
        return self.exit_code


class LearnerRun:
    """A run folder, its buffer service, and the ranks that are started in the folder."""

    def __init__(self, folder: Path, *, recorded: Path | None = None, updates_per_step: int = 1, **model) -> None:
        """Create the folder and start the service.

        Args:
            folder: run folder.
            recorded: a folder that `record` filled, which is copied; None for an empty buffer and bounded lags.
            updates_per_step: updates per step (M).
            model: arguments of `make_model`.
        """
        self.folder = folder
        make_model(folder / "model", **model)
        (folder / "metrics.jsonl").touch()
        facts = facts_of(updates_per_step)
        if recorded is not None:
            facts = facts_of(updates_per_step, max_lag=MANY)
            shutil.copytree(recorded, folder / "buffer")
        self._stop = threading.Event()
        self._service = BufferService(BufferConfig(), facts, folder / "buffer")
        self.address = self._service.bind()
        self._thread = threading.Thread(target=self._service.serve, args=(self._stop,), daemon=True)
        self._thread.start()
        self.ranks: list[Rank] = []
        self.weight_sync: dict[str, object] = {"max_lag": facts.staleness.max_lag}
        """[weight_sync] section of the learner; the buffer service has a separate section."""
        self.constants: dict[str, object] = {}
        """Constants to set in the ranks, by dotted name."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, algorithm=None, hooks=None, *, as_script: bool = False, teachers=(), **config) -> list[Rank]:
        """Start all ranks.

        Args:
            algorithm: [algorithm] section; None for trajectory balance.
            hooks: faults of learner_stage_process by name, with their values.
            as_script: see `Rank`.
            teachers: folders of teacher models, assigned to prompts in turn; if empty, the model itself scores samples.
            config: changes to the [learner] section.
        """
        section = {
            "num_stages": 2,
            "groups_per_step": GROUPS_PER_STEP,
            "token_budget": 64,
            "learning_rate": 1e-2,
            **config,
        }
        spec = {
            "config": section,
            "rendezvous": f"tcp://127.0.0.1:{free_port()}",
            "model_path": str(self.folder / "model"),
            "teachers": [str(teacher) for teacher in teachers],
            "buffer_address": self.address,
            "run_folder": str(self.folder),
            "algorithm": algorithm or {"type": "trajectory_balance"},
            "hooks": hooks or {},
            "constants": {"leeway.learner.stage.COLLECTIVE_TIMEOUT_S": 30.0, **self.constants},
            "weight_sync": self.weight_sync,
        }
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec))
        for ready in self.folder.glob("ready-*"):
            ready.unlink()
        num_ranks = section["num_stages"] * section.get("num_replicas", 1)
        logs = [self.folder / f"rank-{number}.log" for number in range(num_ranks)]
        self.ranks = [Rank(path, number, log, as_script=as_script) for number, log in enumerate(logs)]
        return self.ranks

    def train(self, algorithm=None, hooks=None, **config) -> None:
        """Start all ranks and wait until they exit successfully."""
        codes = self.finish(self.start(algorithm, hooks, **config))
        assert set(codes) == {0}, self.logs()

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {rank.log_path.name}\n{rank.log_path.read_text()[-2500:]}" for rank in self.ranks)

    def finish(self, ranks: list[Rank]) -> list[int | None]:
        return [rank.wait(90) for rank in ranks]

    def reports(self) -> list[dict]:
        """Return the reports of all finished steps, including every repetition of a redone step."""
        return json_rows(self.folder / "reports.jsonl")

    @property
    def step(self) -> int:
        """Return the last finished step."""
        reports = self.reports()
        return reports[-1]["step"] if reports else 0

    def wait_until_ready(self) -> None:
        """Wait until all ranks have finished set-up and begin to train."""
        paths = [self.folder / f"ready-{rank.number}" for rank in self.ranks]
        self.wait_until(lambda: all(path.exists() for path in paths), "start-up")

    def wait_until(self, condition, name: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{name} did not happen; {self.logs()}"
            time.sleep(0.005)

    def steps_saved(self) -> list[int]:
        found = self.checkpoints.glob("step-*/meta.json") if self.checkpoints.exists() else ()
        return sorted(int(path.parent.name.split("-")[1]) for path in found)

    def newest_state(self) -> dict[str, torch.Tensor]:
        """Return the weights and the optimizer's moments in the newest checkpoint, by name."""
        return load_checkpoint(self.checkpoints / f"step-{self.steps_saved()[-1]:08d}")

    def kill(self) -> None:
        """Kill all ranks."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait(60)

    def ledger(self) -> dict[str, int]:
        """Return the buffer's ledger."""
        client = BufferClient(self.address, run_id="test", role="actor", name="observer")
        client.connect()
        try:
            return client.status().result(60).ledger
        finally:
            client.close(1.0)

    def scores(self) -> dict[int, np.ndarray]:
        """Return the stored log-probabilities of the reference, by record."""
        stored = self._service._store.read(lambda tx: list(tx.scores.all_items()))
        return {record: np.frombuffer(score, np.float32) for (record,), score in stored}

    def close(self) -> None:
        self.kill()
        self._stop.set()
        self._thread.join(60)


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of model and optimizer in a checkpoint, by name."""
    state: dict = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    return {name: value for name, value in _flatten(state) if not name.startswith("rng")}


def _flatten(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
