"""Which choices pay? Each against what was before it, in turns, on the same batches."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.fast import forward_and_backward, micro_batch, timed_steps
from benchmarks.gpu.place import Place
from benchmarks.gpu.right import head_inputs
from benchmarks.lib.learner import Learner
from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import command_of, end_families, environment
from learner import attention as attention_file
from learner import model as model_file
from learner.attention import AttentionLayout, packed_attention
from learner.kernels import LIBRARY
from learner.model import StageModule
from learner.products import LogitRule, token_logprobs

Side = Callable[[], object]
ROUNDS = 5


def in_turns(place: Place, sides: Mapping[str, Side], rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of each side; all are warmed up, and then take turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            place.sync()
            start = time.perf_counter()
            side()
            place.sync()
            taken[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(each[1:]) for name, each in taken.items()}


# --- varlen ---------------------------------------------------------------------------------------


@contextmanager
def in_buckets(*, with_cudnn: bool = False) -> Iterator[None]:
    """Attention in grids of sequences of one length, as before; with cuDNN's kernels where torch prefers them."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
    try:
        with mock.patch.object(attention_file, "_takes_packed", return_value=False):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "packed": nullcontext,
    "buckets": in_buckets,
    "buckets, cuDNN": lambda: in_buckets(with_cudnn=True),
}


def varlen(place: Place, shape: str = "1.5B") -> None:
    """One call over packed sequences against grids; alone at three layouts, then a whole step."""
    _, known = place.shape(shape)
    heads, keys = known["num_attention_heads"], known["num_key_value_heads"]
    size = known["hidden_size"] // heads
    learner = place.learner(shape)
    for seed in (1, 2, 3):
        packed = learner.batch(place.rows(shape, 48, seed)).packed
        bounds = packed.bounds[0]
        tokens = int(bounds[-1])
        layout = AttentionLayout.build(bounds, place.device)
        query, key, value = (
            torch.randn(1, num, tokens, size, device=place.device, dtype=torch.bfloat16, requires_grad=True)
            for num in (heads, keys, keys)
        )
        sides = {way: partial(_attend, way, query, key, value, layout) for way in WAYS}
        found = in_turns(place, sides)
        place.tell(
            f"attention, forward and backward, layout {seed}", sequences=len(bounds) - 1, tokens=tokens, ms=found
        )
    for way in WAYS:
        # every step has samples of its own, the same for each way; what cuDNN makes for their shapes counts
        with WAYS[way]():
            found = timed_steps(place, learner, shape, seed=600, num_sequences=48, num_steps=3, seconds=15.0)
        place.tell(f"step: {way}", **found)


def _attend(way: str, query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout) -> None:
    with WAYS[way]():
        out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout)
        out.backward(torch.ones_like(out))


# --- shadow ---------------------------------------------------------------------------------------


def autocast_alone(stage: StageModule, **_: object) -> None:
    """In place of `compute_in_bfloat16`, as before: float32 weights, cast by autocast in every micro-batch."""
    stage._is_rounded = True


def unfused() -> AbstractContextManager[Any]:
    """Learners that are made meanwhile compute without liger-kernel; none may have been made with it before."""
    return mock.patch.object(model_file, "fuse", return_value=False)


def gradients_by_autograd() -> AbstractContextManager[Any]:
    """Learners that are made meanwhile leave it to autograd to add up the gradients of their layers' matrices."""
    return mock.patch.object(model_file, "add_gradients_in_place")


def shadow(place: Place, shape: str = "1.5B") -> None:
    """A micro-batch, its gradients and a step: autocast alone, rounded weights, fused kernels."""
    autocast = mock.patch.object(StageModule, "compute_in_bfloat16", autocast_alone)
    variants: list[tuple[str, AbstractContextManager[Any], dict[str, Any]]] = [
        ("autocast alone", autocast, {}),
        ("rounded weights", unfused(), {}),
    ]
    if importlib.util.find_spec(LIBRARY) is not None:
        variants += [
            ("fused kernels, gradients by autograd", gradients_by_autograd(), {}),
            ("fused kernels", nullcontext(), {}),
        ]
    truth = _truth(place, shape)
    for name, patched, config in variants:
        with patched:
            learner = place.learner(shape, **config)
        _tell_variant(place, shape, name, learner, truth)
        del learner


def compiled(place: Place, shape: str = "1.5B") -> None:
    """Layers compiled by torch, each for itself and with shapes that may vary, in place of fused kernels."""
    truth = _truth(place, shape)
    with unfused(), gradients_by_autograd():  # what a compiler does not trace
        learner = place.learner(shape)
    (module,) = learner.policy.modules
    for layer in module.model.layers.values():
        # on a CPU inductor would need a C++ compiler
        layer.compile(dynamic=True, backend="inductor" if place.on_gpu else "aot_eager")
    place.sync()
    start = time.perf_counter()
    forward_and_backward(learner, micro_batch(place, learner, shape, seed=1))
    place.sync()
    _tell_variant(place, shape, "compiled layers", learner, truth, first_s=time.perf_counter() - start)


def _truth(place: Place, shape: str) -> dict[str, Tensor]:
    """In float32, of which a GPU does not hold the activations of all layers."""
    return _gradients(place, shape, place.learner(shape, precision="float32", activation_checkpointing=True))


def _tell_variant(
    place: Place, shape: str, name: str, learner: Learner, truth: dict[str, Tensor], **more: object
) -> None:
    batch = micro_batch(place, learner, shape, seed=1)
    place.forget_peak()
    taken = place.seconds(lambda: forward_and_backward(learner, batch), ROUNDS)
    memory = place.peak()
    ours = _gradients(place, shape, learner)
    worst = max(float((ours[key] - truth[key]).norm() / truth[key].norm().clamp_min(1e-30)) for key in truth)
    all_ours, all_true = (torch.cat([each[key].flatten() for key in truth]) for each in (ours, truth))
    found = timed_steps(place, learner, shape, seed=700, num_sequences=48, num_steps=3, seconds=9.0)
    place.tell(
        name,
        micro_batch_ms=1000 * taken,
        micro_batch_allocated_gib=memory["allocated_gib"],
        gradient_error=float((all_ours - all_true).norm() / all_true.norm()),
        worst_gradient_error=worst,
        **found,
        **more,
    )


def _gradients(place: Place, shape: str, learner: Learner) -> dict[str, Tensor]:
    """Of one micro-batch, of its first and its last layer."""
    batch = micro_batch(place, learner, shape, seed=1)
    (module,) = learner.policy.modules
    module.batch = batch
    module(batch.tokens_ML[:1], torch.tensor([0])).sum().backward()
    module.batch = None
    chosen = [key for key in module.model.layers if int(key) in (0, len(module.model.layers) - 1)]
    prefixes = tuple(f"model.layers.{key}." for key in chosen)
    found = {
        name: parameter.grad.detach().to("cpu", torch.float32)
        for name, parameter in module.named_parameters()
        if name.startswith(prefixes) and parameter.grad is not None
    }
    for optimizer in learner.policy.optimizers:
        optimizer.clear()
    return found


# --- head -----------------------------------------------------------------------------------------


def head2(place: Place) -> None:
    """The head's loss, forward and backward: the learner's, plain ways to add up its gradient, and Liger's kernel."""
    states, weight, chosen = head_inputs(place)

    def ours(chunk_mib: float, *, kept_mib: float | None = None, is_fused: bool = False) -> Side:
        rule = LogitRule(1.0, chunk_mib=chunk_mib, kept_mib=kept_mib, is_fused=is_fused)

        def run() -> None:
            with torch.autocast(place.device.type, torch.bfloat16):
                token_logprobs(states, weight, chosen, rule).sum().backward()

        return run

    sides: dict[str, Side] = {
        "64 MiB, nothing kept": ours(64, kept_mib=0),
        "1024 MiB, nothing kept": ours(1024, kept_mib=0),
        "1024 MiB": ours(1024),
    }
    if importlib.util.find_spec(LIBRARY) is not None and place.on_gpu:
        sides["1024 MiB, by the fused softmax"] = ours(1024, is_fused=True)
        liger = importlib.import_module(f"{LIBRARY}.ops.fused_linear_cross_entropy")
        sides["Liger"] = lambda: liger.LigerFusedLinearCrossEntropyFunction.apply(states, weight, chosen)[0].backward()
    place.tell("forward and backward", tokens=len(chosen), ms=in_turns(place, sides, 3))
    _tell_sums(place, states[: len(states) // 3].detach(), weight)


def _tell_sums(place: Place, states: Tensor, weight: Tensor) -> None:
    """A chunk's part in the head's gradient: added to float32 sums by a product and a sum, or by one product."""
    shares = torch.randn(len(states), len(weight), device=place.device).bfloat16()
    total = torch.zeros_like(weight, dtype=torch.float32)
    sides: dict[str, Side] = {"a product, then a sum": lambda: total.add_(shares.T @ states)}
    if place.on_gpu:
        sides["one product with out_dtype"] = lambda: torch.addmm(
            total, shares.T, states, out_dtype=torch.float32, out=total
        )
    place.tell("gradient of one chunk", tokens=len(states), ms=in_turns(place, sides))


# --- shared ---------------------------------------------------------------------------------------


def shared(place: Place, shape: str = "0.5B") -> None:
    """A step alone, beside a neighbour that decodes on the same GPU, and where memory is capped; both fit on 80 GB."""
    learner = place.learner(shape)
    alone = timed_steps(place, learner, shape, seed=800, num_sequences=48, num_steps=2, seconds=10.0)
    place.tell("alone", **alone)
    ready = place.folder / "neighbour"
    call = command_of(f"{__name__}:decode", {"ready": str(ready), "on_gpu": place.on_gpu})
    neighbour = subprocess.Popen(call, cwd=ROOT, env=environment(), stdout=sys.stderr)
    try:
        deadline = time.monotonic() + 40
        while not ready.exists():
            if neighbour.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the neighbour on the GPU did not start to decode within 40 s")
            time.sleep(0.05)
        beside = timed_steps(place, learner, shape, seed=800, num_sequences=48, num_steps=2, seconds=20.0)
        place.tell("beside a neighbour", **beside, over_alone=beside["step_s"] / alone["step_s"])
    finally:
        end_families(neighbour)
    if place.on_gpu:
        _tell_cap(place)


def _tell_cap(place: Place) -> None:
    """With a share of the memory said, what asks for more is refused, though the GPU has it."""
    torch.cuda.set_per_process_memory_fraction(0.55, place.device)
    total = torch.cuda.get_device_properties(place.device).total_memory
    try:
        torch.empty(int(0.6 * total), dtype=torch.uint8, device=place.device)
    except torch.OutOfMemoryError as error:
        place.tell("share of 0.55", refused=True, said=" ".join(str(error).split())[:300])
    else:
        place.tell("share of 0.55", refused=False)


def decode(ready: str, on_gpu: bool) -> None:
    """Hold 40 % of the memory and read it as an engine that decodes does, until ended."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    wanted = int(0.4 * torch.cuda.get_device_properties(device).total_memory) if on_gpu else 2**20
    held = torch.zeros(wanted // 2, dtype=torch.bfloat16, device=device)
    rows = held[: 4096 * (len(held) // 4096)].view(-1, 4096)[:500_000]
    token = torch.ones(4096, 8, dtype=torch.bfloat16, device=device)
    began = time.monotonic()
    while time.monotonic() - began < 120:
        rows @ token  # as few columns as there are samples: it reads, and hardly computes
        if on_gpu:
            torch.cuda.synchronize()
        Path(ready).touch()
