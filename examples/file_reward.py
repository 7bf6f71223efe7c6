"""Two reward functions with TRL's signature for the rows of file_rows.jsonl; the two values are summed."""

from __future__ import annotations


def exact(completions: list[str], answer: list[str], **columns: list[object]) -> list[float]:
    """Return 1 for the right sum. Arguments are lists with one entry per sample; `answer` is a column of the file."""
    return [float(completion.strip() == right) for completion, right in zip(completions, answer, strict=True)]


def last_digit(completions: list[str], answer: list[str], **columns: list[object]) -> list[float]:
    """Return 0.2 for a sum that is right modulo 10, as partial credit."""
    pairs = zip(completions, answer, strict=True)
    return [0.2 if completion.strip()[-1:] == right[-1] else 0.0 for completion, right in pairs]
