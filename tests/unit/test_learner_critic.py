"""Training and storage of value heads, which belong to the policy or to a critic model without an LM head."""

import numpy as np
import pytest
import torch

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.learner.batch import StepBatch
from leeway.learner.config import LearnerConfig
from leeway.learner.model import DeviceBatch, load_stage
from leeway.learner.step import TrainStep
from tests.world.learner import TEMPERATURE, build, make_models, make_networks, make_rows, single_rank, weights_of

CPU = torch.device("cpu")


@pytest.fixture
def models(tmp_path):
    make_models(tmp_path)
    return tmp_path


def load(path, heads, rank=0, num_stages=1, dtype=torch.float64):
    return load_stage(path, rank, num_stages, temperature=TEMPERATURE, device=CPU, dtype=dtype, heads=heads)


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_only_the_last_stage_has_a_value_head_and_it_is_not_published_or_exported(models, kind, num_stages):
    for heads in ("token", "token_and_value", "value"):
        stages = [load(models / kind, heads, rank, num_stages) for rank in range(num_stages)]
        owners = [any(name.startswith("value_head") for name, _ in stage.named_parameters()) for stage in stages]
        assert owners == [heads != "token" and stage.share.is_last for stage in stages]
        for stage in stages if heads != "value" else ():
            names = stage.published_tensors().keys() | stage.exported_tensors().keys()
            assert not any("value_head" in name for name in names)
        if heads == "value":
            assert not any(hasattr(stage, "lm_head") for stage in stages), "a critic has no LM head"
            assert not any(stage.tied for stage in stages)


def test_an_untrained_critic_returns_zero_and_does_not_change_the_policy(models):
    batch = DeviceBatch(build(make_rows(0)).packed, CPU)
    outputs = {}
    for heads in ("token", "token_and_value", "value"):
        stage = load(models / "tied", heads)
        stage.batch = batch
        outputs[heads] = stage(batch.tokens_ML[:1], torch.tensor([0]))
        assert outputs[heads].shape == stage.output_shape(batch.packed.width)
    assert torch.equal(outputs["token_and_value"][:, 0], outputs["token"])
    assert not outputs["token_and_value"][:, 1].any()
    assert not outputs["value"].any()


def test_values_are_computed_in_float32_even_if_the_model_runs_in_bfloat16(models):
    stage = load(models / "untied", "token_and_value", dtype=torch.float32)
    stage.compute_in_bfloat16()
    # bfloat16 would round this value to 1
    torch.nn.init.constant_(stage.value_head.bias, 1.001)
    stage.batch = DeviceBatch(build(make_rows(0)).packed, CPU)
    output = stage(stage.batch.tokens_ML[:1], torch.tensor([0]))
    assert output.dtype == torch.float32
    where = stage.batch.completions[0]
    torch.testing.assert_close(output[0, 1, where], torch.full((len(where),), 1.001))


@pytest.mark.parametrize("baseline", ["value_head", "critic"])
def test_a_critic_learns_to_predict_the_reward(models, baseline, monkeypatch):
    """Rewards depend only on the prompt, so values can predict the rewards, and the value loss falls."""
    monkeypatch.setattr("leeway.algorithms.off_policy_ppo.VALUE_CLIP", 100.0)  # a clip of 0.2 needs many more batches
    algorithm = OffPolicyPPOConfig(baseline=baseline, gae_lambda=1.0)
    rates = {"learning_rate": 1e-6, "critic_learning_rate": 3e-2, "warmup_steps": 0}
    config = LearnerConfig(**rates, num_epochs=2, max_grad_norm=100)
    with single_rank():
        networks, reference = make_networks(models / "untied", config, algorithm)
        before = weights_of(networks)
        step = TrainStep(networks, reference, algorithm, config)
        batch = build(make_rows(0, reward=3.0), token_budget=128)
        losses = [step.run(batch, number).metrics["ppo/value_loss"] for number in range(40)]
        assert losses[0] > 3
        assert losses[-1] < 0.1 * losses[0]
        # the learning rate of the policy is far lower than that of the critic
        moved = {name: float((after - before[name]).abs().max()) for name, after in weights_of(networks).items()}
    of_critic = {name: change for name, change in moved.items() if "value_head" in name or name.startswith("critic.")}
    assert max(of_critic.values()) > 0.1
    assert max(change for name, change in moved.items() if name not in of_critic) < 1e-3


@pytest.mark.parametrize("proximal", ["draw_start", "behaviour"])
@pytest.mark.parametrize("baseline", ["value_head", "critic"])
def test_all_updates_of_a_step_read_the_values_from_its_start(models, baseline, proximal, monkeypatch):
    algorithm = OffPolicyPPOConfig(baseline=baseline, proximal=proximal)
    config = LearnerConfig(learning_rate=1e-2, num_minibatches=2, num_epochs=2)
    seen = []
    inputs = StepBatch.loss_inputs
    monkeypatch.setattr(
        StepBatch, "loss_inputs", lambda self, *arguments: seen.append(inputs(self, *arguments)) or seen[-1]
    )
    with single_rank():
        networks, reference = make_networks(models / "untied", config, algorithm)
        torch.nn.init.normal_(
            (networks.critic or networks.policy).modules[-1].value_head.weight,
            generator=torch.Generator().manual_seed(0),
        )
        batch = build(make_rows(0))
        result = TrainStep(networks, reference, algorithm, config).run(batch, 0)
    updates = seen[:4]
    values = [np.sort(np.concatenate([u.old_values_T.numpy() for u in pair])) for pair in (updates[:2], updates[2:])]
    np.testing.assert_array_equal(*values)
    assert np.abs(values[0]).max() > 0.1
    changes = [float((update.values_T.detach() - update.old_values_T).abs().max()) for update in updates]
    assert min(changes[1:]) > 1e-3
    assert all(update.values_T.requires_grad and not update.old_values_T.requires_grad for update in updates)
    assert len(result.updates) == 4
