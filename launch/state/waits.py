"""Who waits for whom, as sentences: from what the roles say of themselves and the states of their processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from actors.report import ActorReport
from buffer.protocol import Status
from common.staleness import PolicyVersion
from launch.state.process_facts import ProcessFacts

LEASE = "waiting for a lease"
POLICY = "waiting for policy"
"""How an actor begins to say so; see `actors.loop`."""
NUM_NAMED = 3
"""Of so many that wait for the same, each is named."""


def waits(
    learner: str,
    publishing: str,
    actors: Mapping[str, ActorReport],
    processes: Iterable[ProcessFacts],
    seconds: Mapping[str, float],
    status: Status | None,
) -> list[str]:
    """Every role that waits, and for whom.

    Args:
        learner: whom the learner waits for; empty where it computes.
        publishing: what published weights wait for; empty for nothing.
        actors: the last report of each that works.
        processes: of the run.
        seconds: name of a process -> how long it has been in its state.
        status: of the buffer.
    """
    found = [f"the learner waits for {learner}"] if learner else []
    if publishing:
        found.append(f"published weights wait for {publishing}")
    if status is not None and status.silent_shards:
        found.append(f"everyone waits for shards {status.silent_shards} of the buffer, which do not answer")
    groups: dict[str, list[str]] = {}
    for name, report in sorted(actors.items()):
        if report.waiting:
            groups.setdefault(_of_actor(report, status), []).append(name)
    found += [f"{together(names)} {_verb(names)} {what}" for what, names in groups.items()]
    return [*found, *_of_processes(processes, seconds)]


def together(names: list[str]) -> str:
    """Names, or the number of them where there are many."""
    if len(names) <= NUM_NAMED:
        return ", ".join(names)
    return f"{len(names)} actors ({', '.join(names[:2])}, ...)"


def _verb(names: list[str]) -> str:
    return "waits for" if len(names) == 1 else "wait for"


def _of_actor(report: ActorReport, status: Status | None) -> str:
    """For whom, out of what it says itself."""
    said = report.waiting
    if said == "draining" or (said.startswith(LEASE) and status is not None and status.draining):
        return "nothing more: the run drains"
    if said.startswith(LEASE):
        further = ""
        if status is not None:
            further = f" than version {status.version} ({status.num_ready_groups} groups are ready for it)"
        return f"the learner: the bound on staleness grants no lease before it is further{further}"
    if said.startswith(POLICY):
        newest = f", and {PolicyVersion(*status.newest)} is the newest published" if status is not None else ""
        return f"{said.removeprefix('waiting for ')}{newest}"
    return said.removeprefix("waiting for ").removeprefix("training waits for ")


def _of_processes(processes: Iterable[ProcessFacts], seconds: Mapping[str, float]) -> Iterator[str]:
    for process in processes:
        for_s = f"for {seconds.get(process.name, 0.0):.0f} s"
        if process.state == "starting":
            yield f"{process.name} is starting, {for_s}; see {process.log}"
        elif process.state == "waiting for resources":
            yield f"{process.name} waits {for_s} for a host of the pool '{process.pool}' that has room for it"
        elif process.state == "leaving":
            yield f"{process.name} is leaving, {for_s}: it hands back what it has leased"
