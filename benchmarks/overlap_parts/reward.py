"""A reward that costs nothing: is the number of words even? Samples of a prompt differ in it."""

from __future__ import annotations


def even(completions: list[str]) -> list[float]:
    """1 for an even number of words, 0 for an odd one."""
    return [1.0 - len(completion) % 2 for completion in completions]
