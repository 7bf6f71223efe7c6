"""A cheap reward that differs between the samples of a prompt: whether the number of words is even."""

from __future__ import annotations


def even(completions: list[str]) -> list[float]:
    """Return 1 for an even number of words, 0 for an odd number."""
    return [1.0 - len(completion) % 2 for completion in completions]
