"""The folders of a run: its files, which command works on it, what is asked of that command, and the weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from common.files import NoLocks, try_lock, write_durably, write_whole
from launch.errors import ConfigError
from launch.host import current_folder, nearest_existing

if TYPE_CHECKING:
    from launch.config import Config

WEIGHTS_KEY = "weight_sync.folder"
WEIGHTS_CLAIM = "RUN"
"""A file that the command of a run holds locked from its start to its end; it says which run."""
_NAME_BYTES = 255
_CLAIM_S = 1.0
"""A command that asks for the owner holds the lock for an instant; one that works on the run holds it for longer."""


class RecordedFacts(BaseModel):
    """The recorded samples that fill the buffer of a run, as they were found when it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_samples: int
    num_groups: int
    num_usable: int
    num_prompts: int
    """Their prompt ids are below it; they are not those of the run's own task."""
    group_size: int
    largest_token: int
    longest: int = 0
    """Tokens of the longest sample; 0 in run folders that are older than this."""
    num_uninformative: int = 0

    def __str__(self) -> str:
        return f"{self.num_samples} recorded ones in {self.num_groups} groups, {self.num_usable} of them to train on"


class RunIdentity(BaseModel):
    """`run.json`: what stays the same however often a run is resumed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Of the buffer, and of Weights & Biases."""
    task_fingerprint: str
    """As in `TaskFacts`: the buffer numbers prompts, and a number means the same prompt for ever."""
    started_s: tuple[float, ...]
    """Wall time of each command that worked on the run, in seconds since the Unix epoch."""
    recorded: RecordedFacts | None = None
    """Of a run that trains on recorded samples."""
    digests: dict[str, str] = {}
    """As `contents` of launch.resume; empty in run folders that are older than this."""


class RunFolder:
    """`runs/NAME/` and its parts."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve() if ".." in root.parts else root.absolute()  # on another host a link may differ
        self.config = self.root / "config.toml"
        self.identity = self.root / "run.json"
        self.claim = self.root / "run.lock"
        self.buffer = self.root / "buffer"
        self.weights = self.root / "weights"
        self.checkpoints = self.root / "checkpoints"
        self.serving_models = self.root / "serving_models"
        self.export = self.root / "model"
        self.logs = self.root / "logs"
        self.metrics = self.root / "metrics.jsonl"
        self.actors = self.root / "actors.jsonl"
        self.events = self.root / "events.jsonl"
        self.evaluations = self.root / "eval.jsonl"
        self.timeline = self.root / "timeline.json"
        self.status = self.root / "status.json"
        self.control = self.root / "control"
        self.summary = self.root / "summary.json"
        self.report = self.root / "report.html"

    @property
    def name(self) -> str:
        return self.root.name

    def log(self, role: str, number: int) -> Path:
        """The log of the n-th process of a role."""
        return self.logs / f"{role}.{number}.log"

    def create(self, config: Config) -> None:
        """Make the folders and write the resolved config; ConfigError if the folder exists, or cannot be made."""
        try:
            self.root.mkdir(parents=True, mode=0o700)
            self.make_parts(config)
            self.write_config(config)
        except FileExistsError:
            raise ConfigError(already_there(self.root)) from None
        except OSError as error:
            shutil.rmtree(self.root, ignore_errors=True)  # a part of it would be in the way of the next try
            raise ConfigError(
                f"the run folder {self.root} cannot be made: {error.strerror or error}; give another place as "
                "--run.dir FOLDER, or free some space"
            ) from None

    def write_config(self, config: Config) -> None:
        from launch.config import to_toml  # with all sections, and torch: who only looks at a run need not wait for it

        write_durably(self.config, to_toml(config).encode())

    def make_parts(self, config: Config) -> None:
        for folder in (self.buffer, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)
        if config.weight_sync.folder is None:
            self.weights.mkdir(exist_ok=True)

    def read_identity(self) -> RunIdentity:
        """Return what `run.json` holds; ConfigError if it is not there, or was changed."""
        try:
            return RunIdentity.model_validate_json(self.identity.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{self.identity} cannot be read ({error.strerror}): without it nobody knows which run this is; it may "
                "have ended before it had begun, or be of an older Leeway. Start a new run"
            ) from None
        except ValidationError as error:
            raise ConfigError(
                f"{self.identity} is not what was written ({error.errors()[0]['msg']}); restore it from a copy, or "
                "start a new run"
            ) from None

    def write_identity(self, identity: RunIdentity) -> None:
        write_durably(self.identity, f"{identity.model_dump_json(indent=2)}\n".encode())


def already_there(root: Path) -> str:
    """Return why a run does not start in the folder of another."""
    return f"the run folder {root} exists already; choose another --run.name, or go on with it: leeway resume {root}"


@contextlib.contextmanager
def claimed(folder: RunFolder) -> Iterator[None]:
    """Keep other commands from working on a run for the length of a block, or until this process ends.

    ConfigError names the process of another command; OSError if the folder cannot be written.
    """
    descriptor = os.open(folder.claim, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor, limit_s=_CLAIM_S):
            owner = owner_of(folder)
            raise ConfigError(
                f"the command of the run {folder.root} still lives (process {owner}); wait for its end, or have it "
                f"write a checkpoint and end: kill -INT {owner}"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def owner_of(folder: RunFolder) -> int | None:
    """The process id of the command that works on a run now, as its host numbers it; None where none does."""
    try:
        descriptor = os.open(folder.claim, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        said = os.read(descriptor, 32).strip()
        pid = int(said) if said.isdigit() else 0
        with contextlib.suppress(NoLocks):
            return None if try_lock(descriptor, shared=True) else pid
        return pid if psutil.pid_exists(pid) else None
    finally:
        os.close(descriptor)


def named_run(path: Path) -> Path:
    """Return the folder of a run, or a folder of one: a bare name is looked for in runs/ too.

    A run goes before what only has its name. ConfigError if it may not be entered, or cannot be the name of a folder.
    """
    named = Path("runs") / path
    try:
        for each in (path, named):
            if (each / "config.toml").is_file():
                return each
        return named if not path.exists() and named.exists() else path
    except OSError as error:
        raise ConfigError(
            f"no run can be read at {str(path)[:200]}: {error.strerror}; the folder of a run is its owner's alone"
        ) from None


def open_run(path: Path) -> RunFolder:
    """Return the folder of a run, by its path or its name within runs/; ConfigError if there is none."""
    folder = RunFolder(named_run(path))
    if not folder.config.is_file():
        runs = sorted(each.parent.name for each in Path("runs").glob("*/config.toml"))
        hint = f"in runs/ are {', '.join(runs[-5:])}" if runs else "give the folder that `leeway train` named"
        raise ConfigError(f"no run is at {path}: it has no config.toml; {hint}")
    return folder


def choose_root(config: Config, config_path: Path) -> Path:
    """The folder of a new run: `run.dir`/`run.name`, by default the config's name and the time."""
    stem = f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = stem if config.run.name is None else config.run.name
    if "/" in name or name in ("", ".", "..") or len(os.fsencode(name)) > _NAME_BYTES:
        raise ConfigError(f"run.name = '{name}' is not a folder name; use run.dir for the place")
    try:
        root = current_folder() / Path(config.run.dir).expanduser() / name
        root.resolve()  # raises if there can be no such place
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"run.dir = '{config.run.dir}': no such place: {error}") from None
    return root


def check_weights_folder(folder: Path) -> None:
    """Check that a run could publish there, leaving nothing behind; ConfigError if not, or if another run did."""
    check_writable(folder, WEIGHTS_KEY)
    if not folder.exists():
        return
    from weight_sync.store import WeightStore  # who only looks at a run need not wait for it

    try:
        with contextlib.suppress(FileNotFoundError), (folder / WEIGHTS_CLAIM).open("rb") as file:
            _lock_weights(file, folder, shared=True)
        newest = WeightStore(folder).newest()
    except OSError as error:
        raise ConfigError(f"{WEIGHTS_KEY} = '{folder}' cannot be read: {error}; choose another folder") from None
    if newest is not None:
        raise ConfigError(
            f"{WEIGHTS_KEY} = '{folder}' holds the weights of an earlier run, up to version {newest}, and those "
            "of this run would not count as newer. Remove them, or choose another folder"
        )


@contextlib.contextmanager
def claimed_weights(folder: Path, run: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it for the length of a block, or until this process ends.

    ConfigError if another run uses it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = (folder / WEIGHTS_CLAIM).open("a+b")
    except OSError as error:
        raise ConfigError(f"{WEIGHTS_KEY} = '{folder}' cannot be written: {error}; choose another folder") from None
    with claim:
        _lock_weights(claim, folder)
        claim.truncate(0)
        claim.write(f"{run}, process {os.getpid()}\n".encode())
        claim.flush()
        yield


def check_writable(folder: Path, key: str) -> None:
    """Check that a folder could be made and written, leaving nothing behind; if not, ConfigError names its key."""
    found = folder
    try:
        found = nearest_existing(folder)
        if not found.is_dir():
            raise ConfigError(f"{key} = '{folder}': {found} is a file; choose a folder")
        with tempfile.NamedTemporaryFile(dir=found) as file:
            try_lock(file.fileno())
    except NoLocks as error:
        raise ConfigError(f"{key} = '{folder}': {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{key} = '{folder}': {found} cannot be written ({error.strerror}); choose another folder, or change its "
            "rights"
        ) from None


def _lock_weights(file: BinaryIO, folder: Path, *, shared: bool = False) -> None:
    if not try_lock(file, shared=shared):
        file.seek(0)
        who = file.read(4096).decode("utf-8", "replace").strip() or "another run"
        raise ConfigError(
            f"{WEIGHTS_KEY} = '{folder}' is in use by a run that is alive ({who}); choose another folder, or end that "
            "run"
        )


# --- control channel: `leeway scale` asks, the launcher answers ---------------------------------------

_LOOK_S = 0.1
_MAX_BYTES = 4096
"""Of a question. Only the owner of the folder can write there, and so ask:

    control/0f3a.ask      {"verb": "scale", "pool": "big", "count": 4}
    control/0f3a.answer   {"ok": true, "text": "..."}     or false, and why not
"""


class NoAnswer(RuntimeError):
    """The launcher did not answer."""


def ask(folder: Path, question: Mapping[str, Any], timeout_s: float) -> str:
    """Ask a launcher through the folder `control/` of its run, and return its answer, a sentence.

    ConfigError if it refused, with its reason; NoAnswer if it did not answer in time, or the folder cannot be written.
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
        raise ConfigError(str(answer["text"]))
    return str(answer["text"])


class Control:
    """Answers, in the launcher, what `ask` writes."""

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
