"""Formatting of numbers, text and token ids for the terminal."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

GIB = 2**30
MAX_TEXT = 65_536
"""Maximum number of characters shown of a stored text; an export has the whole text."""
_TOKENIZER = "tokenizer.json"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def number(value: float | None) -> str:
    """Format a number, or None as a dash."""
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.3f}"


def share_of(part: int, whole: int) -> str:
    """Format a percentage; 0% and 100% are exact, never rounded."""
    percent = 100 * part / whole if whole else 0.0
    if part and percent < 0.1:
        return "under 0.1%"
    return "over 99.9%" if part < whole and percent >= 99.95 else f"{percent:.1f}%"


def duration(seconds: float) -> str:
    """Format seconds as 1:05, or as 2:01:05 from an hour on."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def printable(text: str, most: int = MAX_TEXT) -> str:
    """Return up to `most` characters of a text, with unprintable ones escaped."""
    rest = f" ... and {len(text) - most} more characters" if len(text) > most else ""
    return _escaped(text[:most]) + rest


def shortened(text: str, most: int) -> str:
    """Return a text for a table cell: up to `most` characters, with unprintable ones escaped."""
    return f"{_escaped(text[:most])}..." if len(text) > most else _escaped(text)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class TextOf:
    """Decoder of token ids for the run of a buffer folder; loads the run's tokenizer on first use."""

    def __init__(self, buffer_folder: Path) -> None:
        self._run = buffer_folder.resolve().parent

    def __call__(self, token_ids: Sequence[int]) -> str | None:
        """Return the text; None if the run has no tokenizer."""
        if self._tokenizer is None:
            return None
        decoded: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return decoded

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 -- of the package tokenizers, imported lazily
        for folder in self._folders():
            if (folder / _TOKENIZER).is_file():
                from tokenizers import Tokenizer  # in place of Transformers, which imports torch

                return Tokenizer.from_file(str(folder / _TOKENIZER))
        return None

    def _folders(self) -> Iterator[Path]:
        """Yield the folders that may contain the tokenizer: the exported model, then the initial model."""
        yield self._run / "model"
        try:
            path = tomllib.loads((self._run / "config.toml").read_text(encoding="utf-8"))["model"]["path"]
            if Path(path).is_absolute():
                yield Path(path)
                return
            name, _, revision = path.partition("@")
        except (OSError, KeyError, TypeError, ValueError, AttributeError):  # the file is missing or invalid
            return
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, _TOKENIZER, revision=revision or "main")
        if isinstance(found, str):
            yield Path(found).parent


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str, float | None], None]]:
    """Show progress in one line on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as line:
        task = line.add_task("", total=None)

        def show(text: str, share: float | None = None) -> None:
            line.update(task, description=text, total=None if share is None else 1.0, completed=share)

        yield show
