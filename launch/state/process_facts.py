"""What there is to know of a process of a run, for those who only look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessFacts:
    """One process of a run, for whoever looks at it."""

    name: str
    """As in the name of its log: "actor.0"."""
    role: str
    number: int
    pool: str
    """Of an actor; else empty."""
    state: str
    """"starting", "working", "finished"; of an actor also "waiting for resources", "leaving", "lost: why"."""
    host: str
    """Address in the Ray cluster; empty until it has told."""
    pid: int
    """On that host; 0 until it has told."""
    log: str
    restarts: int


def actor_name(number: int) -> str:
    """What the actor of this number is called in reports, leases and trajectories."""
    return f"actor-{number}"
