"""Split and packed models of every family equal the whole model; also padding, splits by cost, and offloading."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from leeway.common.hf_folder import HEAD
from leeway.learner.decoders import (
    FAMILIES,
    balance,
    check_served,
    cost_of,
    cost_shares,
    split_layers,
    unread_keys,
)
from leeway.learner.model import EMBEDDING, DeviceBatch, StageModule, check_checkpoint
from tests.unit.small_models import (
    CPU,
    LENGTHS,
    LOCAL,
    PROMPTS,
    TEMPERATURE,
    TINY,
    VOCABULARY,
    Model,
    assert_close,
    config_of,
    load,
    packed_batch,
    run,
    sequences,
)

FEW_LOGITS = 7 * VOCABULARY * 8 / 2**20
"""Size in MiB of the float64 logits of 7 tokens."""

MODELS = [
    Model("llama", False),
    Model("llama", True),
    Model("llama", False, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    Model("mistral", False, LOCAL),
    Model("mistral", True, {"sliding_window": None}),
    Model("qwen2", True),
    Model("qwen2", False, {**LOCAL, "use_sliding_window": True, "max_window_layers": 1}),
    Model("qwen3", False, {"head_dim": 8}),
    Model("qwen3", True, {"head_dim": 8, **LOCAL, "use_sliding_window": True, "max_window_layers": 2}),
    Model("gemma", True, {"head_dim": 8}),
    Model("gemma2", True, {"head_dim": 8, **LOCAL, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5,
                           "final_logit_softcapping": 2.0}),
    Model("gemma2", False, {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Model("gemma3_text", True, {"head_dim": 8, **LOCAL, "layer_types": ["sliding_attention", "full_attention"] * 1
                                + ["sliding_attention"]}),
    Model("gemma3_text", False, {"head_dim": 8, "final_logit_softcapping": 3.0}),
]  # fmt: skip


def gradients_of(stages: list[StageModule]) -> dict[str, torch.Tensor]:
    """Return gradients by parameter name of the whole model; the gradients of a tied weight are summed."""
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            key = EMBEDDING if stage.tied and name == HEAD else name
            gradients[key] = gradients.get(key, 0) + parameter.grad
    return gradients


def plain(folder: Path, coefficients_T: torch.Tensor, monkeypatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probabilities [T] and gradients of the Transformers model, computed sequence by sequence."""
    with in_float64(monkeypatch):
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        logprobs_T = torch.cat(
            [
                (whole(torch.tensor(row)[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
                .gather(1, torch.tensor(row[prompt:])[:, None])[:, 0]
                for row, prompt in zip(sequences(), PROMPTS, strict=True)
            ]
        )  # fmt: skip
        (logprobs_T * coefficients_T).sum().backward()
    return logprobs_T.detach(), {name: parameter.grad for name, parameter in whole.named_parameters()}


@contextmanager
def in_float64(monkeypatch):
    """Disable the float32 computations that some Transformers modules use for every model dtype."""
    softmax = F.softmax
    with monkeypatch.context() as patched:
        patched.setattr(F, "softmax", lambda scores, dim, dtype: softmax(scores, dim))
        patched.setattr(
            torch.Tensor, "float", lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        )
        yield


# --- stages ---------------------------------------------------------------------------------------


def test_every_family_is_tested():
    assert {model.family for model in MODELS} == set(FAMILIES)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_chained_stages_give_the_log_probabilities_and_gradients_of_the_whole_model(tmp_path, monkeypatch, model):
    folder = model.save(tmp_path)
    check_checkpoint(folder)  # raises no error for a checkpoint that loads
    packed = packed_batch()
    coefficients_T = torch.randn(len(packed.output_T), dtype=torch.float64)
    expected_T, expected_gradients = plain(folder, coefficients_T, monkeypatch)
    for total, checkpointing in [(1, False), (2, True), (3, False)]:
        stages = [load(folder, index, total, activation_checkpointing=checkpointing) for index in range(total)]
        for stage in stages:
            stage.rule = replace(stage.rule, chunk_mib=FEW_LOGITS)
        with in_float64(monkeypatch):
            logprobs_T = run(stages, packed).flatten()[torch.from_numpy(packed.output_T)]
            (logprobs_T * coefficients_T).sum().backward()
        assert_close(logprobs_T, expected_T)
        gradients = gradients_of(stages)
        assert gradients.keys() == expected_gradients.keys()
        for name, expected in expected_gradients.items():
            assert_close(gradients[name], expected, name)


def test_activation_checkpointing_is_bit_exact_and_skips_forward_only_passes(tmp_path, monkeypatch):
    folder = Model("gemma2", True, {"head_dim": 8, **LOCAL}).save(tmp_path)
    found = []
    for checkpointing in (False, True):
        stages = [load(folder, i, 2, activation_checkpointing=checkpointing, dtype=torch.float32) for i in range(2)]
        for stage in stages:
            stage.compute_in_bfloat16()
        output = run(stages, packed_batch())
        output.sum().backward()
        found.append((output.detach(), gradients_of(stages)))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name
    monkeypatch.setattr("leeway.learner.model.checkpoint", None)
    with torch.no_grad():
        assert torch.equal(run(stages, packed_batch()), found[0][0])
    with pytest.raises(TypeError):
        run(stages, packed_batch())


@pytest.mark.parametrize("heads", ["token", "token_and_value", "value"])
def test_padding_is_not_computed_and_has_no_gradient(tmp_path, heads):
    folder = Model("llama", True).save(tmp_path)
    stages = [load(folder, i, 2, heads=heads) for i in range(2)]
    packed = packed_batch(64, min_micro_batches=len(LENGTHS) + 1)
    assert min(len(members) for members in packed.members) == 0, "one micro-batch is empty"
    batch = DeviceBatch(packed, CPU)
    seen = []
    for stage in stages:
        stage.batch = batch
        next(iter(stage.model.layers.values())).register_forward_hook(
            lambda _, inputs, __: seen.append(inputs[0].shape[1])
        )
    for m, bounds in enumerate(packed.bounds):
        states = stages[0](batch.tokens_ML[m : m + 1], torch.tensor([m]))
        assert states.shape == (1, 64, TINY["hidden_size"])
        assert not states[:, bounds[-1] :].any()
        received = states.detach().requires_grad_()
        output = stages[1](received, torch.tensor([m]))
        assert output.shape == stages[1].output_shape(64)
        assert output.grad_fn is not None, "empty micro-batches take part in the backward pass"
        output.sum().backward()
        assert received.grad.shape == states.shape
        assert not received.grad[:, bounds[-1] :].any()
        states.backward(received.grad)
    assert seen == [int(bounds[-1]) for bounds in packed.bounds for _ in stages]
    assert sum(seen) < 2 * packed.tokens_ML.size
    unused = {"lm_head.weight"} if heads == "value" else set()
    for stage in stages:
        assert not [name for name, p in stage.named_parameters() if p.grad is None and name not in unused]


def test_replicas_together_compute_the_result_of_a_single_one(tmp_path):
    stage = load(Model("qwen3", True, {"head_dim": 8}).save(tmp_path))
    alone = packed_batch(40)
    expected_T = run([stage], alone).flatten()[torch.from_numpy(alone.output_T)]
    together = packed_batch(40, num_replicas=2)
    found_T = torch.full_like(expected_T, torch.nan)
    for replica in range(2):
        part = together.of_replica(replica, 2)
        own_T = torch.from_numpy(part.output_T)
        found_T[own_T >= 0] = run([stage], part).flatten()[own_T[own_T >= 0]]
    assert_close(found_T, expected_T)


# --- split ----------------------------------------------------------------------------------------


def test_layers_are_balanced_by_cost_with_embedding_and_head():
    assert balance([4, 4, 4, 4], 0, 0, 2) == [(0, 2), (2, 4)]
    assert balance([4, 4, 4, 4], 0, 8, 2) == [(0, 3), (3, 4)]
    assert balance([1, 1, 1], 100, 0, 3) == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match=r"num_stages \* learner\.num_chunks = 5.*only 4 layers"):
        balance([1] * 4, 0, 0, 5)


def test_a_large_vocabulary_moves_layers_away_from_the_last_chunk():
    small = config_of(num_hidden_layers=12, vocab_size=8)
    assert split_layers(small, 3) == [(0, 4), (4, 8), (8, 12)]
    # The head costs as much as three layers: the head takes 4 passes over V * hidden weights, and a layer takes 3
    # passes over its weights and attention.
    large = config_of(num_hidden_layers=12, vocab_size=1500)
    (_, first), *_, (last, _) = split_layers(large, 3)
    assert 12 - last < first
    assert split_layers(large, 3, has_lm_head=False) == [(0, 4), (4, 8), (8, 12)]


def test_the_cost_shares_of_chunks_measure_the_balance_of_a_split():
    config = config_of(num_hidden_layers=12, vocab_size=1500)
    balanced = cost_shares(config, split_layers(config, 3))
    assert sum(balanced) == pytest.approx(1)
    assert max(balanced) < max(cost_shares(config, [(0, 4), (4, 8), (8, 12)]))
    # recomputation raises the cost of a layer by a third, but not the cost of the head
    assert cost_shares(config, [(0, 6), (6, 12)], recomputed=True)[0] > cost_shares(config, [(0, 6), (6, 12)])[0]


def test_the_cost_of_a_step_equals_the_count_of_all_products():
    config = config_of(num_hidden_layers=1, vocab_size=1000)
    per_token, squared = cost_of(config)
    hidden, inner, head_size = 24, 20, 6
    layer = 2 * (hidden * 4 * head_size * 2 + hidden * 2 * head_size * 2 + 3 * hidden * inner)
    head = 2 * 1000 * hidden
    assert per_token == pytest.approx(3 * layer + 4 * head, rel=0.01)
    assert squared == 3 * 2 * 2 * 4 * head_size / 2
    # a short window makes attention linear in the length
    windowed = cost_of(config_of("mistral", num_hidden_layers=1, vocab_size=1000, sliding_window=10))
    assert windowed[1] == 0
    assert windowed[0] == per_token + 3 * 2 * 2 * 4 * head_size * 10


def test_more_chunks_than_layers_are_rejected(tmp_path):
    folder = Model("llama", True).save(tmp_path)
    with pytest.raises(ValueError, match=r"num_stages \* learner.num_chunks = 4.*only 3 layers.*lower num_stages or"):
        load(folder, 0, 4)


# --- off-load -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_an_off_loaded_stage_scores_bit_exactly_and_holds_no_weights_in_between(tmp_path, tied):
    folder = Model("gemma2", tied, {"head_dim": 8}).save(tmp_path / "model")
    stages = [load(folder, i, 2).requires_grad_(False) for i in range(2)]
    alone = load(folder).requires_grad_(False)
    expected, expected_alone = run(stages, packed_batch()), run([alone], packed_batch())
    for stage in (*stages, alone):
        stage.offload()
        assert (stage.device, stage.dtype) == (CPU, torch.float64)
        for _ in range(2):
            assert all(p.is_meta for p in stage.parameters())
            if stage is alone:
                assert torch.equal(run([alone], packed_batch()), expected_alone)
            else:
                assert torch.equal(run(stages, packed_batch()), expected)
            assert not any(p.is_meta for p in stage.parameters()), "weights stay until they are released"
            stage.release()
        assert all(p.is_meta for p in stage.parameters())
        assert not any(p.requires_grad for p in stage.parameters())


def test_a_trainable_stage_cannot_be_off_loaded(tmp_path):
    with pytest.raises(AssertionError, match="must be frozen"):
        load(Model("llama", True).save(tmp_path)).offload()


MIXED = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("llama", {"logit_scale": 0.5}, "logit_scale"),
        ("llama", {"sliding_window": 4}, "sliding_window"),
        (
            "llama",
            {"sliding_window": 4, "layer_types": MIXED},
            "sliding_window",
        ),
        ("gemma", {"sliding_window": 4}, "sliding_window"),
        ("mistral", {"layer_types": MIXED}, "sliding_window"),
        ("mistral", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window"),
        ("qwen2", {"head_dim": 8}, "head_dim"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("gemma3_text", {"is_causal": False}, "is_causal"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ],
)
def test_a_key_that_vllm_and_the_learner_interpret_differently_is_rejected_by_name(family, changes, key):
    """The keys were found by a comparison of the models of vLLM 0.32 and of Transformers 5.19."""
    with pytest.raises(ValueError, match=rf"^config.json has {key} = .*: set "):
        check_served(config_of(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"logit_scale": 1.0, "attention_bias": True, "mlp_bias": True, "sliding_window": 0}),
        ("mistral", {"sliding_window": 4}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}),
        ("gemma2", {"sliding_window": 4, "attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        ("llama", {"architectures": ["LlamaForCausalLM"]}),
    ],
)
def test_keys_that_vllm_and_the_learner_interpret_alike_are_accepted(family, changes):
    check_served(config_of(family, **changes))


def test_config_keys_without_a_reader_are_listed():
    assert unread_keys(config_of("llama", residual_multiplier=0.2, use_mrope=False, clip_qkv=None)) == (
        "residual_multiplier",
    )
    assert all(unread_keys(config_of(family)) == () for family in FAMILIES)
