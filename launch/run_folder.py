"""The folders of a run: file layout, identity, locks, and the control channel of the launcher."""

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

import msgspec
import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from leeway.common.files import NoLocks, try_lock, write_durably, write_whole
from leeway.launch.errors import ConfigError
from leeway.launch.host import current_folder, nearest_existing

if TYPE_CHECKING:
    from leeway.launch.config import Config

WEIGHTS_KEY = "weight_sync.folder"
WEIGHTS_CLAIM = "RUN"
"""Lock file in the weights folder that a launcher holds while it runs; it contains the name of the run."""
_NAME_BYTES = 255
_CLAIM_S = 1.0
"""Seconds to retry the lock of a run: `owner_of` holds the lock for an instant, but a launcher holds it for longer."""


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of a file of JSON lines; None for each unreadable line, such as an incomplete last line."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                yield None


class RecordedFacts(BaseModel):
    """Facts on the recorded samples that fill the buffer of a run, found when the run was created."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_samples: int
    num_groups: int
    num_usable: int
    num_prompts: int
    """Upper bound of the prompt ids of the recorded samples, which do not refer to prompts of the run's task."""
    group_size: int
    largest_token: int
    longest: int = 0
    """Number of tokens of the longest sample; 0 in run folders of older versions."""
    num_uninformative: int = 0

    def __str__(self) -> str:
        return f"{self.num_samples} recorded in {self.num_groups} groups, {self.num_usable} of them usable for training"


class RunIdentity(BaseModel):
    """`run.json`: the identity of a run, and the start times of its launches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Id of the run in the buffer and in Weights & Biases."""
    task_fingerprint: str
    """Fingerprint of the prompts (`TaskFacts`): if the prompts change, prompt ids in the buffer lose their meaning."""
    started_s: tuple[float, ...]
    """Start time of each launch of the run, in seconds since the Unix epoch."""
    recorded: RecordedFacts | None = None
    """Facts on the recorded samples to train on; None if actors generate the samples."""
    digests: dict[str, str] = {}
    """Digests of user files and models, from `contents` of launch.resume; empty in run folders of older versions."""


class RunFolder:
    """Paths of the files and folders in `runs/NAME/`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve() if ".." in root.parts else root.absolute()  # links may differ on another host
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
        self.calls = self.root / "trackers.jsonl"
        self.status = self.root / "status.json"
        self.control = self.root / "control"
        self.summary = self.root / "summary.json"
        self.report = self.root / "report.html"

    @property
    def name(self) -> str:
        return self.root.name

    def log(self, role: str, number: int) -> Path:
        """Return the log file of process `number` of a role."""
        return self.logs / f"{role}.{number}.log"

    def create(self, config: Config) -> None:
        """Create the folders and write the config; raise ConfigError if the folder exists or cannot be created."""
        try:
            self.root.mkdir(parents=True, mode=0o700)
            self.make_parts(config)
            self.write_config(config)
        except FileExistsError:
            raise ConfigError(already_exists(self.root)) from None
        except OSError as error:
            shutil.rmtree(self.root, ignore_errors=True)  # a partial folder would block the next attempt
            raise ConfigError(
                f"the run folder {self.root} cannot be created: {error.strerror or error}; give another folder as "
                "--run.dir FOLDER, or free some space"
            ) from None

    def write_config(self, config: Config) -> None:
        from leeway.launch.config import to_toml  # imported lazily: views of a run need neither the sections nor torch

        write_durably(self.config, to_toml(config).encode())

    def make_parts(self, config: Config) -> None:
        for folder in (self.buffer, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)
        if config.weight_sync.folder is None:
            self.weights.mkdir(exist_ok=True)

    def read_identity(self) -> RunIdentity:
        """Return the content of `run.json`; raise ConfigError if it is missing or invalid."""
        try:
            return RunIdentity.model_validate_json(self.identity.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{self.identity} cannot be read ({error.strerror}), so the run has no identity: the run ended during "
                "startup, or an older Leeway created it. Start a new run"
            ) from None
        except ValidationError as error:
            raise ConfigError(
                f"{self.identity} is damaged ({error.errors()[0]['msg']}); restore it from a copy, or start a new run"
            ) from None

    def write_identity(self, identity: RunIdentity) -> None:
        write_durably(self.identity, f"{identity.model_dump_json(indent=2)}\n".encode())


def check_new(root: Path) -> None:
    """Check, without side effects, that the folder of a new run can be created; raise ConfigError if it cannot."""
    if os.path.exists(root):  # returns False for a name that is too long, while Path.exists raises
        raise ConfigError(already_exists(root))
    check_writable(root, "run.dir")


def already_exists(root: Path) -> str:
    """Return the error for a new run whose folder exists."""
    return f"the run folder {root} already exists; choose another --run.name, or resume the run: leeway resume {root}"


@contextlib.contextmanager
def claimed(folder: RunFolder) -> Iterator[None]:
    """Hold the lock of a run within the block, or until this process exits.

    Raise ConfigError with the process id of the launcher that holds the lock; OSError if the folder is not writable.
    """
    with os.fdopen(os.open(folder.claim, os.O_RDWR | os.O_CREAT, 0o600), "wb", buffering=0) as claim:
        if not try_lock(claim, limit_s=_CLAIM_S):
            owner = owner_of(folder)
            raise ConfigError(
                f"the run {folder.root} is running (process {owner}); wait until it ends, or end it with a checkpoint: "
                f"kill -INT {owner}"
            )
        claim.truncate(0)
        claim.write(f"{os.getpid()}\n".encode())
        yield


def owner_of(folder: RunFolder) -> int | None:
    """Return the process id of the launcher of an active run, on the launcher's host; None if the run is not active."""
    try:
        claim = folder.claim.open("rb")
    except FileNotFoundError:
        return None
    with claim:
        text = claim.read(32).strip()
        pid = int(text) if text.isdigit() else 0
        with contextlib.suppress(NoLocks):
            return None if try_lock(claim, shared=True) else pid
        return pid if psutil.pid_exists(pid) else None


def named_run(path: Path) -> Path:
    """Return the path of a run folder, or of a folder inside a run folder; also search runs/.

    A folder with a config.toml takes precedence. Raise ConfigError for an inaccessible folder or an invalid name.
    """
    named = Path("runs") / path
    try:
        for each in (path, named):
            if (each / "config.toml").is_file():
                return each
        return named if not path.exists() and named.exists() else path
    except OSError as error:
        raise ConfigError(
            f"no run can be read at {str(path)[:200]}: {error.strerror}; run the command as the owner of the run"
        ) from None


def find_config(text: str) -> Path:
    """Return the path of a config; a bare name such as `demo` selects a bundled example if no such file exists."""
    bundled = Path(__file__).parents[1] / "examples" / f"{text}.toml"
    return bundled if "/" not in text and not Path(text).is_file() and bundled.is_file() else Path(text)


def open_run(path: Path) -> RunFolder:
    """Return the folder of a run, by its path or its name within runs/; raise ConfigError if there is none."""
    folder = RunFolder(named_run(path))
    if not folder.config.is_file():
        runs = sorted(each.parent.name for each in Path("runs").glob("*/config.toml"))
        hint = f"runs/ has {', '.join(runs[-5:])}" if runs else "give the folder that `leeway train` printed"
        raise ConfigError(f"no run at {path}: the folder has no config.toml; {hint}")
    return folder


def choose_root(config: Config, config_path: Path) -> Path:
    """Return the folder of a new run: `run.dir`/`run.name`, by default the config's name and the time."""
    stem = f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = stem if config.run.name is None else config.run.name
    if "/" in name or name in ("", ".", "..") or len(os.fsencode(name)) > _NAME_BYTES:
        raise ConfigError(f"run.name = '{name}' is not a folder name; set the parent folder with run.dir")
    try:
        root = current_folder() / Path(config.run.dir).expanduser() / name
        root.resolve()  # raises if the path is invalid
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"run.dir = '{config.run.dir}': invalid path: {error}") from None
    return root


def check_weights_folder(folder: Path) -> None:
    """Check, without side effects, that a folder is writable and unused by other runs; raise ConfigError if not."""
    check_writable(folder, WEIGHTS_KEY)
    if not folder.exists():
        return
    from leeway.weight_sync.store import WeightStore  # imported lazily: views of a run do not need the store

    try:
        with contextlib.suppress(FileNotFoundError), (folder / WEIGHTS_CLAIM).open("rb") as file:
            _lock_weights(file, folder, shared=True)
        newest = WeightStore(folder).newest()
    except OSError as error:
        raise ConfigError(f"{WEIGHTS_KEY} = '{folder}' cannot be read: {error}; choose another folder") from None
    if newest is not None:
        raise ConfigError(
            f"{WEIGHTS_KEY} = '{folder}' holds the weights of an earlier run, up to version {newest}, so the "
            "weights of this run would not count as newer: remove the old weights, or choose another folder"
        )


@contextlib.contextmanager
def claimed_weights(folder: Path, run: Path) -> Iterator[None]:
    """Create the weights folder and hold its lock within the block, or until this process exits.

    Raise ConfigError if another run uses the folder, or if the folder is not writable.
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
    """Check, without side effects, that a folder can be created and written; raise ConfigError with its key if not."""
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
            "permissions"
        ) from None


def _lock_weights(file: BinaryIO, folder: Path, *, shared: bool = False) -> None:
    if not try_lock(file, shared=shared):
        file.seek(0)
        owner = file.read(4096).decode("utf-8", "replace").strip() or "another run"
        raise ConfigError(
            f"{WEIGHTS_KEY} = '{folder}' is in use by a running job ({owner}); choose another folder, or end that job"
        )


# --- control channel: requests of `leeway scale` to the launcher --------------------------------------

_POLL_S = 0.1
_MAX_BYTES = 4096
"""Maximum size of a request. Only the owner of the folder can write requests:

    control/0f3a.ask      {"verb": "scale", "pool": "big", "count": 4}
    control/0f3a.answer   {"ok": true, "text": "..."}     ok is false, and text the reason, if the request is rejected
"""


class NoAnswer(RuntimeError):
    """The launcher did not answer in time, or the request could not be written."""


def send_request(folder: Path, request: Mapping[str, Any], timeout_s: float) -> str:
    """Send a request to a launcher through the folder `control/` of its run, and return the launcher's answer as text.

    Raise ConfigError if the launcher rejects the request; NoAnswer after `timeout_s`, or if the write fails.
    """
    name = uuid.uuid4().hex
    request_file, answer_file = folder / f"{name}.ask", folder / f"{name}.answer"
    try:
        write_whole(request_file, [json.dumps(request).encode()])
    except OSError as error:
        raise NoAnswer(f"{folder} cannot be written ({error}): run the command as the owner of the run") from error
    deadline = time.monotonic() + timeout_s
    try:
        while not answer_file.exists():
            if time.monotonic() > deadline:
                raise NoAnswer(
                    f"the launcher of the run {folder.parent} did not answer within {timeout_s:g} s: launchers answer "
                    "only during training; check `leeway status`"
                )
            time.sleep(_POLL_S)
        answer = json.loads(answer_file.read_text(encoding="utf-8"))
    finally:
        request_file.unlink(missing_ok=True)
        answer_file.unlink(missing_ok=True)
    if not answer["ok"]:
        raise ConfigError(str(answer["text"]))
    return str(answer["text"])


class Control:
    """The launcher's end of the control channel: answers the requests of `send_request`."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and remove stale requests to an earlier launcher of the run."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for stale in folder.glob("*.a*"):
            stale.unlink(missing_ok=True)

    def answer(self, verbs: Mapping[str, Callable[[Mapping[str, Any]], str]]) -> None:
        """Answer all requests since the last call; a function returns the answer or raises ValueError with a reason."""
        for file in sorted(self._folder.glob("*.ask")):
            try:
                request = json.loads(file.read_bytes()[:_MAX_BYTES])
                text, is_ok = verbs[request["verb"]](request), True
            except (KeyError, TypeError) as error:
                text, is_ok = f"invalid request ({error!r}): use the version of Leeway that started the run", False
            except ValueError as error:
                text, is_ok = str(error), False
            except FileNotFoundError:
                continue  # the request was withdrawn
            file.unlink(missing_ok=True)
            write_whole(file.with_suffix(".answer"), [json.dumps({"ok": is_ok, "text": text}).encode()])
