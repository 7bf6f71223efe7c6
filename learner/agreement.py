"""Agreement: several ranks do something as one: it is done on all of them, or has failed on all for the same reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

R = TypeVar("R")

_SAID_BYTES = 2048
"""A rank's sentence to the others is cut to this length."""


class Disagreement(RuntimeError):
    """A rank could not do its part; the text, the same on all ranks, says which and why."""


class Agreement:
    """Speaks over a gloo group of its own, so that another thread than that of training may use it."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        """Make the group; all ranks of the default group do so together.

        Args:
            rank: of this process.
            timeout_s: a rank that is silent for longer is lost (seconds).
        """
        self._rank = rank
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def say(self, text: str) -> list[str]:
        """What each rank has to say, in order; nobody goes on before all have spoken.

        Raises:
            RuntimeError: a rank died or was silent for too long.
        """
        said = text.encode()[:_SAID_BYTES].ljust(_SAID_BYTES, b"\0")
        row = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row, group=self.group)
        return [found.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for found in rows]

    def together(self, action: Callable[[], R], what: str) -> R:
        """Do something on every rank.

        Args:
            action: which may fail with an OSError or a ValueError, or be a collective of torch.distributed.checkpoint.
            what: it does, for the error: "rank 1 could not WHAT".

        Raises:
            Disagreement: it failed on a rank. All ranks raise it.
        """
        problem, results = "", []
        try:
            results.append(action())
        except CheckpointException as error:
            # every rank hears of the ranks that failed
            rank, (cause, _) = min(error.failures.items())
            problem = f"rank {rank} could not {what}: {first_line(cause)}"
        except (OSError, ValueError) as error:
            problem = f"rank {self._rank} could not {what}: {first_line(error)}"
        problems = [said for said in self.say(problem) if said]
        if problems:
            raise Disagreement(problems[0])
        return results[0]

    def close(self) -> None:
        """Part from the other ranks."""
        dist.destroy_process_group(self.group)


def first_line(error: BaseException) -> str:
    """What kind of error, and the first line of what it says."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
