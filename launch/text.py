"""Figures, texts and token ids as a terminal shows them."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

GIB = 2**30
MAX_TEXT = 65_536
"""Characters of one text that are shown of a stored trajectory; an export has all of them."""
_TOKENIZER = "tokenizer.json"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def number(value: float | None) -> str:
    """Return a figure; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.3f}"


def share_of(part: int, whole: int) -> str:
    """Return a percentage: never 0% of something, nor 100% of less than all."""
    percent = 100 * part / whole if whole else 0.0
    if part and percent < 0.1:
        return "under 0.1%"
    return "over 99.9%" if part < whole and percent >= 99.95 else f"{percent:.1f}%"


def duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def printable(text: str, most: int = MAX_TEXT) -> str:
    """Return at most that many characters of a text, with those that do not print escaped."""
    rest = f" ... and {len(text) - most} more characters" if len(text) > most else ""
    return _escaped(text[:most]) + rest


def shortened(text: str, most: int) -> str:
    """Do the same for a cell of a table."""
    return f"{_escaped(text[:most])}..." if len(text) > most else _escaped(text)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class TextOf:
    """Decodes token ids with the tokenizer of the run of a buffer, loaded at the first use."""

    def __init__(self, buffer_folder: Path) -> None:
        self._run = buffer_folder.resolve().parent

    def __call__(self, token_ids: Sequence[int]) -> str | None:
        """Return the text; None if the run has no tokenizer."""
        if self._tokenizer is None:
            return None
        decoded: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return decoded

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 -- of the package tokenizers, imported where it is needed
        for folder in self._folders():
            if (folder / _TOKENIZER).is_file():
                from tokenizers import Tokenizer  # without Transformers, which would import torch

                return Tokenizer.from_file(str(folder / _TOKENIZER))
        return None

    def _folders(self) -> Iterator[Path]:
        """Yield the folders that may hold the model: exported, or its source."""
        yield self._run / "model"
        try:
            path = tomllib.loads((self._run / "config.toml").read_text(encoding="utf-8"))["model"]["path"]
            if Path(path).is_absolute():
                yield Path(path)
                return
            name, _, revision = path.partition("@")
        except (OSError, KeyError, TypeError, ValueError, AttributeError):  # no such file, or another one
            return
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, _TOKENIZER, revision=revision or "main")
        if isinstance(found, str):
            yield Path(found).parent


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str, float | None], None]]:
    """Show progress in one line of the standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as line:
        task = line.add_task("", total=None)

        def say(what: str, share: float | None = None) -> None:
            line.update(task, description=what, total=None if share is None else 1.0, completed=share)

        yield say
