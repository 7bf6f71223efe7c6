"""Steps that report facts of the machine, and compare the learner on the GPU with the learner on the CPU."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import math
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.gpu.counting import Counting
from benchmarks.gpu.place import Place, rendezvous
from benchmarks.gpu.shapes import fresh_rows
from benchmarks.learner_parts.sides import configured, long_tailed
from benchmarks.lib.learner import ALGORITHM, TEMPERATURE
from benchmarks.lib.processes import MeasurementFailed, call_in_processes
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from leeway.buffer.schema import Trajectory, to_batch
from leeway.learner.attention import AttentionLayout, packed_attention
from leeway.learner.batch import StepBatch
from leeway.learner.coordinator import Channel, Kind
from leeway.learner.mesh import Agreement, Mesh, MeshPlace, is_rank_loss, join_group
from leeway.learner.model import StageModule
from leeway.learner.networks import Network, Networks, Reference, load_chunks
from leeway.learner.optimizer import UpdateResult
from leeway.learner.packing import IntArray, PackingRule
from leeway.learner.products import LogitRule, token_logprobs
from leeway.learner.step import TrainStep

PACKAGES = (
    "torch", "transformers", "triton", "liger-kernel", "numpy", "pyarrow", "pydantic", "pyzmq", "msgspec", "lmdb",
    "safetensors", "psutil", "vllm", "ray",
)  # fmt: skip
GIB = 2**30


# --- facts ----------------------------------------------------------------------------------------


def facts(place: Place) -> None:
    """Report versions, card, attention kernels, and the speed of matrix products, memory traffic and copies."""
    place.report(
        "software",
        python=platform.python_version(),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        **{name: _version(name) for name in PACKAGES},
    )
    if place.on_gpu:
        before, _ = torch.cuda.mem_get_info()
        torch.zeros(1, device=place.device)
        free, total = torch.cuda.mem_get_info()
        known = torch.cuda.get_device_properties(place.device)
        place.report(
            "card",
            name=known.name,
            capability=torch.cuda.get_device_capability(),
            multiprocessors=known.multi_processor_count,
            bf16=torch.cuda.is_bf16_supported(),
            total_gib=total / GIB,
            free_gib=free / GIB,
            first_allocation_mib=(before - free) / 2**20,
            nvidia_smi=_nvidia_smi(),
        )
    place.report("attention", **_attention_order(place))
    place.report("products", **_products(place))
    for pinned in (False, True):
        place.report("copies pinned" if pinned else "copies pageable", **_copies(place, pinned=pinned))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str:
    query = "--query-gpu=driver_version,clocks.max.sm,clocks.sm,power.limit,memory.used"
    ran = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=30
    )
    return ran.stdout.strip() or ran.stderr.strip()


def _attention_order(place: Place) -> dict[str, object]:
    """Return the attention kernel that torch selects, and the priority of kernels, which the first call sets."""
    query, key, value = (torch.randn(3, 12, 700, 128, device=place.device, dtype=torch.bfloat16) for _ in range(3))
    F.scaled_dot_product_attention(query, key, value, is_causal=True)
    kinds: Any = torch.nn.attention.SDPBackend
    names = {int(value): name for name, value in kinds.__members__.items()}
    order = torch._C._get_sdp_priority_order() if hasattr(torch._C, "_get_sdp_priority_order") else []
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        packed = None
    else:
        packed = ", ".join(inspect.signature(varlen_attn).parameters)
    return {
        "order": [names.get(int(each), int(each)) for each in order],
        "chosen": names.get(int(choice), int(choice)),
        "cudnn_allowed": torch.backends.cuda.cudnn_sdp_enabled(),
        "varlen_attn": packed,
    }


def _products(place: Place) -> dict[str, float]:
    """Measure the rates that docs/results/gpu_paper.md assumes: bf16 matrix products and memory traffic."""
    tokens, hidden, wide = (7868, 1536, 8960) if place.on_gpu else (64, 32, 64)
    states = torch.randn(tokens, hidden, device=place.device, dtype=torch.bfloat16)
    weight = torch.randn(wide, hidden, device=place.device, dtype=torch.bfloat16)
    square = torch.randn(*([8192 if place.on_gpu else 64] * 2), device=place.device, dtype=torch.bfloat16)
    long, other = (torch.randn(2**28 if place.on_gpu else 2**12, device=place.device) for _ in range(2))
    mlp_s = place.seconds(lambda: states @ weight.T, 20)
    return {
        "mlp_tflops": 2 * tokens * hidden * wide / mlp_s / 1e12,
        "square_tflops": 2 * len(square) ** 3 / place.seconds(lambda: square @ square, 20) / 1e12,
        "tb_per_s": 3 * long.nbytes / place.seconds(lambda: long + other, 20) / 1e12,
        "copy_tb_per_s": 2 * long.nbytes / place.seconds(long.clone, 20) / 1e12,
    }


def _copies(place: Place, *, pinned: bool) -> dict[str, float]:
    """Measure the rates of copies between host and GPU, in GB/s."""
    size = GIB if place.on_gpu else 2**16
    on_device = torch.empty(size, dtype=torch.uint8, device=place.device)
    on_host = torch.ones(size, dtype=torch.uint8)
    rates: dict[str, float] = {}
    if pinned and place.on_gpu:
        rates["seconds_to_pin"] = place.seconds(on_host.pin_memory, 1)
        on_host = on_host.pin_memory()
    rates["to_gpu_gb_per_s"] = size / place.seconds(lambda: on_device.copy_(on_host, non_blocking=pinned)) / 1e9
    rates["to_host_gb_per_s"] = size / place.seconds(lambda: on_host.copy_(on_device, non_blocking=pinned)) / 1e9
    return rates


# --- exact ----------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "head_dim": 16,
}
EXACT_WITHIN = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}
"""Maximum difference of a gradient divided by the maximum value of the gradient. bfloat16 is compared with float32 by
the norm of the difference over the norm of all gradients. Rounding reaches half of the limit, and a bug about 1."""


def _families() -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    qwen = {key: value for key, value in _SMALL.items() if key != "head_dim"}
    yield "llama", lambda: LlamaForCausalLM(LlamaConfig(**_SMALL, tie_word_embeddings=False))
    yield "qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**qwen, tie_word_embeddings=True))
    # this model has sliding windows shorter than the sequences, and both soft caps
    yield "gemma2", lambda: Gemma2ForCausalLM(Gemma2Config(**_SMALL, sliding_window=24, query_pre_attn_scalar=16))


class _RecordingNetworks(Networks):
    """Networks that store the gradients of an update before its optimizer step."""

    gradients: dict[str, Tensor]

    def update(self, number: int, lr_scale: float | None) -> UpdateResult:
        self.gradients = {
            # copy on every device, because the step clips gradients in place
            name: parameter.grad.detach().to("cpu", torch.float64, copy=True)
            for module in self.policy.modules
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        return super().update(number, lr_scale)


def exact(place: Place) -> None:
    """Compare all gradients of a step: on the device in one pass, and on the CPU in two passes with another packing."""
    unmet: list[str] = []
    for family, make in _families():
        torch.manual_seed(3)
        folder = place.folder / f"exact-{family}"
        # weights are exact in bfloat16, as in checkpoints, so that rounding of weights causes no difference
        make().to(torch.bfloat16).save_pretrained(folder)
        rows = fresh_rows(24, 512, seed=5, median=40, longest=160)
        for precision in EXACT_WITHIN:
            on_device = _train(place, folder, rows, place.device, precision, budget=256, one_pass=True)
            cpu_precision = "float32" if precision == "bfloat16" else precision
            on_cpu = _train(place, folder, rows, torch.device("cpu"), cpu_precision, budget=384, one_pass=False)
            found = _differences(on_device, on_cpu, by_norm=precision == "bfloat16")
            limit, name = EXACT_WITHIN[precision], f"{family} {precision}"
            met = found["gradient"] <= limit
            place.report(name, **found, wanted=limit, met=met)
            unmet += [] if met else [name]
    if unmet:
        raise RuntimeError(
            f"gradients on the device differ from gradients on the CPU by more than the limit: {', '.join(unmet)}"
        )


def _train(
    place: Place,
    folder: Path,
    rows: Sequence[Trajectory],
    device: torch.device,
    precision: str,
    *,
    budget: int,
    one_pass: bool,
) -> tuple[float, dict[str, Tensor]]:
    config = configured(place.mesh, precision=precision, token_budget=budget)
    chunks = load_chunks(folder, "token", config, TEMPERATURE, place.mesh, device)
    if precision == "float64":
        _widen(chunks)
    networks = _RecordingNetworks(Network.build(chunks, config, place.mesh), None, config, place.mesh)
    reference = Reference((), place.mesh, device, torch.promote_types(networks.policy.dtype, torch.float32))
    step = TrainStep(networks, reference, ALGORITHM, config, one_pass=one_pass)
    (update,) = step.run(StepBatch.build(to_batch(rows, "exact"), 0, {0: 0}, PackingRule(budget)), 0).updates
    loss = update.metrics["loss"]
    assert loss is not None
    return loss, networks.gradients


def _widen(chunks: Sequence[StageModule]) -> None:
    """Compute norms and rotary embeddings in float64. In Transformers, both use float32 and differ between devices."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(_norm, module)
            elif name.endswith("rotary_emb"):
                module.forward = functools.partial(_rotation, module)


def _norm(module: Any, states: Tensor) -> Tensor:  # noqa: ANN401 -- a module of Transformers
    added = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    normed: Tensor = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * (added + module.weight)
    return normed


def _rotation(module: Any, states: Tensor, positions: Tensor, **_: object) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    angles = positions[..., None].to(states.dtype) * module.inv_freq.to(states.dtype)
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling


def _differences(
    on_device: tuple[float, dict[str, Tensor]], on_cpu: tuple[float, dict[str, Tensor]], *, by_norm: bool
) -> dict[str, Any]:
    assert on_device[1].keys() == on_cpu[1].keys()
    errors = {}
    for name, ours in on_device[1].items():
        theirs = on_cpu[1][name]
        size = (lambda each: float(each.norm())) if by_norm else (lambda each: float(each.abs().max()))
        errors[name] = size(ours - theirs) / max(size(theirs), 1e-300)
    worst = max(errors, key=errors.__getitem__)
    found = {"loss": abs(on_device[0] - on_cpu[0]), "worst": worst, "of_worst": errors[worst], "tensors": len(errors)}
    ours, theirs = (torch.cat([each[name].flatten() for name in errors]) for each in (on_device[1], on_cpu[1]))
    return {**found, "gradient": float((ours - theirs).norm() / theirs.norm()) if by_norm else errors[worst]}


# --- attention ------------------------------------------------------------------------------------


def attention(place: Place) -> None:
    """Compare outputs and gradients of attention with the formula in float64, and report the kernel calls."""
    heads, keys, size = (12, 2, 128) if place.on_gpu else (4, 2, 16)
    lengths = long_tailed(24 if place.on_gpu else 6, seed=2, median=200 if place.on_gpu else 20, longest=700)
    bounds = np.cumsum([0, *lengths]).astype(np.int64)
    separate = np.arange(bounds[-1])
    shared = _with_a_shared_prompt(lengths)
    cases: dict[str, tuple[torch.dtype, torch.dtype, int, int | None, IntArray]] = {
        "bf16": (torch.bfloat16, torch.bfloat16, heads, None, separate),
        "bf16, grouped": (torch.bfloat16, torch.bfloat16, keys, None, separate),
        "rotated in float32, grouped": (torch.float32, torch.bfloat16, keys, None, separate),
        "bf16, grouped, window of 64": (torch.bfloat16, torch.bfloat16, keys, 64, separate),
        "bf16, grouped, a prompt shared": (torch.bfloat16, torch.bfloat16, keys, None, shared),
        "bf16, grouped, a prompt shared, window of 64": (torch.bfloat16, torch.bfloat16, keys, 64, shared),
        "float32, grouped": (torch.float32, torch.float32, keys, None, separate),
        "float32, grouped, a prompt shared": (torch.float32, torch.float32, keys, None, shared),
    }
    for name, (rotated, plain, num_keys, window, places) in cases.items():
        torch.manual_seed(1)
        tokens = int(places.max()) + 1
        query_shape, key_shape = (1, heads, tokens, size), (1, num_keys, tokens, size)
        query, key, value = states = [
            torch.randn(query_shape, device=place.device, dtype=plain).to(rotated).requires_grad_(),
            torch.randn(key_shape, device=place.device, dtype=plain).to(rotated).requires_grad_(),
            torch.randn(key_shape, device=place.device, dtype=plain).requires_grad_(),
        ]
        layout = AttentionLayout.build(bounds, place.device, places)
        gradient = torch.randn(1, tokens, heads, size, device=place.device)

        run = functools.partial(_attend, query, key, value, gradient, layout, window, plain is torch.bfloat16)
        with Counting(place.device) as counting:
            out = run()
        ours = [out, *(each.grad for each in states)]
        theirs = _by_formula([each.detach().double() for each in states], bounds, places, window, gradient.double())
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True) if a is not None]
        calls = sorted(counting.attention_shapes)
        place.report(
            name,
            errors=dict(zip(("out", "query", "key", "value"), errors, strict=True)),
            ms=1000 * place.seconds(run),
            kernels=sorted({each[0] for each in calls}),
            calls=len(calls),
            first_call=[f"{dtype} {list(size)}" for size, dtype in calls[0][1]] if calls else None,
            tokens=tokens,
        )


def _with_a_shared_prompt(lengths: Sequence[int]) -> IntArray:
    """Return the packed index of every token, if all sequences share a prompt of 3/4 of the shortest length."""
    prompt = min(lengths) * 3 // 4
    ends = np.cumsum([lengths[0], *(length - prompt for length in lengths[1:])])
    return np.concatenate([np.arange(ends[0]), *(np.r_[:prompt, start:end] for start, end in pairwise(ends))])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    layout: AttentionLayout,
    window: int | None,
    in_autocast: bool,
) -> Tensor:
    with torch.autocast(query.device.type, torch.bfloat16, enabled=in_autocast):
        out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout, sliding_window=window)
    out.backward(gradient.to(out.dtype))
    return out.detach()


def _by_formula(
    states: list[Tensor], bounds: IntArray, places: IntArray, window: int | None, gradient: Tensor
) -> list[Tensor]:
    """Compute attention by its formula, separately for each sequence; return output and gradients."""
    leaves = [each.requires_grad_() for each in states]
    query, key, value = (each.index_select(2, torch.from_numpy(places).to(each.device)) for each in leaves)
    times = query.shape[1] // key.shape[1]
    pieces = []
    for start, end in pairwise(bounds):
        q, k, v = (each[0, :, start:end] for each in (query, key, value))
        k, v = (each.repeat_interleave(times, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        distance = torch.arange(end - start, device=q.device)
        distance = distance[:, None] - distance
        visible = (distance >= 0) & (distance < (window or end - start))
        pieces.append((scores.masked_fill(~visible, -math.inf).softmax(-1) @ v).transpose(0, 1))
    firsts = torch.from_numpy(np.unique(places, return_index=True)[1]).to(gradient.device)
    out = torch.cat(pieces).index_select(0, firsts).unsqueeze(0)
    out.backward(gradient)
    found = [out.detach(), *(each.grad for each in leaves)]
    return [each for each in found if each is not None]


# --- head -----------------------------------------------------------------------------------------


def head_inputs(place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """Return random states, head and tokens of a micro-batch; the logits spread like those of a trained model."""
    tokens, hidden, vocab = (6300, 1536, 151_936) if place.on_gpu else (60, 32, 512)
    torch.manual_seed(4)
    weight = (torch.randn(vocab, hidden, device=place.device) * hidden**-0.5).bfloat16().requires_grad_()
    weight.grad_dtype = torch.float32
    states = (3 * torch.randn(tokens, hidden, device=place.device)).bfloat16().requires_grad_()
    return states, weight, torch.randint(vocab, (tokens,), device=place.device)


def head(place: Place) -> None:
    """Report the error of log-probabilities against float64, and their time by chunk size."""
    states, weight, chosen = head_inputs(place)
    few = slice(0, 256)
    with torch.no_grad():
        logits = states[few].double() @ weight.double().T
        exact_logprobs = logits.gather(1, chosen[few, None]).squeeze(1) - logits.logsumexp(1)
        del logits
        products = {"a product in bf16": lambda: states[few] @ weight.T}
        if place.on_gpu:
            products["a product with out_dtype float32"] = lambda: torch.mm(
                states[few], weight.T, out_dtype=torch.float32
            )
        for name, product in products.items():
            found = product().float()
            error = found.gather(1, chosen[few, None]).squeeze(1) - found.logsumexp(1) - exact_logprobs
            place.report(name, mean_nats=float(error.abs().mean()), max_nats=float(error.abs().max()))
        with torch.autocast(place.device.type, torch.bfloat16):
            error = token_logprobs(states[few], weight, chosen[few], LogitRule(1.0)) - exact_logprobs
        place.report("the learner", mean_nats=float(error.abs().mean()), max_nats=float(error.abs().max()))
    for chunk_mib in (64, 256, 1024, 2048) if place.on_gpu else (0.01, 1):
        place.reset_peak()

        def run() -> None:
            with torch.autocast(place.device.type, torch.bfloat16):
                found = token_logprobs(states, weight, chosen, LogitRule(1.0, chunk_mib=chunk_mib))  # noqa: B023
            found.sum().backward()

        place.report(f"chunk {chunk_mib} MiB", ms=1000 * place.seconds(run, 3), tokens=len(chosen), **place.peak())


# --- groups ---------------------------------------------------------------------------------------


def groups(place: Place) -> None:
    """Test a process group of one rank, and a group of two ranks on the same GPU, which NCCL rejects."""
    mesh = place.mesh
    total = torch.ones(3, device=place.device)
    dist.all_reduce(total, group=mesh.pipeline)
    dist.barrier()
    agreement = Agreement(0, 30.0)
    gathered = agreement.all_gather("here")
    agreement.close()
    Channel(MeshPlace(0)).send(Kind.STOP)
    place.report("one rank", backend=dist.get_backend(), agreed=gathered == ["here"], sum=float(total.sum()))
    calls = [
        {"rank": rank, "address": address, "on_gpu": place.on_gpu} for address in [rendezvous()] for rank in (0, 1)
    ]
    try:
        found = call_in_processes("two ranks", f"{__name__}:meet_on_one_device", calls, limit_s=45.0)
    except MeasurementFailed as error:
        found = [{"ended": str(error)}]
    place.report("two ranks on one device", ranks=found, wanted="refused" if place.on_gpu else "met")


def meet_on_one_device(rank: int, address: str, on_gpu: bool) -> dict[str, object]:
    """Join a process group as one of two ranks on the same GPU, and return the outcome."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    try:
        join_group(address, device, rank=rank, num_ranks=2, timeout=timedelta(seconds=30))
        mesh = Mesh.build(MeshPlace(rank, num_stages=2), timedelta(seconds=30))
        total = torch.ones(1, device=device)
        dist.all_reduce(total, group=mesh.pipeline)
        dist.destroy_process_group()
    except RuntimeError as error:
        return {"refused": " ".join(str(error).split())[:500], "counts_as_lost": is_rank_loss(error)}
    return {"met": float(total)}
