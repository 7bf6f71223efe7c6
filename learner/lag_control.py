"""Lag control: keep the training data close to the policy, by limits on lag, learning rate and gradients.

    drift       mean |log(pi / mu)| over the tokens of an update, times the root of the mean length of their answers:
                how far the policy has moved since sampling
    pace        drift per version of lag and per unit of learning rate, averaged over recent updates
    allowance   lag at which pace and scheduled learning rate lead to `ALLOWED_DRIFT`; bounds the lag of new leases
    brake       learning rate that leads to `BRAKE_DRIFT` at the lag of the current data, or to `ALLOWED_DRIFT` once the
                allowance cannot fall further; limits the rate of an update
    mask        zeroes gradients that would move a log-probability further, once it moved by `MASK_AT` since sampling

If the tokens of an answer move independently, the answer moves by the root of its length. Drift is roughly proportional
to lag and to learning rate, so both bounds use one pace: the allowance makes future data fresher, and the brake acts
until these data arrive. An allowance can only lower the bound `max_lag` (`StalenessContract.admitted_lag`).
"""

from __future__ import annotations

import logging
import math

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from leeway.algorithms.base import LossInputs
from leeway.common.staleness import StalenessContract

logger = logging.getLogger(__name__)

ALLOWED_DRIFT = 0.17
"""Target drift of the allowance in nats; so far below `BRAKE_DRIFT` that a healthy run never brakes."""
BRAKE_DRIFT = 0.25
"""Target drift of the brake in nats. Runs that learn have 0.05 to 0.3; runs that collapse, 0.5 or more."""
MEASURED_LENGTHS = 3, 36
"""Mean answer lengths, in tokens, for which the targets were measured; other lengths count as the nearest of them."""
LEAST_LR_SCALE = 0.1
MASK_AT = 0.2
"""Threshold of the mask in nats; masks 3 to 7 % of the tokens."""
OLDER_TOKENS = 0.95
DECAY = 0.8
"""Weight of the previous pace in the average, per update."""


class LagState(msgspec.Struct, frozen=True):
    """State of lag control, stored in checkpoints."""

    allowed: int
    pace: float | None = None
    """Average pace; None until the first update on data with a lag of 1 or more."""
    rate: float | None = None
    """Mean learning rate of the updates between sampling and training."""


class LagControl:
    """Controller of the lag of one run, on the coordinator; it observes each update before the update is applied."""

    def __init__(self, contract: StalenessContract) -> None:
        """Start at the smallest allowance; `contract` must have a `max_lag` above 0. To resume, set `state`."""
        bound = contract.bound()
        assert bound, "lag control needs a max_lag above 0"
        self._bound = bound
        self._least = min(bound, contract.least + contract.updates_per_step)
        """One step above `contract.least`, the smallest valid bound; below, generation and training cannot overlap."""
        self.state = LagState(self._least)
        self._is_known = True

    @property
    def allowed(self) -> int:
        """Maximum lag of newly leased groups, between `_least` and `max_lag`."""
        return min(self._bound, max(self._least, self.state.allowed))

    def observe(self, per_token: float | None, lag: float, rate: float, root: float) -> float:
        """Update the allowance, and return the factor of the learning rate for this update, from 0 to 1.

        Args:
            per_token: `drift_per_token` of the update, in nats. A drift that is None, not finite, or 0 for stale data
                counts as unknown: the allowance falls to its minimum, and the factor is 1.
            lag: `older_lag` of the update's tokens, in versions.
            rate: scheduled learning rate.
            root: `root_length` of the update.
        """
        state = self.state
        is_known = per_token is not None and math.isfinite(per_token) and (per_token > 0 or lag < 1)
        if is_known != self._is_known:
            self._is_known = is_known
            logger.warning(
                "the drift of the data is %s (%s at a lag of %g): lag control allows a lag of up to %d",
                "measured again" if is_known else "unknown",
                per_token,
                lag,
                self.allowed if is_known else self._least,
            )
        if per_token is None or not is_known:
            self.state = LagState(self._least, state.pace, state.rate)
            return 1.0
        drift = per_token * root
        pace, scale, allowed = state.pace, 1.0, state.allowed
        if state.rate and lag >= 1:
            now = drift / (lag * state.rate)
            pace = now if pace is None else pace + (1 - DECAY) * (now - pace)
        if pace is not None:
            per_version = max(pace * rate, 1e-30)
            allowed = math.floor(min(float(self._bound), ALLOWED_DRIFT / per_version))
            target = BRAKE_DRIFT if allowed > self._least else ALLOWED_DRIFT
            scale = min(1.0, max(LEAST_LR_SCALE, target / (per_version * max(lag, 1.0))))
        mean = state.rate
        mean = rate * scale if mean is None else mean + (rate * scale - mean) / (1 + lag)
        self.state = LagState(allowed, pace, mean)
        return scale


def older_lag(lag_T: npt.NDArray[np.integer]) -> float:
    """Return the `OLDER_TOKENS` quantile of the lag of the tokens, in versions; 0 without tokens."""
    return float(np.quantile(lag_T, OLDER_TOKENS)) if len(lag_T) else 0.0


def root_length(inputs: LossInputs) -> float:
    """Return the root of the mean length of the answers in tokens, within `MEASURED_LENGTHS`."""
    shortest, longest = MEASURED_LENGTHS
    return math.sqrt(min(max(len(inputs.sequence_T) / max(1, len(inputs.rewards_B)), shortest), longest))


def drift_per_token(inputs: LossInputs) -> float | None:
    """Return mean |log(pi / mu)| in nats; None without tokens, or if a value is not finite."""
    drift = float(_moved(inputs).abs().mean())
    return drift if math.isfinite(drift) else None


def masked(gradient_T: Tensor, inputs: LossInputs) -> Tensor:
    """Return the gradient of a loss, set to 0 where a step would move a token further from its value at sampling.

    A token is masked if log(pi / mu) exceeds `MASK_AT` in the direction of the step. A policy that has stopped moving
    has no masked tokens, so the mask does not change the optimum of a loss.
    """
    moved_T = _moved(inputs)
    return gradient_T.masked_fill((moved_T.abs() > MASK_AT) & (gradient_T * moved_T < 0), 0.0)


def _moved(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs_T - inputs.behaviour_logprobs_T).detach()
