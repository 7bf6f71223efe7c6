"""The device of a rank: selection, memory limits, memory estimates and offloading.

device_of, configure   select the device of a rank and apply its memory limit
memory_need            estimate the peak memory of training
allocate_host_copies   host memory for copies of tensors
Offload                keep the weights of a frozen stage in host memory while a step trains

Estimates are computed, not measured, for the longest samples. The bytes that a layer keeps for its backward pass were
counted by tracing a layer without data; all other numbers follow from the shapes of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from leeway.common.process import keep_freed_memory, threads_of
from leeway.learner.config import LearnerConfig, default_most_held, stage_of
from leeway.learner.decoders import StageShare, split_layers, widths
from leeway.learner.products import KEPT_MIB, LogitRule
from leeway.weight_sync.tensors import pin

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

GIB = 2**30
FIRST_WITH_BFLOAT16 = (8, 0)
KEPT_BYTES: Mapping[str, tuple[int, int, int, int]] = {
    "float32": (24, 12, 8, 16),
    "bfloat16": (20, 6, 4, 8),
    "float64": (48, 24, 16, 32),
}
"""Precision -> bytes that a layer keeps per token for its backward pass, per unit of each of its four widths: states,
query heads, key heads, feed-forward block. Counted on Llama and Qwen2 layers."""
RUNTIME_BYTES = GIB
"""Estimated bytes of the CUDA context, library workspaces, NCCL buffers and allocator rounding."""
LOGIT_COPIES = 3
"""Copies of a chunk of logits in memory: the logits, their exponentials and a temporary product."""
HEAD_STATES = 3
"""Copies of the input states of the head: normed states, states in the dtype of products, and their gradient."""
_ALIGNED_BYTES = 64
"""Alignment of host copies; equal to that of torch's own tensors."""


def device_of(config: LearnerConfig, rank: int) -> torch.device:
    """Return the device of a rank; raise ValueError if a requested GPU is missing or lacks `learner.precision`."""
    if not config.gpus and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"learner.gpus = {config.gpus:g}, but torch {torch.__version__} (CUDA version: "
            f"{torch.version.cuda or 'none'}) finds no GPU on this host: run leeway doctor there, or set "
            "learner.gpus = 0"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    if config.precision != "bfloat16":
        return device
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_WITH_BFLOAT16:
        raise ValueError(
            f"learner.precision = 'bfloat16' needs compute capability 8.0, but the GPU of this stage "
            f"({torch.cuda.get_device_name(device)}) has {capability[0]}.{capability[1]}: use 'float32' or another GPU"
        )
    return device


def configure(config: LearnerConfig, device: torch.device) -> None:
    """Configure this process for its device.

    On a GPU, limit its memory, so that the share of an engine that restarts on the same GPU stays free. On a CPU, set
    the number of threads and retain freed memory: without this, page faults would take an eighth of a step.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads_of(config.cpus))
        keep_freed_memory()
    elif device.type == "cuda" and config.memory_limit is not None:
        torch.cuda.set_per_process_memory_fraction(config.memory_limit, device)


@dataclass(frozen=True)
class MemoryNeed:
    """Estimated peak memory of training on the device of a stage."""

    stage: int
    parts: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size >= GIB / 20)
        return f"stage {self.stage} needs up to {self.size_bytes / GIB:.1f} GiB: {shown}"


def memory_need(
    model: PreTrainedConfig,
    config: LearnerConfig,
    *,
    update_tokens: int,
    scored_tokens: int = 0,
    references: Sequence[PreTrainedConfig] = (),
    num_models: int = 1,
) -> MemoryNeed:
    """Return the estimate of the stage that needs most memory; `references` are the frozen models.

    `update_tokens`: maximum number of tokens in one update, over all replicas. `scored_tokens`: the maximum for a
    scoring pass over the whole batch; 0 without a scoring pass. `num_models`: 2 if the critic is a separate model.
    """
    needs = [
        _need_of(stage, model, config, (update_tokens, scored_tokens), references, num_models)
        for stage in range(config.num_stages)
    ]
    return max(needs, key=lambda need: need.size_bytes)


def _need_of(
    stage: int,
    model: PreTrainedConfig,
    config: LearnerConfig,
    tokens: tuple[int, int],
    references: Sequence[PreTrainedConfig],
    num_models: int,
) -> MemoryNeed:
    budget, width = config.token_budget, model.hidden_size
    checkpointing = config.activation_checkpointing
    shares = _shares(stage, model, config)
    num_layers = sum(share.end_layer - share.first_layer for share in shares)
    has_head = shares[-1].is_last
    num_weights = _num_weights(shares, model)
    trained = num_weights
    if num_models > 1:
        of_critic = stage_of(1, stage, config.num_stages) if config.schedule == "fused" else stage
        trained += _num_weights(_shares(of_critic, model, config, has_lm_head=False), model, has_lm_head=False)
    item = 8 if config.precision == "float64" else 4
    is_narrow = config.precision == "bfloat16"
    num_micro_batches, num_scored = (max(1, ceil(each / config.num_replicas / budget)) for each in tokens)
    in_flight = micro_batches_in_flight(config, stage, num_micro_batches)
    per_layer = budget * kept_bytes(model, config)
    kept = item * budget * width * num_layers if checkpointing else per_layer * num_layers
    computed: torch.dtype = getattr(torch, config.precision)
    head = LogitRule(1.0, kept_mib=most_kept_mib(config, "cuda"))
    chunk, most_kept = (of(model.vocab_size, computed, "cuda") for of in (head.chunk_tokens, head.kept_tokens))
    chunk_bytes = item * model.vocab_size * min(chunk, budget)
    heads = min(heads_in_flight(config), num_micro_batches)
    probabilities = computed.itemsize * model.vocab_size * min(most_kept, budget) * heads * has_head
    static = {
        "weights": item * trained,
        "rounded weights": 2 * trained * is_narrow,
        "gradients": item * trained,
        "moments": 2 * item * trained,
        "logits": (LOGIT_COPIES * chunk_bytes + HEAD_STATES * item * budget * width) * has_head,
        "CUDA": RUNTIME_BYTES,
    }
    between = 2 * item * budget * width * (config.num_stages > 1)
    training = {
        "between stages": between * num_micro_batches,
        "probabilities": probabilities,
        "activations": int(in_flight * kept),
        "current layer": per_layer,
    }
    # a scoring pass covers the whole batch and keeps nothing for a backward pass
    scoring = {"between stages": between * num_scored, "current layer": per_layer}
    frozen_item = 2 if is_narrow else item
    frozen = [frozen_item * _num_weights(_shares(stage, each, config), each) for each in references]
    if config.reference_offload == "none":
        static["reference"] = sum(frozen)
    else:  # only the reference model that is scoring is on the device
        scoring["reference"] = max(frozen, default=0)
    larger = training if sum(training.values()) >= sum(scoring.values()) else scoring
    return MemoryNeed(stage, {**static, **larger})


def _shares(
    stage: int, model: PreTrainedConfig, config: LearnerConfig, *, has_lm_head: bool = True
) -> list[StageShare]:
    num_chunks = config.num_stages * config.num_chunks
    split = split_layers(model, num_chunks, has_lm_head=has_lm_head, recomputed=config.activation_checkpointing)
    return [StageShare(chunk, num_chunks, *split[chunk]) for chunk in range(stage, num_chunks, config.num_stages)]


def _num_weights(shares: Sequence[StageShare], model: PreTrainedConfig, *, has_lm_head: bool = True) -> int:
    num_layers = sum(share.end_layer - share.first_layer for share in shares)
    has_embedding, has_head = shares[0].is_first, shares[-1].is_last and has_lm_head
    is_one = bool(model.tie_word_embeddings) and has_embedding and has_head
    return num_layers * widths(model).num_weights + model.vocab_size * model.hidden_size * (
        has_embedding + has_head - is_one
    )


def kept_bytes(model: PreTrainedConfig, config: LearnerConfig) -> int:
    """Return the bytes per token that one layer keeps for its backward pass."""
    found = widths(model)
    of_states, of_queries, of_keys, of_block = KEPT_BYTES[config.precision]
    return of_states * found.states + of_queries * found.queries + of_keys * found.keys + of_block * found.block


def most_kept_mib(config: LearnerConfig, device: str) -> float:
    """Return the MiB of probabilities that each micro-batch may keep: all micro-batches in flight share `KEPT_MIB`."""
    return KEPT_MIB[device] / heads_in_flight(config)


def heads_in_flight(config: LearnerConfig) -> int:
    """Return the maximum number of micro-batches that have run the head but not their backward pass."""
    at_once = {"zero_bubble": config.num_stages, "fused": default_most_held(config.num_stages)}
    return at_once.get(config.schedule, 1) if config.num_stages > 1 else 1


def micro_batches_in_flight(config: LearnerConfig, stage: int, num_micro_batches: int) -> float:
    """Return the maximum number of micro-batches whose activations a stage holds at once."""
    num_stages = config.num_stages
    at_most = {
        "1f1b": float(num_stages - stage),
        "interleaved_1f1b": num_stages * (1 + 1 / config.num_chunks),
        "zero_bubble": float(num_stages),
        "fused": float(default_most_held(num_stages)),
    }
    num_networks = 2 if config.schedule == "fused" else 1
    return min(at_most[config.schedule], num_networks * num_micro_batches)


# --- offloading -----------------------------------------------------------------------------------


def allocate_host_copies(tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    """Allocate uninitialized host tensors with the names, shapes and dtypes of `tensors`.

    `pinned` memory allows asynchronous copies from and to a GPU. The memory is one block of the exact size:
    torch's own pinned allocator rounds each tensor up to a power of two, up to twice its size.
    """
    if not pinned:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    sizes = [-(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for tensor in tensors.values()]
    flat = torch.empty(sum(sizes), dtype=torch.uint8).numpy()
    if code := pin(flat):
        logger.warning(
            "CUDA could not pin %.1f GiB of host memory (error %d): copies to and from the GPU are synchronous. "
            "Check the locked-memory limit of this process or its container",
            flat.nbytes / 2**30,
            code,
        )
    copies: dict[str, Tensor] = {}
    start = 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        # separate storage per tensor: the checkpoint writer would first clone a view of a larger storage
        copies[name] = torch.from_numpy(flat[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        start += size
    return copies


class Offload:
    """Host copy of the weights of a frozen stage, which are removed from the device while a step trains.

    All weights move together: scoring runs many micro-batches through every layer, and hooks that fetch single layers
    would move the model once per micro-batch. After each move, the caller must restore weight tying.
    """

    def __init__(self, stage: nn.Module, device: torch.device) -> None:
        """Copy the weights to host memory if the device is a GPU; they stay on the device until `release`."""
        assert not any(parameter.requires_grad for parameter in stage.parameters()), "the stage must be frozen"
        self.device = device
        self._stage = stage
        self._kept = {name: parameter.detach() for name, parameter in stage.named_parameters()}
        if device.type == "cuda":
            copies = allocate_host_copies(self._kept, pinned=True)
            for name, weight in self._kept.items():
                copies[name].copy_(weight)
            self._kept = copies

    def fetch(self) -> None:
        """Copy the weights to the device, unless the device has them."""
        if next(self._stage.parameters()).is_meta:
            # no wait needed: later work on the device waits for these copies, and the host copies never change
            self._assign({name: weight.to(self.device, non_blocking=True) for name, weight in self._kept.items()})

    def release(self) -> None:
        self._assign({name: torch.empty_like(weight, device="meta") for name, weight in self._kept.items()})

    def _assign(self, weights: dict[str, Tensor]) -> None:
        self._stage.load_state_dict(weights, strict=False, assign=True)
