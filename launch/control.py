"""What is asked of a run while it lives, through files of its folder: `leeway scale` asks, the run's command answers.

    control/0f3a.ask      {"verb": "scale", "pool": "big", "count": 4}
    control/0f3a.answer   {"ok": true, "text": "..."}     or false, and why not

Its owner alone may write into the folder, and so may ask.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.files import write_whole

_LOOK_S = 0.1
_MAX_BYTES = 4096


class NoAnswer(RuntimeError):
    """The run's command did not answer."""


class Declined(ValueError):
    """It answered that it cannot do that; nothing was changed."""


def ask(folder: Path, question: Mapping[str, Any], timeout_s: float) -> str:
    """Ask a run's command, by the folder `control/` of the run; its answer is a sentence.

    Raises:
        Declined: it cannot do that, and says why.
        NoAnswer: it did not answer in time, or cannot be asked.
    """
    name = uuid.uuid4().hex
    asked, answered = folder / f"{name}.ask", folder / f"{name}.answer"
    try:
        _write(asked, question)
    except OSError as error:
        raise NoAnswer(
            f"{folder} cannot be written ({error}): only a run that lives, and its owner, can be asked"
        ) from error
    deadline = time.monotonic() + timeout_s
    try:
        while not answered.exists():
            if time.monotonic() > deadline:
                raise NoAnswer(
                    f"the command of the run {folder.parent} did not answer for {timeout_s:g} s: it does while it "
                    "trains, not while it starts, ends or is gone; `leeway status` says which"
                )
            time.sleep(_LOOK_S)
        answer = json.loads(answered.read_text(encoding="utf-8"))
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if not answer["ok"]:
        raise Declined(str(answer["text"]))
    return str(answer["text"])


class Control:
    """The run's side."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, and forget what an earlier command of the run was asked."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for stale in folder.glob("*.a*"):
            stale.unlink(missing_ok=True)

    def answer(self, verbs: Mapping[str, Callable[[Mapping[str, Any]], str]]) -> None:
        """Answer all that was asked since the last call; each verb gives a sentence, or raises ValueError with one."""
        for asked in sorted(self._folder.glob("*.ask")):
            try:
                question = json.loads(asked.read_bytes()[:_MAX_BYTES])
                text, is_ok = verbs[question["verb"]](question), True
            except (KeyError, TypeError) as error:
                text, is_ok = f"the run does not understand the question ({error!r}); is it of another version?", False
            except ValueError as error:
                text, is_ok = str(error), False
            except FileNotFoundError:
                continue  # who asked has given up
            asked.unlink(missing_ok=True)
            _write(asked.with_suffix(".answer"), {"ok": is_ok, "text": text})


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_whole(path, [json.dumps(document).encode()])
