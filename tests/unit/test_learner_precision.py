"""Compute in bfloat16: rounded copies of float32 masters, inputs of products, and tensors that stay float32."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.common.hf_folder import HEAD
from leeway.learner.batch import Leaves
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import MeshPlace
from leeway.learner.model import EMBEDDING, load_stage
from leeway.learner.networks import load_chunks
from leeway.learner.products import embed, round_parameters
from leeway.learner.step import TrainStep
from tests.unit.small_models import CPU, LOCAL, VOCABULARY, Model, load, packed_batch, run
from tests.world.learner import SEED, build, make_models, make_networks, make_rows, single_rank

BF16 = torch.bfloat16
BALANCE = TrajectoryBalanceConfig()
FAMILIES = [
    Model("llama", True),
    Model("qwen2", False, {**LOCAL, "use_sliding_window": True, "max_window_layers": 1}),
    Model("qwen3", True, {"head_dim": 8}),
    Model("gemma", True, {"head_dim": 8}),
    Model("gemma2", False, {"head_dim": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    Model("gemma3_text", True, {"head_dim": 8}),
]
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu"}
CASTS = {"_to_copy", "copy_", "clone"}


class Watch(TorchDispatchMode):
    """Recorder of the dtypes of products, and of the weights that are cast or copied."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.products: list[tuple[str, set[torch.dtype]]] = []
        self.casts: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in PRODUCTS:
            self.products.append((name, {tensor.dtype for tensor in tensors if tensor.is_floating_point()}))
        if name in CASTS and any(tensor.untyped_storage().data_ptr() in self.weights for tensor in tensors):
            self.casts.append(f"{name} {[tuple(tensor.shape) for tensor in tensors]}")
        return func(*args, **(kwargs or {}))


def rounded_stages(folder, total=2, **options):
    stages = [load(folder, i, total, dtype=torch.float32, **options) for i in range(total)]
    for stage in stages:
        stage.add_gradients_in_place()
        stage.compute_in_bfloat16()
    return stages


def in_bf16(model, folder):
    """Save a checkpoint with bfloat16 weights, as in published checkpoints."""
    AutoModelForCausalLM.from_pretrained(model.save(folder), dtype=BF16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("model", FAMILIES, ids=lambda model: model.name)
def test_no_weight_is_cast_per_micro_batch_and_every_product_is_in_bfloat16(tmp_path, model, checkpointing):
    stages = rounded_stages(model.save(tmp_path), activation_checkpointing=checkpointing)
    for stage in stages:
        stage.rule = replace(stage.rule, chunk_mib=7 * VOCABULARY * 4 / 2**20)
    named = [each for stage in stages for each in (*stage.named_parameters(), *stage.masters.items())]
    # excludes the small weights of norms, which Gemma's code casts to float32
    with Watch(weight for name, weight in named if not name.endswith("norm.weight")) as seen:
        run(stages, packed_batch()).sum().backward()
    assert len(seen.products) > 3 * 7 * 3
    wide = {(name, *sorted(map(str, dtypes))) for name, dtypes in seen.products if dtypes - {BF16}}
    if model.changes.get("attn_logit_softcapping"):
        wide = {each for each in wide if each[0] != "bmm"}  # full scores are computed in float32
    assert not wide
    assert seen.casts == []


@pytest.mark.parametrize("model", FAMILIES, ids=lambda model: model.name)
def test_log_probabilities_and_gradients_match_float64_within_bfloat16_precision(tmp_path, model):
    folder = in_bf16(model, tmp_path)
    exact = load(folder)
    expected = run([exact], packed_batch())
    expected.sum().backward()
    stages = rounded_stages(folder)
    found = run(stages, packed_batch())
    assert found.dtype == torch.float32
    found.sum().backward()
    assert float((found - expected).detach().abs().mean()) < 0.02
    gradients = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert (parameter.dtype, parameter.grad.dtype) == (BF16, torch.float32), name
            key = EMBEDDING if stage.tied and name == HEAD else name
            gradients[key] = gradients.get(key, 0) + parameter.grad.double()
    for name, parameter in exact.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert float(error) < 0.12, name


def record_dtypes(seen, _module, inputs, output):
    seen |= {inputs[0].dtype, output.dtype}


def test_hidden_states_are_float32(tmp_path):
    folder = Model("llama", False).save(tmp_path)
    first, _ = stages = rounded_stages(folder)
    seen = set()
    note = functools.partial(record_dtypes, seen)
    for stage in stages:
        for layer in stage.model.layers.values():
            layer.register_forward_hook(note)
    run(stages, packed_batch())
    assert seen == {torch.float32} == {first.states_dtype}
    assert load(folder).states_dtype == torch.float64


def test_norms_divide_in_float32_and_round_their_output_once(tmp_path):
    (stage,) = rounded_stages(Model("llama", False).save(tmp_path), total=1)
    layer = stage.model.layers["0"]
    states = torch.randn(1, 5, 24)
    states[..., 0] = 300.0
    found = layer.input_layernorm(states)
    exact = states.double() * (states.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert found.dtype == BF16
    torch.testing.assert_close(
        found.double(), exact * layer.input_layernorm.weight.double(), rtol=2**-8, atol=0, check_dtype=False
    )
    assert stage.model.norm(states).dtype == torch.float32, "the input of the heads is not rounded twice"


def test_embedding_gradients_are_summed_in_float32():
    embedding = torch.nn.Embedding(8, 4, padding_idx=3)
    masters = round_parameters(embedding, exclude=lambda _: False)
    assert list(masters) == ["weight"]
    tokens = torch.tensor([[1] * 3000 + [2, 3]])
    for _ in range(2):
        states = embed(embedding, tokens)
        (states * 1.01).sum().backward()
    gradient = embedding.weight.grad
    torch.testing.assert_close(gradient[1], torch.full((4,), 6060.0), rtol=1e-5, atol=0)
    assert not gradient[3].any(), "the padding row has no gradient"
    plain = torch.nn.Embedding(8, 4, dtype=BF16)
    (plain(tokens) * 1.01).sum().backward()
    assert float((plain.weight.grad[1] - 3030).abs().max()) > 100, "the bfloat16 sum of torch saturates"


# --- masters ----------------------------------------------------------------------------------------


@pytest.fixture
def networks_of(tmp_path):
    """Return a function that builds the networks of one process in a precision."""
    make_models(tmp_path)
    with single_rank():
        yield lambda kind="tied", algorithm=BALANCE, precision="bfloat16", **config: make_networks(
            tmp_path / kind, LearnerConfig(**{"learning_rate": 1e-2, **config}), algorithm, precision=precision
        )


def step(networks, seed=0):
    batch = networks.on_device(build(make_rows(seed)).packed)
    leaves = networks.forward_only(batch)
    networks.train(batch, Leaves(torch.ones_like(leaves.logprobs_T), leaves.values_T))
    return networks.update(seed, 1.0)


@pytest.mark.parametrize("rounds", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_gradients_of_matrices_added_in_place_equal_those_of_autograd(tmp_path, checkpointing, rounds):
    folder, handed, gradients = in_bf16(Model("qwen2", True), tmp_path), {}, {}
    for splits in (False, True):
        stage = load(folder, dtype=torch.float32, activation_checkpointing=checkpointing)
        if rounds:
            stage.compute_in_bfloat16()
        if not splits:
            stage.add_gradients_in_place()
        handed[splits] = set()
        for name, weight in stage.named_parameters():
            weight.register_hook(
                lambda found, name=name, seen=handed[splits]: seen.update({name} if found is not None else {})
            )
        for _ in range(2):
            run([stage], packed_batch()).sum().backward()
        gradients[splits] = {name: weight.grad for name, weight in stage.named_parameters()}
    of_matrices = {name for name, each in gradients[True].items() if each.ndim == 2}
    assert handed[True] - handed[False] == of_matrices
    assert not handed[False] & of_matrices
    for name, reference in gradients[True].items():
        found = gradients[False][name]
        assert found.dtype == torch.float32
        # the gradient of a bias is a sum over tokens, which autograd rounds to bfloat16
        within = 1e-5 if name in of_matrices or not rounds else 0.1
        assert float((found - reference).norm()) <= within * float(reference.norm()), name


@pytest.mark.parametrize(
    ("schedule", "num_stages", "adds", "kept_mib"),
    [("1f1b", 2, True, 192), ("zero_bubble", 2, False, 96), ("zero_bubble", 1, True, 192)],
)
def test_the_schedule_sets_the_kept_size_of_the_head_and_in_place_addition(
    schedule, num_stages, adds, kept_mib, tmp_path
):
    make_models(tmp_path)
    mesh = SimpleNamespace(place=MeshPlace(0, num_stages=num_stages))
    config = LearnerConfig(num_stages=num_stages, precision="bfloat16", schedule=schedule)
    (stage,) = load_chunks(tmp_path / "tied", "token", config, 1.0, mesh, CPU)
    assert (stage.rule.adds_in_place, stage.rule.kept_mib) == (adds, kept_mib)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_passes_and_actors_use_rounded_masters_and_the_export_has_the_masters(networks_of, kind):
    networks, _ = networks_of(kind)
    (module,) = networks.policy.modules
    for number in range(2):
        before = {name: weight.detach().clone() for name, weight in networks.policy.named_weights()}
        assert step(networks, number).taken
        masters = dict(networks.policy.named_weights())
        assert not any(torch.equal(before[name], masters[name]) for name in masters)
        computed = dict(module.named_parameters())
        assert computed.keys() == masters.keys()
        for name, parameter in computed.items():
            assert masters[name].dtype == torch.float32
            assert torch.equal(parameter, masters[name].to(BF16)), name
            assert parameter.grad is None
            assert masters[name].grad is None
        published, wide = (networks.policy.published_tensors(rounded=rounded) for rounded in (True, False))
        assert {tensor.dtype for tensor in published.values()} == {BF16}
        assert published.keys() == wide.keys() == masters.keys() | {HEAD}
        assert all(torch.equal(tensor, wide[name].to(BF16)) for name, tensor in published.items())
        for name, tensor in networks.policy.exported_tensors().items():
            assert torch.equal(tensor, masters[name]), name
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == (kind == "tied")


def test_updates_too_small_for_bfloat16_accumulate_in_the_masters(networks_of):
    networks, _ = networks_of(learning_rate=1e-5)
    (module,) = networks.policy.modules
    start = {name: weight.detach().clone() for name, weight in networks.policy.named_weights()}
    for _ in range(3):
        step(networks)
    num_moved = [0, 0]
    for name, weight in networks.policy.named_weights():
        num_moved[0] += int((weight != start[name]).sum())
        num_moved[1] += int((module.get_parameter(name) != start[name].to(BF16)).sum())
    num_parameters = sum(weight.numel() for weight in start.values())
    assert num_moved[0] > 0.95 * num_parameters
    assert num_moved[1] < 0.1 * num_parameters


def test_modules_in_other_precisions_hold_the_trained_weights_without_copies(networks_of):
    for precision, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        networks, reference = networks_of(precision=precision)
        (module,) = networks.policy.modules
        assert not module.masters
        assert all(
            weight is parameter
            for weight, parameter in zip(module.weights().values(), module.parameters(), strict=True)
        )
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        assert {p.dtype for each in reference.pipelines[0].modules for p in each.parameters()} == {dtype}


def test_a_bfloat16_reference_scores_like_the_initial_policy_without_a_float32_copy(networks_of):
    networks, reference = networks_of("untied")
    (module,) = reference.pipelines[0].modules
    assert {(p.dtype, p.requires_grad) for p in module.parameters()} == {(BF16, False)}
    assert not module.masters
    batch = build(make_rows(0))
    on_device = networks.on_device(batch.packed)
    scores_T, _ = reference.score(batch, on_device)
    assert torch.equal(scores_T, networks.forward_only(on_device).logprobs_T)


def test_the_states_of_policy_reference_and_critic_are_float32(networks_of):
    algorithm = OffPolicyPPOConfig(baseline="critic", kl_beta=0.1)
    networks, reference = networks_of("untied", algorithm)
    modules = [module for network in networks.all for module in network.modules] + [*reference.pipelines[0].modules]
    assert [module.states_dtype for module in modules] == [torch.float32] * 3


def test_value_heads_stay_float32_and_learn(networks_of):
    for baseline in ("value_head", "critic"):
        algorithm = OffPolicyPPOConfig(baseline=baseline)
        networks, reference = networks_of("untied", algorithm)
        head = (networks.critic or networks.policy).modules[-1].value_head
        assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
        result = TrainStep(networks, reference, algorithm, LearnerConfig(), SEED).run(build(make_rows(0)), 0)
        assert not result.skipped
        assert head.weight.any()


# --- clipping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm_times", [0.3, 0.9999999, 1.0000001, 17.3])
def test_clipping_equals_torch_with_a_float64_norm_bit_for_bit(networks_of, dtype, norm_times, monkeypatch):
    networks, _ = networks_of(precision=str(dtype).removeprefix("torch."))
    (optimizer,) = networks.optimizers
    bound = optimizer._config.max_grad_norm
    parameters = list(optimizer.parameters.values())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()
    norm = bound * norm_times
    torch.nn.utils.clip_grads_with_norm_(copies, bound, torch.tensor(norm, dtype=torch.float64))
    multiplied, multiply = [], torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *args: multiplied.append(1) or multiply(*args))
    optimizer.apply(norm, 1e-3)
    for copy, parameter in zip(copies, parameters, strict=True):
        assert torch.equal(copy.grad, parameter.grad)
    assert len(multiplied) == (norm_times > 0.99), "gradients below the bound are not multiplied"


def test_a_loaded_stage_keeps_float32_masters_for_any_checkpoint_dtype(tmp_path):
    folder = Model("llama", True).save(tmp_path)  # saved in float64
    stage = load_stage(folder, 0, 1, temperature=1.0, device=CPU, heads="token_and_value")
    stage.compute_in_bfloat16()
    assert {weight.dtype for weight in stage.masters.values()} == {torch.float32}
    assert not any(name.startswith("value_head") for name in stage.masters)
    assert stage.weights().keys() == dict(stage.named_parameters()).keys()
