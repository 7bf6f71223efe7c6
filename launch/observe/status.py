"""RunStatus: the status of a run in memory, in status.json and in every view.

The file is the interface between a run and its readers: `leeway status`, `leeway top`, the report and users' scripts.
The file is one JSON document that only its owner can read, replaced atomically about twice a second. Readers reject
other format numbers and ignore unknown fields. A new field needs a default, and a removal needs a new format number.
Times are seconds since the Unix epoch, lags are in versions, and tokens are completion tokens; null means unknown.
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

from leeway.common.files import private_file
from leeway.launch.errors import ConfigError
from leeway.launch.observe.totals import PoolEngines
from leeway.launch.run_folder import RunFolder, open_run, owner_of
from leeway.launch.text import number

if TYPE_CHECKING:
    from leeway.actors.report import ActorReport
    from leeway.buffer.protocol import Status

FORMAT = 3
NUM_EVENTS = 20
"""Number of newest events in status.json; events.jsonl has all events."""
STALE_S = 60.0
"""Age of status.json in seconds after which a launcher on another host counts as dead."""
SILENT_S = 10.0
"""Age of the status in seconds above which `leeway status` prints the age."""
LAG_METRICS = ("lag/token_mean", "lag/allowed", "lag/drift", "brake/lr_scale")
NUM_LAG_STEPS = 60
NUM_NAMED = 3
"""Maximum number of actors with the same wait that a sentence names one by one."""
LEASE = "waiting for a lease"
POLICY = "waiting for policy"
"""Prefixes of `ActorReport.waiting`; see `leeway.actors.loop`."""


class StatusError(ConfigError):
    """The status of the run is missing or unreadable; the text has the reason and the fix."""


# --- the structure ------------------------------------------------------------------------------------


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a run, as reported by the process and by the supervisor."""

    name: str
    """Name of the log, such as "stage.0"; for an actor, the name in leases and trajectories, such as "actor-0"."""
    role: str = ""
    number: int = 0
    pool: str = ""
    state: str
    """"starting", "working" or "finished"; stages and actors have more states, see `leeway.launch.processes`."""
    since_s: float = 0.0
    """Time at which the process was first observed in its state."""
    restarts: int
    host: str
    """Address of the host in the Ray cluster; while the address is unknown, `host` is '' and `pid` is 0."""
    pid: int
    log: str


class ActorStatus(ProcessStatus, frozen=True, kw_only=True):
    """An actor: a vLLM engine and its loop."""

    version: str | None = None
    """Policy version that the actor serves, such as `45`, or `45 (start 3)` after three restarts of the learner."""
    behind: int | None = None
    """Number of versions behind the newest published version."""
    waits_for: str = ""
    """Reason that the actor does not run more samples, such as "waiting for a lease"; empty without a reason."""
    waits_s: float = 0.0
    running: int = 0
    tokens_per_s: float = 0.0
    acknowledged: int = 0
    """Number of samples of the actor that the buffer acknowledged during this launch."""
    mismatch_lag0_abs: float | None = None
    refused: str = ""
    """Reason that the actor refused its last weight update; empty if the actor accepted the update."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    wanted: int
    working: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    lag_mean: float | None = None
    """Mean lag of all tokens of the pool that were used for training."""
    mismatch_lag0_abs: float | None = None
    """Mismatch in the newest step that had tokens of lag 0 from the pool."""
    engines: PoolEngines = PoolEngines()


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of all stages together."""

    tokens_per_s: float = 0.0
    """Completion tokens per second of the newest step, including its wait; decays if the next step takes longer."""
    waits_for: str = ""
    publishing: str = ""
    """Reason for a delayed publication of weights; empty if nothing delays it."""
    restarts: int = 0


class BufferStatus(msgspec.Struct, frozen=True, kw_only=True):
    sampler: str = ""
    ready_groups: int
    drawn_groups: int
    groups_per_step: int
    ledger: dict[str, int]
    """Counts of samples by state; a 'gap' other than 0 is a bug."""
    failed_by_reason: dict[str, int]
    quarantined_by_reason: dict[str, int] = {}
    invalid_by_sender: dict[str, int] = {}
    fidelity_ks: float
    is_draining: bool


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy at one version, or at several versions if the actors had different versions."""

    versions: str
    policy_version: int = 0
    start: int = 0
    """`policy_version` is the newest evaluated version; `start` is the learner start that made it, counted from 0."""
    greedy: float | None
    sampled: float | None
    num_problems: int
    num_failed: int = 0
    """Answers that could not be generated or scored; they are excluded from both accuracies."""

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
    """Complete status. The observer assigns fields but never mutates their values, so a shallow copy is enough."""

    format: int = FORMAT
    run: str
    run_id: str
    folder: str
    pid: int
    host: str
    started_s: float
    written_s: float = 0.0
    wall_s: float = 0.0
    """Wall time of this launch and of all earlier launches, in seconds."""
    polled_s: float | None = None
    """Time of the last poll of the roles; the file is also written between polls."""
    phase: str = ""
    phase_since_s: float = 0.0
    step: int = 0
    num_steps: int
    steps_redone: int = 0
    """Number of steps that the learner repeated, because it died before it wrote a checkpoint of them."""
    trained_tokens: int = 0
    version: int = 0
    published: str | None = None
    """Newest published version, in the format of `ActorStatus.version`."""
    row: dict[str, Any] = {}
    """Metrics of the newest step, from metrics.jsonl and actors.jsonl."""
    lag_mean: float | None = None
    lag_max: int = 0
    max_lag: int | str
    mismatch_lag0_abs: float | None = None
    """Mismatch in the newest step that had tokens of lag 0."""
    generated_tokens_per_s: float = 0.0
    ledger_gap: int = 0
    """Largest ledger gap of the run; a value other than 0 is a bug."""
    learner: LearnerStatus = LearnerStatus()
    evaluations: list[Accuracy] = []
    pools: list[PoolStatus] = []
    actors: list[ActorStatus] = []
    stages: list[ProcessStatus] = []
    services: list[ProcessStatus] = []
    buffer: BufferStatus | None = None
    lags: dict[str, dict[int, int]] = {}
    """Number of tokens trained on by pool and lag, counted once per update; a repeated step counts once."""
    recent_lags: dict[str, list[float | None]] = {}
    """`LAG_METRICS` of the newest `NUM_LAG_STEPS` steps; empty if lag control is off."""
    waits: list[str] = []
    alerts: list[str] = []
    alert_kinds: list[str] = []
    """Kind of each of `alerts`."""
    events: list[RunEvent] = []
    ended: Ended | None = None

    @property
    def learner_busy_frac(self) -> float | None:
        """Fraction of the last step, including the wait for its batch, in which the learner computed."""
        step_s, wait_s = (self.row.get(f"time/{name}") for name in ("step", "wait_for_batch"))
        return step_s / (step_s + (wait_s or 0.0)) if step_s else None

    def note_lags(self, step: Mapping[str, Any]) -> None:
        if step.get("lag/allowed") is not None:
            before = self.recent_lags
            self.recent_lags = {name: [*before.get(name, []), step.get(name)][-NUM_LAG_STEPS:] for name in LAG_METRICS}


def lag_control_effect(lags: Mapping[str, Sequence[float | None]], max_lag: int | str) -> str:
    """Return a sentence on the effect of lag control on lags and updates; '' if lag control is off."""
    known = {name: [value for value in values if value is not None] for name, values in lags.items()}
    allowed, scales = (known.get(name) for name in ("lag/allowed", "brake/lr_scale"))
    if not allowed or not isinstance(max_lag, int):
        return ""
    limited = sum(each < max_lag for each in allowed) / len(allowed)
    rate = f", and scaled the learning rate to {sum(scales) / len(scales):.0%} on average" if scales else ""
    return f"Lag control limited the lag of new samples to less than max_lag in {limited:.0%} of the steps{rate}."


@dataclass
class PollResult:
    """The reports of the roles at one poll."""

    steps: Sequence[Mapping[str, Any]] = ()
    learner_waits_for: str = ""
    publishing: str | None = None
    """Reason for a delayed publication of weights; empty if nothing delays it, None if the learner did not reply."""
    resumed_at: int | None = None
    """Step after which a restarted learner resumes; set in one poll per restart. Later steps are repeated."""
    resumed_version: int = 0
    """Policy version from which the learner resumes."""
    actors: list[ActorReport] = field(default_factory=list)
    working: frozenset[str] | None = None
    """Names of the working actors, without starting and lost actors; None if unknown."""
    quarantined: tuple[str, ...] = ()
    """Names of the actors that were quarantined because of their weights."""
    desired: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[ProcessStatus, ...] = ()
    """All processes of the run: services, learner stages and actors."""
    status: Status | None = None


# --- the file -----------------------------------------------------------------------------------------


class _Format(msgspec.Struct, frozen=True):
    format: int = 0


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the file atomically.

    Raises:
        OSError: the file cannot be written; the old file is kept.
    """
    with private_file(path) as file:
        file.write(msgspec.json.encode(status, enc_hook=float))  # a row may contain NumPy numbers


def read_status(path: Path) -> RunStatus:
    """Read the newest status.

    Raises:
        StatusError: the file is missing, unreadable, or of another format.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise StatusError(
            f"{path} does not exist: the launcher exited before it wrote the file, or an older Leeway created the run"
        ) from None
    except OSError as error:
        raise StatusError(f"{path} cannot be read: {error.strerror}; only its owner can read it") from None
    try:
        found = msgspec.json.decode(text, type=_Format).format
        if found != FORMAT:
            raise StatusError(
                f"{path} has format {found}, but this Leeway reads {FORMAT}: use the version that created the run"
            )
        return msgspec.json.decode(text, type=RunStatus)
    except msgspec.DecodeError as error:
        raise StatusError(f"{path} is not a valid status file: {error}") from None


# --- views from other processes -----------------------------------------------------------------------


@dataclass(frozen=True)
class StatusView:
    """A snapshot of a run for a process that is not part of the run."""

    status: RunStatus
    now_s: float
    gone: str = ""
    """If the launcher died without a final status, the evidence and the fix; else empty."""
    resuming: str = ""
    """If another launcher is resuming the run and has not written a status, a text about that launcher; else empty."""

    @property
    def is_active(self) -> bool:
        return bool(self.resuming) or (self.status.ended is None and not self.gone)

    @property
    def outcome(self) -> str:
        """State or outcome of the run in a few words."""
        ended = None if self.resuming else self.status.ended
        if ended is not None:
            names = {0: "finished", 1: "failed", 130: "interrupted"}
            return names.get(ended.exit_status, f"ended with {ended.exit_status}")
        return "resuming" if self.resuming else "no end recorded" if self.gone else self.status.phase

    @property
    def is_healthy(self) -> bool:
        if self.resuming:
            return True
        return self.status.ended.exit_status == 0 if self.status.ended is not None else not self.gone


def find_run(path: Path | None) -> RunFolder:
    """Open the run at a path, or the newest run in runs/.

    Raises:
        ConfigError: no run was found.
    """
    if path is not None:
        return open_run(path)
    runs = sorted(Path("runs").glob("*/config.toml"), key=lambda config: config.parent.stat().st_mtime)
    if not runs:
        raise ConfigError("runs/ contains no run: pass the run folder that `leeway train` printed")
    return RunFolder(runs[-1].parent)


def view_run(folder: RunFolder) -> StatusView:
    """Read the status of a run, and check whether its launcher is alive.

    Raises:
        StatusError: the status is missing or unreadable.
    """
    owner = owner_of(folder)
    try:
        status = read_status(folder.status)
    except StatusError as error:
        if folder.status.exists() or owner is None:
            raise
        raise StatusError(f"the run {folder.root} has just started: try again in a few seconds") from error
    now_s = status.written_s + max(0.0, time.time() - folder.status.stat().st_mtime)
    # in a restarted container, a launcher may have the pid of the previous launcher
    if owner is not None and (owner != status.pid or _claimed_s(folder) > status.written_s):
        launcher = f"a launcher (pid {owner})" if owner else "a launcher"
        return StatusView(status, now_s, resuming=f"{launcher} is resuming the run")
    return StatusView(status, now_s, gone=_why_gone(folder, status, owner))


def _claimed_s(folder: RunFolder) -> float:
    """Return the time at which a launcher last claimed the run; 0 if the folder was just removed."""
    with contextlib.suppress(OSError):
        return folder.claim.stat().st_mtime
    return 0.0


def _why_gone(folder: RunFolder, status: RunStatus, owner: int | None) -> str:
    is_local = status.host == socket.gethostname()
    is_alive = owner is not None if is_local else time.time() - status.written_s <= STALE_S
    if is_alive or status.ended is not None:
        return ""
    where = "" if is_local else f" on {status.host}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.written_s))
    return (
        f"the launcher (pid {status.pid}{where}) exited at {since} without a final status: "
        f"run `leeway resume {folder.root}`"
    )


def why_stopped(folder: RunFolder) -> str:
    """Return why a run has no live launcher; empty if a launcher on any host that shares the folder is alive."""
    if owner_of(folder) is not None:
        return ""
    try:
        view = view_run(folder)
    except StatusError:  # the launcher exited before it wrote a status
        return f"the run {folder.root} has no live launcher: run `leeway resume {folder.root}`"
    if (ended := view.status.ended) is not None:
        return f"the run {folder.root} has ended ({ended.text}): run `leeway resume {folder.root}`"
    return view.gone


# --- waits as sentences -------------------------------------------------------------------------------


def waits(status: RunStatus, now_s: float) -> list[str]:
    """Return a sentence for every waiting role."""
    learner = status.learner
    found = [f"the learner waits for {learner.waits_for}"] if learner.waits_for else []
    found += [f"the weight publisher waits for {learner.publishing}"] if learner.publishing else []
    groups: dict[tuple[str, str], list[ActorStatus]] = {}
    for actor in sorted(status.actors, key=lambda actor: actor.name):
        if actor.waits_for:
            groups.setdefault(_phrase(actor.waits_for, status), []).append(actor)
    for (verb, what), actors in groups.items():
        names, most_s = [actor.name for actor in actors], max(actor.waits_s for actor in actors)
        subject = ", ".join(names) if len(names) <= NUM_NAMED else f"{len(names)} actors ({', '.join(names[:2])}, ...)"
        found.append(f"{subject} {verb}{'s' * (len(names) == 1)} {what}" + (f", {most_s:.0f} s" if most_s else ""))
    return [*found, *_process_waits(status, now_s)]


def _phrase(waiting: str, status: RunStatus) -> tuple[str, str]:
    """Return a verb and its object that express `waiting`, the current wait of an actor."""
    buffer = status.buffer
    if waiting.startswith("evaluating "):
        return "evaluate", waiting.removeprefix("evaluating ")
    if waiting in ("draining", "stopped") or (waiting.startswith(LEASE) and buffer is not None and buffer.is_draining):
        return "wait", "for the run to finish draining"
    if waiting.startswith(LEASE):
        past = f" past version {status.version} ({buffer.ready_groups} groups are ready)" if buffer else ""
        return "wait", f"for the learner: the staleness bound grants no lease until the learner advances{past}"
    newest = f" (newest published: {status.published})" if waiting.startswith(POLICY) and status.published else ""
    return "wait", f"for {waiting.removeprefix('waiting for ')}{newest}"


def _process_waits(status: RunStatus, now_s: float) -> Iterator[str]:
    for process in (*status.services, *status.stages, *status.actors):
        name, for_s = f"{process.role}.{process.number}", f"for {now_s - process.since_s:.0f} s"
        if process.state == "starting":
            yield f"{name} has been starting {for_s}; see {process.log}"
        elif process.state == "waiting for resources":
            yield f"{name} has waited {for_s} for a host of pool '{process.pool}' with enough free resources"
        elif process.state == "leaving":
            yield f"{name} has been shutting down {for_s}: it requeues its leased samples"
