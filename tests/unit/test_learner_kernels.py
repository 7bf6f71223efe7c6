"""Fused kernels in the place of a decoder's own modules: the same numbers, through stand-ins, and our own by Triton."""

import functools
import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from learner import kernels
from learner.decoders import FAMILIES
from learner.kernels import fuse
from learner.model import DeviceBatch
from learner.products import LogitRule, token_logprobs
from tests.unit.small_models import CPU, LOCAL, Model, load, packed_batch, run
from tests.world import fused_kernels

ROTATION = "apply_rotary_pos_emb"
FUNCTIONAL = "liger_kernel.transformers.functional"
MODELS = [Model(family, tied=False, changes=LOCAL if family == "gemma3_text" else {}) for family in FAMILIES]


@pytest.fixture
def library(monkeypatch):
    """Installed, and at home on CPUs, in float64 too; model files get their rotation back at the end."""
    for family in FAMILIES:
        kind = family.removesuffix("_text")
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        monkeypatch.setattr(file, ROTATION, getattr(file, ROTATION))
    module, module_of_ours = fused_kernels.as_module(), fused_kernels.ours()
    module.ours = module_of_ours
    monkeypatch.setitem(sys.modules, "learner.row_kernels", module_of_ours)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, FUNCTIONAL, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "liger_kernel")
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "ROTATED", (torch.float64, torch.bfloat16))
    return module


def learned(stage):
    stage.zero_grad()
    found = run([stage], packed_batch())
    coefficients = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    (found * coefficients).sum().backward()
    return {"": found.detach(), **{name: parameter.grad for name, parameter in stage.named_parameters()}}


def assert_like(found, wanted, within):
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert found[name].dtype == each.dtype, name
        assert float((found[name] - each).norm()) <= within * float(each.norm()), name


def asked(library, monkeypatch):
    """Which of its functions and of ours are called, how often."""
    count = {}
    ours = dict.fromkeys(("add_norm", "softmax"), library.ours)
    names = ("liger_rms_norm", "liger_swiglu", "liger_geglu", "liger_rope")
    for name, module in {**dict.fromkeys(names, library), **ours}.items():
        plain = getattr(module, name)

        def counting(*args, plain=plain, name=name, **options):
            count[name] = count.get(name, 0) + 1
            return plain(*args, **options)

        monkeypatch.setattr(module, name, counting)
    return count


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_fused_kernels_compute_what_a_decoder_does_and_so_do_their_gradients(model, library, monkeypatch, tmp_path):
    """Both take roots of squares in float32, also in float64."""
    stage = load(model.save(tmp_path))
    wanted = learned(stage)
    count = asked(library, monkeypatch)
    assert fuse(stage.model, CPU)
    count.clear()  # of what it has tried
    found = learned(stage)
    layers, passes = 3, packed_batch().num_micro_batches
    norms = {"gemma": 2, "gemma2": 4, "gemma3_text": 6, "qwen3": 2}.get(model.family, 0) * layers + 1
    gate = "liger_geglu" if "gemma" in model.family else "liger_swiglu"
    sums = {} if "gemma" in model.family else {"add_norm": 2 * layers * passes}
    assert count == {"liger_rms_norm": norms * passes, gate: layers * passes, "liger_rope": layers * passes, **sums}
    assert_like(found, wanted, within=1e-5)


def test_in_bfloat16_a_stage_on_the_device_of_the_kernels_is_fused_and_learns_the_same(library, monkeypatch, tmp_path):
    folder = Model("qwen3", tied=True).save(tmp_path)
    count, stages = asked(library, monkeypatch), []
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(kernels, "DEVICE", device)
        stages.append(load(folder, dtype=torch.float32))
        stages[-1].compute_in_bfloat16()
    plain, fused = stages
    assert "forward" not in vars(plain.model.norm)
    assert "forward" in vars(fused.model.norm)
    monkeypatch.setattr(kernels, "DEVICE", "cuda")
    wanted = learned(plain)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    count.clear()
    assert_like(learned(fused), wanted, within=0.05)
    assert set(count) == {"liger_rms_norm", "liger_swiglu", "liger_rope", "add_norm", "softmax"}


def test_a_backward_pass_in_two_parts_reads_nothing_that_a_kernel_has_written_over(library, tmp_path):
    """Of inputs first, of weights later, as zero-bubble schedules do it."""
    stage = load(Model("qwen3", tied=False).save(tmp_path))
    fuse(stage.model, CPU)
    wanted = learned(stage)
    stage.zero_grad()
    packed = packed_batch()
    stage.batch = DeviceBatch(packed, CPU)
    tokens = stage.batch.tokens_ML.split(1)
    out = [stage(each, torch.tensor([m])) for m, each in enumerate(tokens)]
    coefficients = torch.randn(
        torch.cat(out).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).split(1)
    for each, coefficient in zip(out, coefficients, strict=True):
        weights = list(stage.parameters())
        states = torch.zeros(1, requires_grad=True)
        _, groups = stage_backward_input([each + 0 * states.sum()], [coefficient], [states], iter(weights))
        stage_backward_weight(iter(weights), groups)
    assert_like(
        {name: each.grad for name, each in stage.named_parameters()}, {k: v for k, v in wanted.items() if k}, 1e-9
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_mib", [None, 0.002])
def test_log_probabilities_by_the_fused_softmax_are_those_by_torchs_and_so_are_their_gradients(
    softcap, chunk_mib, library, monkeypatch
):
    count = asked(library, monkeypatch)
    rule = LogitRule(0.7, softcap, chunk_mib)
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(num, 16, generator=random).bfloat16() for num in (20, 50))
    tokens, coefficients = torch.arange(20), torch.randn(20, generator=random)

    def all_of(rule):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        found = token_logprobs(*leaves, tokens, rule)
        gradients = torch.autograd.grad((found * coefficients).sum(), leaves)
        return [token_logprobs(hidden, weight, tokens, rule), found.detach(), *gradients]

    wanted = all_of(rule)
    assert not count
    found = all_of(replace(rule, is_fused=True))
    chunks = 20 // rule.chunk_tokens(50, torch.bfloat16, "cpu") or 1
    assert count == {"softmax": 2 * chunks}, "the one that scores, and the forward pass of the other"
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm()) <= (1e-6 if one.dtype == torch.float32 else 2e-3) * float(other.norm())


def plainness(stage):
    """A way to see whether all in it is as Transformers made it."""
    file = sys.modules["transformers.models.llama.modeling_llama"]
    rotation = getattr(file, ROTATION)
    return lambda: (
        not any("forward" in vars(module) for module in stage.modules()) and getattr(file, ROTATION) is rotation
    )


def test_nothing_is_replaced_where_the_library_is_not_installed_or_the_device_is_another(
    library, monkeypatch, tmp_path, caplog
):
    stage = load(Model("llama", tied=True).save(tmp_path))
    is_plain = plainness(stage)
    assert not fuse(stage.model, torch.device("cuda"))
    assert is_plain()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not fuse(stage.model, CPU)
    assert is_plain()
    assert not caplog.records


def no_compiler(*_args, **_options):
    raise OSError("gcc: not found")


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("liger_rms_norm", no_compiler, "OSError: gcc: not found"),
        ("liger_rms_norm", lambda X, W, eps, **_: torch.nn.functional.rms_norm(X, (16,), W.detach(), eps), "Runtime"),
        ("liger_swiglu", lambda a, b: a * b, "wrong numbers of the gate"),
        ("liger_geglu", lambda a, b: torch.nn.functional.silu(a) * b.detach() + b - b.detach(), "wrong numbers"),
        ("liger_rope", lambda q, k, cos, sin: (q, k), "wrong numbers of the rotation"),
        ("softmax", lambda logits, tokens, out: fused_kernels.softmax(logits, tokens, None), "numbers of the softmax"),
        ("add_norm", lambda states, added, *more: fused_kernels.add_norm(states, -added, *more), "sum and its norm"),
    ],
)
def test_a_library_that_fails_or_computes_something_else_is_not_used_and_a_warning_says_why(
    name, function, said, library, monkeypatch, tmp_path, caplog
):
    stage = load(Model("llama", tied=True).save(tmp_path))
    is_plain = plainness(stage)
    monkeypatch.setattr(library if hasattr(library, name) else library.ours, name, function)
    assert not fuse(stage.model, CPU)
    assert is_plain()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert said in record.getMessage()


def test_a_rotation_is_replaced_once_and_leaves_all_but_16_bits_on_its_device_to_torch(library, monkeypatch, tmp_path):
    stage = load(Model("llama", tied=True).save(tmp_path))
    file = sys.modules["transformers.models.llama.modeling_llama"]
    plain = getattr(file, ROTATION)
    for _ in range(2):
        fuse(stage.model, CPU)
    replaced = getattr(file, ROTATION)
    assert isinstance(replaced, functools.partial)
    assert replaced.args[1] is plain
    monkeypatch.setattr(kernels, "ROTATED", (torch.bfloat16, torch.float16))
    count = asked(library, monkeypatch)
    run([stage], packed_batch())
    assert "liger_rope" not in count, "it is in float64 here"


@pytest.mark.process
def test_our_own_kernels_compute_their_formulas_as_triton_interprets_them():
    """Its interpreter is chosen when Triton is imported, so by a process of its own."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.world.interpreted_kernels"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.split() == ["right"], ran.stderr
