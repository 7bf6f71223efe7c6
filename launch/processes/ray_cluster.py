"""Start, join and shut down Ray, and monitor Ray's own processes, whose death Ray rarely reports."""

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
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from leeway.common.process import usable_cpus
from leeway.launch.config import Config
from leeway.launch.errors import END_SIGNALS, Stopped
from leeway.launch.host import OBJECT_STORE_BYTES, make_sessions_folder, sessions_folder
from leeway.launch.pools import resource_of
from leeway.launch.processes.role_process import RunFailed

RAY_SHUTDOWN_GRACE_S = 3.0
"""Seconds that Ray's own processes have to exit after the shutdown of Ray, before they are killed."""


def start_ray(config: Config, namespace: str) -> RayWatch:
    """Start a local Ray, or join the cluster at launch.ray_address; raise RunFailed on failure, Stopped on SIGTERM."""
    global _session, _sessions_before
    address = config.launch.ray_address
    _session, _sessions_before = None, frozenset(_sessions())
    # without a cluster, False makes Ray's servers listen on loopback only, not on every interface
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = address is not None
    try:
        with _preserve_signals(END_SIGNALS if address is None else frozenset()):
            ray.init(
                address=address or "local",  # without an address, Ray would look for a cluster in the environment
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                **({} if address else _local_options(config)),
            )
    except SystemExit as error:  # raised by Ray's own SIGTERM handler if another thread received the signal
        raise Stopped from error
    except Exception as error:  # Ray raises a bare Exception if a node starts too slowly on a busy machine
        where = f"no Ray cluster answers at launch.ray_address = '{address}'" if address else "Ray failed to start"
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "Check that the head node is up" if address else "If the machine is busy, retry when its load is lower"
        raise RunFailed(f"{where}: {why}. {hint}") from error
    node = ray._private.worker._global_node
    if address is None:
        _session = Path(node.get_session_dir_path())
    logs = Path(node.get_logs_dir_path())
    return RayWatch(ray.get_runtime_context().gcs_address, logs)


def _local_options(config: Config) -> dict[str, Any]:
    """Return the options of a local Ray with the resources of every pool, without monitors and dashboard."""
    node = ray._private.node.Node
    node.start_monitor = node.start_log_monitor = node.start_api_server = lambda *_, **__: None
    ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("unused")  # the agent needs no web server
    return {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "num_cpus": usable_cpus(),
        "resources": dict.fromkeys(map(resource_of, config.pools), 1.0),
        "_temp_dir": str(make_sessions_folder()),
    }


@contextlib.contextmanager
def _preserve_signals(blocked: frozenset[signal.Signals]) -> Iterator[None]:
    """Block the signals in `blocked` while Ray starts; then restore the signal mask and handlers of this process.

    Ray replaces the SIGTERM handler, and its processes inherit the mask. `timeout`, systemd and Slurm signal every
    process of a job. Without the mask, Ray's processes would exit before the launcher can write a checkpoint.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_ray() -> None:
    """Shut down the Ray that `start_ray` started on this machine, and remove its session folder.

    Kill Ray's agents too, because they would run for another minute or two after a failed start.
    """
    family = [child for child in psutil.Process().children(recursive=True) if _is_of_ray(child)]
    if (node := ray._private.worker._global_node) is not None:
        kill = node.kill_all_processes
        # by default, Ray waits 1 s for each process to handle SIGTERM, but these processes block SIGTERM
        node.kill_all_processes = lambda **how: kill(**how | {"allow_graceful": False})
    ray.shutdown()
    _, alive = psutil.wait_procs(family, timeout=RAY_SHUTDOWN_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for session in set(_sessions()) - _sessions_before if _session is None else {_session}:
        shutil.rmtree(session, ignore_errors=True)


_session: Path | None = None
"""Session folder of the Ray that this process started; None if Ray did not start, or if the run joined a cluster."""
_sessions_before: frozenset[Path] = frozenset()
"""Session folders that existed before Ray started; they may belong to a process with our pid in another container."""


def _sessions() -> Iterable[Path]:
    return sessions_folder().glob(f"session_*_{os.getpid()}")


_abandoned = False


def abandon_ray(watch: RayWatch) -> None:
    """Kill every local process of Ray without a call to Ray, which would never return."""
    global _abandoned
    _abandoned = True
    watch.end_all()
    watch.close()


def exit_if_abandoned(status: int) -> None:
    """If Ray was abandoned, print the current exception and exit without Ray's hooks, which wait for dead processes."""
    if _abandoned:
        if sys.exception() is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_NAMES = {"gcs_server": "the Ray GCS", "raylet": "the Ray node manager"}
_CONNECT_S = 2.0
_POLL_S = 5.0
_SHUTDOWN_GRACE_S = 5.0
_GCS_TIMEOUT_S = 45.0
"""Seconds without a connection after which Ray's control service (GCS) counts as dead."""


def _ticks_at_start(pid: int) -> str:
    """Return the start time of a process in ticks since boot; '' if no process has this pid."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _reap(done: str, grace_s: float) -> None:
    """Kill the Ray processes of a killed launcher. This function runs in its own process until the launcher exits.

    Each line of stdin lists the processes as PID:TICKS; the start time in ticks detects a reused pid. If stdin ends
    without the line `done`, the launcher was killed. Processes that still run after `grace_s` are then killed.
    """
    import os, signal, sys, time  # noqa: E401, I001 -- the process runs only this source code, to save memory

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the signals are for the launcher; this process waits for its exit
    named: list[str] = []
    for line in sys.stdin:
        if line.strip() == done:
            return
        named = line.split()
    time.sleep(grace_s)
    for each in named:
        pid, _, start = each.partition(":")
        if start and _ticks_at_start(int(pid)) == start:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


_DONE = "done"
_REAP_GRACE_S = 5.0
"""Seconds in which Ray's workers exit on their own, before all processes are killed; Ray's agents would need 90 s."""
_REAPER = f"{inspect.getsource(_ticks_at_start)}\n{inspect.getsource(_reap)}\n_reap({_DONE!r}, {_REAP_GRACE_S})"


class RayWatch:
    """Monitors Ray's own processes on this machine, and the connection to the GCS."""

    def __init__(self, address: str, logs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Monitor a running Ray. `address` is HOST:PORT of its control service (GCS), `logs` the folder of its logs."""
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._logs = logs
        self._clock = clock
        self._family = _family()
        programs = ((Path((_command(child) or [""])[0]).name, child) for child in self._family)
        self._servers = [(name, child) for name, child in programs if name in _NAMES]
        self._reached_s = self._polled_s = clock()
        self.is_dead = False
        """Whether Ray is dead; a call to a dead Ray never returns."""
        self._reaper = subprocess.Popen(
            # -S saves the memory of site-packages; -E and -P ignore modules of the environment and the current folder
            [sys.executable, "-S", "-E", "-P", "-c", _REAPER],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._send_family()

    def check(self) -> None:
        """Raise RunFailed if one of Ray's own processes died, or if the GCS is unreachable for `_GCS_TIMEOUT_S`."""
        for name, process in self._servers:
            if not _lives(process):
                self.is_dead = True
                raise RunFailed(
                    f"{_NAMES[name]} ({name}, pid {process.pid}) died, and the run cannot continue without it; see "
                    f"{self._logs}/{name}.out and {name}.err"
                )
        now = self._clock()
        if now - self._polled_s >= _POLL_S:
            self._polled_s = now
            self._family = _family()
            self._send_family()
            self._check_gcs(now)

    def end_all(self) -> None:
        """Kill every process of Ray on this host; Ray's processes on other hosts exit when the connection is lost."""
        self._family = [*self._family, *_family()]
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._family, timeout=_SHUTDOWN_GRACE_S)

    def close(self) -> None:
        """Stop the process that runs `_reap`, after Ray was shut down. Idempotent."""
        if self._reaper.stdin is not None and not self._reaper.stdin.closed:
            self._send(_DONE)
            with contextlib.suppress(BrokenPipeError):  # `close` retries the failed write
                self._reaper.stdin.close()
            self._reaper.wait(_SHUTDOWN_GRACE_S)

    def _send_family(self) -> None:
        self._send(" ".join(f"{each.pid}:{_ticks_at_start(each.pid)}" for each in self._family))

    def _send(self, line: str) -> None:
        """Send a line to the process that kills Ray's processes if this process is killed."""
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the receiver was killed; the run continues without it
            self._reaper.stdin.write(line + "\n")
            self._reaper.stdin.flush()

    def _check_gcs(self, now: float) -> None:
        try:
            socket.create_connection(self._address, timeout=_CONNECT_S).close()
            self._reached_s = now
        except OSError as error:
            host, port = self._address
            if now - self._reached_s > _GCS_TIMEOUT_S:
                self.is_dead = True
                raise RunFailed(
                    f"the Ray GCS at {host}:{port} has been unreachable for {now - self._reached_s:.0f} s ({error}): "
                    "check that the head node is up with `launch/cluster.sh status`"
                ) from error


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _family() -> list[psutil.Process]:
    """Return Ray's own child processes and all their descendants: the roles and their engines."""
    family = [child for child in psutil.Process().children() if _is_of_ray(child)]
    for child in tuple(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            family += child.children(recursive=True)
    return family


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_of_ray(process: psutil.Process) -> bool:
    """Return whether a process is one of Ray's own processes or a Ray worker."""
    command = _command(process)
    # only an argument that starts with / is a program. Other arguments may contain Ray's folder too: Ray adds it to the
    # search path, and multiprocessing passes the search path to its server process as code
    programs = [each for each in command if each.startswith("/") and "site-packages/ray/" in each]
    return bool(programs) or (bool(command) and command[0].startswith("ray::"))
