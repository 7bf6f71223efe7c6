"""RunStatus: what is known of a run, in memory, as status.json, and on every view.

The file is the contract between a run and its observers: `leeway status`, `leeway top`, the report, a script of yours.
It is one JSON document that only its owner can read, replaced in one go about twice a second. A reader refuses another
format number and ignores unknown fields, so a new field has a default, and removing one takes a new number.
Times are seconds since the Unix epoch, lags are versions, tokens are completion tokens; null means "not known (yet)".
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from common.files import private_file
from launch.errors import ConfigError
from launch.observe.totals import PoolEngines
from launch.run_folder import RunFolder, open_run, owner_of
from launch.text import number

if TYPE_CHECKING:
    from actors.report import ActorReport
    from buffer.protocol import Status

FORMAT = 2
NUM_EVENTS = 20
"""Newest events in the file; events.jsonl has all of them."""
STALE_S = 60.0
"""Age in seconds at which the file of a command on another host counts as that of a command that is gone."""
SILENT_S = 10.0
"""Age in seconds from which the age of the figures is shown."""
LAG_METRICS = ("lag/token_mean", "lag/allowed", "lag/drift", "brake/lr_scale")
NUM_LAG_STEPS = 60
NUM_NAMED = 3
"""Actors that wait for the same thing and are named one by one."""
LEASE = "waiting for a lease"
POLICY = "waiting for policy"
"""How `waiting` of an actor begins; see `actors.loop`."""


class StatusError(ConfigError):
    """There is no status, or it cannot be read; the text says why and what to try."""


# --- the structure ------------------------------------------------------------------------------------


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a run, as it reports itself and as its supervisor sees it."""

    name: str
    """As in the name of its log, "stage.0"; of an actor as in leases and trajectories, "actor-0"."""
    role: str = ""
    number: int = 0
    pool: str = ""
    state: str
    """"starting", "working", "finished", and more of stages and actors; see `launch.processes`."""
    since_s: float = 0.0
    """When it was first seen in that state."""
    restarts: int
    host: str
    """Address in the Ray cluster; empty until it is known, as the pid is 0."""
    pid: int
    log: str


class ActorStatus(ProcessStatus, frozen=True, kw_only=True):
    """An actor: a vLLM engine and its loop."""

    version: str | None = None
    """Served version: `45`, or `45 (start 3)` if not of the first start."""
    behind: int | None = None
    """Versions behind the newest published one."""
    waits_for: str = ""
    """Empty while nothing keeps it from running more."""
    waits_s: float = 0.0
    running: int = 0
    tokens_per_s: float = 0.0
    acknowledged: int = 0
    """Samples that the buffer acknowledged to its processes under this command."""
    mismatch_lag0_abs: float | None = None
    refused: str = ""
    """Why it did not take its last update; empty if it did."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    wanted: int
    working: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    lag_mean: float | None = None
    """Over all trained tokens that it sampled."""
    mismatch_lag0_abs: float | None = None
    """Of the newest step that had such tokens of it."""
    engines: PoolEngines = PoolEngines()


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of all stages together."""

    tokens_per_s: float = 0.0
    """Completion tokens of the newest step over its time and the wait for its batch; less if the next one is late."""
    waits_for: str = ""
    publishing: str = ""
    """What keeps published weights from being on disk; empty if nothing does."""
    restarts: int = 0


class BufferStatus(msgspec.Struct, frozen=True, kw_only=True):
    sampler: str = ""
    ready_groups: int
    drawn_groups: int
    groups_per_step: int
    ledger: dict[str, int]
    """Counts of samples, with 'gap': 0, or a bug."""
    failed_by_reason: dict[str, int]
    quarantined_by_reason: dict[str, int] = {}
    nonsense_by_sender: dict[str, int] = {}
    fidelity_ks: float
    is_draining: bool


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy at one version, or at a few if actors differed."""

    versions: str
    policy_version: int = 0
    start: int = 0
    """Number of the newest version, and of the start of the learner that made it, from 0."""
    greedy: float | None
    sampled: float | None
    num_problems: int
    num_failed: int = 0
    """Answers that could not be generated or scored: neither right nor wrong."""

    def row(self) -> dict[str, Any]:
        return {
            "eval/accuracy_greedy": self.greedy,
            "eval/accuracy_sampled": self.sampled,
            "eval/num_problems": self.num_problems,
            "eval/num_failed": self.num_failed,
            "eval/policy_version": self.policy_version,
            "eval/start": self.start,
        }

    def describe(self) -> str:
        failed = f", {self.num_failed} answers failed" if self.num_failed else ""
        return (
            f"held-out accuracy at version {self.versions}: greedy {number(self.greedy)}, "
            f"sampled {number(self.sampled)} ({self.num_problems} problems{failed})"
        )


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A line of events.jsonl."""

    time_s: float
    kind: str
    text: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    text: str
    exit_status: int


class RunStatus(msgspec.Struct, kw_only=True):
    """All of it. The observer updates it in place; its parts are replaced and never changed, so a copy is cheap."""

    format: int = FORMAT
    run: str
    run_id: str
    folder: str
    pid: int
    host: str
    started_s: float
    written_s: float = 0.0
    wall_s: float = 0.0
    """Seconds that commands worked on the run, this one and those before it."""
    polled_s: float | None = None
    """When the roles were last polled; the file is also written between polls."""
    phase: str = ""
    phase_since_s: float = 0.0
    step: int = 0
    num_steps: int
    steps_redone: int = 0
    """Steps taken again, because a learner was lost before a checkpoint held them."""
    trained_tokens: int = 0
    version: int = 0
    published: str | None = None
    """Newest published version, written as that of an actor."""
    row: dict[str, Any] = {}
    """The metrics of the newest step, of metrics.jsonl and actors.jsonl; every view reads them here."""
    lag_mean: float | None = None
    lag_max: int = 0
    max_lag: int | str
    mismatch_lag0_abs: float | None = None
    """Of the newest step that had tokens of lag 0."""
    generated_tokens_per_s: float = 0.0
    ledger_gap: int = 0
    """The largest so far: 0, or a bug."""
    learner: LearnerStatus = LearnerStatus()
    evaluations: list[Accuracy] = []
    pools: list[PoolStatus] = []
    actors: list[ActorStatus] = []
    stages: list[ProcessStatus] = []
    services: list[ProcessStatus] = []
    buffer: BufferStatus | None = None
    lags: dict[str, dict[int, int]] = {}
    """Pool -> lag -> trained tokens, once for each update that trained them; a step taken again counts once."""
    recent_lags: dict[str, list[float | None]] = {}
    """`LAG_METRICS` of the newest `NUM_LAG_STEPS` steps; empty where lag is not controlled."""
    waits: list[str] = []
    tripped: list[str] = []
    events: list[RunEvent] = []
    ended: Ended | None = None

    @property
    def learner_busy_frac(self) -> float | None:
        """Share of the last step, and of the wait for its batch, in which the learner computed."""
        step_s, wait_s = (self.row.get(f"time/{name}") for name in ("step", "wait_for_batch"))
        return step_s / (step_s + (wait_s or 0.0)) if step_s else None

    def note_lags(self, step: Mapping[str, Any]) -> None:
        if step.get("lag/allowed") is not None:
            before = self.recent_lags
            self.recent_lags = {name: [*before.get(name, []), step.get(name)][-NUM_LAG_STEPS:] for name in LAG_METRICS}


def said_of_control(lags: Mapping[str, Sequence[float | None]], max_lag: int | str) -> str:
    """Return a sentence on what limited the lag of some steps, and their updates; '' where it was not controlled."""
    known = {name: [value for value in values if value is not None] for name, values in lags.items()}
    allowed, scales = (known.get(name) for name in ("lag/allowed", "brake/lr_scale"))
    if not allowed or not isinstance(max_lag, int):
        return ""
    by_control = sum(each < max_lag for each in allowed) / len(allowed)
    rate = f", and updates took {sum(scales) / len(scales):.0%} of their learning rate" if scales else ""
    return f"Lag control kept new samples younger than max_lag in {by_control:.0%} of the steps{rate}."


@dataclass
class PollResult:
    """What the roles reported at one poll."""

    steps: Sequence[Mapping[str, Any]] = ()
    learner_waits_for: str = ""
    publishing: str | None = None
    """What keeps published weights from being on disk; empty if nothing does, None if no answer came."""
    resumed_at: int | None = None
    """Once after each restart of the learner: the step after which it goes on; later steps are taken again."""
    resumed_version: int = 0
    """The version that it goes on from."""
    actors: list[ActorReport] = field(default_factory=list)
    working: frozenset[str] | None = None
    """Names of the actors that work, and not those that start or are out of the run. None: not known."""
    quarantined: tuple[str, ...] = ()
    """Names of the actors that were taken out of the run because of their weights."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[ProcessStatus, ...] = ()
    """All of the run: buffer, weights, stages, actors."""
    status: Status | None = None


# --- the file -----------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder(enc_hook=float)  # a row may hold numbers of NumPy
_decoder = msgspec.json.Decoder(RunStatus)


class _Format(msgspec.Struct, frozen=True):
    format: int = 0


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written, and stays as it was.
    """
    with private_file(path) as file:
        file.write(_encoder.encode(status))


def read_status(path: Path) -> RunStatus:
    """Read the newest one.

    Raises:
        StatusError: it is missing, unreadable, or of another format.
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


# --- looked at from outside ---------------------------------------------------------------------------


@dataclass(frozen=True)
class StatusView:
    """A run as it is seen at one moment."""

    status: RunStatus
    now_s: float
    gone: str = ""
    """Why its command counts as gone though it recorded no end, and what to do; else empty."""
    resuming: str = ""
    """That another command has resumed it, which the status does not show yet; else empty."""

    @property
    def is_well(self) -> bool:
        if self.resuming:
            return True
        return self.status.ended.exit_status == 0 if self.status.ended is not None else not self.gone


def find_run(path: Path | None) -> RunFolder:
    """Open the run at a path, or the newest in runs/.

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
    """Read the status of a run, and check whether its command is alive.

    Raises:
        StatusError: there is no status to read.
    """
    owner = owner_of(folder)
    try:
        status = read_status(folder.status)
    except StatusError as error:
        if folder.status.exists() or owner is None:
            raise
        raise StatusError(f"the run {folder.root} has only just begun; look again in a few seconds") from error
    now_s = status.written_s + max(0.0, time.time() - folder.status.stat().st_mtime)
    # in a container that was started again, a command has the number of the one before
    if owner is not None and (owner != status.pid or _began_s(folder) > status.written_s):
        who = f"a command (process {owner})" if owner else "a command"
        return StatusView(status, now_s, resuming=f"{who} is just going on with it")
    return StatusView(status, now_s, gone=_why_gone(folder, status, owner))


def _began_s(folder: RunFolder) -> float:
    """Return when a command claimed the run last; 0 if the folder was just removed."""
    with contextlib.suppress(OSError):
        return folder.claim.stat().st_mtime
    return 0.0


def _why_gone(folder: RunFolder, status: RunStatus, owner: int | None) -> str:
    is_here = status.host == socket.gethostname()
    is_there = owner is not None if is_here else time.time() - status.written_s <= STALE_S
    if is_there or status.ended is not None:
        return ""
    where = "" if is_here else f" on {status.host}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.written_s))
    return (
        f"the command (process {status.pid}{where}) is gone since {since}, nothing runs; `leeway resume {folder.root}` "
        "goes on"
    )


def why_nobody_works(folder: RunFolder) -> str:
    """Return why no command works on a run; empty if one does, here or on another host that shares its folder."""
    if owner_of(folder) is not None:
        return ""
    try:
        seen = look(folder)
    except StatusError:  # it ended before it wrote one
        return f"no command works on the run {folder.root}; `leeway resume {folder.root}` goes on with it"
    if (ended := seen.status.ended) is not None:
        return f"the run {folder.root} is over ({ended.text}); `leeway resume {folder.root}` goes on with it"
    return seen.gone


# --- in words -----------------------------------------------------------------------------------------


def waits(status: RunStatus, now_s: float) -> list[str]:
    """Return a sentence for every role that waits, and what for."""
    learner = status.learner
    found = [f"the learner waits for {learner.waits_for}"] if learner.waits_for else []
    found += [f"published weights wait for {learner.publishing}"] if learner.publishing else []
    groups: dict[tuple[str, str], list[ActorStatus]] = {}
    for actor in sorted(status.actors, key=lambda actor: actor.name):
        if actor.waits_for:
            groups.setdefault(_of_actor(actor.waits_for, status), []).append(actor)
    for (does, what), actors in groups.items():
        names, most_s = [actor.name for actor in actors], max(actor.waits_s for actor in actors)
        together = ", ".join(names) if len(names) <= NUM_NAMED else f"{len(names)} actors ({', '.join(names[:2])}, ...)"
        found.append(f"{together} {does}{'s' * (len(names) == 1)} {what}" + (f", {most_s:.0f} s" if most_s else ""))
    return [*found, *_of_processes(status, now_s)]


def _of_actor(said: str, status: RunStatus) -> tuple[str, str]:
    """Return a verb and its object, from what an actor reports."""
    buffer = status.buffer
    if said.startswith("evaluating "):
        return "evaluate", said.removeprefix("evaluating ")
    if said in ("draining", "stopped") or (said.startswith(LEASE) and buffer is not None and buffer.is_draining):
        return "wait", "for nothing more: the run drains"
    if said.startswith(LEASE):
        than = f" than version {status.version} ({buffer.ready_groups} groups are ready for it)" if buffer else ""
        return "wait", f"for the learner: the bound on staleness grants no lease before it is further{than}"
    newest = f", and {status.published} is the newest published" if said.startswith(POLICY) and status.published else ""
    return "wait", f"for {said.removeprefix('waiting for ')}{newest}"


def _of_processes(status: RunStatus, now_s: float) -> Iterator[str]:
    for process in (*status.services, *status.stages, *status.actors):
        name, for_s = f"{process.role}.{process.number}", f"for {now_s - process.since_s:.0f} s"
        if process.state == "starting":
            yield f"{name} is starting, {for_s}; see {process.log}"
        elif process.state == "waiting for resources":
            yield f"{name} waits {for_s} for a host of the pool '{process.pool}' that has room for it"
        elif process.state == "leaving":
            yield f"{name} is leaving, {for_s}: it hands on what it has leased"
