"""GPU optimizations of the learner, each compared with its alternatives on the same batches."""

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
from benchmarks.gpu.fast import forward_and_backward, micro_batch, timed_steps
from benchmarks.gpu.place import Place
from benchmarks.gpu.right import head_inputs
from benchmarks.lib.learner import Learner
from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import command_of, end_families, environment
from torch import Tensor

from leeway.learner import attention as attention_file
from leeway.learner import model as model_file
from leeway.learner.attention import AttentionLayout, packed_attention
from leeway.learner.kernels import LIBRARY
from leeway.learner.model import StageModule
from leeway.learner.products import LogitRule, token_logprobs

Side = Callable[[], object]
ROUNDS = 5


def in_turns(place: Place, sides: Mapping[str, Side], rounds: int = ROUNDS) -> dict[str, float]:
    """Run the sides in turns after a warm-up round; return the median milliseconds of each side."""
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            place.sync()
            start = time.perf_counter()
            side()
            place.sync()
            times_s[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(each[1:]) for name, each in times_s.items()}


# --- varlen ---------------------------------------------------------------------------------------


@contextmanager
def in_buckets(*, with_cudnn: bool = False) -> Iterator[None]:
    """Compute attention in grids of equally long sequences in this context, with cuDNN kernels if `with_cudnn`."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
    try:
        with mock.patch.object(attention_file, "_supports_varlen", return_value=False):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "packed": nullcontext,
    "buckets": in_buckets,
    "buckets, cuDNN": lambda: in_buckets(with_cudnn=True),
}


def varlen(place: Place, shape: str = "1.5B") -> None:
    """Compare one attention call over packed sequences with grids, at three layouts and in a whole step."""
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
        sides = {variant: partial(_attend, variant, query, key, value, layout) for variant in VARIANTS}
        ms = in_turns(place, sides)
        place.report(f"attention, forward and backward, layout {seed}", sequences=len(bounds) - 1, tokens=tokens, ms=ms)
    for variant in VARIANTS:
        # all variants train on the same samples, new in each step; times include cuDNN's plans for new shapes
        with VARIANTS[variant]():
            figures = timed_steps(place, learner, shape, seed=600, num_sequences=48, num_steps=3, seconds=15.0)
        place.report(f"step: {variant}", **figures)


def _attend(variant: str, query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout) -> None:
    with VARIANTS[variant]():
        out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout)
        out.backward(torch.ones_like(out))


# --- shadow ---------------------------------------------------------------------------------------


def autocast_alone(stage: StageModule) -> None:
    """Keep float32 weights, which autocast casts in every micro-batch; replaces `compute_in_bfloat16`."""
    stage._is_rounded = True


def unfused() -> AbstractContextManager[Any]:
    """Disable liger-kernel for learners built in this context; no earlier learner may have used liger-kernel."""
    return mock.patch.object(model_file, "fuse", return_value=False)


def gradients_by_autograd() -> AbstractContextManager[Any]:
    """Let autograd add the gradients of matrices, for learners built in this context."""
    return mock.patch.object(StageModule, "add_gradients_in_place")


def shadow(place: Place, shape: str = "1.5B") -> None:
    """Compare plain autocast, rounded weights and fused kernels: a micro-batch, its gradients, and a step."""
    autocast = mock.patch.multiple(StageModule, compute_in_bfloat16=autocast_alone, add_gradients_in_place=mock.Mock())
    variants: list[tuple[str, AbstractContextManager[Any], dict[str, Any]]] = [
        ("autocast alone", autocast, {}),
        ("rounded weights", unfused(), {}),
    ]
    if importlib.util.find_spec(LIBRARY) is not None:
        variants += [
            ("fused kernels, gradients by autograd", gradients_by_autograd(), {}),
            ("fused kernels", nullcontext(), {}),
        ]
    exact = _float32_gradients(place, shape)
    for name, patched, config in variants:
        with patched:
            learner = place.learner(shape, **config)
        _report_variant(place, shape, name, learner, exact)
        del learner


def compiled(place: Place, shape: str = "1.5B") -> None:
    """Measure layers that torch compiles one by one with dynamic shapes, as an alternative to fused kernels."""
    exact = _float32_gradients(place, shape)
    with unfused(), gradients_by_autograd():  # the compiler can trace neither fused kernels nor in-place gradient sums
        learner = place.learner(shape)
    (module,) = learner.policy.modules
    for layer in module.model.layers.values():
        # on a CPU, avoid inductor, which requires a C++ compiler
        layer.compile(dynamic=True, backend="inductor" if place.on_gpu else "aot_eager")
    place.sync()
    start = time.perf_counter()
    forward_and_backward(learner, micro_batch(place, learner, shape, seed=1))
    place.sync()
    _report_variant(place, shape, "compiled layers", learner, exact, first_s=time.perf_counter() - start)


def _float32_gradients(place: Place, shape: str) -> dict[str, Tensor]:
    """Return gradients in float32; activation checkpointing is on, because all activations exceed the GPU's memory."""
    return _gradients(place, shape, place.learner(shape, precision="float32", activation_checkpointing=True))


def _report_variant(
    place: Place, shape: str, name: str, learner: Learner, exact: dict[str, Tensor], **more: object
) -> None:
    batch = micro_batch(place, learner, shape, seed=1)
    place.reset_peak()
    seconds = place.seconds(lambda: forward_and_backward(learner, batch), ROUNDS)
    memory = place.peak()
    ours = _gradients(place, shape, learner)
    worst = max(float((ours[key] - exact[key]).norm() / exact[key].norm().clamp_min(1e-30)) for key in exact)
    all_ours, all_exact = (torch.cat([each[key].flatten() for key in exact]) for each in (ours, exact))
    figures = timed_steps(place, learner, shape, seed=700, num_sequences=48, num_steps=3, seconds=9.0)
    place.report(
        name,
        micro_batch_ms=1000 * seconds,
        micro_batch_allocated_gib=memory["allocated_gib"],
        gradient_error=float((all_ours - all_exact).norm() / all_exact.norm()),
        worst_gradient_error=worst,
        **figures,
        **more,
    )


def _gradients(place: Place, shape: str, learner: Learner) -> dict[str, Tensor]:
    """Return the gradients of the first and the last layer for one micro-batch."""
    batch = micro_batch(place, learner, shape, seed=1)
    (module,) = learner.policy.modules
    module.batch = batch
    module(batch.tokens_ML[:1], torch.tensor([0])).sum().backward()
    module.batch = None
    chosen = [key for key in module.model.layers if int(key) in (0, len(module.model.layers) - 1)]
    prefixes = tuple(f"model.layers.{key}." for key in chosen)
    gradients = {
        name: parameter.grad.detach().to("cpu", torch.float32)
        for name, parameter in module.named_parameters()
        if name.startswith(prefixes) and parameter.grad is not None
    }
    for optimizer in learner.policy.optimizers:
        optimizer.clear()
    return gradients


# --- head -----------------------------------------------------------------------------------------


def head2(place: Place) -> None:
    """Compare implementations of the head, forward and backward: chunk sizes, stored probabilities, and Liger."""
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
    place.report("forward and backward", tokens=len(chosen), ms=in_turns(place, sides, 3))
    _report_sums(place, states[: len(states) // 3].detach(), weight)


def _report_sums(place: Place, states: Tensor, weight: Tensor) -> None:
    """Compare two ways to add a chunk's gradient to float32 sums: a product and a separate sum, or one product."""
    chunk = torch.randn(len(states), len(weight), device=place.device).bfloat16()
    total = torch.zeros_like(weight, dtype=torch.float32)
    sides: dict[str, Side] = {"a product, then a sum": lambda: total.add_(chunk.T @ states)}
    if place.on_gpu:
        sides["one product with out_dtype"] = lambda: torch.addmm(
            total, chunk.T, states, out_dtype=torch.float32, out=total
        )
    place.report("gradient of one chunk", tokens=len(states), ms=in_turns(place, sides))


# --- shared ---------------------------------------------------------------------------------------


def shared(place: Place, shape: str = "0.5B") -> None:
    """Time a step with and without a process that decodes on the same 80 GB GPU, and test the cap on GPU memory."""
    learner = place.learner(shape)
    alone = timed_steps(place, learner, shape, seed=800, num_sequences=48, num_steps=2, seconds=10.0)
    place.report("alone", **alone)
    ready = place.folder / "neighbour"
    call = command_of(f"{__name__}:decode", {"ready": str(ready), "on_gpu": place.on_gpu})
    neighbour = subprocess.Popen(call, cwd=ROOT, env=environment(), stdout=sys.stderr)
    try:
        deadline = time.monotonic() + 40
        while not ready.exists():
            if neighbour.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the decoding process did not start within 40 s: see its output above")
            time.sleep(0.05)
        shared_step = timed_steps(place, learner, shape, seed=800, num_sequences=48, num_steps=2, seconds=20.0)
        place.report("beside a neighbour", **shared_step, over_alone=shared_step["step_s"] / alone["step_s"])
    finally:
        end_families(neighbour)
    if place.on_gpu:
        _report_cap(place)


def _report_cap(place: Place) -> None:
    """Check that an allocation above the memory share fails although the GPU has room."""
    torch.cuda.set_per_process_memory_fraction(0.55, place.device)
    total = torch.cuda.get_device_properties(place.device).total_memory
    try:
        torch.empty(int(0.6 * total), dtype=torch.uint8, device=place.device)
    except torch.OutOfMemoryError as error:
        place.report("share of 0.55", refused=True, said=" ".join(str(error).split())[:300])
    else:
        place.report("share of 0.55", refused=False)


def decode(ready: str, on_gpu: bool) -> None:
    """Allocate 40 % of the GPU memory, and read this memory like a decoding engine for 120 s or until killed."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    size_bytes = int(0.4 * torch.cuda.get_device_properties(device).total_memory) if on_gpu else 2**20
    held = torch.zeros(size_bytes // 2, dtype=torch.bfloat16, device=device)
    rows = held[: 4096 * (len(held) // 4096)].view(-1, 4096)[:500_000]
    token = torch.ones(4096, 8, dtype=torch.bfloat16, device=device)
    began = time.monotonic()
    while time.monotonic() - began < 120:
        rows @ token  # few columns, like the samples of an engine, so that reading memory takes most of the time
        if on_gpu:
            torch.cuda.synchronize()
        Path(ready).touch()
