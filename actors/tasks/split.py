"""Which questions train and which evaluate: decided by the question itself, never by a seed.

Generated datasets derive an item from seed + index, so two seeds share almost all their items.
A hash of the question separates them for every seed, template, order of a file, and for whoever
else asks `held_out` (a supervised warm-up, say), so no held-out question is ever trained on.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Generic, TypeVar

P = TypeVar("P")


def normalised(text: str) -> str:
    """The text without white space and without case: what makes two questions the same."""
    return "".join(text.split()).casefold()


def held_out(question: str, share: float) -> bool:
    """Is this question set aside for evaluation?

    Args:
        question: its text; white space and case do not matter.
        share: of all questions, how many are set aside (0 to 1). A smaller share is a subset of a greater.
    """
    value = int.from_bytes(blake2b(normalised(question).encode(), digest_size=8).digest(), "big")
    return value / 2**64 < share


class Split(Generic[P]):
    """Collects distinct problems into a training and a held-out half until both have as many as asked."""

    def __init__(self, share: float, num_train: int | None, num_heldout: int | None) -> None:
        """Start with two empty halves.

        Args:
            share: see `held_out`.
            num_train: how many training problems to keep; None keeps all.
            num_heldout: how many held-out problems to keep; None keeps all.
        """
        self.share = share
        self.train: list[P] = []
        self.heldout: list[P] = []
        self._num_train = num_train
        self._num_heldout = num_heldout
        self._seen: set[str] = set()

    @property
    def num_distinct(self) -> int:
        """Distinct questions offered so far."""
        return len(self._seen)

    @property
    def full(self) -> bool:
        """Are both halves complete? Never, where all problems are kept."""
        return len(self.train) == self._num_train and len(self.heldout) == self._num_heldout

    def is_new(self, question: str) -> bool:
        """Was this question never offered before? Marks it as offered."""
        key = normalised(question)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def room_for(self, question: str) -> list[P] | None:
        """The half that this question belongs to, or None where that half is complete."""
        if held_out(question, self.share):
            return None if len(self.heldout) == self._num_heldout else self.heldout
        return None if len(self.train) == self._num_train else self.train
