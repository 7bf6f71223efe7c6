"""Sampling laws: which of the ready groups enter a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol


class ReadyGroup(NamedTuple):
    """A group that may be drawn."""

    oldest: int
    """Version that its oldest token counts with."""
    group_id: int


class SamplingLaw(Protocol):
    """Chooses groups for a step. A law is a pure function of the candidates: draws stay reproducible."""

    def choose(self, oldest_first: Iterable[ReadyGroup], num_groups: int) -> list[ReadyGroup]:
        """Up to `num_groups` of the candidates; fewer mean that the step waits.

        Args:
            oldest_first: groups within the age bound, by the version of their oldest token.
            num_groups: how many the step takes.
        """
        ...


class Fifo:
    """Oldest tokens first, each group once."""

    def choose(self, oldest_first: Iterable[ReadyGroup], num_groups: int) -> list[ReadyGroup]:
        """The first `num_groups`."""
        return list(islice(oldest_first, num_groups))
