"""What there is to know of a process of a run, for those who only look."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.files import private_file
from launch.errors import ConfigError
from launch.run_folder import RunFolder, open_run, owner_of


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


FORMAT = 1
NUM_EVENTS = 20
"""The last so many events are in it; all are in events.jsonl."""


class StatusError(ValueError):
    """There is none, or it cannot be read; the text says why and what to try."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
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


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
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


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Any other process of the run: a stage of the learner, a buffer or the weight service."""

    name: str
    state: str
    since_s: float
    waits_for: str
    restarts: int
    host: str
    pid: int
    log: str


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
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


class BufferStatus(msgspec.Struct, frozen=True, kw_only=True):
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


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
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
    learner: LearnerStatus
    evaluations: list[Evaluated]
    pools: list[PoolStatus]
    actors: list[ActorStatus]
    stages: list[ProcessStatus]
    services: list[ProcessStatus]
    buffer: BufferStatus | None
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
_decoder = msgspec.json.Decoder(RunStatus)


class _Format(msgspec.Struct, frozen=True):
    format: int = 0


def write_status(path: Path, snapshot: RunStatus) -> None:
    """Put it in place of the last one.

    Raises:
        OSError: the disk is full, say; the last one stays.
    """
    with private_file(path) as file:
        file.write(_encoder.encode(snapshot))


def read_status(path: Path) -> RunStatus:
    """The newest one.

    Raises:
        StatusError: it is not there, not readable, or of another format.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise StatusError(
            f"{path} is not there: the command ended before it had begun, or is of an older Leeway"
        ) from None
    except OSError as error:
        raise StatusError(f"{path} cannot be read: {error.strerror}; only its owner can") from None
    try:
        found = msgspec.json.decode(text, type=_Format).format
        if found != FORMAT:
            raise StatusError(
                f"{path} has format {found}, and this Leeway reads {FORMAT}; use the Leeway that made the run"
            )
        return _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise StatusError(f"{path} is not what a run writes: {error}") from None


STALE_S = 60.0
"""A command on another host writes every few seconds; one that has not for so long is taken for gone."""
SILENT_S = 10.0
"""After so long without a new figure it is said how old they are."""


@dataclass(frozen=True)
class StatusView:
    """A run as it is seen at one moment."""

    snapshot: RunStatus
    now_s: float
    gone: str
    """Why its command is thought gone though it said no farewell, and what to do; else empty."""
    resuming: str = ""
    """That another command goes on with it, of which the snapshot does not know yet; else empty."""

    @property
    def is_well(self) -> bool:
        """It goes on, or is done."""
        if self.resuming:
            return True
        if self.snapshot.ended is not None:
            return self.snapshot.ended.exit_status == 0
        return not self.gone


def find_run(path: Path | None) -> RunFolder:
    """The run that is meant; without a path the newest in runs/.

    Raises:
        ConfigError: there is none.
    """
    if path is not None:
        return open_run(path)
    runs = sorted(Path("runs").glob("*/config.toml"), key=lambda config: config.parent.stat().st_mtime)
    if not runs:
        raise ConfigError("there is no run in runs/; give the folder that `leeway train` named")
    return RunFolder(runs[-1].parent)


def look(folder: RunFolder) -> StatusView:
    """See how a run is now.

    Raises:
        StatusError: nothing can be seen of it.
    """
    try:
        snapshot = read_status(folder.status)
    except StatusError as error:
        if folder.status.exists() or owner_of(folder) is None:
            raise
        raise StatusError(f"the run {folder.root} has only just begun; look again in a few seconds") from error
    now_s, owner = time.time(), owner_of(folder)
    if owner is not None and owner != snapshot.pid:
        who = f"a command (process {owner})" if owner else "a command"
        return StatusView(snapshot, now_s, "", f"{who} is just going on with it")
    return StatusView(snapshot, now_s, _why_gone(folder, snapshot, now_s, owner))


def _why_gone(folder: RunFolder, snapshot: RunStatus, now_s: float, owner: int | None) -> str:
    if snapshot.ended is not None:
        return ""
    silent_s = now_s - snapshot.written_s
    if snapshot.host == socket.gethostname():
        if owner is not None:
            return ""
        who = f"the command (process {snapshot.pid})"
    elif silent_s <= STALE_S:
        return ""
    else:
        who = f"the command (process {snapshot.pid} on {snapshot.host})"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.written_s))
    return f"{who} is gone since {since}, nothing runs; `leeway resume {folder.root}` goes on"
