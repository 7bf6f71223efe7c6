"""Training of a policy in an enumerable world, with one loss of `algorithms` and data of a given age."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from benchmarks.off_policy_world.world import (
    BETA,
    CHOICES_SL,
    LENGTH,
    NODES_SL,
    NUM_CHOICES,
    NUM_NODES,
    NUM_PROMPTS,
    NUM_TOKENS,
    TreePolicy,
    World,
    of_sequences,
    sequence_logprobs,
)
from torch import Tensor

from leeway.algorithms.base import AlgorithmSection, LossInputs
from leeway.algorithms.distillation import DistillationConfig
from leeway.algorithms.oapl import OAPLConfig
from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.online_dpo import OnlineDPOConfig
from leeway.algorithms.registry import Loss, loss_for
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig

Lag = Literal["0", "1", "4", "16", "first", "uniform"]
"""Age of the data: updates from the behaviour policy to the draw, or "first", or "uniform"."""
LAGS: tuple[Lag, ...] = ("0", "1", "4", "16", "first", "uniform")
MAX_LAG = 16

SAMPLES_PER_DRAW = 1024
NUM_MINIBATCHES = 2
NUM_EPOCHS = 2
UPDATES_PER_DRAW = NUM_MINIBATCHES * NUM_EPOCHS
# the learner's defaults
ADAM_BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""Grid of learning rates. Each row has the rate with the lowest KL at lag 0 (off_policy.py --tune)."""
GROUP_SIZE = 8


@dataclass(frozen=True)
class Row:
    """One algorithm with its settings, which do not depend on the lag."""

    name: str
    config: AlgorithmSection
    learning_rate: float
    has_teacher: bool = False
    """Whether the optimum pi* replaces the reference policy."""


def _ppo(name: str, learning_rate: float, **keys: Any) -> Row:  # noqa: ANN401
    return Row("off_policy_ppo" + name, OffPolicyPPOConfig(kl_beta=BETA, **keys), learning_rate)


def _dpo(name: str, learning_rate: float, **keys: Any) -> Row:  # noqa: ANN401
    return Row("online_dpo" + name, OnlineDPOConfig(**keys), learning_rate)


ROWS = (
    Row("trajectory_balance", TrajectoryBalanceConfig(beta=BETA), 1e-2),
    Row("trajectory_balance+unweighted", TrajectoryBalanceConfig(beta=BETA, corrections=()), 1e-2),
    _dpo("", 1e-3, beta=BETA),
    # for IPO, beta sets the margin of a pair to 1 / (2 * beta)
    _dpo("+ipo", 1e-3, beta=0.1, variant="ipo"),
    Row("oapl", OAPLConfig(beta=BETA), 1e-2),
    _ppo("", 1e-2),
    _ppo("+unbounded", 1e-2, corrections=[]),
    _ppo("+naive", 1e-2, proximal="behaviour"),
    _ppo("+proximal_rloo", 1e-2, proximal="behaviour", corrections=["sequence_clip"]),
    _ppo("+sequence_tis", 1e-2, corrections=["sequence_tis"]),
    _ppo("+icepop", 1e-2, corrections=["icepop"]),
    _ppo("+geometric_mask", 1e-2, corrections=["geometric_mask"]),
    _ppo("+gspo", 1e-2, corrections=["gspo"]),
    _ppo("+cispo", 3e-3, corrections=["cispo"]),
    _ppo("+interpolated", 1e-2, proximal="interpolated"),
    _ppo("+dr_grpo", 1e-2, baseline="dr_grpo", mean_over=LENGTH),
    _ppo("+batch", 1e-2, baseline="batch"),
    _ppo("+entropy", 1e-2, entropy_coef=0.01),
    _ppo("+critic", 1e-2, baseline="value_head"),
    Row("distillation", DistillationConfig(), 1e-2, has_teacher=True),
)


@dataclass(frozen=True)
class Outcome:
    """Final figures of a run; None if the run became non-finite."""

    kl: float | None
    """KL(pi || pi*), nats, mean over prompts."""
    reward: float | None
    """Exact expected reward, mean over prompts."""


@dataclass(frozen=True)
class Draw:
    """Samples of one step, G groups of K completions, with tables that stay constant over the updates of the step."""

    rewards_PS: Tensor
    prompts_G: Tensor
    sequences_GK: Tensor
    behaviour_PC: Tensor
    proximal_PC: Tensor
    reference_PC: Tensor
    old_values_PN: Tensor


def train(world: World, row: Row, lag: Lag, seed: int, num_draws: int) -> Outcome:
    """Run one cell: start at the reference, and take UPDATES_PER_DRAW updates on each draw.

    The learning rate decays to 0 on a cosine over all updates.

    Args:
        world: world to learn.
        row: algorithm and its settings.
        lag: age of the data. Early draws use the first policy if no policy is old enough.
        seed: seed of the samples and of the order of minibatches.
        num_draws: number of draws.
    """
    random = torch.Generator().manual_seed(seed)
    policy = copy.deepcopy(world.reference)
    loss = loss_for(row.config)
    adam = torch.optim.AdamW(policy.parameters(), betas=ADAM_BETAS, weight_decay=0.0)
    with torch.no_grad():
        reference_PC, _ = world.reference()
    scored_PC = world.optimum_PC() if row.has_teacher else reference_PC
    past: deque[Tensor] = deque(maxlen=MAX_LAG)
    num_updates = 0
    for _ in range(num_draws):
        with torch.no_grad():
            proximal_PC, old_values_PN = policy()
        behaviour_PC = reference_PC if lag == "first" else behaviour(lag, proximal_PC, past)
        prompts_G, sequences_GK = sample(behaviour_PC, random)
        draw = Draw(world.rewards_PS, prompts_G, sequences_GK, behaviour_PC, proximal_PC, scored_PC, old_values_PN)
        began = num_updates
        for _ in range(NUM_EPOCHS):
            for groups in torch.randperm(prompts_G.numel(), generator=random).chunk(NUM_MINIBATCHES):
                progress = num_updates / (num_draws * UPDATES_PER_DRAW)
                learning_rate = row.learning_rate * (1 + math.cos(math.pi * progress)) / 2
                choices_PC, values_PN = policy()
                past.append(choices_PC.detach())
                inputs = loss_inputs(draw, groups, choices_PC, values_PN, age(lag, began, num_updates))
                if not update(policy, adam, loss, inputs, learning_rate):
                    return Outcome(None, None)
                num_updates += 1
    logprobs_PS = sequence_logprobs(policy)
    return Outcome(world.kl(logprobs_PS), world.expected_reward(logprobs_PS))


def behaviour(lag: Lag, present_PC: Tensor, past: deque[Tensor]) -> Tensor:
    """Return log mu of every choice: P, C. `past` contains the previous policies, the newest last."""
    if lag == "uniform":
        return torch.full_like(present_PC, -math.log(NUM_TOKENS))
    num_back = min(int(lag), len(past))
    return past[-num_back] if num_back else present_PC


def age(lag: Lag, began: int, num_updates: int) -> int:
    """Return the age in updates of the samples of a draw that began after `began` updates; uniform data are oldest."""
    if not lag.isdecimal():
        return num_updates if lag == "first" else num_updates + 1
    return num_updates - began + min(int(lag), began)


def sample(behaviour_PC: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample an equal number of groups per prompt from the behaviour policy: G prompts, and G, K completions."""
    share_PS = of_sequences(behaviour_PC).exp()
    drawn = torch.multinomial(share_PS, SAMPLES_PER_DRAW // NUM_PROMPTS, replacement=True, generator=random)
    sequences_GK = drawn.view(-1, GROUP_SIZE)
    return torch.arange(NUM_PROMPTS).repeat_interleave(len(sequences_GK) // NUM_PROMPTS), sequences_GK


def loss_inputs(draw: Draw, groups: Tensor, choices_PC: Tensor, values_PN: Tensor, lag: int) -> LossInputs:
    """Return loss inputs for a minibatch of groups of a draw; gradients flow to `choices_PC` and `values_PN`."""
    sequence_B = draw.sequences_GK[groups].flatten()
    prompt_B = draw.prompts_G[groups].repeat_interleave(GROUP_SIZE)
    num_sequences = sequence_B.numel()
    choice_T = (prompt_B[:, None] * NUM_CHOICES + CHOICES_SL[sequence_B]).flatten()
    node_T = (prompt_B[:, None] * NUM_NODES + NODES_SL[sequence_B]).flatten()
    return LossInputs(
        logprobs_T=choices_PC.flatten().index_select(0, choice_T),
        proximal_logprobs_T=draw.proximal_PC.flatten()[choice_T],
        behaviour_logprobs_T=draw.behaviour_PC.flatten()[choice_T],
        reference_logprobs_T=draw.reference_PC.flatten()[choice_T],
        sequence_T=torch.arange(num_sequences).repeat_interleave(LENGTH),
        group_B=torch.arange(groups.numel()).repeat_interleave(GROUP_SIZE),
        rewards_B=draw.rewards_PS[prompt_B, sequence_B],
        finished_B=torch.ones(num_sequences, dtype=torch.bool),
        num_groups=groups.numel(),
        prompt_B=prompt_B,
        values_T=values_PN.flatten().index_select(0, node_T),
        old_values_T=draw.old_values_PN.flatten()[node_T],
        lag_T=torch.full_like(choice_T, lag),
    )


def update(
    policy: TreePolicy,
    adam: torch.optim.Optimizer,
    loss: Loss,
    inputs: LossInputs,
    learning_rate: float,
) -> bool:
    """Take one optimizer step; return False if the gradient is not finite."""
    output = loss(inputs)
    adam.zero_grad()
    output.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    if not torch.isfinite(norm):
        return False
    for group in adam.param_groups:
        group["lr"] = learning_rate
    adam.step()
    return True


def run_cells(cells: list[dict[str, Any]]) -> list[dict[str, float | None]]:
    """Train cells and return their outcomes in order, as dicts; print progress to stderr.

    A cell is a dict with `row` (a name), `lag`, `seed`, `num_draws` and `learning_rate` (None for the rate of the row).
    """
    torch.set_num_threads(1)
    rows = {row.name: row for row in ROWS}
    found = []
    for number, cell in enumerate(cells, 1):
        row = rows[cell["row"]]
        row = replace(row, learning_rate=cell["learning_rate"] or row.learning_rate)
        began = time.monotonic()
        outcome = train(World.made_from(cell["seed"]), row, cell["lag"], cell["seed"], cell["num_draws"])
        text = f"[{number}/{len(cells)}] {row.name} lag={cell['lag']} seed={cell['seed']} lr={row.learning_rate:g}"
        text += f" kl={outcome.kl} reward={outcome.reward} {time.monotonic() - began:.1f} s"
        print(text, file=sys.stderr, flush=True)
        found.append(asdict(outcome))
    return found
