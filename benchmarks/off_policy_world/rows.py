"""The rows of the matrix: every algorithm and correction, by the name that the results carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from algorithms.base import AlgorithmSection
from algorithms.diagnostics import EssRule
from algorithms.oapl import OAPLConfig
from algorithms.off_policy_ppo import OffPolicyPPOConfig
from algorithms.online_dpo import OnlineDPOConfig
from algorithms.trajectory_balance import TrajectoryBalanceConfig
from benchmarks.off_policy_world.world import BETA

LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""Each row takes the one with which its KL at lag 0 is least (off_policy.py --tune)."""
GROUP_SIZE = 8
ETA = BETA / 5


@dataclass(frozen=True)
class Row:
    """One algorithm as it is run at every lag."""

    name: str
    config: AlgorithmSection
    learning_rate: float
    ess: EssRule | None = None
    group_size: int = GROUP_SIZE


def _ppo(name: str, learning_rate: float, ess: EssRule | None = None, **keys: Any) -> Row:  # noqa: ANN401
    return Row("off_policy_ppo" + name, OffPolicyPPOConfig(kl_beta=BETA, **keys), learning_rate, ess)


def _dpo(name: str, learning_rate: float, **keys: Any) -> Row:  # noqa: ANN401
    return Row("online_dpo" + name, OnlineDPOConfig(**keys), learning_rate)


ROWS = (
    Row("trajectory_balance", TrajectoryBalanceConfig(beta=BETA), 1e-2),
    Row("trajectory_balance+unweighted", TrajectoryBalanceConfig(beta=BETA, corrections=[]), 1e-2),
    Row("trajectory_balance+proximal", TrajectoryBalanceConfig(beta=BETA, eta=ETA), 1e-2),
    _dpo("", 1e-3, beta=BETA),
    # beta is another thing here: it sets the margin of a pair to 1 / (2 * beta)
    _dpo("+ipo", 1e-3, beta=0.1, variant="ipo"),
    Row("oapl", OAPLConfig(beta=BETA), 1e-2),
    Row("oapl+unweighted", OAPLConfig(beta=BETA, corrections=[]), 1e-2),
    Row("oapl+groups_of_64", OAPLConfig(beta=BETA), 1e-2, group_size=64),
    _ppo("", 1e-2),
    _ppo("+unbounded", 1e-2, corrections=[]),
    _ppo("+naive", 1e-2, proximal="behaviour"),
    _ppo("+proximal_rloo", 1e-2, preset="proximal_rloo"),
    _ppo("+sequence_tis", 1e-2, corrections=["sequence_tis"]),
    _ppo("+icepop", 1e-2, corrections=["icepop"]),
    _ppo("+geometric_mask", 1e-2, corrections=["geometric_mask"]),
    _ppo("+gspo", 1e-2, corrections=["gspo"]),
    _ppo("+cispo", 3e-3, corrections=["cispo"]),
    _ppo("+critic", 1e-2, baseline="critic"),
    _ppo("+ess", 1e-2, ess=EssRule(budget=0.5, action="scale_lr", max_drops=0)),
)
