"""Checkpoints: the state for a restart, written by all ranks during training, and visible only once complete.

    save        copies everything to host memory; a thread writes the copies:
    .step-00000050.tmp/     torch.distributed.checkpoint writes and syncs one file per rank; replicas share the work
      meta.json             the coordinator adds the checksum of each file and the training progress
    step-00000050/          renamed when all of it is on disk

The writer threads use a separate process group, so that their collectives do not interleave with those of training.
Tensors are saved under names of the whole model, so a run may restart with other stages, chunks and replicas:

    NAME                        a parameter, named as in the Hugging Face checkpoint
    optimizer.exp_avg.NAME      first moment of a parameter; also exp_avg_sq, and step, the number of its updates
    critic.NAME                 a parameter or moment of a critic that is a separate model
    rng.RANK, rng_cuda.RANK     random generator states, the only tensors that belong to a rank
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

from leeway.common.files import discard, replace_durably, sync, write_durably
from leeway.common.process import DaemonThreads
from leeway.learner.checkpoint_files import (
    META_NAME,
    RNG,
    RNG_CUDA,
    CheckpointMeta,
    Seal,
    TrainingProgress,
    is_rng_state,
    steps_in,
)
from leeway.learner.device import allocate_host_copies
from leeway.learner.mesh import Agreement, Mesh, RankFailed, StageLost, first_line, is_rank_death
from leeway.learner.networks import Networks

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.step-\d{8}\.(tmp|(\d+\.)?old)|\.probe-\d+")
_INDEX = ".metadata"
"""File that maps tensors to files; written by rank 0."""

Stored = Mapping[str, TensorStorageMetadata]


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; earlier checkpoints are unchanged."""


class CheckpointMismatch(ValueError):
    """A checkpoint is intact but belongs to another model."""


class Checkpoints:
    """The checkpoints of one run. All ranks must create the object and call its methods together."""

    def __init__(self, folder: Path, keep: int, mesh: Mesh, timeout_s: float, model: str = "") -> None:
        """Open a folder shared by all ranks, keep the newest `keep` checkpoints, and remove leftovers of a crash.

        Writing or reading a checkpoint fails after `timeout_s`. `model` is the `model_identity` of the trained model;
        if '', only tensors are compared. Raises CheckpointFailed on all ranks if any rank cannot write to the folder.
        """
        self._folder = folder
        self._keep = keep
        self._place = mesh.place
        self._timeout_s = timeout_s
        self._model = model
        self._state = TrainingState(mesh.place.rank)
        self._ranks = Agreement(mesh.place.rank, timeout_s)
        # daemon threads: a process that exits on an error does not block on a slow disk
        self._writer = DaemonThreads("checkpoint", max_threads=1)
        self._in_progress: tuple[int, Future[None]] | None = None
        self._oldest = -1
        self._released: int | None = None
        try:
            self._ranks.run_on_all(self._probe, f"write to the checkpoint folder {folder}")
            self._ranks.run_on_all(lambda: self._if_coordinator(self._clear), f"remove crash leftovers in {folder}")
        except RankFailed as error:
            raise CheckpointFailed(str(error)) from None

    def steps(self) -> list[int]:
        return steps_in(self._folder)

    # --- write ----------------------------------------------------------------------------------------

    def save(self, networks: Networks, progress: TrainingProgress) -> None:
        """Wait for the write in progress, copy the state to host memory, and start writing it in the background."""
        self.wait()
        progress = structs.replace(progress, learning_rate=networks.rate)
        self._in_progress = (progress.step, self._writer.submit(self._write, self._state.take(networks), progress))

    def released(self) -> int | None:
        """Return, on the coordinator, the step of the oldest kept checkpoint; None if unchanged since the last call.

        Batches up to this step are never requested again, because restarts use no older checkpoint. Does not block.
        Raises CheckpointFailed, once, if a checkpoint could not be written.
        """
        if self._in_progress is not None and self._in_progress[1].done():
            self.wait()
        released, self._released = self._released, None
        return released

    def wait(self) -> None:
        """Wait for the write in progress; raise CheckpointFailed if it fails or times out, StageLost if a rank died."""
        if self._in_progress is None:
            return
        step, done = self._in_progress
        try:
            failed = done.exception(self._timeout_s)
        except FutureTimeout:
            raise CheckpointFailed(
                f"rank {self._place.rank}: the checkpoint {self._path(step)} was not written within "
                f"{self._timeout_s:g} s: the disk or another rank is too slow. Write to a faster disk"
            ) from None
        self._in_progress = None
        if isinstance(failed, RankFailed):
            raise CheckpointFailed(str(failed))
        if failed is not None:
            # a rank that only timed out may have a slow disk, which a restart does not fix
            lost = is_rank_death(failed)
            raise (StageLost if lost else CheckpointFailed)(
                f"rank {self._place.rank}: the checkpoint {self._path(step)} was not completed because "
                f"another rank {'died' if lost else 'timed out'}: {first_line(failed)}"
            ) from failed
        if self._place.is_coordinator and (oldest := self.steps()[-self._keep :][0]) != self._oldest:
            self._oldest = self._released = oldest

    def close(self) -> None:
        """Wait for the write in progress, then destroy the process group; raise the errors of `wait`."""
        self.wait()
        self._ranks.close()

    def _write(self, tensors: dict[str, Tensor], progress: TrainingProgress) -> None:
        final, temporary = self._path(progress.step), self._temporary(progress.step)
        # no copies ahead: the tensors are on the host, and each copy ahead would synchronize the stream of a GPU
        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        writer.fs = _Disk()
        own_file = temporary / _file_of(self._place.rank)
        ranks = self._ranks
        try:
            ranks.run_on_all(lambda: self._if_coordinator(lambda: discard(temporary)), f"empty {temporary}")
            ranks.run_on_all(
                lambda: save(tensors, storage_writer=writer, process_group=ranks.group), f"write the checkpoint {final}"
            )
            own = ranks.run_on_all(lambda: Seal.of(own_file), f"read {own_file} back")
            seals = ranks.all_gather(f"{own.size_bytes} {own.xxh3}")
            ranks.run_on_all(lambda: self._if_coordinator(lambda: self._complete(progress, seals)), f"complete {final}")
        except RankFailed as error:
            free, needed = shutil.disk_usage(self._folder).free, sum(tensor.nbytes for tensor in tensors.values())
            if self._place.is_coordinator:
                discard(temporary)  # the partial checkpoint may have filled the disk
            raise RankFailed(f"{error}. The disk has {free >> 20} MiB free; a rank needs {needed >> 20} MiB") from error

    def _complete(self, progress: TrainingProgress, encoded_seals: list[str]) -> None:
        """Complete and rename a checkpoint, then remove old ones; `encoded_seals`: size and checksum of each file."""
        place, step = self._place, progress.step
        final, temporary = self._path(step), self._temporary(step)
        pairs = (text.split() for text in encoded_seals)
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
        """Rename a checkpoint, then delete it, so that a crash leaves no partial checkpoint under the final name."""
        path = self._path(step)
        with suppress(OSError):  # the rename fails if, for example, the folder is immutable
            path = path.rename(self._folder / f".step-{step:08d}.{time.monotonic_ns()}.old")
        sync(self._folder)
        discard(path)

    # --- read -----------------------------------------------------------------------------------------

    def restore(self, networks: Networks) -> TrainingProgress | None:
        """Load the newest intact checkpoint and return its training progress; None if there is no checkpoint.

        Newer damaged checkpoints are renamed. Raises CheckpointMismatch, without any change, if the checkpoint belongs
        to another model, and CheckpointFailed if checkpoints exist but none is intact.
        """
        self._state.prepare(networks)
        damaged: list[int] = []
        listed = " ".join(map(str, self.steps()[-64:])) if self._place.is_coordinator else ""
        # all ranks use the coordinator's list: another rank may list a folder that is being removed
        for step in reversed([int(step) for step in self._ranks.all_gather(listed)[self._place.coordinator].split()]):
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
                f"no intact checkpoint in {self._folder}: the log describes the damage of steps {damaged}. "
                "To start again from the model, move that folder away"
            )
        return None

    def _read(self, step: int, networks: Networks) -> CheckpointMeta | None:
        """Load a checkpoint; return None, with nothing changed, if it is damaged."""
        path, ranks = self._path(step), self._ranks
        try:
            meta, stored = ranks.run_on_all(lambda: self._checked(path), f"use the checkpoint {path}")
            read = self._state.to_read(networks, stored)
            self._check_fit(path, meta, stored, read)
            reader = FileSystemReader(path)
            ranks.run_on_all(
                lambda: load(read, storage_reader=reader, process_group=ranks.group), f"read the checkpoint {path}"
            )
        except RankFailed as error:
            logger.warning("%s. Falling back to the previous checkpoint", error)
            return None
        self._state.put(networks, read)
        rate = meta.progress.learning_rate
        networks.rate = networks.config.learning_rate if rate is None else rate
        return meta

    def _checked(self, path: Path) -> tuple[CheckpointMeta, Stored]:
        """Read the metadata of a checkpoint; each rank verifies its share of the files and the index that it loads."""
        meta = CheckpointMeta.read(path)
        share = sorted(meta.files)[self._place.rank :: self._place.num_ranks]
        meta.check(path, {*share, _INDEX})
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        return meta, {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def _check_fit(self, path: Path, meta: CheckpointMeta, stored: Stored, own: Mapping[str, Tensor]) -> None:
        """Raise CheckpointMismatch on all ranks if a tensor of the model or the checkpoint has no counterpart."""
        problem = _first_mismatch(stored, own)
        names = sorted(stored)
        known = torch.tensor([name in own or is_rng_state(name) for name in names], dtype=torch.uint8)
        dist.all_reduce(known, dist.ReduceOp.MAX, group=self._ranks.group)
        problems = [text for text in self._ranks.all_gather(problem) if text]
        problems += [f"this run has no tensor {name}" for name, found in zip(names, known, strict=True) if not found]
        if not problems and meta.model and self._model and meta.model != self._model:
            problems.append(f"it was written for the model {meta.model}, but this run trains {self._model}")
        if problems:
            hint = ""
            if "critic" in problems[0] or "value_head" in problems[0]:
                hint = " (the [algorithm] of the checkpoint or of this run has no such critic)"
            raise CheckpointMismatch(
                f"checkpoint {path} does not belong to this run: {problems[0]}{hint}. Use the [model] and [algorithm] "
                f"sections of the run that wrote it, or move {self._folder} away to start from the model again"
            )

    def _set_aside(self, damaged: list[int]) -> None:
        for step in damaged:
            aside = self._folder / f"damaged-{self._path(step).name}"
            discard(aside)
            self._path(step).rename(aside)
            logger.warning("renamed the damaged checkpoint of step %d to %s", step, aside)

    # --- folders --------------------------------------------------------------------------------------

    def _probe(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        probe = self._folder / f".probe-{self._place.rank}"
        probe.write_bytes(b"write test\n")
        probe.unlink()

    def _if_coordinator(self, action: Callable[[], None]) -> None:
        if self._place.is_coordinator:
            action()

    def _clear(self) -> None:
        for path in self._folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                logger.warning("removing %s, a leftover of a crash", path)
                discard(path)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _temporary(self, step: int) -> Path:
        return self._folder / f".step-{step:08d}.tmp"


class _Disk(FileSystem):
    """File system that raises the original OSError in place of the RuntimeError of torch's archive writer."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _file_of(rank: int) -> str:
    """Return the name that torch.distributed.checkpoint gives to the single file of a rank."""
    return f"__{rank}_0.distcp"


def _first_mismatch(stored: Stored, own: Mapping[str, Tensor]) -> str:
    for name, tensor in own.items():
        entry = stored.get(name)
        if entry is None:
            return f"it has no tensor {name}"
        stored_as = f"shape {list(entry.size)} ({entry.properties.dtype})"
        expected = f"shape {list(tensor.shape)} ({tensor.dtype})"
        if stored_as != expected:
            return f"tensor {name} has {stored_as} in the checkpoint, but {expected} in this run"
    return ""


class TrainingState:
    """Host copies of one rank's tensors; they take as much memory as its weights and moments.

    Training continues while the copies are written. Loading fills the copies first: a failed load changes no weights.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._copies: dict[str, Tensor] = {}

    def prepare(self, networks: Networks) -> None:
        """Allocate and touch the host memory now: a first touch is slow, and a step would otherwise wait for it."""
        self._allocate(networks)
        for copy in self._copies.values():
            copy.zero_()

    def take(self, networks: Networks) -> dict[str, Tensor]:
        """Copy the state to host memory, reusing the memory of the previous call."""
        on_gpu = networks.policy.device.type == "cuda"
        for name, tensors in self._allocate(networks).items():
            self._copies[name].copy_(tensors[0], non_blocking=on_gpu)
        taken = dict(self._copies)
        taken[f"{RNG}.{self._rank}"] = torch.get_rng_state()
        if on_gpu:
            taken[f"{RNG_CUDA}.{self._rank}"] = torch.cuda.get_rng_state(networks.policy.device)
            torch.cuda.synchronize(networks.policy.device)
        return taken

    def to_read(self, networks: Networks, stored: Container[str]) -> dict[str, Tensor]:
        """Return the host tensors to load a checkpoint into; `stored` holds the names in the checkpoint.

        A rank that has no generator state in the checkpoint loads the generator state of rank 0.
        """
        self._allocate(networks)
        targets = dict(self._copies)
        generators = {RNG: torch.get_rng_state()}
        if networks.policy.device.type == "cuda":
            generators[RNG_CUDA] = torch.cuda.get_rng_state(networks.policy.device)
        for kind, state in generators.items():
            known = [name for name in (f"{kind}.{self._rank}", f"{kind}.0") if name in stored]
            if known:
                targets[known[0]] = state
        return targets

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

    def _allocate(self, networks: Networks) -> dict[str, list[Tensor]]:
        """Return the live tensors, and allocate their host copies on the first call."""
        live = live_tensors(networks)
        if self._copies.keys() != live.keys():
            on_gpu = networks.policy.device.type == "cuda"
            self._copies = allocate_host_copies({name: tensors[0] for name, tensors in live.items()}, pinned=on_gpu)
        return live


def live_tensors(networks: Networks) -> dict[str, list[Tensor]]:
    """Return the tensors of this rank by saved name; a tied weight may have two copies on one rank."""
    found: dict[str, list[Tensor]] = {}
    for network, prefix in zip(networks.all, ("", "critic."), strict=False):
        named = [(name, parameter.detach()) for name, parameter in network.named_weights()]
        for optimizer in network.optimizers:
            named += [(f"optimizer.{name}", tensor) for name, tensor in optimizer.state().items()]
        for name, tensor in named:
            # tied embedding and head are one tensor, possibly on two ranks: saved once, loaded by both
            found.setdefault(prefix + network.modules[0].stored_name(name), []).append(tensor)
    return found
