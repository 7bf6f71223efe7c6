"""Admission: may this sample start in the engine now? `actors.admission` says who decides.

slots  SlotAdmission: `actors.max_running_samples` at once
cache  `planning.kv_gate`: as many as the engine's cache is likely to hold to their end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

from actors.config import ActorsConfig, AdmissionName

SampleKey = tuple[int, int]
"""Lease and index in its group."""


class KvCache(NamedTuple):
    """The room of an engine for keys and values."""

    num_blocks: int
    block_tokens: int
    shares_prompts: bool
    """Samples of a group have the whole blocks of their prompt in common."""


class KvSample(NamedTuple):
    """A sample that is to run."""

    group: int
    prompt_tokens: int
    limit: int
    """Completion tokens that it has at most when it leaves the engine."""
    there: int = 0
    """Completion tokens that it goes on from."""
    usual_tokens: float = 0.0
    """Geometric mean of those that samples of its prompt are likely to have; 0: not known."""


class Admission(Protocol):
    """Decides which samples of one engine may start; FIFO."""

    num_sure: int
    """Samples that there is room for, however long they become."""

    @property
    def needs_lengths(self) -> bool:
        """Does it need the lengths that the buffer predicts of a prompt?"""

    def at_once(self) -> int:
        """Return how many samples run at once as things are."""

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        """Wait until the sample may start."""

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Note that it starts only now, because it waited for weights after it was admitted."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        """Note that it ended, with `num_tokens` of completion, or None if that says nothing of lengths."""


class SlotAdmission:
    """A semaphore of `actors.max_running_samples`."""

    needs_lengths = False

    def __init__(self, config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> None:
        """All slots are free; neither the cache nor the engine's steps matter."""
        self.num_sure = config.max_running_samples
        self._free = asyncio.Semaphore(self.num_sure)

    def at_once(self) -> int:
        return self.num_sure

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        await self._free.acquire()

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Nothing depends on when it starts."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        self._free.release()


ADMISSIONS: Mapping[AdmissionName, str] = {
    "slots": "actors.admission:SlotAdmission",
    "cache": "planning.kv_gate:cache_admission",
}


def admission_of(config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> Admission:
    """Return the admission of one engine.

    Args:
        config: says which.
        cache: of the engine; None if it is not known.
        now: steps of the engine so far, each a token of every running sample.
    """
    made: Admission = resolve_name(ADMISSIONS[config.admission])(config, cache, now)
    return made
