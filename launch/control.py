"""Control channel of a running job through files of its folder: `leeway scale` asks, the launcher answers.

    control/0f3a.ask      {"verb": "scale", "pool": "big", "count": 4}
    control/0f3a.answer   {"ok": true, "text": "..."}     or false, and why not

Only its owner may write into the folder, and so ask.
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
    """The launcher did not answer."""


class Declined(ValueError):
    """The launcher refused; nothing was changed."""


def ask(folder: Path, question: Mapping[str, Any], timeout_s: float) -> str:
    """Ask a launcher through the folder `control/` of its run, and return its answer, a sentence.

    Raises:
        Declined: it refused, with the reason.
        NoAnswer: it did not answer in time, or the folder cannot be written.
    """
    name = uuid.uuid4().hex
    asked, answered = folder / f"{name}.ask", folder / f"{name}.answer"
    try:
        _write(asked, question)
    except OSError as error:
        raise NoAnswer(f"{folder} cannot be written ({error}): ask a running job as its owner") from error
    deadline = time.monotonic() + timeout_s
    try:
        while not answered.exists():
            if time.monotonic() > deadline:
                raise NoAnswer(
                    f"the launcher of the run {folder.parent} did not answer for {timeout_s:g} s: it answers while it "
                    "trains; see `leeway status`"
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
    """The launcher's side."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and remove questions to an earlier launcher of the run."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for stale in folder.glob("*.a*"):
            stale.unlink(missing_ok=True)

    def answer(self, verbs: Mapping[str, Callable[[Mapping[str, Any]], str]]) -> None:
        """Answer all questions since the last call; each verb returns a sentence, or raises ValueError with one."""
        for asked in sorted(self._folder.glob("*.ask")):
            try:
                question = json.loads(asked.read_bytes()[:_MAX_BYTES])
                text, is_ok = verbs[question["verb"]](question), True
            except (KeyError, TypeError) as error:
                text, is_ok = f"invalid question ({error!r}): use the version of Leeway that started the run", False
            except ValueError as error:
                text, is_ok = str(error), False
            except FileNotFoundError:
                continue  # the question was withdrawn
            asked.unlink(missing_ok=True)
            _write(asked.with_suffix(".answer"), {"ok": is_ok, "text": text})


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_whole(path, [json.dumps(document).encode()])
