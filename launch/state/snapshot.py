"""Snapshot: what is known of a run at one moment, as `status.json` holds it.

It is the contract between a run and whoever looks at it from outside: `leeway status`, `leeway top`, the report, a
script of yours. The file is one JSON document, written anew about every launch.poll_interval_s and replaced in one go,
so that no reader ever sees half of it; its owner alone can read it. A reader of another format number refuses it, and
passes over fields that it does not know.
Times are in seconds since the Unix epoch, lags in versions, tokens are completion tokens; null is "not known (yet)".
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.files import private_file

FORMAT = 1
NUM_EVENTS = 20
"""The last so many events are in it; all are in events.jsonl."""


class SnapshotError(ValueError):
    """There is none, or it cannot be read; the text says why and what to try."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of actors."""

    name: str
    wanted: int
    """Actors that it should have."""
    working: int
    running: int
    """Samples in flight."""
    tokens_per_s: float
    lag_mean: float | None
    """Over all trained tokens that it sampled."""
    mismatch_lag0_abs: float | None
    """Of the newest step that had such tokens of it."""


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """An actor: a vLLM engine and its loop."""

    name: str
    pool: str
    state: str
    """As `launch.processes.role_process.ProcessFacts` has it: 'starting', 'working', 'lost: why' and so on."""
    since_s: float
    """When it was first seen in that state."""
    version: str | None
    """INCARNATION.VERSION that it serves."""
    behind: int | None
    """Versions that it is behind the newest published one."""
    running: int
    tokens_per_s: float
    acknowledged: int = 0
    """Samples of which the buffer told it that it has them, over all its processes of this command."""
    mismatch_lag0_abs: float | None
    waits_for: str
    """Empty while nothing keeps it from running more."""
    refused: str
    """Why it did not take its last update; empty where it did."""
    restarts: int
    host: str
    pid: int
    log: str


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Any other process of the run: a stage of the learner, a buffer or the weight service."""

    name: str
    state: str
    since_s: float
    waits_for: str
    restarts: int
    host: str
    pid: int
    log: str


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """All stages together."""

    tokens_per_s: float
    """Trained, over the last seconds."""
    busy_frac: float | None
    """Share of the last step, and of the wait for its batch, in which it computed."""
    step_s: float | None
    """That the last step took."""
    waits_for: str
    publishing: str
    """What keeps published weights from being on disk; empty where nothing does."""
    restarts: int


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """The replay buffer, all shards together."""

    law: str
    """By which steps draw groups."""
    ready_groups: int
    drawn_groups: int
    groups_per_step: int
    ledger: dict[str, int]
    """Counts of samples, with 'gap': 0, or a bug."""
    failed_by_reason: dict[str, int]
    fidelity_ks: float
    is_draining: bool
    silent_shards: list[int]


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out evaluation."""

    versions: str
    greedy: float | None
    sampled: float | None
    num_problems: int


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """As in events.jsonl."""

    time_s: float
    kind: str
    text: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the command ended."""

    at_s: float
    text: str
    exit_status: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    format: int
    run: str
    run_id: str
    folder: str
    pid: int
    """Of the command."""
    host: str
    """Name of the machine that it runs on."""
    started_s: float
    written_s: float
    polled_s: float | None
    """When the roles were last asked for news; the file is written on while they are not."""
    phase: str
    phase_since_s: float
    step: int
    num_steps: int
    version: int
    published: str | None
    """Newest published version, INCARNATION.VERSION."""
    reward: float | None
    loss: float | None
    lag_mean: float | None
    """Over all trained tokens so far."""
    lag_max: int
    max_lag: int | str
    """The bound, or 'unbounded'."""
    mismatch_lag0_abs: float | None
    """Of the newest step that had tokens of lag 0."""
    overlap_frac: float | None
    generated_tokens_per_s: float
    learner: Learner
    evaluations: list[Evaluated]
    pools: list[Pool]
    actors: list[Actor]
    stages: list[Process]
    services: list[Process]
    buffer: Buffer | None
    lags: dict[str, dict[int, int]]
    """Pool -> lag -> tokens trained under this command, once for each update that trained them; a step taken again
    counts once."""
    waits: list[str]
    """Who waits for whom, as sentences."""
    tripped: list[str]
    """What is wrong now, as sentences."""
    events: list[Event]
    ended: Ended | None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Snapshot)


class _Format(msgspec.Struct, frozen=True):
    format: int = 0


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Put it in place of the last one.

    Raises:
        OSError: the disk is full, say; the last one stays.
    """
    with private_file(path) as file:
        file.write(_encoder.encode(snapshot))


def read_snapshot(path: Path) -> Snapshot:
    """The newest one.

    Raises:
        SnapshotError: it is not there, not readable, or of another format.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise SnapshotError(
            f"{path} is not there: the command ended before it had begun, or is of an older Leeway"
        ) from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}; only its owner can") from None
    try:
        found = msgspec.json.decode(text, type=_Format).format
        if found != FORMAT:
            raise SnapshotError(
                f"{path} has format {found}, and this Leeway reads {FORMAT}; use the Leeway that made the run"
            )
        return _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"{path} is not what a run writes: {error}") from None
