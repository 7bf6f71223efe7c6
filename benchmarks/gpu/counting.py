"""Count the kernels, bytes and memory of a micro-batch of the learner on a simulated GPU.

    python -m benchmarks.gpu.counting SHAPE [--fused] [KEY=VALUE ...]

Prints one JSON line with the figures of a shape. KEY=VALUE sets a key of the learner's config section. --fused uses the
kernels of liger-kernel. The counted learner is the one on the Python path.

A dispatch mode intercepts each operation below autograd. An operation reads its inputs and writes its outputs. A view
moves no bytes. An operation that selects, adds or sets rows moves only these rows. Each operation that moves bytes
counts as one kernel. Figures of a layer are the difference between a model of two layers and a model of one layer, so
these figures exclude head and embedding.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from benchmarks.gpu.pretended import BUDGET, CUDA, fake_stage, pretended_gpu, pretended_kernels
from benchmarks.gpu.shapes import SHAPES, config_of, fresh_rows
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leeway.buffer.schema import to_batch
from leeway.learner.batch import StepBatch
from leeway.learner.decoders import split_layers
from leeway.learner.model import DeviceBatch, StageModule
from leeway.learner.packing import PackedBatch, PackingRule

GEMM_FLOPS, BYTES_PER_S = 600e12, 2.6e12
"""Assumed rates of an H100: FLOP/s of bf16 matrix products, and memory bandwidth of all other operations."""
NUM_SEQUENCES, SEED = 256, 7
NUM_STAGES = (1, 2, 3, 4)

Figures = dict[str, float]
AttentionCall = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""Name of an attention kernel, and shape and dtype of each input of the call."""

_FILLS = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "arange", "zero_", "fill_")
_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")
_MOVES_NOTHING = frozenset({*_ALLOCATES, "detach", "alias", "_local_scalar_dense", "set_", "resize_"})
_SELECTS = frozenset({"index_select", "gather", "embedding", "index"})
_ADDS_ROWS = frozenset({"index_add", "index_add_"})
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm"})
_CASTS = frozenset({"_to_copy", "copy_"})


def is_attention(name: str) -> bool:
    """Return whether an operation is a fused attention kernel."""
    return "attention" in name or "_attn" in name


class Counting(TorchDispatchMode):
    """Counter of operations by phase and kind, in `figures` with keys such as "forward.other.bytes"."""

    def __init__(self, device: torch.device = CUDA) -> None:
        """Initialize counts of zero; only operations on the type of `device` are counted."""
        super().__init__()
        self.phase = "forward"
        self._kind = device.type
        self.figures: Figures = defaultdict(float)
        self.attention_shapes: set[AttentionCall] = set()
        """Distinct calls of attention kernels, by kernel, shapes and dtypes."""
        self.by_operation: Counter[str] = Counter()
        """Name of an operation that is not a matrix product -> bytes moved."""
        self._weights: dict[int, object] = {}
        self._made: list[tuple[StorageWeakRef, int, bool]] = []

    def register_weights(self, weights: Iterator[Tensor]) -> None:
        """Register tensors as weights, so that their casts are counted separately."""
        for weight in weights:
            storage = weight.untyped_storage()
            self._weights[storage._cdata] = storage

    def kept(self) -> tuple[int, int]:
        """Return the bytes of live tensors of the forward pass: copies of weights, and all other tensors."""
        alive = [(size, is_copy) for reference, size, is_copy in self._made if not reference.expired()]
        copies = sum(size for size, is_copy in alive if is_copy)
        return copies, sum(size for size, _ in alive) - copies

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- torch API
        types: object,
        args: Any = (),  # noqa: ANN401 -- torch API
        kwargs: Any = None,  # noqa: ANN401 -- torch API
    ) -> Any:  # noqa: ANN401 -- torch API
        """Run an operation and count its bytes, its FLOPs and its kernel."""
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = {key: value for key, value in kwargs.items() if key != "out"}
        inputs = [each for each in tree_leaves((args, read)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        casts_weight = name in _CASTS and any(self._is_weight(each) for each in inputs[-1:])
        self._remember(outputs, inputs, is_copy=casts_weight)
        moved = moved_bytes(func, name, inputs, outputs)
        if not moved or not any(each.device.type == self._kind for each in (*inputs, *outputs)):
            return out
        kind = "gemm" if name in _PRODUCTS else "attention" if is_attention(name) else "other"
        self._count(kind, moved, product_flops(args) if kind == "gemm" else 0)
        if casts_weight:
            self.figures["casts"] += 1
        if kind != "gemm":
            self.by_operation[f"{self.phase}.{name}"] += moved
        if kind == "attention" and not name.endswith("backward"):
            call = tuple((tuple(each.shape), str(each.dtype)) for each in inputs if each.is_floating_point())
            self.attention_shapes.add((name, call))
        return out

    def _count(self, kind: str, moved: int, flops: float) -> None:
        prefix = f"{self.phase}.{kind}"
        self.figures[f"{prefix}.kernels"] += 1
        self.figures[f"{prefix}.bytes"] += moved
        self.figures[f"{prefix}.flops"] += flops
        self.figures[f"{prefix}.seconds"] += max(flops / GEMM_FLOPS, moved / BYTES_PER_S)

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._weights

    def _remember(self, outputs: list[Tensor], inputs: list[Tensor], *, is_copy: bool) -> None:
        old = {each.untyped_storage()._cdata for each in inputs}
        for each in outputs:
            storage = each.untyped_storage()
            if each.device.type == self._kind and storage._cdata not in old and self.phase == "forward":
                self._made.append((StorageWeakRef(storage), storage.nbytes(), is_copy))


def product_flops(args: Sequence[object]) -> int:
    """Return the FLOPs of the product of the last two tensors in the arguments, which may be batches of matrices."""
    left, right = [each for each in args if isinstance(each, Tensor)][-2:]
    return 2 * left.numel() * right.shape[-1]


def moved_bytes(func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:  # noqa: ANN401 -- torch API
    """Return the bytes that an operation reads and writes; see the module docstring."""
    returns = func._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    if name in _MOVES_NOTHING or is_view:
        return 0
    written = sum(map(bytes_of, outputs))
    if name in _FILLS:
        return written
    if name in _SELECTS:
        return 2 * written + sum(bytes_of(each) for each in inputs if not each.is_floating_point())
    if name == "scatter_":
        indices = inputs[1]
        return bytes_of(indices) + indices.numel() * outputs[0].element_size()
    if name in _ADDS_ROWS:
        # bytes of the rows three times (read the target, read the source, write the target), and bytes of the indices
        return 3 * bytes_of(inputs[-1]) + sum(bytes_of(each) for each in inputs if not each.is_floating_point())
    read = inputs[1:] if name == "copy_" else inputs
    return written + sum(map(bytes_of, read))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor spans; an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size() if tensor.numel() else 0


# --- counting a shape ------------------------------------------------------------------------------


def packed_batch(name: str) -> PackedBatch:
    """Return a step of samples with long-tailed lengths, packed by the learner."""
    rows = fresh_rows(NUM_SEQUENCES, SHAPES[name]["vocab_size"], SEED)
    return StepBatch.build(to_batch(rows, "counting"), 0, {0: 0}, PackingRule(BUDGET)).packed


def typical(packed: PackedBatch) -> int:
    """Return the index of the micro-batch whose number of tokens is nearest to the mean."""
    counts = [int(bounds[-1]) for bounds in packed.bounds]
    mean = sum(counts) / len(counts)
    return min(range(len(counts)), key=lambda m: abs(counts[m] - mean))


def count_micro_batch(stage: StageModule, packed: PackedBatch, m: int, *, train: bool = True) -> Counting:
    """Count the forward pass of a micro-batch and, if `train`, its backward pass, which adds to existing gradients."""
    counting = Counting()
    counting.register_weights(stage.parameters())
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32) if train else None
    stage.batch = DeviceBatch(packed, CUDA)
    width = packed.width
    if stage.share.is_first:
        states = stage.batch.tokens_ML[m : m + 1]
    else:
        dtype = getattr(stage, "states_dtype", stage.dtype)  # `states_dtype` is missing in the learner of old checkouts
        states = torch.empty(1, width, stage.hidden_size, dtype=dtype, device=CUDA, requires_grad=train)
    with counting, torch.set_grad_enabled(train):
        out = stage(states, torch.tensor([m]))
        copies, kept = counting.kept()
        counting.figures["kept.weight_copies"], counting.figures["kept.activations"] = copies, kept
        if train:
            counting.phase = "backward"
            out.backward(torch.empty_like(out))
    stage.batch = None
    return counting


def count_shape(name: str, **config: object) -> dict[str, Any]:
    """Count one micro-batch of a shape; return figures of a layer, of the head with its norm, and of the embedding."""
    with pretended_gpu():
        packed = packed_batch(name)
        m = typical(packed)

        def figures(layers: tuple[int, int], *, last: bool, train: bool) -> Figures:
            return dict(
                count_micro_batch(fake_stage(name, layers, last=last, **config), packed, m, train=train).figures
            )

        parts: dict[str, Any] = {}
        for kind, train in (("training", True), ("scoring", False)):
            one, two = (figures((1, layers), last=True, train=train) for layers in (1, 2))
            first = figures((1, 1), last=False, train=train)
            layer = _difference(two, one)
            parts[kind] = {
                "layer": layer,
                "head": _difference(one, layer),
                "embedding": _difference(first, layer),
            }
        stage = fake_stage(name, (1, 1), last=False, **config)
        shapes = attention_shapes(stage, packed)
    lengths = [int(b - a) for a, b in zip(packed.bounds[m][:-1], packed.bounds[m][1:], strict=True)]
    return {
        "shape": name,
        "tokens": int(packed.bounds[m][-1]),
        "completion_tokens": len(packed.predicting[m]),
        "squared_tokens": sum(length**2 for length in lengths),
        "micro_batches": packed.num_micro_batches,
        "attention_shapes": len(shapes),
        "attention_kernels": sorted({str(each[0]) for each in shapes}),
        "attention_dtypes": sorted({dtype for each in shapes for _, dtype in each[1]}),
        "bytes_per_weight": _bytes_per_weight(stage),
        "splits": [split_layers(config_of(name), num) for num in NUM_STAGES],
        **parts,
    }


def _bytes_per_weight(stage: StageModule) -> float:
    """Return the bytes per weight of compute copy and masters; excludes the 12 bytes of gradient and moments."""
    computed = list(stage.parameters())
    held = {id(each): each.nbytes for each in (*computed, *getattr(stage, "masters", {}).values())}
    return sum(held.values()) / sum(each.numel() for each in computed)


def attention_shapes(stage: StageModule, packed: PackedBatch) -> set[AttentionCall]:
    """Return the distinct calls of attention kernels in a whole step."""
    found: set[AttentionCall] = set()
    for m in range(packed.num_micro_batches):
        found |= count_micro_batch(stage, packed, m, train=False).attention_shapes
    return found


def _difference(more: Figures, less: Figures) -> Figures:
    return {key: more.get(key, 0) - less.get(key, 0) for key in sorted({*more, *less})}


def main() -> None:
    """Print the figures of one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    parsed = parser.parse_intermixed_args()
    config = dict(key.split("=", 1) for key in parsed.keys)
    with pretended_kernels() if parsed.fused else nullcontext():
        print(json.dumps(count_shape(parsed.shape, **config)))


if __name__ == "__main__":
    main()
