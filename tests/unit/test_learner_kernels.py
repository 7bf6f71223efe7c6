"""Fused kernels compute the results of a decoder's own modules; liger-kernel is faked, our kernels run in Triton."""

import functools
import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from leeway.learner import kernels
from leeway.learner.decoders import FAMILIES
from leeway.learner.kernels import fuse
from leeway.learner.model import DeviceBatch
from leeway.learner.products import LogitRule, token_logprobs
from tests.unit.small_models import CPU, LOCAL, Model, load, packed_batch, run
from tests.world import fused_kernels

ROTATION = "apply_rotary_pos_emb"
FUNCTIONAL = "liger_kernel.transformers.functional"
MODELS = [Model(family, tied=False, changes=LOCAL if family == "gemma3_text" else {}) for family in FAMILIES]


@pytest.fixture
def library(monkeypatch):
    """Fake an installed kernel library that supports CPUs and float64; restore the rotary embedding of model files."""
    for family in FAMILIES:
        kind = family.removesuffix("_text")
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        monkeypatch.setattr(file, ROTATION, getattr(file, ROTATION))
    module, module_of_ours = fused_kernels.as_module(), fused_kernels.ours()
    module.ours = module_of_ours
    monkeypatch.setitem(sys.modules, "leeway.learner.row_kernels", module_of_ours)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, FUNCTIONAL, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "liger_kernel")
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "ROTATED", (torch.float64, torch.bfloat16))
    return module


def train_once(stage):
    stage.zero_grad()
    found = run([stage], packed_batch())
    coefficients = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    (found * coefficients).sum().backward()
    return {"": found.detach(), **{name: parameter.grad for name, parameter in stage.named_parameters()}}


def assert_like(found, expected, within):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype, name
        assert float((found[name] - each).norm()) <= within * float(each.norm()), name


def count_calls(library, monkeypatch):
    """Return a dictionary that counts the calls of each library function and of each of our kernels."""
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
def test_fused_kernels_give_the_outputs_and_gradients_of_the_decoder(model, library, monkeypatch, tmp_path):
    """The tolerance covers norms, which fused and plain modules compute in float32 even for float64 models."""
    stage = load(model.save(tmp_path))
    expected = train_once(stage)
    count = count_calls(library, monkeypatch)
    assert fuse(stage.model, CPU)
    count.clear()  # drops the calls of the self-test in `fuse`
    found = train_once(stage)
    layers, passes = 3, packed_batch().num_micro_batches
    norms = {"gemma": 2, "gemma2": 4, "gemma3_text": 6, "qwen3": 2}.get(model.family, 0) * layers + 1
    gate = "liger_geglu" if "gemma" in model.family else "liger_swiglu"
    sums = {} if "gemma" in model.family else {"add_norm": 2 * layers * passes}
    assert count == {"liger_rms_norm": norms * passes, gate: layers * passes, "liger_rope": layers * passes, **sums}
    assert_like(found, expected, within=1e-5)


def test_a_bfloat16_stage_is_fused_only_on_the_device_of_the_kernels(library, monkeypatch, tmp_path):
    folder = Model("qwen3", tied=True).save(tmp_path)
    count, stages = count_calls(library, monkeypatch), []
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(kernels, "DEVICE", device)
        stages.append(load(folder, dtype=torch.float32))
        stages[-1].compute_in_bfloat16()
    plain, fused = stages
    assert "forward" not in vars(plain.model.norm)
    assert "forward" in vars(fused.model.norm)
    monkeypatch.setattr(kernels, "DEVICE", "cuda")
    expected = train_once(plain)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    count.clear()
    assert_like(train_once(fused), expected, within=0.05)
    assert set(count) == {"liger_rms_norm", "liger_swiglu", "liger_rope", "add_norm", "softmax"}


def test_a_split_backward_pass_reads_no_overwritten_tensors(library, tmp_path):
    """Compute gradients of inputs first and of weights later, as zero-bubble schedules do."""
    stage = load(Model("qwen3", tied=False).save(tmp_path))
    fuse(stage.model, CPU)
    expected = train_once(stage)
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
        {name: each.grad for name, each in stage.named_parameters()}, {k: v for k, v in expected.items() if k}, 1e-9
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_mib", [None, 0.002])
def test_the_fused_softmax_gives_the_log_probabilities_and_gradients_of_torch(softcap, chunk_mib, library, monkeypatch):
    count = count_calls(library, monkeypatch)
    rule = LogitRule(0.7, softcap, chunk_mib)
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(num, 16, generator=random).bfloat16() for num in (20, 50))
    tokens, coefficients = torch.arange(20), torch.randn(20, generator=random)

    def all_of(rule):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        found = token_logprobs(*leaves, tokens, rule)
        gradients = torch.autograd.grad((found * coefficients).sum(), leaves)
        return [token_logprobs(hidden, weight, tokens, rule), found.detach(), *gradients]

    expected = all_of(rule)
    assert not count
    found = all_of(replace(rule, is_fused=True))
    chunks = 20 // rule.chunk_tokens(50, torch.bfloat16, "cpu") or 1
    assert count == {"softmax": 2 * chunks}, "one call scores, and one is the forward pass of training"
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm()) <= (1e-6 if one.dtype == torch.float32 else 2e-3) * float(other.norm())


def plainness(stage):
    """Return a predicate that is true while the stage has its original modules and rotary embedding."""
    file = sys.modules["transformers.models.llama.modeling_llama"]
    rotation = getattr(file, ROTATION)
    return lambda: (
        not any("forward" in vars(module) for module in stage.modules()) and getattr(file, ROTATION) is rotation
    )


def test_nothing_is_replaced_without_the_library_or_on_another_device(library, monkeypatch, tmp_path, caplog):
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
    ("name", "function", "message"),
    [
        ("liger_rms_norm", no_compiler, "OSError: gcc: not found"),
        ("liger_rms_norm", lambda X, W, eps, **_: torch.nn.functional.rms_norm(X, (16,), W.detach(), eps), "Runtime"),
        ("liger_swiglu", lambda a, b: a * b, "wrong results of the gate kernel"),
        ("liger_geglu", lambda a, b: torch.nn.functional.silu(a) * b.detach() + b - b.detach(), "wrong results"),
        ("liger_rope", lambda q, k, cos, sin: (q, k), "wrong results of the rotary embedding kernel"),
        ("softmax", lambda logits, tokens, out: fused_kernels.softmax(logits, tokens, None), "of the softmax kernel"),
        ("add_norm", lambda states, added, *more: fused_kernels.add_norm(states, -added, *more), "add_norm kernel"),
    ],
)
def test_a_kernel_that_fails_or_gives_wrong_results_disables_fusion_with_a_warning(
    name, function, message, library, monkeypatch, tmp_path, caplog
):
    stage = load(Model("llama", tied=True).save(tmp_path))
    is_plain = plainness(stage)
    monkeypatch.setattr(library if hasattr(library, name) else library.ours, name, function)
    assert not fuse(stage.model, CPU)
    assert is_plain()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert message in record.getMessage()


def test_rotary_embedding_is_replaced_once_and_falls_back_to_torch_for_other_dtypes(library, monkeypatch, tmp_path):
    stage = load(Model("llama", tied=True).save(tmp_path))
    file = sys.modules["transformers.models.llama.modeling_llama"]
    plain = getattr(file, ROTATION)
    for _ in range(2):
        fuse(stage.model, CPU)
    replaced = getattr(file, ROTATION)
    assert isinstance(replaced, functools.partial)
    assert replaced.args[1] is plain
    monkeypatch.setattr(kernels, "ROTATED", (torch.bfloat16, torch.float16))
    count = count_calls(library, monkeypatch)
    run([stage], packed_batch())
    assert "liger_rope" not in count, "float64 uses the rotary embedding of torch"


@pytest.mark.process
def test_our_own_kernels_match_their_formulas_in_the_triton_interpreter():
    """Run in a separate process because Triton selects its interpreter on import."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.world.interpreted_kernels"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.split() == ["right"], ran.stderr
