"""Deadlines in memory, the next of them at hand."""

from __future__ import annotations

import heapq


class Deadlines:
    """Which key is due when. Setting, dropping and taking one cost the logarithm of their number."""

    def __init__(self) -> None:
        self._due_at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """May hold entries that were replaced or dropped; they are passed over when they come up."""

    def set(self, key: int, due_at: float) -> None:
        """The key is due then, and at no other time."""
        self._due_at[key] = due_at
        heapq.heappush(self._heap, (due_at, key))
        if len(self._heap) > 2 * len(self._due_at) + 64:
            self._heap = [(at, each) for each, at in self._due_at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: int) -> None:
        """The key is never due."""
        self._due_at.pop(key, None)

    @property
    def next_at(self) -> float | None:
        """When the next key is due; None without keys."""
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[int]:
        """The keys that are due; they stay until they are dropped or set anew."""
        found = []
        while (at := self.next_at) is not None and at <= now:
            found.append(heapq.heappop(self._heap)[1])
        for key in found:
            heapq.heappush(self._heap, (self._due_at[key], key))
        return found
