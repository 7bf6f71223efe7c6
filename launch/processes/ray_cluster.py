"""The Ray of a run: started here or joined, watched, since it reports little of its own processes' death, and ended."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from common.process import usable_cpus
from launch.config import Config
from launch.errors import END_SIGNALS, Stopped
from launch.host import OBJECT_STORE_BYTES, make_sessions_folder, sessions_folder
from launch.pools import resource_of
from launch.processes.role_process import RunFailed

RAY_GOODBYE_S = 3.0
"""Grace period of Ray's own processes after its shutdown."""


def start_ray(config: Config, namespace: str) -> RayWatch:
    """Start Ray here, or join launch.ray_address; RunFailed if that does not work, Stopped at a SIGTERM meanwhile."""
    global _session, _sessions_before
    address = config.launch.ray_address
    _session, _sessions_before = None, frozenset(_sessions())
    # where no other host is to reach them, Ray's own servers listen on loopback alone, and not on every interface
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = address is not None
    try:
        with _our_signals(END_SIGNALS if address is None else frozenset()):
            ray.init(
                address=address or "local",  # unset, Ray would look for a cluster in the environment
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                **({} if address else _of_this_machine(config)),
            )
    except SystemExit as error:  # of Ray's own handler of SIGTERM: another thread than this one heard the signal
        raise Stopped from error
    except Exception as error:  # a node that is late on a busy machine is a bare Exception of Ray's
        where = f"no Ray cluster answers at launch.ray_address = '{address}'" if address else "Ray does not start here"
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "" if address else ". Where the machine is busy, start the run again once it is less so"
        raise RunFailed(f"{where}: {why}{hint}") from error
    node = ray._private.worker._global_node
    if address is None:
        _session = Path(node.get_session_dir_path())
    logs = Path(node.get_logs_dir_path())
    return RayWatch(ray.get_runtime_context().gcs_address, logs)


def _of_this_machine(config: Config) -> dict[str, Any]:
    """Return how Ray is started here: the machine is a host of every pool."""
    return {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "num_cpus": usable_cpus(),
        "resources": dict.fromkeys(map(resource_of, config.pools), 1.0),
        "_temp_dir": str(make_sessions_folder()),
    }


@contextlib.contextmanager
def _our_signals(deaf_to: frozenset[signal.Signals]) -> Iterator[None]:
    """Keep our handlers of signals while Ray starts; its processes and all below them ignore `deaf_to`.

    Ray's own handler of SIGTERM ends this process. `timeout`, systemd and Slurm signal every process of a job: without
    the mask, which is inherited, Ray would be half dead before the command could write a checkpoint.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_ray() -> None:
    """End what `start_ray` started here, and remove its session.

    If it failed to start, Ray leaves agents behind that go on for a minute or two.
    """
    family = [child for child in psutil.Process().children(recursive=True) if _is_of_ray(child)]
    if (node := ray._private.worker._global_node) is not None:
        kill = node.kill_all_processes
        # else each in turn gets a second to hear the SIGTERM that it is deaf to
        node.kill_all_processes = lambda **how: kill(**how | {"allow_graceful": False})
    ray.shutdown()
    _, alive = psutil.wait_procs(family, timeout=RAY_GOODBYE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for session in set(_sessions()) - _sessions_before if _session is None else {_session}:
        shutil.rmtree(session, ignore_errors=True)


_session: Path | None = None
"""Of the Ray that was started here; None if it did not start, or is a cluster's."""
_sessions_before: frozenset[Path] = frozenset()
"""Those of processes with our number in other containers, which may share the folder."""


def _sessions() -> Iterable[Path]:
    return sessions_folder().glob(f"session_*_{os.getpid()}")


_abandoned = False


def abandon_ray(watch: RayWatch) -> None:
    """End every process of Ray's here without asking Ray, whose own processes are dead."""
    global _abandoned
    _abandoned = True
    watch.end_all()
    watch.close()


def was_abandoned() -> bool:
    return _abandoned


def leave(status: int) -> None:
    """End this process now if Ray was abandoned: its hooks at exit wait for what is dead."""
    if _abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_NAMES = {"gcs_server": "Ray's control store", "raylet": "Ray's node manager"}
_CONNECT_S = 2.0
_LOOK_EVERY_S = 5.0
_GOODBYE_S = 5.0
_GONE_S = 45.0
"""A control store on another machine that takes no connection for so long is gone."""


def _ticks_at_start(pid: int) -> str:
    """Return when a process was started, in ticks since boot; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _reap(done: str, patience_s: float) -> None:
    """Kill what a killed command leaves behind: run beside the command until that ends, in a process of its own.

    A line of its input names the processes, each as PID:TICKS, so that a reused number is not taken for it. If the
    input ends without the line `done`, the command was killed, and what is left of them after a while is killed too.
    """
    import os, signal, sys, time  # noqa: E401, I001 -- the process has this source alone, and little memory

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the command, whose end is what counts
    named: list[str] = []
    for line in sys.stdin:
        if line.strip() == done:
            return
        named = line.split()
    time.sleep(patience_s)
    for each in named:
        pid, _, start = each.partition(":")
        if start and _ticks_at_start(int(pid)) == start:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


_DONE = "done"
_PATIENCE_S = 5.0
"""Ray's workers end by themselves when their command does; its agents take a minute and a half."""
_REAPER = f"{inspect.getsource(_ticks_at_start)}\n{inspect.getsource(_reap)}\n_reap({_DONE!r}, {_PATIENCE_S})"


class RayWatch:
    """Watches what a run of this machine stands on."""

    def __init__(self, address: str, logs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Ray is up, with its control store at HOST:PORT, and its own processes log to `logs`."""
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._logs = logs
        self._clock = clock
        self._family = _family()
        self._rays_own = [(name, child) for child in self._family if (name := _name(child)) is not None]
        self._reached_s = self._looked_s = clock()
        self.is_dead = False
        """Calls to Ray would never return."""
        self._reaper = subprocess.Popen(
            # without packages, for they take memory, and without the modules of the current folder
            [sys.executable, "-S", "-E", "-P", "-c", _REAPER],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._name_family()

    def check(self) -> None:
        """RunFailed if a process of Ray's is gone; takes no time if all is well."""
        for name, process in self._rays_own:
            if not _lives(process):
                self.is_dead = True
                raise RunFailed(
                    f"{_NAMES[name]} ({name}, process {process.pid}) died, and the run cannot go on without it; see "
                    f"{self._logs}/{name}.out and {name}.err"
                )
        now = self._clock()
        if now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            self._family = _family()
            self._name_family()
            self._reach(now)

    def end_all(self) -> None:
        """Kill every process that Ray had started here; those elsewhere end because they miss it."""
        self._family = [*self._family, *_family()]
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._family, timeout=_GOODBYE_S)

    def close(self) -> None:
        """End the reaper once Ray was ended. Idempotent."""
        if self._reaper.stdin is not None and not self._reaper.stdin.closed:
            self._tell(_DONE)
            with contextlib.suppress(BrokenPipeError):  # closing writes once more what could not be written
                self._reaper.stdin.close()
            self._reaper.wait(_GOODBYE_S)

    def _name_family(self) -> None:
        self._tell(" ".join(f"{each.pid}:{_ticks_at_start(each.pid)}" for each in self._family))

    def _tell(self, line: str) -> None:
        """Send a line to the reaper, which ends the family if this process is killed."""
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed itself; the run goes on without one
            self._reaper.stdin.write(line + "\n")
            self._reaper.stdin.flush()

    def _reach(self, now: float) -> None:
        try:
            socket.create_connection(self._address, timeout=_CONNECT_S).close()
            self._reached_s = now
        except OSError as error:
            host, port = self._address
            if now - self._reached_s > _GONE_S:
                self.is_dead = True
                raise RunFailed(
                    f"Ray's control store at {host}:{port} takes no connection for {now - self._reached_s:.0f} s "
                    f"({error}): check that the head is up with `launch/cluster.sh status`"
                ) from error


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _name(process: psutil.Process) -> str | None:
    program = Path((_command(process) or [""])[0]).name
    return program if program in _NAMES else None


def _family() -> list[psutil.Process]:
    """Return Ray's own processes below this one, and all below them: the roles and their engines."""
    own = [child for child in psutil.Process().children() if _is_of_ray(child)]
    return [*own, *(below for child in own for below in _below(child))]


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _is_of_ray(process: psutil.Process) -> bool:
    """Return whether it is one of Ray's own, or a worker of it."""
    command = _command(process)
    # an argument that begins with the folder names a program; in a text of code it is but the search path, into which
    # Ray puts a folder of its own, and which multiprocessing hands to its server
    programs = [each for each in command if each.startswith("/") and "site-packages/ray/" in each]
    return bool(programs) or (bool(command) and command[0].startswith("ray::"))
