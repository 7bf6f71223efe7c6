"""The rows of the page: every algorithm as it ships, and with what protects it taken off."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.stability_parts.loop import CONFIG
from launch.load import load_config


@dataclass(frozen=True)
class Row:
    """One loss."""

    name: str
    overrides: tuple[str, ...]
    """Of examples/sums.toml."""
    lags: tuple[int, ...]
    """At which its greatest rate is searched for."""
    ships: bool = False
    """Is it one that a user gets by `algorithm.type` (and `algorithm.variant`) alone?"""


def _row(name: str, *overrides: str, lags: tuple[int, ...], ships: bool = False) -> Row:
    kind = name.split(",")[0]
    row = Row(name, ("--algorithm.type", kind, *overrides), lags, ships)
    load_config(CONFIG, row.overrides)  # a typo is an error before anything runs
    return row


def _ships(name: str, *overrides: str) -> Row:
    return _row(name, *overrides, lags=(0, 1, 4, 16, 64), ships=True)


def _unweighted(name: str, *overrides: str) -> Row:
    # at lag 0 every weight is 1
    return _row(f"{name}, no weights", *overrides, *NONE, lags=(1, 4, 16, 64))


def _candidate(name: str, *overrides: str) -> Row:
    return _row(name, *overrides, lags=(4, 16))


NONE = ("--algorithm.corrections", "[]")
IPO = ("--algorithm.variant", "ipo")
ROWS = (
    _ships("trajectory_balance"),
    _unweighted("trajectory_balance"),
    _candidate("trajectory_balance, weights, ess_budget 0.5", "--learner.ess_budget", "0.5"),
    _candidate("trajectory_balance, no weights, ess_budget 0.5", *NONE, "--learner.ess_budget", "0.5"),
    _candidate("trajectory_balance, no weights, anchor (eta 1)", *NONE, "--algorithm.eta", "1.0"),
    _candidate("trajectory_balance, weights and anchor (eta 0.3)", "--algorithm.eta", "0.3"),
    _candidate("trajectory_balance, weights up to 1", "--algorithm.corrections", '[{type = "token_tis", cap = 1.0}]'),
    _candidate("trajectory_balance, raw weights in [0.5, 5], else 0", "--algorithm.corrections", '["icepop"]'),
    _candidate("trajectory_balance, weights of sequences", "--algorithm.corrections", '["sequence_tis"]'),
    _ships("online_dpo"),
    _unweighted("online_dpo"),
    _ships("online_dpo, ipo", *IPO),
    _unweighted("online_dpo, ipo", *IPO),
    _ships("off_policy_ppo"),
    _candidate("off_policy_ppo, raw weights", *NONE),
    _candidate("off_policy_ppo, proximal = behaviour", "--algorithm.proximal", "behaviour"),
    _ships("oapl"),
    _unweighted("oapl"),
    _candidate("oapl, no weights, beta 1", "--algorithm.beta", "1.0", *NONE),
)
