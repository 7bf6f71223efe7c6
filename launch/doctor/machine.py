"""What this machine has, beside what a run takes of it, and which processes dead runs left on it.

Finding  what one check has found
examine  all checks side by side, each with its limit of time
show     the table
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from common.process import memory_left, usable_cpus
from launch.errors import ConfigError, hiding_module
from launch.host import OBJECT_STORE_BYTES, low_limits, nearest_existing, role_processes
from launch.observe.status import why_nobody_works
from launch.run_folder import RunFolder, check_writable
from launch.text import GIB, gib

if TYPE_CHECKING:  # with torch and the other libraries, each of which may be broken
    from launch.config import Config
    from launch.gpus import Gpu
    from launch.plans import MachineNeeds, Need

State = Literal["ok", "warning", "problem"]
LIMIT_S = 28.0
"""Of all checks together, where none is known to take longer."""
BUSY = 2.0
"""Processes that want to run, per core."""
_STYLE = {"ok": "green", "warning": "yellow", "problem": "red"}
OPEN_FILES = 4096
"""Ray, the services and the engines of a small run take a few hundred; a large one has thousands of connections."""
IDLE_BYTES = GIB
"""Of a GPU, which its driver and a desktop may take."""
SLOW_FSYNC_S = 0.02
NUM_SYNCS = 15
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "afs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.rclone", "fuse.juicefs", "fuse.blobfuse2"),
)
"""File systems on which a lock or a memory map may not mean what LMDB takes it to mean."""
_ON_NETWORK = ": LMDB's memory map and locks are only trustworthy on a disk of this machine"
_IN_MEMORY = ", in memory, and is gone after a reboot"
_RISKS = {
    **dict.fromkeys(NETWORK, (_ON_NETWORK, "put the runs on a local disk: --run.dir FOLDER")),
    **dict.fromkeys(("tmpfs", "ramfs"), (_IN_MEMORY, "--run.dir FOLDER on a disk")),
    "overlay": (
        ", a container's own layer, which is gone when the container is removed",
        "mount a volume and give it as --run.dir FOLDER",
    ),
}


# --- what a check finds ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    state: State
    found: str
    remedy: str = ""
    """What to do; '' where it is in order."""


Check = Callable[[], Sequence[Finding]]


def ok(name: str, found: str) -> list[Finding]:
    return [Finding(name, "ok", found)]


def warning(name: str, found: str, remedy: str) -> list[Finding]:
    """A run may go well, or be slow, or lose something."""
    return [Finding(name, "warning", found, remedy)]


def problem(name: str, found: str, remedy: str) -> list[Finding]:
    return [Finding(name, "problem", found, remedy)]


def late(name: str, found: str, remedy: str) -> list[Finding]:
    """A check that is not done in time: a problem, but a warning where others kept the cores busy."""
    load = os.getloadavg()[0] / usable_cpus()
    return (warning if load > BUSY else problem)(name, f"{found}, at {load:.0f} busy processes per core", remedy)


def examine(checks: Sequence[tuple[str, Check]], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Run all named checks at once, each in a process of its own, and yield what they find, in their order.

    One that raises or crashes is a problem of its name, and so is one that is `late`: not done within `limit_s` of all
    together.
    """
    deadline = time.monotonic() + limit_s
    for name, (pid, answer) in [(name, _fork(name, check)) for name, check in checks]:
        told = b""
        while select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if part := os.read(answer, 65536):
                told += part
                continue
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            how = f"the check's process ended with status {status}"  # negative: the number of a signal
            crashed = problem(name, how, "make install repairs a library; else remove .venv first")
            yield from crashed if status else [Finding(**each) for each in json.loads(told)]
            break
        else:
            os.kill(pid, signal.SIGKILL)  # not awaited: what hangs in the kernel outlives even that
            hangs = "something that it looks at hangs, such as a network file system or a broken GPU driver"
            yield from late(name, f"no answer within {limit_s:g} s", f"{hangs}; or look again when fewer programs run")
        os.close(answer)


def _fork(name: str, check: Check) -> tuple[int, int]:
    """Begin a check, and return its process and where it answers."""
    answer, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, answer
    status = 1
    try:
        for stream in (1, 2):  # a library that dies may say a page
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            found = check()
        except Exception as error:  # a check that fails is a result too
            text = str(error).splitlines()[0] if str(error) else "no reason given"
            found = problem(name, f"could not be looked at: {type(error).__name__}: {text}", "see to that first")
        with os.fdopen(writing, "w") as out:
            json.dump([asdict(each) for each in found], out)
        status = 0
    finally:
        os._exit(status)


def show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", pad_edge=False, box=None)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        what = Text(finding.found)
        if finding.remedy:
            what.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(finding.name, no_wrap=True), Text(finding.state, _STYLE[finding.state], no_wrap=True), what)
    Console(highlight=False, markup=False).print(table)
    counts = Counter(finding.state for finding in findings)
    print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} in order")


# --- what the machine has -------------------------------------------------------------------------


def check_disk(runs: Path, needs: MachineNeeds | None) -> list[Finding]:
    """Can the folder of the runs be written, is it on a disk that LMDB can trust, fast enough and large enough?"""
    try:
        check_writable(runs, "run.dir")
    except ConfigError as error:
        return problem("runs", str(error), "give another place as --run.dir FOLDER")
    folder = nearest_existing(runs)
    free_bytes = shutil.disk_usage(folder).free
    found = f"{gib(free_bytes)} free in {folder}"
    if needs is not None:
        remedy = "free some space, give another --run.dir, or lower buffer.capacity_gib or learner.keep_checkpoints"
        room = _compare("disk", free_bytes, found, needs.disk, remedy)
    elif free_bytes < 2 * GIB:
        remedy = "the demo writes 0.1 GiB, a model of 1 B parameters 50 GiB; free some space"
        room = warning("disk", found, remedy)
    else:
        room = ok("disk", found)
    return [*_check_file_system(folder, file_system_of(folder)), *_check_sync(folder), *room]


def check_memory(needs: MachineNeeds | None) -> list[Finding]:
    """Is there room for the engines and the stages?"""
    available = min(psutil.virtual_memory().available, memory_left())
    found = f"{gib(available)} available"
    if needs is not None:
        remedy = "lower actors.num_actors, actors.kv_cache_gib or learner.num_stages; or spread the run over hosts"
        return _compare("memory", available, found, needs.memory, remedy)
    if available < 4 * GIB:
        return warning("memory", found, "the demo takes 4 GiB; end other programs")
    return ok("memory", found)


def _compare(name: str, has_bytes: int, has: str, need: Need, remedy: str) -> list[Finding]:
    run = f"the run takes about {gib(need.size_bytes)}: {need.parts}"
    return problem(name, f"{has}, and {run}", remedy) if has_bytes < need.size_bytes else ok(name, f"{has}; {run}")


def _check_file_system(folder: Path, kind: str) -> list[Finding]:
    risk, remedy = _RISKS.get(kind, ("", ""))
    found = f"{folder} lies on {kind}{risk}"
    return warning("file system", found, remedy) if risk else ok("file system", found)


def _check_sync(folder: Path) -> list[Finding]:
    try:
        took_s = sync_s(folder)
    except OSError as error:
        why = f"a file in {folder} cannot be written and synced ({error.strerror})"
        return problem("fsync", why, "free some space")
    if took_s <= SLOW_FSYNC_S:
        return ok("fsync", f"{1000 * took_s:.2f} ms in {folder}")
    return warning(
        "fsync",
        f"{1000 * took_s:.1f} ms in {folder}: every commit of the buffer waits for one",
        "use a faster disk; or buffer.durability = 'interval', which survives kill -9 but no power cut",
    )


def check_shm(needs: MachineNeeds | None, shm: Path = Path("/dev/shm")) -> list[Finding]:
    """Ray's object store lies there, weights that came over the network, and what processes on GPUs send each other."""
    if not shm.is_dir():
        return warning("/dev/shm", "is not there: Ray uses the disk instead", "mount a tmpfs there")
    free = shutil.disk_usage(shm).free
    wanted = OBJECT_STORE_BYTES + (needs.staging_bytes if needs is not None else 0)
    if needs is not None and free < needs.queues_bytes:
        return problem(
            "/dev/shm",
            f"{free / 2**20:.0f} MiB free, and up to {needs.queues_bytes / 2**20:.0f} MiB are wanted for the queues "
            "between the processes of an engine and NCCL's between stages, which can lie nowhere else",
            "in a container, --shm-size 8g or --ipc=host",
        )
    if free < wanted:
        return warning(
            "/dev/shm",
            f"{free / 2**20:.0f} MiB free, and {wanted / 2**20:.0f} MiB are wanted for Ray's object store and weights "
            "that come over the network: those go to the temporary folder instead",
            "in a container, --shm-size 8g; or set weight_sync.staging_dir",
        )
    return ok("/dev/shm", f"{free / GIB:.1f} GiB free, {wanted / GIB:.1f} GiB wanted")


def check_open_files() -> list[Finding]:
    """How many files and connections may a process have?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        return warning("open files", f"{soft} at most (hard limit {hard})", f"ulimit -n {max(65536, OPEN_FILES)}")
    return ok("open files", "no limit" if soft < 0 else f"{soft} at most")


def check_limits() -> list[Finding]:
    """Return whether the limits on processes and on the size of a file leave room for a run."""
    low = low_limits()
    return problem("limits", *low.rsplit(": ", 1)) if low else ok("limits", "of processes and files leave room")


def check_modules() -> list[Finding]:
    """Return a problem if a file of the user's hides a library."""
    hidden = hiding_module(os.getcwd())
    return problem("modules", *hidden.rsplit(": ", 1)) if hidden else []


def file_system_of(folder: Path) -> str:
    """The kind of file system that a folder lies on, as the kernel names it."""
    path = folder.resolve()
    mounts = [(Path(each.mountpoint), each.fstype) for each in psutil.disk_partitions(all=True)]
    above = [(len(mount.parts), kind) for mount, kind in mounts if path.is_relative_to(mount)]
    return max(above, default=(0, "unknown"), key=lambda each: each[0])[1]


def sync_s(folder: Path) -> float:
    """Median seconds to write a page and have it on disk, leaving nothing behind."""
    took = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(NUM_SYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - started)
    return statistics.median(took)


# --- GPUs -----------------------------------------------------------------------------------------


def check_gpus(config: Config | None) -> list[Finding]:
    """Is the driver new enough, do the GPUs suit the run and hold it, and who is on them already?"""
    from launch.gpus import gpus_here

    gpus = gpus_here()
    if not gpus:
        return []  # what torch sees is told with the import of vLLM
    return [*_check_driver(gpus[0].driver), *_check_neighbours(gpus), *_check_room(config, gpus)]


def _check_driver(version: str) -> list[Finding]:
    from launch.gpus import MIN_DRIVER

    if version.split(".")[0].isdigit() and int(version.split(".")[0]) < MIN_DRIVER:
        what = f"{version}, and the CUDA 13 wheels of torch and vLLM need {MIN_DRIVER} or newer: torch would see no GPU"
        return problem("driver", what, "install a newer NVIDIA driver on the host; containers have the host's")
    return ok("driver", f"{version}; {MIN_DRIVER} or newer is needed")


def _check_neighbours(gpus: Sequence[Gpu]) -> list[Finding]:
    """Processes that compute there already; but for those of this very look, which imports vLLM meanwhile."""
    from launch.gpus import gpu_processes

    doctor = psutil.Process().parent() or psutil.Process()  # which has a process for each check
    mine = {os.getpid(), doctor.pid, *(child.pid for child in doctor.children(recursive=True))}
    found = []
    there = [each for each in gpu_processes() if each.pid not in mine]
    for gpu in gpus:
        names = [f"{each.name} ({each.pid}, {gib(each.used_bytes)})" for each in there if each.uuid == gpu.uuid]
        if names or gpu.used_bytes > IDLE_BYTES:
            who = ", ".join(names) or "processes that are not seen from here"
            what = f"{gpu}: {gib(gpu.used_bytes)} are taken by {who}"
            found += warning("GPU memory", what, "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
    return found


def _check_room(config: Config | None, gpus: Sequence[Gpu]) -> list[Finding]:
    if config is None or config.launch.ray_address is not None:
        return ok("GPU memory", ", ".join(map(str, gpus)))
    from actors.config import ON_GPU_BYTES
    from launch.gpus import stage_need, too_small, unfit
    from launch.plans import weights_of_engines
    from launch.pools import actor_pools

    if why := unfit(config, gpus):
        return problem("GPU memory", why, "change the config, or the GPU")
    found = []
    need = stage_need(config)
    if need is not None:
        small = too_small(config, need, gpus)
        remedy = "this is the most that it may take; change the config where the first steps end for want of memory"
        found += warning("GPU memory", small, remedy) if small else ok("GPU memory", need.describe())
    weights = weights_of_engines(config)
    for pool in actor_pools(config):
        smallest, kv_cache_gib = min(gpus, key=lambda gpu: gpu.total_bytes), pool.config.kv_cache_gib
        # one that has a GPU alone and was told its bytes takes no heed of a share
        share = 1.0 if kv_cache_gib is not None and pool.config.gpus >= 1 else pool.config.gpu_memory_share
        needed = weights.get(pool.name, 0) + ON_GPU_BYTES + int((kv_cache_gib or 0) * GIB)
        if pool.name in weights and needed >= share * smallest.total_bytes:
            which = "without" if kv_cache_gib is None else "with"
            what = (
                f"an engine of pool '{pool.name}' takes {gib(needed)} {which} attention keys and values, and its "
                f"share is {share:g} of {smallest}"
            )
            remedy = "raise actors.gpu_memory_share or actors.tensor_parallel_size, or lower actors.kv_cache_gib"
            found += problem("GPU memory", what, remedy)
    return found or ok("GPU memory", ", ".join(map(str, gpus)))


# --- what dead runs left --------------------------------------------------------------------------


def check_programs(config: Config | None) -> list[Finding]:
    """Are programs that a model writes cut off from this machine? Only where a reward runs some."""
    found: list[Finding] = []
    if config is None:
        return found
    from actors.sandbox import HINT
    from actors.tasks import TaskError
    from actors.tasks.code import check_code
    from actors.tasks.config import CodeRule

    for name in config.task.rewards:
        rule = config.task.named_rewards.get(name)
        if isinstance(rule, CodeRule):
            try:
                refused = check_code(name, rule)
                found += warning("programs", refused, HINT) if refused else ok("programs", f"{name} isolates them")
            except TaskError as error:
                found += problem("programs", str(error), HINT)
    return found


def check_leftovers() -> list[Finding]:
    """Roles whose command is gone: they hold memory and GPUs. What dead runs left on disk the next run removes."""
    by_run: dict[Path, list[int]] = {}
    for each in role_processes():
        by_run.setdefault(each.run, []).append(each.process.pid)
    found = []
    for root, pids in by_run.items():
        with suppress(OSError):  # somebody else's
            if (root / "run.json").exists() and why_nobody_works(RunFolder(root)):
                what = f"{len(pids)} processes of the run {root} live on, and its command does not"
                found += warning("leftovers", what, f"kill -9 {' '.join(map(str, pids))}")
    return found or ok("leftovers", "no process of a dead run")
