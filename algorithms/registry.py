"""The algorithms by name, and the config union that `algorithm.type` selects from.

To add one: write a file with a frozen config and a pure loss, and add both here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field

from algorithms.inputs import LossInputs, LossOutput
from algorithms.off_policy_ppo import OffPolicyPPOConfig, off_policy_ppo
from algorithms.online_dpo import OnlineDPOConfig, online_dpo
from algorithms.trajectory_balance import TrajectoryBalanceConfig, trajectory_balance

AlgorithmConfig = Annotated[TrajectoryBalanceConfig | OnlineDPOConfig | OffPolicyPPOConfig, Field(discriminator="type")]

Loss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, and what a run must provide for it."""

    config_class: type[BaseModel]
    loss: Callable[[Any, LossInputs], LossOutput]
    needs_groups: bool
    """A group of one (K = 1) gives no gradient, so a config with it is refused."""
    needs_reference: Callable[[Any], bool]
    """From its config: does the loss read reference log-probabilities?"""
    weight_cap: Callable[[Any], float | None] = lambda config: None
    """From its config: where the loss truncates pi_prox / mu; None where it does not."""


ALGORITHMS: dict[str, Algorithm] = {
    "trajectory_balance": Algorithm(TrajectoryBalanceConfig, trajectory_balance, True, lambda config: True),
    "online_dpo": Algorithm(OnlineDPOConfig, online_dpo, True, lambda config: True),
    "off_policy_ppo": Algorithm(
        OffPolicyPPOConfig,
        off_policy_ppo,
        needs_groups=True,
        needs_reference=lambda config: bool(config.kl_beta > 0),
        weight_cap=lambda config: config.behaviour_weight_cap,
    ),
}


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    """The entry of a config's type."""
    return ALGORITHMS[config.type]


def loss_for(config: AlgorithmConfig) -> Loss:
    """The loss of a config, as a function of a batch alone."""
    loss = algorithm_of(config).loss
    return lambda inputs: loss(config, inputs)


def needs_reference(config: AlgorithmConfig) -> bool:
    """Must trajectories be scored by the reference model?"""
    return algorithm_of(config).needs_reference(config)


def weight_cap(config: AlgorithmConfig) -> float | None:
    """Where the loss truncates the behaviour weights pi_prox / mu; None where it does not."""
    return algorithm_of(config).weight_cap(config)
