"""Helpers for tests of the learner step: tiny models, synthetic trajectories, and ranks as processes.

Importing this module shortens the attention buckets and makes norms compute in float64, which changes rounding. If two
ranks are compared bit by bit, both or neither must import it.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from leeway.algorithms.registry import AlgorithmConfig
from leeway.buffer.schema import Trajectory, VersionSpan, to_batch
from leeway.common.staleness import PolicyVersion
from leeway.learner import attention
from leeway.learner.batch import StepBatch
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh, MeshPlace
from leeway.learner.networks import Networks, Reference, build_reference, load_networks
from leeway.learner.packing import PackingRule, micro_batches_required
from leeway.learner.step import TrainStep
from tests.world.forks import FORKS
from tests.world.run_context import run_context, run_facts

VOCABULARY, TEMPERATURE, TOKEN_BUDGET, NUM_STEPS = 40, 0.8, 48, 2
SEED = 5

TABLES = frozenset({"lag0_by_actor", "lag_by_actor"})
"""Fields of a report that are not metrics."""

READS = ("_local_scalar_dense", "nonzero", "bincount", "_unique2", "masked_select", "equal", "unique_dim")


@dataclass(frozen=True)
class Case:
    """A run to compare with an unsplit one."""

    kind: str
    """Model: tied or untied."""
    config: LearnerConfig
    algorithm: AlgorithmConfig
    precision: str = "float64"


def _compute_norms_in_float64(kind: type[torch.nn.Module], offset: float) -> None:
    """Make a norm compute in float64 for float64 states; the norms of Transformers always compute in float32.

    Float32 rounds the gradient of each copy of a prompt, but only the sum for a shared prompt.
    """
    plain = kind.forward

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype != torch.float64:
            return plain(self, states)
        eps = self.eps if offset else self.variance_epsilon
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * (offset + self.weight)

    kind.forward = forward


attention.SHORTEST_BUCKET = 2
"""Low enough that some of these short prompts are queried once for several samples."""


for _kind, _offset in ((LlamaRMSNorm, 0.0), (Qwen3RMSNorm, 0.0), (Gemma2RMSNorm, 1.0)):
    _compute_norms_in_float64(_kind, _offset)


class NoDeviceReads(TorchDispatchMode):
    """Fail if a number is read or a shape depends on values: on a GPU each waits for all queued work.

    Single integers are exempt: the number of a micro-batch is always in host memory.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        is_number = name == "_local_scalar_dense" and args[0].dtype == torch.int64
        assert name not in READS or is_number, f"{name} waits for the device"
        wheres = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [where for where in wheres if where is not None and where.dtype == torch.bool]
        assert not masks, f"{name} with a mask waits for the device"
        return func(*args, **(kwargs or {}))


def make_rows(seed: int, num_groups: int = 4, num_prompts: int | None = None, **changes) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        prompt = random.integers(0, VOCABULARY, random.integers(1, 7))
        for index in range(3):
            length = int(random.integers(1, 20))
            completion = random.integers(0, VOCABULARY, length)
            fields = {
                "lease_id": 0,
                "attempt": 0,
                "group_id": group,
                "sample_index": index,
                "prompt_id": group % (num_prompts or num_groups),
                "token_ids": np.concatenate([prompt, completion]).astype(np.int32),
                "prompt_length": len(prompt),
                "logprobs": -random.random(length).astype(np.float32) * 5,
                "spans": (VersionSpan(PolicyVersion(0, 0), 0, length),),
                "reward": float(random.random()),
                "finish_reason": "stop",
            }
            rows.append(Trajectory(**{**fields, **changes}))
    return rows


def make_models(folder: Path, num_layers: int = 3) -> None:
    for kind in ("tied", "untied"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            tie_word_embeddings=kind == "tied",
        )
        LlamaForCausalLM(config).double().save_pretrained(folder / kind)


def make_networks(
    path: Path,
    config: LearnerConfig,
    algorithm: AlgorithmConfig,
    mesh: Mesh | None = None,
    precision="float64",
    **changes: object,
) -> tuple[Networks, Reference]:
    """Build networks as a rank of a run does, or as its only rank without a mesh; `changes` go to the run context."""
    mesh = mesh or Mesh.build(MeshPlace(0))
    place = mesh.place
    update = {"num_stages": place.num_stages, "num_replicas": place.num_replicas, "precision": precision}
    context = run_context(
        path,
        run_facts(seed=SEED),
        temperature=TEMPERATURE,
        learner=config.model_copy(update=update),
        algorithm=algorithm,
        **changes,
    )
    critic = algorithm.needs.critic
    networks = load_networks(path, context.config.learner, critic, TEMPERATURE, mesh, torch.device("cpu"))
    return networks, build_reference(context, mesh, torch.device("cpu"))


def build(rows: list[Trajectory], version: int = 0, token_budget: int = TOKEN_BUDGET, **rule: int) -> StepBatch:
    return StepBatch.build(to_batch(rows, "run"), version, {0: 0}, PackingRule(token_budget, **rule))


@contextmanager
def single_rank() -> Iterator[None]:
    """Create a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def weights_of(networks: Networks) -> dict[str, torch.Tensor]:
    """Return copies of all trained weights by name."""
    found = {}
    for name, network in zip(("policy", "critic"), networks.all, strict=False):
        found |= {f"{name}.{key}": parameter.detach().clone() for key, parameter in network.named_weights()}
    return found


def run_ranks(module: str, folder: Path, shapes: list[tuple[int, int]]) -> None:
    """Run `module.one_rank(folder, mesh)` in a process per rank, for each (replicas, stages) in turn."""
    for num_replicas, num_stages in shapes:
        places = [MeshPlace(rank, num_stages, num_replicas) for rank in range(num_replicas * num_stages)]
        logs = [folder / f"rank-{num_replicas}x{num_stages}-{place.rank}.log" for place in places]
        arguments = [(module, folder, place, log) for place, log in zip(places, logs, strict=True)]
        ranks = [FORKS.Process(target=run_rank, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        deadline_s = time.monotonic() + 200
        for rank in ranks:
            rank.join(max(0.0, deadline_s - time.monotonic()))
            rank.kill()
            rank.join()
        output = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs if log.exists())
        codes = [rank.exitcode for rank in ranks]
        assert not any(codes), f"{num_replicas} replicas of {num_stages} stages exited with {codes}\n{output}"


def run_rank(module: str, folder: Path, place: MeshPlace, log: Path) -> None:
    """Run as a rank that writes to its own log file and treats every warning as an error."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    one_rank = importlib.import_module(module).one_rank
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
    """Train every case for `NUM_STEPS` steps and save its metrics and weights."""
    place = mesh.place
    for name, case in cases.items():
        networks, reference = make_networks(folder / case.kind, case.config, case.algorithm, mesh, case.precision)
        train_step = TrainStep(networks, reference, case.algorithm, case.config, SEED)
        fewest, multiple = micro_batches_required(case.config.schedule, place.num_stages)
        tensors, version = {}, 0
        for step in range(NUM_STEPS):
            # the second step fits one micro-batch: it is spread over the stages, and some micro-batches stay empty
            budget, least = (TOKEN_BUDGET, fewest) if step == 0 else (4096, 12)
            rule = {"num_replicas": place.num_replicas, "min_micro_batches": least, "multiple": multiple}
            batch = build(make_rows(step), version, budget, **rule)
            result = train_step.run(batch, step)
            assert all(update.result.taken for update in result.updates)
            version = result.version
            for number, update in enumerate(result.updates):
                seen = dict(zip(("grad_norm", "critic_norm"), update.result.grad_norms, strict=False))
                seen |= {key: value for key, value in update.metrics.items() if value is not None}
                numbers = {f"seen.{step}.{number}.{key}": value for key, value in seen.items()}
                tensors |= {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
        # clones, because safetensors rejects two names for one storage
        tensors |= {key: tensor.clone() for key, tensor in networks.policy.published_tensors().items()}
        for prefix, network in zip(("policy.", "critic."), networks.all, strict=False):
            for key, parameter in network.named_weights():
                if prefix == "critic." or key.startswith("value_head."):
                    tensors[prefix + key] = parameter.detach().clone()
        save_file(tensors, folder / f"{name}-{place.num_replicas}x{place.num_stages}-{place.rank}.safetensors")
