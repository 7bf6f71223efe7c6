"""`grpo`, `dr_grpo`, `rloo` and `dpo` as algorithm.type: the losses of TRL, written out by hand, on fresh samples."""

import math
import tomllib
from pathlib import Path

import pytest
import torch

from leeway.algorithms.registry import RECIPES
from leeway.launch.config import load_config, to_toml
from leeway.launch.errors import ConfigError
from tests.unit.loss_batches import evaluate, make_inputs

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"
LENGTHS, GROUPS, LIMIT = [3, 1, 4, 2, 5, 2], [0, 1, 0, 1, 1, 0], 9
CONFIG = f"""
[model]
path = "{DEMO.parents[2]}/examples/demo_model"
[task]
type = "file"
path = "x.jsonl"
rewards = ["exact"]
[actors]
max_new_tokens = {LIMIT}
[algorithm]
"""


@pytest.fixture
def algorithm(tmp_path):
    """Return `algorithm(keys, *overrides)`: the section of a config with these lines in [algorithm]."""

    def load(keys: str, *overrides: str):
        (tmp_path / "c.toml").write_text(CONFIG + keys)
        return load_config(tmp_path / "c.toml", overrides).algorithm

    return load


def fresh(**changes):
    """Return a batch of which pi_prox sampled every token."""
    inputs = make_inputs(groups=GROUPS, lengths=LENGTHS)
    changed = {"behaviour_logprobs_T": inputs.proximal_logprobs_T, **changes}
    return make_inputs(groups=GROUPS, lengths=LENGTHS, **changed)


def of_sequences(inputs, values_T) -> list[torch.Tensor]:
    return list(values_T.split(LENGTHS))


def group_of(values, b: int) -> list[float]:
    return [values[j] for j in range(len(GROUPS)) if GROUPS[j] == GROUPS[b]]


def clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def by_hand(name: str, inputs, beta: float) -> tuple[float, torch.Tensor]:
    """Return the loss as TRL's trainers compute it (1e-6 beside the standard deviation), and its gradient."""
    leaf = inputs.logprobs_T.clone().requires_grad_()
    new, old, ref = (
        of_sequences(inputs, each) for each in (leaf, inputs.proximal_logprobs_T, inputs.reference_logprobs_T)
    )
    rewards, terms = inputs.rewards_B.tolist(), []
    if name == "rloo":
        rewards = [r - beta * float((o - f).sum()) for r, o, f in zip(rewards, old, ref, strict=True)]
    for b, reward in enumerate(rewards):
        mates = group_of(rewards, b)
        mean = sum(mates) / len(mates)
        centred = reward - mean
        std = math.sqrt(sum((each - mean) ** 2 for each in mates) / (len(mates) - 1))
        if name == "rloo":
            others = (sum(mates) - reward) / (len(mates) - 1)
            terms.append(-clipped((new[b] - old[b]).sum().exp(), reward - others))
            continue
        token_T = -clipped((new[b] - old[b]).exp(), centred / (std + 1e-6) if name == "grpo" else centred)
        if beta:
            token_T = token_T + beta * ((ref[b] - new[b]).exp() - 1 - (ref[b] - new[b]))
        terms.append(token_T.mean() if name == "grpo" else token_T.sum() / LIMIT)
    loss = torch.stack(terms).mean()
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(
    ("name", "beta"), [("grpo", 0.0), ("grpo", 0.04), ("dr_grpo", 0.0), ("dr_grpo", 0.1), ("rloo", 0.05)]
)
def test_a_name_is_the_loss_of_trl_on_fresh_samples(algorithm, name, beta):
    config = algorithm(f'type = "{name}"\nkl_beta = {beta}')
    loss, slope_T, _, metrics = evaluate(config, fresh())
    expected, expected_T = by_hand(name, fresh(), beta)
    assert loss == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(slope_T, expected_T, rtol=0, atol=1e-12)
    assert metrics["off_policy/clip_frac_low"] + metrics["off_policy/clip_frac_high"] > 0


def test_dpo_is_the_sigmoid_loss_on_the_better_and_the_worse_answer_of_a_pair(algorithm):
    groups, lengths = [0, 0, 1, 1], [3, 2, 4, 1]
    inputs = make_inputs(groups=groups, lengths=lengths, rewards_B=torch.tensor([1.0, 0.0, 0.25, 0.5]).double())
    leaf = inputs.logprobs_T.clone().requires_grad_()
    ratio_B = [each.sum() for each in (leaf - inputs.reference_logprobs_T).split(lengths)]
    pairs = [(0, 1), (3, 2)]
    loss = -sum(torch.nn.functional.logsigmoid(0.1 * (ratio_B[a] - ratio_B[b])) for a, b in pairs) / 2
    found, slope_T, _, _ = evaluate(algorithm('type = "dpo"'), inputs)
    assert found == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(slope_T, torch.autograd.grad(loss, leaf)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RECIPES)
def test_the_config_of_a_run_has_the_keys_that_a_name_means_and_loads_again(tmp_path, name):
    path = tmp_path / "c.toml"
    path.write_text(f'{CONFIG}type = "{name}"')
    config = load_config(path)
    written = tomllib.loads(to_toml(config))["algorithm"]
    assert written["type"] == {"dpo": "online_dpo"}.get(name, "off_policy_ppo")
    path.write_text(to_toml(config))
    assert load_config(path).algorithm == config.algorithm


def test_keys_beside_a_name_win_and_overrides_expand(algorithm):
    assert algorithm('type = "dr_grpo"').mean_over == LIMIT
    assert algorithm('type = "dr_grpo"', "--actors.max_new_tokens", "5").mean_over == 5
    assert algorithm('type = "dr_grpo"\nmean_over = "tokens"').mean_over == "tokens"
    assert algorithm('type = "rloo"\nkl_beta = 0.0').kl_beta == 0
    assert algorithm('type = "grpo"\nclip_high = 0.28', "--algorithm.baseline", "rloo").baseline == "rloo"
    assert algorithm('type = "oapl"', "--algorithm.type", "grpo").type == "off_policy_ppo"
    assert algorithm('type = "grpo"\nkl_beta = 0.1\nkl_in = "reward"').kl_in == "reward"
    with pytest.raises(ConfigError, match=r"'distillation', 'grpo', 'dr_grpo', 'rloo', 'dpo'; did you mean 'grpo'\?"):
        algorithm('type = "grop"')
