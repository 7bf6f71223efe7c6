"""Keeps the data of a run near enough to its policy to learn from them.

    drift       mean |log(pi / mu)| over the tokens of an update: how far the policy has moved since it sampled them
    pace        drift per version of lag and unit of learning rate, an average over the last updates
    allowance   the lag at which the scheduled rate leads to `AIMED_DRIFT` at that pace; new groups are leased up to it
    brake       the rate that leads to `MOST_DRIFT` at the lag of the data at hand; an update takes no greater one
    mask        a token whose probability has moved by `MASK_AT` since it was sampled is pushed no further that way

Drift is a mean over tokens, so the length of answers does not matter. It is about proportional to lag and rate, so one
pace serves both: the allowance lets the next data be younger, and the brake holds until they come. `max_lag` stays the
bound: an allowance only tightens admission (`common.staleness.StalenessContract.admitted_lag`).
"""

from __future__ import annotations

import logging
import math

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from algorithms.base import LossInputs
from common.staleness import StalenessContract

logger = logging.getLogger(__name__)

MOST_DRIFT = 0.14
"""Nats a token, to which the brake holds the next update; runs that learn have 0.04 to 0.12, those that collapse 0.3 or
more."""
AIMED_DRIFT = MOST_DRIFT / 2
"""That the allowance leads to: far enough below that the brake leaves a healthy run alone."""
LEAST_LR_SCALE = 0.1
MASK_AT = 0.2
"""Nats; 3 to 7 percent of the tokens are beyond it."""
OLDER_TOKENS = 0.95
DECAY = 0.8
"""Of the pace, an update."""


class LagState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of it."""

    allowed: int
    pace: float | None = None
    """None until data of lag 1 or more were trained."""
    rate: float | None = None
    """Mean learning rate of the updates that moved the policy away from its data."""


class LagControl:
    """Of one run, on the coordinator: takes in each update before it is made, and says how."""

    def __init__(self, contract: StalenessContract) -> None:
        """Begin; the contract has a `max_lag` above 0. To go on from a checkpoint, set `state` to what it kept."""
        bound = contract.bound()
        assert bound, "there is nothing to control"
        self._bound = bound
        self._least = min(bound, contract.least + contract.updates_per_step)
        """One step more than the least bound of the theorem: with less nothing could overlap."""
        self.state = LagState(self._least)
        self._is_known = True

    @property
    def allowed(self) -> int:
        """The lag up to which new groups may be leased: from the least bound and one step more to `max_lag`."""
        return min(self._bound, max(self._least, self.state.allowed))

    def take_in(self, drift: float | None, lag: float, rate: float) -> float:
        """Return the factor of the learning rate of an update, from 0 to 1.

        Args:
            drift: of its tokens, nats; None where it is not known, as it is not if old data have none at all. Then the
                allowance is the least, and the factor 1.
            lag: of its older tokens (`older_lag`), versions.
            rate: that the schedule has for it.
        """
        state = self.state
        is_known = drift is not None and math.isfinite(drift) and (drift > 0 or lag < 1)
        if is_known != self._is_known:
            self._is_known = is_known
            said = "%s the drift of the data (%s at a lag of %g): new samples may be up to %d versions old"
            logger.warning(
                said,
                "lag control knows" if is_known else "lag control does not know",
                drift,
                lag,
                self.allowed if is_known else self._least,
            )
        if drift is None or not is_known:
            self.state = LagState(self._least, state.pace, state.rate)
            return 1.0
        pace, scale, allowed = state.pace, 1.0, state.allowed
        if state.rate and lag >= 1:
            now = drift / (lag * state.rate)
            pace = now if pace is None else pace + (1 - DECAY) * (now - pace)
        if pace is not None:
            of_a_version = max(pace * rate, 1e-30)
            allowed = math.floor(min(float(self._bound), AIMED_DRIFT / of_a_version))
            scale = min(1.0, max(LEAST_LR_SCALE, MOST_DRIFT / (of_a_version * max(lag, 1.0))))
        mean = state.rate
        mean = rate * scale if mean is None else mean + (rate * scale - mean) / (1 + lag)
        self.state = LagState(allowed, pace, mean)
        return scale


def older_lag(lag_T: npt.NDArray[np.integer]) -> float:
    """Return the lag that a share of `OLDER_TOKENS` of the tokens does not exceed, versions; 0 without tokens."""
    return float(np.quantile(lag_T, OLDER_TOKENS)) if len(lag_T) else 0.0


def drift_of(inputs: LossInputs) -> float | None:
    """Return mean |log(pi / mu)|, nats; None without tokens, or where one of the values is not finite."""
    drift = float(_moved(inputs).abs().mean())
    return drift if math.isfinite(drift) else None


def masked(gradient_T: Tensor, inputs: LossInputs) -> Tensor:
    """Return the gradient of a loss with 0 where a step down it would push a token further from its sampler.

    That is where its log(pi / mu) is past `MASK_AT` already on the side that it is pushed to. A policy that has stopped
    moving has no such tokens, so the optimum of a loss stays where it is.
    """
    moved_T = _moved(inputs)
    return gradient_T.masked_fill((moved_T.abs() > MASK_AT) & (gradient_T * moved_T < 0), 0.0)


def _moved(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs_T - inputs.behaviour_logprobs_T).detach()
