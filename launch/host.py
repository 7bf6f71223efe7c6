"""This machine: file modes and locations, processes of runs, limits and reachable addresses."""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from leeway.common.process import address_of, cgroup_values
from leeway.launch.errors import ConfigError

OBJECT_STORE_BYTES = 80 * 2**20
"""Size of Ray's object store, near Ray's minimum: only control messages pass through Ray."""
_REST_THREADS, _WORKER_THREADS = 240, 65
"""Threads of Ray, services and launcher together, and threads of each engine or stage; 370 in total on two cores."""
CONNECT_S = 3.0
_QUIET_S = 3600.0
WANDB_HOST = "https://api.wandb.ai"
NO_WANDB_LOGIN = (
    "WANDB_MODE=online needs a login of Weights & Biases, but there is none: run 'wandb login', set WANDB_API_KEY, or "
    "use WANDB_MODE=offline and 'wandb sync' later"
)
OWNER_ONLY = 0o077  # umask of a run
_ROLE_LOG = re.compile(r"(buffer|weights|ranker|stage|actor)\.\d+\.log")


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files that are created within the block readable only by their owner."""
    previous = os.umask(OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(previous)


def configure_logging(file: Path | None = None) -> None:
    """Send the log records of this process to a file, or to standard error."""
    # by default, each log line that cannot be written to a full disk prints a traceback
    logging.raiseExceptions = False
    handler = logging.FileHandler(file) if file is not None else logging.StreamHandler(sys.stderr)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler], force=True
    )


class FoundProcess(NamedTuple):
    """Process of a run, found because its standard output is a log file in a run folder."""

    run: Path
    """Run folder, with links resolved by the system."""
    name: str
    process: psutil.Process


def role_processes() -> Iterator[FoundProcess]:
    """Yield the role processes of all runs on this machine that this user can see.

    Skip this process and its parents, because the output of a parent shell may also go to a log file.
    """
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:  # the process has exited, or belongs to another user
            continue
        if output.parent.name == "logs" and _ROLE_LOG.fullmatch(output.name) and process.pid not in own:
            yield FoundProcess(output.parent.parent, output.stem, process)


def leeway_command(*arguments: str, first: str = "pass", module: str = "leeway.launch.cli") -> list[str]:
    """Return a command line that runs this copy of `leeway`, whatever the current folder and installed packages are.

    `first` is a Python statement that the new process runs before `main` of `module`.
    """
    begin = f"import sys; sys.path.insert(0, sys.argv[1]); from {module} import main; sys.exit(main(sys.argv[2:]))"
    code = f"{first}; {begin}"
    return [sys.executable, "-P", "-c", code, str(Path(__file__).parents[2]), *arguments]


def sessions_folder() -> Path:
    """Return the folder of Ray's sessions. The parent is private, because Ray lets all users access its own folders.

    The path is short, because the length of a socket path is limited; RAY_TMPDIR replaces /tmp.
    """
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / f"leeway-{os.geteuid()}-ray" / "r"


def make_sessions_folder() -> Path:
    """Create the sessions folder; remove sessions of killed launchers; raise OSError if the folder is not private."""
    folder = sessions_folder()
    _make_private(folder.parent)
    for session in folder.glob("session_*_*"):  # the name ends with the pid of the process that started Ray
        pid = session.name.rpartition("_")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and _is_quiet(session):
            shutil.rmtree(session, ignore_errors=True)
    return folder


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & OWNER_ONLY:
            raise PermissionError(
                f"{folder} for Ray's sockets must be a folder that belongs only to this user (mode 0700): remove it, "
                "or set RAY_TMPDIR"
            ) from None


def ensure_home(environment: MutableMapping[str, str] = os.environ) -> None:
    """Redirect libraries to a spare folder of this user if the home folder is missing or not writable.

    Raise ConfigError if neither folder is writable.
    """
    home, spare = os.path.expanduser("~"), sessions_folder().parents[1] / f"leeway-{os.geteuid()}-home"
    environment.setdefault("HOME", home)
    if not environment.get("LOGNAME"):  # a container may have no entry for this user
        environment.setdefault("USER", f"user-{os.geteuid()}")
    is_there = os.path.isabs(home) and os.path.isdir(home)
    parts = [nearest_existing(Path(home, part)) for part in (".cache", ".config", ".ray")]
    if is_there and all(os.access(part, os.W_OK) for part in parts):
        return
    try:
        _make_private(spare)
    except OSError as error:
        raise ConfigError(
            f"neither the home folder {home} nor {spare} is writable ({error.strerror or error}): set HOME to a "
            "writable folder"
        ) from None
    if not is_there:
        environment["HOME"] = str(spare)
        return
    if os.path.isdir(models := f"{environment.get('XDG_CACHE_HOME', f'{home}/.cache')}/huggingface"):
        environment.setdefault("HF_HOME", models)  # downloaded models stay readable
    if not os.path.isfile(environment.get("RAY_AUTH_TOKEN_PATH", f"{home}/.ray/auth_token")):
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"):
        environment.setdefault(name, str(spare))


def low_limits(num_workers: int = 2) -> str:
    """Return the limit that a run with `num_workers` engines and stages would exceed, and the fix; "" if none."""
    largest, most = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC))
    if 0 <= largest < OBJECT_STORE_BYTES:
        text = f"files are limited to {largest:,} bytes (ulimit -f); Ray's object store needs {OBJECT_STORE_BYTES:,}"
        return f"{text}: run ulimit -f unlimited"
    required = _REST_THREADS + num_workers * _WORKER_THREADS
    groups = cgroup_values("pids", ("pids.max", "pids.current"))
    rooms = [(limit - taken, f"the limit of {limit} (pids.max of {folder})") for folder, (limit, taken) in groups]
    if most >= 0 and os.geteuid() != 0:  # the limit does not apply to root
        each = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
        mine = sum(info["num_threads"] or 0 for info in each if info["uids"] and info["uids"].real == os.getuid())
        rooms.append((most - mine, f"the limit of {most} (ulimit -u)"))
    room, limit = min(rooms, default=(required, ""))
    if room >= required:
        return ""
    text = f"{limit} leaves room for {max(0, room)} processes and threads, but a run starts about {required}"
    return f"{text}: raise it, or end other programs of this user"


def current_folder() -> Path:
    """Return the current folder as the shell's path (PWD), with its links unresolved."""
    logical = Path(os.environ.get("PWD", "."))
    return logical if logical.is_absolute() and logical.is_dir() and logical.samefile(".") else Path.cwd()


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    absolute = folder.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.exists())


def _is_quiet(session: Path) -> bool:
    """Return whether a session was idle for an hour; its processes may be invisible, in another container."""
    with contextlib.suppress(FileNotFoundError):  # a file was removed: the session is in use, or being removed
        return time.time() - max(file.lstat().st_mtime for file in (session, *session.glob("logs/*"))) > _QUIET_S
    return False


def is_reachable(address: str, limit_s: float = CONNECT_S) -> bool:
    """Return whether HOST:PORT accepts a connection within `limit_s`."""
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((address_of(host, limit_s), int(port)), timeout=limit_s)):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def bind_error(host: str, port: int) -> str:
    """Return why HOST:PORT cannot be bound; "" if it can be bound."""
    try:
        address = address_of(host)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error) or "the lookup of its name timed out"
    return ""


def has_wandb_login(environment: Mapping[str, str] = os.environ, home: Callable[[], Path] = Path.home) -> bool:
    """Return whether wandb would find a login for its server; the login is not verified."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = Path(environment.get("WANDB_CONFIG_DIR") or home() / ".config" / "wandb") / "settings"
    for file in (settings, Path("wandb/settings"), Path(".wandb/settings")):
        with contextlib.suppress(OSError, ValueError):
            if "api_key" in file.read_text(encoding="utf-8"):
                return True
    host = urlsplit(environment.get("WANDB_BASE_URL", WANDB_HOST)).hostname or ""
    for file in [Path(given)] if (given := environment.get("NETRC")) else [home() / ".netrc", home() / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(file.expanduser())).authenticators(host) is not None:
                return True
    return False
