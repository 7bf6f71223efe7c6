"""What a run takes of this machine, what the machine has, and which processes dead runs left on it."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import psutil

from actors.config import ON_GPU_BYTES
from actors.sandbox import HINT
from actors.tasks import TaskError
from actors.tasks.config import CodeRule
from actors.tasks.rules import check_code
from common.hf_folder import EMBEDDING_SUFFIX, HEAD, tensors_in
from launch.config import Config
from launch.doctor.findings import Finding, ok, problem, warning
from launch.errors import ConfigError
from launch.gpus import GIB, MIN_DRIVER, Gpu, gpu_processes, gpus_here, stage_need, too_small, unfit
from launch.host import OBJECT_STORE_BYTES, role_processes
from launch.observe.status import why_nobody_works
from launch.pools import actor_pools, scorer_pools, serving_dtypes, stage_pools
from launch.run_folder import RunFolder, check_writable, nearest_existing

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Measured with the demo (PSS): engine with actor 1.3 GiB, stage 0.4 GiB, the rest 1.0 GiB on one host.
ENGINE_BYTES = int(1.3 * GIB)
"""A vLLM engine and its actor without a model, on CPU; taken for one on a GPU as well."""
STAGE_BYTES = int(0.5 * GIB)
"""A stage without a model: torch and Transformers loaded."""
REST_BYTES = int(1.1 * GIB)
"""Ray, the services and the command."""
TRAINED_BYTES = 16
"""Per parameter: float32 weight, gradient and two moments."""
REFERENCE_BYTES = 4
"""Per parameter of the frozen reference."""
CHECKPOINT_BYTES = 12
"""Per parameter: weight and two moments, in a checkpoint and in the host copy that it is written from."""
HOST_COPIES = 3
"""Of the weights that are published, in each dtype: two, and a third where deltas are made."""
TOKEN_BYTES = 12
"""Of a stored token: id, log-probability, reference log-probability."""
SAMPLE_BYTES = 1536
"""Of a stored sample besides, with its place in the indexes."""
BROADCAST_BYTES = 160 * 2**20
"""What vLLM sends to the workers of an engine of several GPUs: ten messages of its largest."""
ANSWERS_BYTES = 240 * 2**20
"""The same from each of them."""
NCCL_BYTES = 64 * 2**20
"""Of a rank among others on its host, where GPUs do not reach each other directly."""
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


class Need(NamedTuple):
    """Room that a run takes."""

    size_bytes: int
    parts: str
    """What it is made of, in words."""

    @classmethod
    def of(cls, parts: Mapping[str, int]) -> Need:
        """Bytes of each part, by its name."""
        return cls(sum(parts.values()), ", ".join(f"{name} {_gib(size)}" for name, size in parts.items()))


@dataclass(frozen=True)
class MachineNeeds:
    """Rough figures, on the safe side, but that activations are not in them."""

    disk: Need
    memory: Need
    """On this machine, where it is the only one."""
    staging_bytes: int
    """In /dev/shm, for weights that came over the network."""
    queues_bytes: int = 0
    """In /dev/shm, between the processes of an engine of several GPUs, and between stages on GPUs; nowhere else."""

    @classmethod
    def of(cls, config: Config) -> MachineNeeds | None:
        """None where the model is not here yet, so that its size is not known."""
        sizes = _sizes(Path(config.model.path)) if config.model.path is not None else {}
        if not sizes:
            return None
        num_parameters, num_served = sum(sizes.values()), _num_served(sizes)
        learner = config.learner
        num_trained = 2 if config.algorithm.needs.critic == "model" else 1
        served = [_BYTES[dtype] * num_served for dtype in serving_dtypes(config)]
        engines = [(pool, pool.count * pool.config.tensor_parallel_size) for pool in actor_pools(config)]
        on_cpu = sum(
            num * (pool.config.kv_cache_bytes_on_cpu + _BYTES[pool.config.dtype] * num_served)
            for pool, num in engines
            if not pool.config.gpus
        )
        num_stages = learner.num_stages * learner.num_replicas
        stages = num_stages * STAGE_BYTES + HOST_COPIES * sum(served) + _in_stages(config, num_trained) * num_served
        stages += _frozen_bytes(config, num_served)
        disk = {
            "buffer": _buffer_bytes(config),
            "checkpoints": (learner.keep_checkpoints + 1) * CHECKPOINT_BYTES * num_trained * num_parameters,
            "weights": (config.weight_sync.keep_versions + 1) * sum(served) + 4 * num_parameters,
        }
        memory = {
            f"{sum(pool.count for pool, _ in engines)} engines": on_cpu + ENGINE_BYTES * sum(num for _, num in engines),
            f"{num_stages} stages": stages,
            **_of_scorers(config, num_served),
            "the rest": REST_BYTES,
        }
        staging_bytes = 0 if config.weight_sync.transport == "folder" else 3 * max(served, default=0)
        return cls(Need.of(disk), Need.of(memory), staging_bytes, _queues_bytes(config))


def _sizes(folder: Path) -> dict[str, int]:
    """Parameters of each tensor of a model; empty where it is not here."""
    return {name: prod(tensor.shape) for name, tensor in tensors_in(folder).items()}


def _num_served(sizes: Mapping[str, int]) -> int:
    """Parameters, with a head that is the embedding: it is served, and held by the first and the last stage, apart."""
    return sum(sizes.values()) + sum(
        size for name, size in sizes.items() if name.endswith(EMBEDDING_SUFFIX) and HEAD not in sizes
    )


def _in_stages(config: Config, num_trained: int) -> int:
    """Bytes of host memory per parameter that all stages hold together, without what they publish."""
    return config.learner.num_replicas * num_trained * (CHECKPOINT_BYTES + TRAINED_BYTES * _trains_on_cpu(config))


def _trains_on_cpu(config: Config) -> bool:
    learner = config.learner
    pools = [pool.gpus for pool in config.pools.values() if pool.role == "learner" and pool.gpus is not None]
    return learner.device == "cpu" or (learner.device == "auto" and not max([learner.gpus, *pools]))


def _frozen_bytes(config: Config, num_served: int) -> int:
    """Host memory that all stages hold together of the models that score; without any of its own it is the model."""
    kept_in = ("cpu", "none") if _trains_on_cpu(config) else ("cpu",)
    if not config.algorithm.needs.reference or config.learner.reference_offload not in kept_in:
        return 0
    return config.learner.num_replicas * REFERENCE_BYTES * _num_frozen(config, num_served)


def _num_frozen(config: Config, num_served: int) -> int:
    """Parameters of the models that score."""
    return sum([_num_served(_sizes(path)) for path in config.model.frozen.values()] or [num_served])


def _of_scorers(config: Config, num_served: int) -> dict[str, int]:
    """Bytes of host memory that scorers hold, where there are some: each has the whole of what scores."""
    if not (pools := scorer_pools(config)):
        return {}
    on_cpu = REFERENCE_BYTES * _num_frozen(config, num_served)
    held = sum(pool.count * (STAGE_BYTES + (0 if pool.bundle.get("GPU") else on_cpu)) for pool in pools)
    return {f"{sum(pool.count for pool in pools)} scorers": held}


def _queues_bytes(config: Config) -> int:
    """At most, where all of them are on this machine."""
    split = [pool for pool in actor_pools(config) if pool.config.tensor_parallel_size > 1]
    queues = sum(pool.count * (BROADCAST_BYTES + pool.config.tensor_parallel_size * ANSWERS_BYTES) for pool in split)
    num_ranks = sum(pool.count for pool in stage_pools(config) if pool.bundle.get("GPU"))
    return queues + (num_ranks * NCCL_BYTES if num_ranks > 1 else 0)


def _buffer_bytes(config: Config) -> int:
    """At most: all samples of the run, as long as they may be, or what the buffer may hold."""
    learner, buffer = config.learner, config.buffer
    largest = buffer.largest_group(config.actors.group_size)
    num_samples = learner.num_steps * learner.groups_per_step * largest
    longest = TOKEN_BYTES * config.actors.max_model_tokens + SAMPLE_BYTES
    most = min(num_samples * 5 // 4, buffer.capacity_trajectories) * longest
    return min(most, int(buffer.capacity_gib * GIB)) if buffer.capacity_gib else most


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


# --- what the machine has -------------------------------------------------------------------------


def check_disk(runs: Path, needs: MachineNeeds | None) -> list[Finding]:
    """Can the folder of the runs be written, is it on a disk that LMDB can trust, fast enough and large enough?"""
    try:
        check_writable(runs, "run.dir")
    except ConfigError as error:
        return problem("runs", str(error), "give another place as --run.dir FOLDER")
    folder = nearest_existing(runs)
    free_bytes = shutil.disk_usage(folder).free
    found = f"{_gib(free_bytes)} free in {folder}"
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
    available = min(psutil.virtual_memory().available, _limit_of_container())
    found = f"{_gib(available)} available"
    if needs is not None:
        remedy = "lower actors.num_actors, actors.kv_cache_gib or learner.num_stages; or spread the run over hosts"
        return _compare("memory", available, found, needs.memory, remedy)
    if available < 4 * GIB:
        return warning("memory", found, "the demo takes 4 GiB; end other programs")
    return ok("memory", found)


def _compare(name: str, has_bytes: int, has: str, need: Need, remedy: str) -> list[Finding]:
    run = f"the run takes about {_gib(need.size_bytes)}: {need.parts}"
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


def _limit_of_container() -> int:
    """Bytes that a container may use; without a limit, more than there are."""
    limit = 2**62
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such group, or "max"
            limit = min(limit, int(Path(path).read_text()))
    return limit


# --- GPUs -----------------------------------------------------------------------------------------


def check_gpus(config: Config | None) -> list[Finding]:
    """Is the driver new enough, do the GPUs suit the run and hold it, and who is on them already?"""
    gpus = gpus_here()
    if not gpus:
        return []  # what torch sees is told with the import of vLLM
    return [*_check_driver(gpus[0].driver), *_check_neighbours(gpus), *_check_room(config, gpus)]


def _check_driver(version: str) -> list[Finding]:
    if version.split(".")[0].isdigit() and int(version.split(".")[0]) < MIN_DRIVER:
        what = f"{version}, and the CUDA 13 wheels of torch and vLLM need {MIN_DRIVER} or newer: torch would see no GPU"
        return problem("driver", what, "install a newer NVIDIA driver on the host; containers have the host's")
    return ok("driver", f"{version}; {MIN_DRIVER} or newer is needed")


def _check_neighbours(gpus: Sequence[Gpu]) -> list[Finding]:
    """Processes that compute there already; but for those of this very look, which imports vLLM meanwhile."""
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = []
    there = [each for each in gpu_processes() if each.pid not in mine]
    for gpu in gpus:
        names = [f"{each.name} ({each.pid}, {_gib(each.used_bytes)})" for each in there if each.uuid == gpu.uuid]
        if names or gpu.used_bytes > IDLE_BYTES:
            who = ", ".join(names) or "processes that are not seen from here"
            what = f"{gpu}: {_gib(gpu.used_bytes)} are taken by {who}"
            found += warning("GPU memory", what, "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
    return found


def _check_room(config: Config | None, gpus: Sequence[Gpu]) -> list[Finding]:
    if config is None or config.launch.ray_address is not None:
        return ok("GPU memory", ", ".join(map(str, gpus)))
    if why := unfit(config, gpus):
        return problem("GPU memory", why, "change the config, or the GPU")
    found = []
    need = stage_need(config)
    if need is not None:
        small = too_small(config, need, gpus)
        remedy = "this is the most that it may take; change the config where the first steps end for want of memory"
        found += warning("GPU memory", small, remedy) if small else ok("GPU memory", need.describe())
    weights = _weights_of_engines(config)
    for pool in actor_pools(config):
        smallest, kv_cache_gib = min(gpus, key=lambda gpu: gpu.total_bytes), pool.config.kv_cache_gib
        # one that has a GPU alone and was told its bytes takes no heed of a share
        share = 1.0 if kv_cache_gib is not None and pool.config.gpus >= 1 else pool.config.gpu_memory_share
        needed = weights.get(pool.name, 0) + ON_GPU_BYTES + int((kv_cache_gib or 0) * GIB)
        if pool.name in weights and needed >= share * smallest.total_bytes:
            which = "without" if kv_cache_gib is None else "with"
            what = (
                f"an engine of pool '{pool.name}' takes {_gib(needed)} {which} attention keys and values, and its "
                f"share is {share:g} of {smallest}"
            )
            remedy = "raise actors.gpu_memory_share or actors.tensor_parallel_size, or lower actors.kv_cache_gib"
            found += problem("GPU memory", what, remedy)
    return found or ok("GPU memory", ", ".join(map(str, gpus)))


def _weights_of_engines(config: Config) -> dict[str, int]:
    """Bytes on each GPU of an engine, by pool; of pools with GPUs, where the model is here."""
    tensors = tensors_in(Path(config.model.path)) if config.model.path is not None else {}
    num = _num_served({name: prod(tensor.shape) for name, tensor in tensors.items()})
    with_gpus = [pool for pool in actor_pools(config) if pool.config.gpus] if num else []
    return {pool.name: _BYTES[pool.config.dtype] * num // pool.config.tensor_parallel_size for pool in with_gpus}


# --- what dead runs left --------------------------------------------------------------------------


def check_programs(config: Config | None) -> list[Finding]:
    """Are programs that a model writes cut off from this machine? Only where a reward runs some."""
    found: list[Finding] = []
    if config is None:
        return found
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
