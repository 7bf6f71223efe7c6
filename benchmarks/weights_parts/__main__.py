"""One peer: python -m weights_parts ROLE OPTIONS. Its calls come on standard input, one JSON to a line."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import sys
import threading
import traceback
from typing import Any


def lines_of(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[bytes]:
    """What comes on standard input. Its end is the end of this process: whoever gave orders is gone."""
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    def watch() -> None:
        rest = b""
        while data := os.read(0, 65536):  # no buffered reader: its lock would be held when the interpreter ends
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(queue.put_nowait, line)
        os._exit(1)

    threading.Thread(target=watch, name="orders", daemon=True).start()
    return queue


async def main() -> None:
    """Take the role, then answer every call in turn."""
    name, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    lines = lines_of(asyncio.get_running_loop())
    role = importlib.import_module(f"benchmarks.weights_parts.{name}_role").Role(**json.loads(options))
    while True:
        call: dict[str, Any] = json.loads(await lines.get())
        if call["method"] == "end":
            break
        answer: dict[str, Any]
        try:
            found = getattr(role, call["method"])(**call["arguments"])
            answer = {"result": await found if inspect.isawaitable(found) else found}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)
    closing = role.close()
    if inspect.isawaitable(closing):
        await closing


if __name__ == "__main__":
    asyncio.run(main())
