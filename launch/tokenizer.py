"""The text of token ids, where the run has a tokenizer."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"


class TextOf:
    """Decodes token ids with the tokenizer of the run that a buffer belongs to; it is loaded at the first use."""

    def __init__(self, buffer_folder: Path) -> None:
        self._run = buffer_folder.resolve().parent

    def __call__(self, token_ids: Sequence[int]) -> str | None:
        """The text, quoted, with what does not print escaped; None where the run has no tokenizer."""
        text = self.text(token_ids)
        return None if text is None else repr(text)

    def text(self, token_ids: Sequence[int]) -> str | None:
        """The text as it is; None where the run has no tokenizer."""
        if self._tokenizer is None:
            return None
        decoded: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return decoded

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 -- of the package tokenizers, imported where it is needed
        for folder in self._folders():
            if (folder / _FILE).is_file():
                from tokenizers import Tokenizer  # without Transformers, which would import torch

                return Tokenizer.from_file(str(folder / _FILE))
        return None

    def _folders(self) -> Iterator[Path]:
        """Where a model of the run may lie: exported, served, or where it came from."""
        yield self._run / "model"
        yield self._run / "serving_model"
        try:
            path = tomllib.loads((self._run / "config.toml").read_text(encoding="utf-8"))["model"]["path"]
        except (OSError, KeyError, TypeError, ValueError):  # no such file, or another one
            return
        yield Path(path)
