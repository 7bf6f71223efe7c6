"""What the tests of the learner's step share: tiny models, made-up trajectories, and ranks as processes.

As a script this file is the ranks of one shape: `python -m tests.unit.two_pass CASES_MODULE FOLDER REPLICAS STAGES`.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from algorithms.registry import AlgorithmConfig
from buffer.config import BufferConfig
from buffer.trajectory import Trajectory, VersionSpan
from learner.assembly import build_networks, build_reference
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.mesh import Mesh, Place
from learner.networks import Networks
from learner.packing import PackingRule
from learner.pipeline import micro_batch_rule
from learner.reference import Reference
from learner.spec import LearnerSpec
from learner.step import TrainStep
from weight_sync.config import WeightSyncConfig
from weight_sync.staleness import PolicyVersion

ROOT = Path(__file__).parents[2]
VOCABULARY, TEMPERATURE, TOKEN_BUDGET, NUM_STEPS = 40, 0.8, 48, 2
SEED = 5


@dataclass(frozen=True)
class Case:
    """One run to compare with an unsplit one."""

    kind: str
    """tied or untied."""
    config: LearnerConfig
    algorithm: AlgorithmConfig
    precision: str = "float64"


def make_rows(seed: int, num_groups: int = 4, num_prompts: int | None = None, **changes) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        for index in range(3):
            prompt, length = int(random.integers(1, 7)), int(random.integers(1, 20))
            fields = {
                "lease_id": 0,
                "attempt": 0,
                "group_id": group,
                "sample_index": index,
                "prompt_id": group % (num_prompts or num_groups),
                "token_ids": random.integers(0, VOCABULARY, prompt + length).astype(np.int32),
                "prompt_length": prompt,
                "logprobs": -random.random(length).astype(np.float32) * 5,
                "spans": (VersionSpan(PolicyVersion(0, 0), 0, length),),
                "reward": float(random.random()),
                "finish_reason": "stop",
            }
            rows.append(Trajectory(**{**fields, **changes}))
    return rows


def make_models(folder: Path) -> None:
    for kind in ("tied", "untied"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            tie_word_embeddings=kind == "tied",
        )
        LlamaForCausalLM(config).double().save_pretrained(folder / kind)


def make_networks(
    path: Path, config: LearnerConfig, algorithm: AlgorithmConfig, mesh: Mesh | None = None, precision="float64"
) -> tuple[Networks, Reference]:
    """As a rank of a run makes them; without a mesh as the only one."""
    mesh = mesh or Mesh.build(Place(0))
    place = mesh.place
    update = {"num_stages": place.num_stages, "num_replicas": place.num_replicas, "precision": precision}
    spec = LearnerSpec(
        rank=place.rank,
        rendezvous="",
        model_path=path,
        reference_path=path,
        temperature=TEMPERATURE,
        max_tokens=1,
        run_id="test",
        seed=SEED,
        buffer_addresses=(),
        run_folder=path,
        config=config.model_copy(update=update),
        algorithm=algorithm,
        weight_sync=WeightSyncConfig(),
        buffer=BufferConfig(),
    )
    networks = build_networks(spec, mesh, torch.device("cpu"))
    return networks, build_reference(spec, networks)


def build(rows: list[Trajectory], version: int = 0, token_budget: int = TOKEN_BUDGET, **rule: int) -> StepBatch:
    return StepBatch.build(rows, version, {0: 0}, PackingRule(token_budget, **rule))


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def weights_of(networks: Networks) -> dict[str, torch.Tensor]:
    """Copies of all that is trained, by name."""
    found = {}
    for name, network in zip(("policy", "critic"), networks.all, strict=False):
        found |= {f"{name}.{key}": parameter.detach().clone() for key, parameter in network.named_parameters()}
    return found


def run_ranks(module: str, folder: Path, shapes: list[tuple[int, int]]) -> None:
    """Run `module.one_rank(folder, mesh)` in a process per rank, for each (replicas, stages)."""
    for num_replicas, num_stages in shapes:
        command = [sys.executable, "-W", "error", "-m", "tests.unit.two_pass", module, str(folder)]
        ranks = subprocess.run(
            [*command, str(num_replicas), str(num_stages)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=240,
            check=False,
        )
        assert ranks.returncode == 0, ranks.stderr[-4000:]


def run_forked(module: str, folder: Path, num_replicas: int, num_stages: int) -> int:
    """The ranks of one shape, forked from a process that has imported everything; returns how many failed."""
    one_rank = importlib.import_module(module).one_rank
    processes = []
    for rank in range(num_replicas * num_stages):
        place = Place(rank, num_stages, num_replicas)
        processes.append(multiprocessing.get_context("fork").Process(target=run_rank, args=(one_rank, folder, place)))
        processes[-1].start()
    for process in processes:
        process.join(200)
        process.kill()
        process.join()
    return sum(process.exitcode != 0 for process in processes)


def run_rank(one_rank: Callable[[Path, Mesh], None], folder: Path, place: Place) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{place.num_replicas}x{place.num_stages}",
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=timedelta(seconds=60),
    )
    one_rank(folder, Mesh.build(place))
    dist.destroy_process_group()


def train_cases(cases: dict[str, Case], folder: Path, mesh: Mesh) -> None:
    """Train every case for some steps, and write down what came of it."""
    place = mesh.place
    for name, case in cases.items():
        networks, reference = make_networks(folder / case.kind, case.config, case.algorithm, mesh, case.precision)
        train_step = TrainStep(networks, reference, case.algorithm, case.config, SEED)
        asked = micro_batch_rule(case.config.schedule, place.num_stages)
        tensors, version = {}, 0
        for step in range(NUM_STEPS):
            # the second step fits one micro-batch: it is spread over the stages, and some more stay empty
            budget, least = (TOKEN_BUDGET, asked.least) if step == 0 else (4096, 12)
            rule = {"num_replicas": place.num_replicas, "min_micro_batches": least, "multiple": asked.multiple}
            batch = build(make_rows(step), version, budget, **rule)
            result = train_step.run(batch, step)
            assert all(update.result.taken for update in result.updates)
            version = result.version
            for number, update in enumerate(result.updates):
                seen = dict(zip(("grad_norm", "critic_norm"), update.result.grad_norms, strict=False))
                seen |= {key: value for key, value in update.metrics.items() if value is not None}
                numbers = {f"seen.{step}.{number}.{key}": value for key, value in seen.items()}
                tensors |= {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
        # copies: a file refuses two names for one memory
        tensors |= {key: tensor.clone() for key, tensor in networks.policy.published_tensors().items()}
        for prefix, network in zip(("policy.", "critic."), networks.all, strict=False):
            for key, parameter in network.named_parameters():
                if prefix == "critic." or key.startswith("value_head."):
                    tensors[prefix + key] = parameter.detach().clone()
        save_file(tensors, folder / f"{name}-{place.num_replicas}x{place.num_stages}-{place.rank}.safetensors")


if __name__ == "__main__":
    its_module, where, replicas, stages = sys.argv[1:]
    sys.exit(run_forked(its_module, Path(where), int(replicas), int(stages)))
