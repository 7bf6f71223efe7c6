"""A reward function with TRL's signature: closeness of the first number in a completion to the answer."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+")


def closeness(prompts: list[str], completions: list[str], answer: list[str], **columns: list[object]) -> list[float]:
    """Return 1 for the right number, up to 0.5 for a near number, and 0 if the completion has no number."""
    return [_score(completion, int(right)) for completion, right in zip(completions, answer, strict=True)]


def _score(completion: str, right: int) -> float:
    numbers = NUMBER.findall(completion)
    if not numbers:
        return 0.0
    distance = abs(int(numbers[0][:12]) - right)
    return 1.0 if distance == 0 else 0.5 / (1.0 + distance / 5.0)
