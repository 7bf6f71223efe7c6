"""Packing, attention, stage split, schedules of the learning rate, lags and checkpoints, in one process."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from buffer.trajectory import Trajectory, VersionSpan
from learner import model as model_file
from learner.attention import AttentionLayout, packed_attention
from learner.batch import Leaves, StepBatch
from learner.checkpoint import Checkpoints, Progress
from learner.config import LearnerConfig
from learner.model import DeviceBatch, load_stage
from learner.networks import Network, Networks
from learner.optimizer import Verdict, learning_rate
from learner.packing import best_fit, pack
from learner.report import lag_metrics
from learner.split import balance
from weight_sync.staleness import PolicyVersion

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sequences(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, TINY["vocab_size"], length) for length in lengths]


# --- packing --------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=40),
    st.integers(50, 90),
    st.integers(1, 4),
)
def test_every_completion_token_is_found_again_behind_its_prediction(shapes, token_budget, min_micro_batches):
    rows = sequences([prompt + completion for prompt, completion in shapes])
    prompts = [prompt for prompt, _ in shapes]
    packed = pack(rows, prompts, token_budget, min_micro_batches)
    assert packed.width <= token_budget
    assert packed.num_micro_batches >= min_micro_batches
    # the output at l predicts the token at l + 1, which must be the completion's, in order
    read_back = packed.tokens_ML.reshape(-1)[packed.output_T + 1]
    expected = [row[prompt:] for row, prompt in zip(rows, prompts, strict=True)]
    np.testing.assert_array_equal(read_back, np.concatenate(expected))
    assert packed.num_tokens == sum(len(row) for row in rows)
    assert sum(len(positions) for positions in packed.predicting) == len(packed.output_T)
    for m, bounds in enumerate(packed.bounds):
        assert len(bounds) >= 2, "attention needs a sequence in every micro-batch"
        restarts = packed.positions_ML[m][: bounds[-1]]
        np.testing.assert_array_equal(restarts, np.concatenate([np.arange(n) for n in np.diff(bounds)]))


def test_best_fit_fills_the_fullest_bin_first_and_loses_nothing():
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_a_batch_just_above_the_budget_does_not_compute_two_full_ones():
    packed = pack(sequences([10] * 11), [2] * 11, token_budget=100)
    assert packed.num_micro_batches == 2
    assert packed.efficiency > 0.85


def test_a_sequence_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match=r"sequence 1 of the batch has 9 tokens.*token_budget = 8"):
        pack(sequences([3, 9]), [1, 1], 8)


# --- attention ------------------------------------------------------------------------------------


def test_packed_attention_equals_attention_within_each_sequence_and_so_does_its_gradient():
    torch.manual_seed(0)
    lengths, width, heads, kv_heads, size = [5, 33, 16, 17, 1, 40], 128, 4, 2, 8
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    states = [torch.randn(1, n, width, size, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    packed_states = [state.clone().requires_grad_() for state in states]
    plain_states = [state.clone().requires_grad_() for state in states]
    layout = AttentionLayout.build(bounds, width, CPU)
    out, _ = packed_attention(torch.nn.Module(), *packed_states, None, layout=layout, scaling=0.3)
    weight = torch.randn(1, int(bounds[-1]), heads, size, dtype=torch.float64)
    pieces = []
    for start, end in itertools.pairwise(bounds):
        query, key, value = (state[:, :, start:end] for state in plain_states)
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
        pieces.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3))
    expected = torch.cat(pieces, dim=2).transpose(1, 2)
    torch.testing.assert_close(out[:, : bounds[-1]], expected, rtol=0, atol=1e-12)
    (out[:, : bounds[-1]] * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, theirs in zip(packed_states, plain_states, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_attention_refuses_what_would_not_be_exact():
    layout = AttentionLayout.build(np.array([0, 20]), 20, CPU)
    states = [torch.zeros(1, 1, 20, 4)] * 3
    with pytest.raises(ValueError, match=r"sliding window of 16"):
        packed_attention(torch.nn.Module(), *states, None, layout=layout, sliding_window=16)
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        packed_attention(torch.nn.Module(), *states, None, layout=layout, dropout=0.1)


# --- stages ---------------------------------------------------------------------------------------


def test_stages_are_balanced_by_cost_with_embedding_and_head():
    assert balance([4, 4, 4, 4], 0, 0, 2) == [(0, 2), (2, 4)]
    assert balance([4, 4, 4, 4], 0, 8, 2) == [(0, 3), (3, 4)]
    assert balance([1, 1, 1], 100, 0, 3) == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match=r"num_stages = 5.*only 4 layers"):
        balance([1] * 4, 0, 0, 5)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_stages_in_a_row_give_the_log_probabilities_and_gradients_of_the_whole_model(
    tmp_path, monkeypatch, family, num_stages
):
    # a head in chunks of 7 tokens, so that checkpointing is at work
    monkeypatch.setattr(model_file, "LOGITS_AT_ONCE", 7 * TINY["vocab_size"])
    torch.manual_seed(0)
    if family == "qwen3":
        whole = Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=False)).double()
    else:
        whole = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=family == "llama-tied")).double()
    whole.save_pretrained(tmp_path)
    rows, prompts = sequences([5, 17, 3, 20, 9, 30, 2]), [2, 5, 1, 9, 3, 1, 1]
    expected_T = torch.cat(
        [
            (whole(torch.tensor(row)[None]).logits[0] / 0.7).log_softmax(-1)[prompt - 1 : -1]
            .gather(1, torch.tensor(row[prompt:])[:, None])[:, 0]
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    )  # fmt: skip
    coefficients_T = torch.randn_like(expected_T)
    (expected_T * coefficients_T).sum().backward()
    stages = [
        load_stage(tmp_path, rank, num_stages, temperature=0.7, device=CPU, dtype=torch.float64)
        for rank in range(num_stages)
    ]
    packed = pack(rows, prompts, 40)
    batch = DeviceBatch(packed, CPU)
    outputs = []
    for m in range(packed.num_micro_batches):
        states = batch.tokens_ML[m : m + 1]
        for stage in stages:
            stage.batch = batch
            states = stage(states, torch.tensor([m]))
        outputs.append(states)
    logprobs_T = torch.cat(outputs).flatten()[torch.from_numpy(packed.output_T)]
    torch.testing.assert_close(logprobs_T, expected_T, rtol=0, atol=1e-10)
    (logprobs_T * coefficients_T).sum().backward()
    gradients = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            tied = family == "llama-tied" and name == "lm_head.weight"
            key = "model.embed_tokens.weight" if tied else name
            gradients[key] = gradients.get(key, 0) + parameter.grad
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=0, atol=1e-10, msg=name)
    assert not gradients


def test_a_model_of_another_family_is_refused(tmp_path):
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"type 'gpt2'.*Llama family"):
        load_stage(tmp_path, 0, 1, temperature=1.0, device=CPU)


# --- optimizer ------------------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_decays_to_its_floor():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=2, num_steps=6, lr_schedule="linear", min_lr_ratio=0.2)
    assert [round(learning_rate(config, step), 6) for step in range(7)] == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    cosine = config.model_copy(update={"lr_schedule": "cosine"})
    assert learning_rate(cosine, 4) == pytest.approx(0.6)
    assert learning_rate(LearnerConfig(learning_rate=0.3), 99) == 0.3


# --- batch ----------------------------------------------------------------------------------------


def trajectory(spans, **changes) -> Trajectory:
    length = spans[-1][-1]
    row = Trajectory(
        lease_id=0,
        attempt=0,
        group_id=0,
        sample_index=0,
        prompt_id=0,
        token_ids=np.zeros(2 + length, np.int32),
        prompt_length=2,
        logprobs=np.zeros(length, np.float32),
        spans=tuple(VersionSpan(PolicyVersion(*version), start, end) for version, start, end in spans),
        reward=1.0,
        finish_reason="stop",
        finished_s=100.0,
    )
    return replace(row, **changes)


def test_a_group_that_is_drawn_twice_counts_as_two():
    spans = [((0, 0), 0, 3)]
    once = [trajectory(spans, group_id=4, sample_index=0), trajectory(spans, group_id=4, sample_index=1)]
    other = [trajectory(spans, group_id=2, sample_index=0), trajectory(spans, group_id=2, sample_index=1)]
    batch = StepBatch.build([*once, *other, *once], 0, {0: 0}, 64)
    assert batch.num_groups == 3
    assert batch.group_B.tolist() == [1, 1, 0, 0, 2, 2]


def test_lags_count_from_the_checkpoint_that_a_restart_resumed_from():
    # incarnation 0 reached version 9, and incarnation 1 resumed from its checkpoint at version 6
    abandoned = trajectory([((0, 8), 0, 3)])
    crossing = trajectory([((0, 5), 0, 1), ((1, 7), 1, 3)], group_id=4)
    batch = StepBatch.build([abandoned, crossing], 8, {0: 0, 1: 6}, 64)
    assert batch.lag_T.tolist() == [2, 2, 2, 3, 1, 1]
    assert batch.group_B.tolist() == [0, 1]
    assert batch.single_version_B.tolist() == [True, False]
    metrics = lag_metrics([batch], batch, newest_published=7, started_s=103.0)
    assert metrics["lag/abandoned"] == 3
    assert metrics["lag/token_max"] == 3
    assert metrics["lag/in_flight"] == 1.0
    assert metrics["lag/in_queue"] == 1.5
    assert metrics["lag/publish"] == 1
    assert metrics["lag/wall_s"] == 3.0


# --- checkpoints ----------------------------------------------------------------------------------


def make_stage(folder: Path, critic: str | None = None) -> Networks:
    config = LearnerConfig(learning_rate=1e-2)

    def network(heads):
        return Network.build(load_stage(folder, 0, 1, temperature=1.0, device=CPU, heads=heads), config)

    policy = network("token_and_value" if critic == "head" else "token")
    return Networks(policy, network("value") if critic == "model" else None, config)


def take_step(networks, seed):
    batch = DeviceBatch(pack(sequences([9, 12, 7], seed), [2, 3, 1], 32), CPU)
    leaves = networks.forward_only(batch)
    values_T = None if leaves.values_T is None else leaves.values_T - 1
    networks.train(batch, Leaves(torch.ones_like(leaves.logprobs_T), values_T))
    return networks.update(0, Verdict())


def parameters_of(networks):
    models = [networks.policy] if networks.critic is None else [networks.policy, networks.critic]
    return {(i, name): p for i, model in enumerate(models) for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("critic", [None, "head", "model"])
@pytest.mark.usefixtures("process_group")
def test_a_restored_run_continues_exactly_and_a_damaged_checkpoint_is_passed_over(tmp_path, critic):
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    first = make_stage(tmp_path / "model", critic)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, 0, 1)
    assert checkpoints.restore(first) is None
    for step in (1, 2, 3):
        take_step(first, seed=step)
        checkpoints.save(first, Progress(step, step, 0))
    assert checkpoints.steps() == [2, 3]
    take_step(first, seed=4)

    second = make_stage(tmp_path / "model", critic)
    untouched = {key: parameter.detach().clone() for key, parameter in parameters_of(second).items()}
    assert checkpoints.restore(second) == Progress(3, 3, 0)
    take_step(second, seed=4)
    theirs = parameters_of(second)
    for key, ours in parameters_of(first).items():
        assert torch.equal(ours, theirs[key]), key
        assert not torch.equal(ours, untouched[key]), key

    for file in (tmp_path / "checkpoints" / "step-00000003").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    assert checkpoints.restore(second) == Progress(2, 2, 0)
    (tmp_path / "checkpoints" / "step-00000002" / ".metadata").unlink()
    with pytest.raises(RuntimeError, match="can be read"):
        checkpoints.restore(second)


@pytest.mark.usefixtures("process_group")
def test_an_update_with_a_sick_gradient_changes_no_weight(tmp_path):
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    networks = make_stage(tmp_path)
    before = {key: parameter.clone() for key, parameter in parameters_of(networks).items()}
    batch = DeviceBatch(pack(sequences([9]), [2], 32), CPU)
    networks.train(batch, Leaves(torch.full_like(networks.forward_only(batch).logprobs_T, torch.nan)))
    result = networks.update(0, Verdict())
    assert result.sick
    assert not result.taken
    assert all(torch.equal(before[key], parameter) for key, parameter in parameters_of(networks).items())
    assert take_step(networks, seed=0).taken
