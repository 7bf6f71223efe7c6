"""Admission: decides which samples start in the engine now, by `actors.admission`.

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
    """Samples of a group share the whole blocks of their prompt."""


class KvSample(NamedTuple):
    """A sample that is to run."""

    group: int
    prompt_tokens: int
    limit: int
    """Most completion tokens when it leaves the engine."""
    there: int = 0
    """Completion tokens that it continues from."""
    usual_tokens: float = 0.0
    """Geometric mean of the likely completion tokens of its prompt; 0: not known."""


class Admission(Protocol):
    """Decides which samples of one engine may start; FIFO."""

    num_sure: int
    """Samples that there is room for, however long they become."""

    @property
    def needs_lengths(self) -> bool:
        """Does it need the lengths that the buffer predicts of a prompt?"""

    def at_once(self) -> int:
        """Return how many samples run at once at present."""

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        """Wait until the sample may start."""

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Note that a sample starts only now: it waited for weights after it was admitted."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        """Note that it ended, with `num_tokens` of completion, or None if that says nothing of lengths."""


class SlotAdmission:
    """A semaphore of `actors.max_running_samples`."""

    needs_lengths = False

    def __init__(self, config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> None:
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

    `cache` is the engine's, None if unknown; `now` counts its steps so far, each a token of every running sample.
    """
    made: Admission = resolve_name(ADMISSIONS[config.admission])(config, cache, now)
    return made
