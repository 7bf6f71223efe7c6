"""EssRule: what to do with an update whose data say too little about the present policy.

The effective sample size tells how many of the samples count once each is weighed by pi_prox / mu; where it
falls, a few samples decide the update. Below a stated budget the rule lowers the learning rate, or drops the
update and so waits: the version stands still while the actors catch up with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EssAction = Literal["scale_lr", "drop"]


@dataclass(frozen=True)
class EssVerdict:
    """What becomes of an update."""

    lr_scale: float = 1.0
    """Factor of the learning rate, in [0, 1]."""
    drop: bool = False
    """Take no optimizer step."""


@dataclass(frozen=True)
class EssRule:
    """Compares the effective sample share of an update with a budget."""

    budget: float
    """Share of the samples that must count, in (0, 1]."""
    action: EssAction
    max_drops: int
    """So many steps in a row may drop updates; the next one takes them, at a lower learning rate."""

    def judge(self, ess: float | None, drops_in_a_row: int) -> EssVerdict:
        """The verdict on an update.

        The learning rate falls with the square root of ess / budget, as it would for a batch that is smaller
        by that factor under Adam.

        Args:
            ess: effective sample share, in [0, 1]; None where the data do not tell.
            drops_in_a_row: how many steps just before dropped updates.
        """
        if ess is None or ess >= self.budget:
            return EssVerdict()
        if self.action == "drop" and drops_in_a_row < self.max_drops:
            return EssVerdict(drop=True)
        return EssVerdict(lr_scale=float((ess / self.budget) ** 0.5))
