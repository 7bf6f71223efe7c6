"""Checkpoints: what a restart needs, written by all ranks while training goes on, and visible only once complete.

    save        copies everything to host memory; a thread writes the copies:
    .step-00000050.tmp/     torch.distributed.checkpoint writes and syncs one file per rank; replicas share the work
      meta.json             the coordinator adds the checksum of each file, and where training stood
    step-00000050/          renamed when all of it is on disk

The threads have a process group of their own: their collectives must not come between those of training. Tensors are
saved under names of the whole model, so a run may restart with other stages, chunks and replicas:

    NAME                        a parameter, as the Hugging Face checkpoint calls it
    optimizer.exp_avg.NAME      a moment of it; also exp_avg_sq, and step, the updates that it had
    critic.NAME                 either of the above, of a critic that is a model of its own
    rng.RANK, rng_cuda.RANK     random generators, the only tensors that belong to a rank
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from common.files import discard, replace_durably, sync, write_durably
from common.process import DaemonThreads
from learner.checkpoint_files import (
    META_NAME,
    RNG,
    RNG_CUDA,
    CheckpointMeta,
    Seal,
    TrainingProgress,
    is_of_a_rank,
    steps_in,
)
from learner.device import host_room
from learner.mesh import Agreement, Disagreement, Mesh, StageLost, first_line, tells_of_death
from learner.networks import Networks

logger = logging.getLogger(__name__)

_LEFT_BEHIND = re.compile(r"\.step-\d{8}\.(tmp|(\d+\.)?old)|\.probe-\d+")
_INDEX = ".metadata"
"""Which tensor is in which file, written by rank 0."""

Stored = Mapping[str, TensorStorageMetadata]


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


class CheckpointMismatch(ValueError):
    """A checkpoint is whole, and belongs to another model."""


class Checkpoints:
    """Saves and restores one run's checkpoints. All ranks make it, and call its methods, together."""

    def __init__(self, folder: Path, keep: int, mesh: Mesh, timeout_s: float, model: str = "") -> None:
        """Open a folder, the same for all ranks, keep the newest `keep` checkpoints, and remove what a crash left.

        Writing or reading one for longer than `timeout_s` fails. `model`: `model_identity` of what is trained; '' to go
        by the tensors alone. CheckpointFailed, on all ranks, if one cannot write there.
        """
        self._folder = folder
        self._keep = keep
        self._place = mesh.place
        self._timeout_s = timeout_s
        self._model = model
        self._state = TrainingState(mesh.place.rank)
        self._ranks = Agreement(mesh.place.rank, timeout_s)
        # its threads do not keep a process that ends on an error waiting for a disk
        self._writer = DaemonThreads("checkpoint", max_threads=1)
        self._under_way: tuple[int, Future[None]] | None = None
        self._oldest = -1
        self._released: int | None = None
        try:
            self._ranks.together(self._try_to_write, f"write into {folder}, where checkpoints go")
            self._ranks.together(lambda: self._if_coordinator(self._clear), f"remove what a crash left in {folder}")
        except Disagreement as error:
            raise CheckpointFailed(str(error)) from None

    def steps(self) -> list[int]:
        return steps_in(self._folder)

    # --- write ----------------------------------------------------------------------------------------

    def save(self, networks: Networks, progress: TrainingProgress) -> None:
        """Begin to write a checkpoint, after a `wait` for the one under way; the state is copied on return."""
        self.wait()
        progress = structs.replace(progress, learning_rate=networks.rate)
        self._under_way = (progress.step, self._writer.submit(self._write, self._state.take(networks), progress))

    def released(self) -> int | None:
        """Return, on the coordinator, the step of the oldest checkpoint kept if it changed since the last call.

        Draws up to it are never asked for again, whichever checkpoint a restart finds whole. Never waits.
        CheckpointFailed, once, if one could not be written.
        """
        if self._under_way is not None and self._under_way[1].done():
            self.wait()
        released, self._released = self._released, None
        return released

    def wait(self) -> None:
        """Wait for what is under way; CheckpointFailed if it is not written in time, StageLost if a rank died."""
        if self._under_way is None:
            return
        step, done = self._under_way
        try:
            failed = done.exception(self._timeout_s)
        except FutureTimeout:
            raise CheckpointFailed(
                f"rank {self._place.rank}: the checkpoint {self._path(step)} is not written after "
                f"{self._timeout_s:g} s: the disk, or another rank, is too slow. Write to a faster disk"
            ) from None
        self._under_way = None
        if isinstance(failed, Disagreement):
            raise CheckpointFailed(str(failed))
        if failed is not None:
            # one that only did not answer may be at a slow disk, which is no better after a restart
            lost = tells_of_death(failed)
            raise (StageLost if lost else CheckpointFailed)(
                f"rank {self._place.rank}: the checkpoint {self._path(step)} was not finished, because "
                f"another rank {'died' if lost else 'did not answer'}: {first_line(failed)}"
            ) from failed
        if self._place.is_coordinator and (oldest := self.steps()[-self._keep :][0]) != self._oldest:
            self._oldest = self._released = oldest

    def close(self) -> None:
        """Wait as `wait`, and leave the process group."""
        self.wait()
        self._ranks.close()

    def _write(self, tensors: dict[str, Tensor], progress: TrainingProgress) -> None:
        final, temporary = self._path(progress.step), self._temporary(progress.step)
        # ours lie on the host: with a GPU, the loader that copies ahead waits for its stream at each of them
        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        writer.fs = _Disk()
        own_file = temporary / _file_of(self._place.rank)
        ranks = self._ranks
        try:
            ranks.together(lambda: self._if_coordinator(lambda: discard(temporary)), f"empty {temporary}")
            ranks.together(
                lambda: save(tensors, storage_writer=writer, process_group=ranks.group), f"write the checkpoint {final}"
            )
            own = ranks.together(lambda: Seal.of(own_file), f"read {own_file} back")
            told = ranks.say(f"{own.size_bytes} {own.xxh3}")
            ranks.together(lambda: self._if_coordinator(lambda: self._complete(progress, told)), f"complete {final}")
        except Disagreement as error:
            free, needed = shutil.disk_usage(self._folder).free, sum(tensor.nbytes for tensor in tensors.values())
            if self._place.is_coordinator:
                discard(temporary)  # it may be what filled the disk
            raise Disagreement(f"{error}; {free >> 20} MiB were left, and each rank writes {needed >> 20}") from error

    def _complete(self, progress: TrainingProgress, told: list[str]) -> None:
        """Rename a checkpoint, then remove those that are too many; `told`: each rank's seal of its file."""
        place, step = self._place, progress.step
        final, temporary = self._path(step), self._temporary(step)
        pairs = (text.split() for text in told)
        seals = {_file_of(rank): Seal(int(size), xxh3) for rank, (size, xxh3) in enumerate(pairs)}
        seals[_INDEX] = Seal.of(temporary / _INDEX)
        meta = CheckpointMeta(progress, place.num_stages, place.num_replicas, self._model, seals)
        write_durably(temporary / META_NAME, meta.encode())
        if final.exists():
            self._remove(step)
        replace_durably(temporary, final)
        for old in self.steps()[: -self._keep]:
            if old < step:
                self._remove(old)
        for left in self._folder.glob(".step-*.old"):
            discard(left)

    def _remove(self, step: int) -> None:
        """Rename first, so that a crash leaves no half of a checkpoint under its name."""
        path = self._path(step)
        with suppress(OSError):  # as of an immutable folder
            path = path.rename(self._folder / f".step-{step:08d}.{time.monotonic_ns()}.old")
        sync(self._folder)
        discard(path)

    # --- read -----------------------------------------------------------------------------------------

    def restore(self, networks: Networks) -> TrainingProgress | None:
        """Read the newest checkpoint that is whole and return where training stood, or None without one.

        Damaged ones after it are set aside under another name. CheckpointMismatch, with nothing changed, if it belongs
        to another model; CheckpointFailed if there are checkpoints, and none is whole.
        """
        self._state.prepare(networks)
        damaged: list[int] = []
        listed = " ".join(map(str, self.steps()[-64:])) if self._place.is_coordinator else ""
        # the coordinator decides: another rank may see a folder that is just being removed
        for step in reversed([int(step) for step in self._ranks.say(listed)[self._place.coordinator].split()]):
            meta = self._read(step, networks)
            if meta is None:
                damaged.append(step)
                continue
            if self._place.is_coordinator:
                self._set_aside(damaged)
            logger.info(
                "resumed from %s, written by %d x %d ranks", self._path(step), meta.num_replicas, meta.num_stages
            )
            return meta.progress
        if damaged:
            raise CheckpointFailed(
                f"no checkpoint in {self._folder} is whole (the log says what is wrong with steps {damaged}). "
                "To start from the model again, move that folder away"
            )
        return None

    def _read(self, step: int, networks: Networks) -> CheckpointMeta | None:
        """Load a checkpoint; None, with nothing changed, if it is damaged."""
        path, ranks = self._path(step), self._ranks
        try:
            meta, stored = ranks.together(lambda: self._checked(path), f"use the checkpoint {path}")
            read = self._state.to_read(networks, stored)
            self._check_fit(path, meta, stored, read)
            reader = FileSystemReader(path)
            ranks.together(
                lambda: load(read, storage_reader=reader, process_group=ranks.group), f"read the checkpoint {path}"
            )
        except Disagreement as error:
            logger.warning("%s. The checkpoint before it is used", error)
            return None
        self._state.put(networks, read)
        rate = meta.progress.learning_rate
        networks.rate = networks.config.learning_rate if rate is None else rate
        return meta

    def _checked(self, path: Path) -> tuple[CheckpointMeta, Stored]:
        """Read a checkpoint's metadata. Every rank checks its share of the files, and the index that it unpickles."""
        meta = CheckpointMeta.read(path)
        share = sorted(meta.files)[self._place.rank :: self._place.num_ranks]
        meta.check(path, {*share, _INDEX})
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        return meta, {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def _check_fit(self, path: Path, meta: CheckpointMeta, stored: Stored, own: Mapping[str, Tensor]) -> None:
        """Raise CheckpointMismatch, on all ranks, if a tensor of the model or of the checkpoint has no counterpart."""
        problem = _first_misfit(stored, own)
        names = sorted(stored)
        wanted = torch.tensor([name in own or is_of_a_rank(name) for name in names], dtype=torch.uint8)
        dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self._ranks.group)
        problems = [said for said in self._ranks.say(problem) if said]
        problems += [f"this run has no tensor {name}" for name, known in zip(names, wanted, strict=True) if not known]
        if not problems and meta.model and self._model and meta.model != self._model:
            problems.append(f"it was written for the model {meta.model}, and this run trains {self._model}")
        if problems:
            hint = ""
            if "critic" in problems[0] or "value_head" in problems[0]:
                hint = " (one was written, or is run, with an [algorithm] that has no such critic)"
            raise CheckpointMismatch(
                f"checkpoint {path} does not belong to this run: {problems[0]}{hint}. Continue with the [model] and "
                f"[algorithm] that wrote it, or move {self._folder} away to start from the model again"
            )

    def _set_aside(self, damaged: list[int]) -> None:
        for step in damaged:
            aside = self._folder / f"damaged-{self._path(step).name}"
            discard(aside)
            self._path(step).rename(aside)
            logger.warning("the damaged checkpoint of step %d is now %s", step, aside)

    # --- folders --------------------------------------------------------------------------------------

    def _try_to_write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        probe = self._folder / f".probe-{self._place.rank}"
        probe.write_bytes(b"can this rank write here?\n")
        probe.unlink()

    def _if_coordinator(self, action: Callable[[], None]) -> None:
        if self._place.is_coordinator:
            action()

    def _clear(self) -> None:
        for path in self._folder.iterdir():
            if _LEFT_BEHIND.fullmatch(path.name):
                logger.warning("removing %s, which a crash left behind", path)
                discard(path)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _temporary(self, step: int) -> Path:
        return self._folder / f".step-{step:08d}.tmp"


class _Disk(FileSystem):
    """Raises the disk's error: torch's writer of archives fails once more because of it, and raises that alone."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _file_of(rank: int) -> str:
    """Return the name that torch.distributed.checkpoint gives a rank's only file."""
    return f"__{rank}_0.distcp"


def _first_misfit(stored: Stored, own: Mapping[str, Tensor]) -> str:
    for name, tensor in own.items():
        entry = stored.get(name)
        if entry is None:
            return f"it has no tensor {name}"
        there = f"shape {list(entry.size)} of {entry.properties.dtype}"
        here = f"shape {list(tensor.shape)} of {tensor.dtype}"
        if there != here:
            return f"tensor {name} has {there} in the checkpoint and {here} in this run"
    return ""


class TrainingState:
    """Copies of one rank's tensors, in as much host memory as its weights and moments.

    Training goes on while they are written, and a checkpoint is read into them first: on failure the live tensors stay.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._copies: dict[str, Tensor] = {}

    def prepare(self, networks: Networks) -> None:
        """Touch the memory: the first touch takes longer than to fill it later, while a step waits."""
        self._room_for(networks)
        for copy in self._copies.values():
            copy.zero_()

    def take(self, networks: Networks) -> dict[str, Tensor]:
        """Copy everything to host memory, into the copies of the call before."""
        on_gpu = networks.policy.device.type == "cuda"
        for name, tensors in self._room_for(networks).items():
            self._copies[name].copy_(tensors[0], non_blocking=on_gpu)
        taken = dict(self._copies)
        taken[f"{RNG}.{self._rank}"] = torch.get_rng_state()
        if on_gpu:
            taken[f"{RNG_CUDA}.{self._rank}"] = torch.cuda.get_rng_state(networks.policy.device)
            torch.cuda.synchronize(networks.policy.device)
        return taken

    def to_read(self, networks: Networks, stored: Container[str]) -> dict[str, Tensor]:
        """Return host tensors for a checkpoint to be read into.

        A rank that the checkpoint, with these names stored, does not know takes the generators of rank 0.
        """
        self._room_for(networks)
        wanted = dict(self._copies)
        generators = {RNG: torch.get_rng_state()}
        if networks.policy.device.type == "cuda":
            generators[RNG_CUDA] = torch.cuda.get_rng_state(networks.policy.device)
        for kind, state in generators.items():
            known = [name for name in (f"{kind}.{self._rank}", f"{kind}.0") if name in stored]
            if known:
                wanted[known[0]] = state
        return wanted

    def put(self, networks: Networks, read: dict[str, Tensor]) -> None:
        for name, tensors in live_tensors(networks).items():
            for tensor in tensors:
                tensor.copy_(read[name])
        for optimizer in networks.optimizers:
            optimizer.round()
        for name, state in read.items():
            if name.startswith(f"{RNG}."):
                torch.set_rng_state(state)
            elif name.startswith(f"{RNG_CUDA}."):
                torch.cuda.set_rng_state(state, networks.policy.device)

    def _room_for(self, networks: Networks) -> dict[str, list[Tensor]]:
        """Return the live tensors, and make room for their copies once."""
        live = live_tensors(networks)
        if self._copies.keys() != live.keys():
            on_gpu = networks.policy.device.type == "cuda"
            self._copies = host_room({name: tensors[0] for name, tensors in live.items()}, pinned=on_gpu)
        return live


def live_tensors(networks: Networks) -> dict[str, list[Tensor]]:
    """Return this rank's tensors by the name they are saved under; a tied weight may have two copies on one rank."""
    found: dict[str, list[Tensor]] = {}
    for network, prefix in zip(networks.all, ("", "critic."), strict=False):
        named = [(name, parameter.detach()) for name, parameter in network.named_weights()]
        for optimizer in network.optimizers:
            named += [(f"optimizer.{name}", tensor) for name, tensor in optimizer.state().items()]
        for name, tensor in named:
            # embedding and head are one tensor, perhaps on two ranks: saved once, read by both
            found.setdefault(prefix + network.stored_name(name), []).append(tensor)
    return found
