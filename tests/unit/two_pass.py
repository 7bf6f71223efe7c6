"""What the tests of the learner's step share: tiny models, made-up trajectories, and ranks as processes.

As a script this file is one rank: `python -m tests.unit.two_pass CASES_MODULE FOLDER RANK NUM_STAGES`.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
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
from buffer.trajectory import Trajectory, VersionSpan
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.model import Heads, load_stage
from learner.networks import Network, Networks
from learner.pipeline import Pipeline
from learner.reference import Reference
from learner.step import TrainStep
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
    path: Path, config: LearnerConfig, algorithm: AlgorithmConfig, rank=0, num_stages=1, dtype=torch.float64
) -> tuple[Networks, Reference]:
    def load(heads: Heads = "token"):
        return load_stage(
            path, rank, num_stages, temperature=TEMPERATURE, device=torch.device("cpu"), dtype=dtype, heads=heads
        )

    needs = algorithm.needs
    policy = Network.build(load("token_and_value" if needs.critic == "head" else "token"), config)
    critic = Network.build(load("value"), config) if needs.critic == "model" else None
    reference = Pipeline(load().requires_grad_(False), config.schedule, None) if needs.reference else None
    return Networks(policy, critic, config), Reference(reference, policy.module)


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
    for name, network in (("policy", networks.policy), ("critic", networks.critic)):
        if network is not None:
            found |= {f"{name}.{key}": p.detach().clone() for key, p in network.module.named_parameters()}
    return found


def start_group(folder: Path, rank: int, num_stages: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_stages}",
        rank=rank,
        world_size=num_stages,
        timeout=timedelta(seconds=60),
    )


def run_ranks(module: str, folder: Path, stages: list[int]) -> None:
    """Run `module.one_rank(folder, rank, num_stages)` in a process per rank, for each number of stages."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.unit.two_pass", module, str(folder), str(rank), str(num)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for num in stages
        for rank in range(num)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def train_cases(cases: dict[str, Case], folder: Path, rank: int, num_stages: int) -> None:
    """Train every case for some steps, and write down what came of it."""
    for name, case in cases.items():
        networks, reference = make_networks(folder / case.kind, case.config, case.algorithm, rank, num_stages)
        train_step = TrainStep(networks, reference, case.algorithm, case.config, SEED)
        tensors, version = {}, 0
        for step in range(NUM_STEPS):
            # the second step fits one micro-batch: it is spread over the stages, and one more stays empty
            budget, least = (TOKEN_BUDGET, 1) if step == 0 else (4096, 12)
            batch = StepBatch.build(make_rows(step), version, {0: 0}, budget, least)
            assert batch.packed.num_micro_batches > num_stages
            result = train_step.run(batch, step)
            assert all(update.result.taken for update in result.updates)
            version = result.version
            for number, update in enumerate(result.updates):
                seen = dict(zip(("grad_norm", "critic_norm"), update.result.grad_norms, strict=False))
                seen |= {key: value for key, value in update.metrics.items() if value is not None}
                numbers = {f"seen.{step}.{number}.{key}": value for key, value in seen.items()}
                tensors |= {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
        # copies: a file refuses two names for one memory
        tensors |= {key: tensor.clone() for key, tensor in networks.policy.module.published_tensors().items()}
        for prefix, network in (("policy.", networks.policy), ("critic.", networks.critic)):
            if network is not None:
                for key, parameter in network.module.named_parameters():
                    if prefix == "critic." or key.startswith("value_head."):
                        tensors[prefix + key] = parameter.detach().clone()
        save_file(tensors, folder / f"{name}-{num_stages}-{rank}.safetensors")


if __name__ == "__main__":
    cases_module, where, its_rank, stages_in_all = sys.argv[1:]
    start_group(Path(where), int(its_rank), int(stages_in_all))
    importlib.import_module(cases_module).one_rank(Path(where), int(its_rank), int(stages_in_all))
    dist.destroy_process_group()
