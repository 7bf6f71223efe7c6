"""A role's process as the supervisor sees it, and the calls to it that may fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError


class RunFailed(RuntimeError):
    """The run cannot go on; the text names the role, the reason and the log."""


@dataclass
class RoleProcess:
    """One process. `starting` and `running` are pending Ray calls; they end when that phase does."""

    role: str
    number: int
    handle: Any
    log: Path
    starting: Any = None
    """Of an actor: ends when it is ready."""
    running: Any = None
    """Ends when the role's work does; None before the work begins."""
    started_s: float = field(default_factory=time.monotonic)
    restarts: int = 0
    lost: str = ""
    """Why it was given up, where it was."""

    @property
    def name(self) -> str:
        """For people: role and number, as in the name of its log."""
        return f"{self.role}.{self.number}"

    def result(self, pending: object, what: str, deadline: float, limit_key: str) -> Any:  # noqa: ANN401
        """Wait for a call.

        Args:
            pending: the call.
            what: what the process is to do, as in 'to be ready'.
            deadline: on the monotonic clock.
            limit_key: the config key behind the deadline.

        Raises:
            RunFailed: the call failed, or did not end in time.
        """
        started = time.monotonic()
        try:
            return ray.get(pending, timeout=max(0.1, deadline - started))
        except GetTimeoutError:
            waited_s = time.monotonic() - started
            raise RunFailed(
                f"waited {waited_s:.0f} s for {self.name} {what} and gave up; see {self.log}, or raise {limit_key}"
            ) from None
        except (RayActorError, RayTaskError) as error:
            raise RunFailed(f"{self.name} failed: {reason(error)}; see {self.log}") from None

    @property
    def is_ready(self) -> bool:
        """Of an actor: it is up, and its work has not failed."""
        if self.lost or not done(self.starting) or outcome(self.starting):
            return False
        return self.running is None or not done(self.running) or not outcome(self.running)


def all_results(calls: Sequence[tuple[RoleProcess, Any]], what: str, deadline: float, limit_key: str) -> None:
    """Wait for calls that several processes are in together; the first failure is the one reported.

    The others often fail because of it, and later.

    Raises:
        RunFailed: as `RoleProcess.result`.
    """
    waiting = {call: process for process, call in calls}
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.1, deadline - time.monotonic()))
        call = ready[0] if ready else next(iter(waiting))
        waiting.pop(call).result(call, what, deadline, limit_key)


def done(pending: object) -> bool:
    """Has this call ended, well or badly?"""
    ready, _ = ray.wait([pending], timeout=0)
    return bool(ready)


def outcome(pending: object) -> str:
    """Why a call that has ended did so badly; empty where it ended well."""
    try:
        ray.get(pending)
    except (RayActorError, RayTaskError) as error:
        return reason(error)
    return ""


def reason(error: Exception) -> str:
    """The sentence of the error that was raised in the role, out of Ray's page about it."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    if isinstance(error, RayTaskError) or "creation task" in lines[0]:
        return lines[-1] if "creation task" in lines[0] else f"{type(cause).__name__}: {lines[-1]}"
    return lines[0]
