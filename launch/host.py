"""This machine as runs use it: modes and places of files, processes of runs, limits, and addresses that answer."""

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

from common.process import address_of, group_figures
from launch.errors import ConfigError, hiding_module

OBJECT_STORE_BYTES = 80 * 2**20
"""Only control passes through Ray, so its object store stays near the smallest that it accepts."""
_REST_THREADS, _WORKER_THREADS = 240, 65
"""Of Ray, the services and the command; and of an engine or a stage: as measured with two cores, where 370 ran."""
CONNECT_S = 3.0
_QUIET_S = 3600.0
WANDB_HOST = "https://api.wandb.ai"
NO_WANDB_LOGIN = (
    "tracking.wandb = 'online' needs a login of Weights & Biases, and there is none: run 'wandb login', set "
    "WANDB_API_KEY, or use tracking.wandb = 'offline' and 'wandb sync' later"
)
OWNER_ONLY = 0o077  # umask of a run
_ROLE_LOG = re.compile(r"(buffer|weights|ranker|stage|actor)\.\d+\.log")


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files that are written within a block readable by their owner alone."""
    earlier = os.umask(OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(earlier)


def configure_logging(file: Path | None = None) -> None:
    """Send this process's log records to a file, or to its standard error."""
    # else each line that a full disk refuses prints a traceback
    logging.raiseExceptions = False
    handler = logging.FileHandler(file) if file is not None else logging.StreamHandler(sys.stderr)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler], force=True
    )


class FoundProcess(NamedTuple):
    """A process that writes into the log of a role."""

    run: Path
    """The folder of its run, as the system names it."""
    name: str
    process: psutil.Process


def role_processes() -> Iterator[FoundProcess]:
    """Yield the role processes of all runs on this machine that this user can see.

    Leaves out this command and its parents: the output of a shell may be a log too.
    """
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:  # it has exited, or is another user's
            continue
        if output.parent.name == "logs" and _ROLE_LOG.fullmatch(output.name) and process.pid not in mine:
            yield FoundProcess(output.parent.parent, output.stem, process)


def ourselves(*arguments: str, first: str = "pass") -> list[str]:
    """Return the command line of this `leeway`, independent of the current folder and of what is installed.

    `first` is Python that its process runs before all else.
    """
    begin = "import sys; sys.path.insert(0, sys.argv[1]); from launch.cli import main; sys.exit(main(sys.argv[2:]))"
    code = f"{first}; {begin}"
    return [sys.executable, "-P", "-c", code, str(Path(__file__).parents[1]), *arguments]


def check_folder() -> None:
    """Raise ConfigError if a file hides a module: Ray's workers import from the folder of the command first."""
    if hidden := hiding_module(os.getcwd()):
        raise ConfigError(hidden)


def sessions_folder() -> Path:
    """Return the folder of Ray's sessions, in one of this user: Ray opens its own folders to all users.

    It is near the root, because a socket's path is limited and names in it are long; RAY_TMPDIR moves it.
    """
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / f"leeway-{os.geteuid()}-ray" / "r"


def make_sessions_folder() -> Path:
    """Create that folder and remove sessions of killed commands from it; OSError if it is not this user's alone."""
    folder = sessions_folder()
    _make_private(folder.parent)
    for session in folder.glob("session_*_*"):  # Ray puts the process that starts it last
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
                f"{folder} is not a folder of this user alone, and Ray's sockets would lie in it: remove it, or set "
                "RAY_TMPDIR"
            ) from None


def settle_home(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have libraries write to a spare folder of this user if there is no home folder, or it cannot be written.

    ConfigError if neither can be written.
    """
    home, spare = os.path.expanduser("~"), sessions_folder().parents[1] / f"leeway-{os.geteuid()}-home"
    environment.setdefault("HOME", home)
    if not environment.get("LOGNAME"):  # a container may not know this user
        environment.setdefault("USER", f"user-{os.geteuid()}")
    is_there = os.path.isabs(home) and os.path.isdir(home)
    parts = [nearest_existing(Path(home, part)) for part in (".cache", ".config", ".ray")]
    if is_there and all(os.access(part, os.W_OK) for part in parts):
        return
    try:
        _make_private(spare)
    except OSError as error:
        raise ConfigError(
            f"the home folder {home} cannot be written, nor can {spare} ({error.strerror or error}): set HOME to a "
            "folder that can be written"
        ) from None
    if not is_there:
        environment["HOME"] = str(spare)
        return
    if os.path.isdir(models := f"{environment.get('XDG_CACHE_HOME', f'{home}/.cache')}/huggingface"):
        environment.setdefault("HF_HOME", models)  # they can be read
    if not os.path.isfile(environment.get("RAY_AUTH_TOKEN_PATH", f"{home}/.ray/auth_token")):
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"):
        environment.setdefault(name, str(spare))


def low_limits(num_workers: int = 2) -> str:
    """Return the limit that a run with this number of engines and stages would exceed, and the fix; else ""."""
    largest, most = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC))
    if 0 <= largest < OBJECT_STORE_BYTES:
        what = f"a file may have {largest:,} bytes (ulimit -f), and Ray's object store has {OBJECT_STORE_BYTES:,}"
        return f"{what}: ulimit -f unlimited"
    wanted = _REST_THREADS + num_workers * _WORKER_THREADS
    groups = group_figures("pids", ("pids.max", "pids.current"))
    rooms = [(limit - taken, f"the limit of {limit} (pids.max of {folder})") for folder, (limit, taken) in groups]
    if most >= 0 and os.geteuid() != 0:  # root is not held to it
        each = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
        mine = sum(info["num_threads"] or 0 for info in each if info["uids"] and info["uids"].real == os.getuid())
        rooms.append((most - mine, f"the limit of {most} (ulimit -u)"))
    room, limit = min(rooms, default=(wanted, ""))
    if room >= wanted:
        return ""
    what = f"{limit} leaves room for {max(0, room)} processes and threads, and a run starts about {wanted}"
    return f"{what}: raise it, or end other programs of this user"


def current_folder() -> Path:
    """Return the current folder by the path that the shell has for it."""
    named = Path(os.environ.get("PWD", "."))
    return named if named.is_absolute() and named.is_dir() and named.samefile(".") else Path.cwd()


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest of its parents that exists."""
    found = folder.absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def _is_quiet(session: Path) -> bool:
    """Return whether nothing was written there for an hour: containers may share it without seeing other processes."""
    with contextlib.suppress(FileNotFoundError):  # another command removes it, or its process writes
        return time.time() - max(file.lstat().st_mtime for file in (session, *session.glob("logs/*"))) > _QUIET_S
    return False


def answers(address: str, limit_s: float = CONNECT_S) -> bool:
    """Return whether HOST:PORT accepts a connection in this time."""
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((address_of(host, limit_s), int(port)), timeout=limit_s)):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def cannot_bind(host: str, port: int) -> str:
    """Return why nothing can listen there now, or ""."""
    try:
        address = address_of(host)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error) or "its name is not looked up in time"
    return ""


def has_wandb_login(environment: Mapping[str, str] = os.environ, home: Callable[[], Path] = Path.home) -> bool:
    """Return whether wandb would find a login for its server; it is not verified."""
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
