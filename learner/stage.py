"""Stage: one process of the learner. The last stage of replica 0 is the coordinator, which is connected to the buffer.

    setup   create process groups, models and optimizers, resume from the newest checkpoint, publish the first version
    run     draw a batch -> train one step (one or more updates, each may publish) -> (checkpoint), until num_steps
            are finished or a stop is requested
    export  write the policy as a Hugging Face folder and destroy the process group

All stages call the same methods. The coordinator selects the batches and the time to stop; the other stages follow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs
from transformers import AutoConfig

from leeway.buffer.client import Batch
from leeway.buffer.errors import BufferError
from leeway.buffer.schema import read_stream
from leeway.common.hf_folder import complete_folder, model_identity
from leeway.common.process import wall_time
from leeway.common.run import RunContext
from leeway.common.staleness import PolicyVersion, StaleTokens
from leeway.common.user_input import UserFileError
from leeway.learner.batch import StepBatch
from leeway.learner.checkpoint import CheckpointFailed, Checkpoints
from leeway.learner.checkpoint_files import KEPT_CHECKPOINTS, TrainingProgress, write_shard
from leeway.learner.config import LearnerSections
from leeway.learner.coordinator import Channel, Coordinator, Kind
from leeway.learner.decoders import cost_of
from leeway.learner.device import configure, device_of
from leeway.learner.lag_control import LagControl
from leeway.learner.mesh import (
    COLLECTIVE_TIMEOUT_S,
    Agreement,
    GpuFailed,
    Mesh,
    MeshPlace,
    StageLost,
    first_line,
    is_gpu_fault,
    is_rank_loss,
    join_group,
)
from leeway.learner.networks import build_reference, load_networks
from leeway.learner.packing import CostModel, PackingRule
from leeway.learner.report import BadBatches, BadSample, StepTimes, TrainingDiverged, check_samples, step_report
from leeway.learner.step import TrainStep
from leeway.weight_sync.client import PUBLISH_TIMEOUT_S, StoreAccess
from leeway.weight_sync.manifest import PublishFailed
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.store import KEPT_VERSIONS

logger = logging.getLogger(__name__)

CHECKPOINT_TIMEOUT_S = 1800.0
"""Seconds before a checkpoint write fails and ends the learner; a terabyte at 600 MB/s takes less."""
DEADLINE_MARGIN_S = 5.0
"""Seconds before the startup timeout at which the coordinator stops waiting for the buffer and raises its own error."""


class Stage:
    def __init__(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """Create an unloaded stage. `rendezvous` is tcp://HOST:PORT with a free port on the host of rank 0."""
        self._context = context
        self._config = config = context.config.learner
        self._place = MeshPlace(rank, config.num_stages, config.num_replicas)
        self._rendezvous = rendezvous
        self._contract = context.facts.contract
        self._control = LagControl(self._contract) if context.config.weight_sync.controls_lag else None
        self._device = torch.device("cpu")
        self._stop = threading.Event()
        self._coordinator: Coordinator | None = None
        self._publisher: Publisher | None = None
        self._progress = TrainingProgress(step=0, version=0, incarnation=0)
        self._resumed_at: dict[int, int] = {}
        self._saved_step = -1
        self._published_version = -1
        self._bad_batches = BadBatches(context.folder / "bad_batches")

    # --- supervisor interface -----------------------------------------------------------------------

    def setup(self) -> None:
        """Load the models, resume from the newest checkpoint and publish the initial version.

        Raises StageLost if a stage misses the rendezvous or does not load in time. Raises TimeoutError with the
        name of the service if the buffer does not answer the coordinator.
        """
        self._guard(self._setup, "set up")

    def run(self) -> None:
        """Train until `num_steps` steps are finished or a stop is requested, then write a checkpoint and publish.

        A stage that raises cannot rejoin the pipeline: terminate its process. Only the coordinator raises NoBatch,
        PublishFailed and StaleTokens; the other stages then raise CoordinatorFailed, or StageLost if a step was in
        progress. Any stage raises StageLost if another died or hung, and GpuFailed if its own GPU failed. All stages
        raise BadSample for a sample that no loss can use, and TrainingDiverged after three consecutive steps without a
        finite loss or gradient.
        """
        self._guard(self._run, "train")

    def request_stop(self) -> None:
        """End `run` after the current step. Only effective on the coordinator; thread-safe."""
        self._stop.set()

    @property
    def waiting_for(self) -> str:
        """Reason that the learner is waiting; empty while it computes, and on stages other than the coordinator."""
        return self._coordinator.waiting_for if self._coordinator is not None else ""

    @property
    def publishing(self) -> str:
        """Reason for a delayed publication, which runs in the background; empty if nothing delays it."""
        return self._publisher.waiting_for if self._publisher is not None else ""

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; all stages must call it after `run`, as their last call."""
        self._guard(lambda: self._export(folder), "export")

    # --- setup --------------------------------------------------------------------------------------

    def _setup(self) -> None:
        context, config, place = self._context, self._config, self._place
        deadline = time.monotonic() + context.startup_timeout_s - DEADLINE_MARGIN_S
        self._device = device = device_of(config, place.rank)
        _make_current(device)
        configure(config, device)
        torch.manual_seed(context.facts.seed)
        join_group(
            self._rendezvous,
            device,
            rank=place.rank,
            num_ranks=place.num_ranks,
            rendezvous_timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        mesh = Mesh.build(place, timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._ranks = Agreement(place.rank, context.startup_timeout_s)
        critic = context.config.algorithm.needs.critic
        self._networks = load_networks(context.model_path, config, critic, context.temperature, mesh, device)
        self._reference = build_reference(context, mesh, device)
        # wait until all ranks have loaded: slow loading must not time out a collective of training
        self._ranks.all_gather("")
        logger.info("%s has loaded its weights", place.name)
        self._train_step = TrainStep(
            self._networks, self._reference, context.config.algorithm, config, context.facts.seed, control=self._control
        )
        cost = CostModel(*cost_of(AutoConfig.from_pretrained(context.model_path, local_files_only=True)))
        unit = context.config.algorithm.needs.separable or "sequence"
        self._packing = PackingRule.of_schedule(
            config.schedule, config.num_stages, config.token_budget, config.num_replicas, cost, unit
        ).on_device(device.type)
        self._checkpoints = Checkpoints(
            context.folder / "checkpoints",
            KEPT_CHECKPOINTS,
            mesh,
            CHECKPOINT_TIMEOUT_S,
            model_identity(context.model_path),
        )
        self._channel = Channel(place)
        self._resume()
        self._begin_incarnation(deadline)
        if place.publishes:
            self._publisher = self._open_publisher()
        self._publish(self._progress.version)

    def _open_publisher(self) -> Publisher:
        context = self._context
        return Publisher(
            StoreAccess.of(context.config.weight_sync, context).open_sink(f"stage-{self._place.rank}"),
            self._place.stage,
            self._place.num_stages,
            context.serving_dtypes,
            keep_versions=KEPT_VERSIONS,
            timeout_s=PUBLISH_TIMEOUT_S,
            # longer than timeout_s, so that a stage without disk space fails first, with its own error
            parts_timeout_s=PUBLISH_TIMEOUT_S + 30.0,
        )

    def _resume(self) -> None:
        resumed = self._checkpoints.restore(self._networks)
        if resumed is not None:
            self._progress, self._saved_step = resumed, resumed.step
            self._bad_batches.non_finite_steps = resumed.non_finite_steps
            if self._control is not None and resumed.lag_control is not None:
                self._control.state = resumed.lag_control

    def _begin_incarnation(self, deadline: float) -> None:
        """Begin an incarnation; broadcast the version that each incarnation resumed from, for losses that read lags.

        The buffer may delay the coordinator, so the startup timeout applies to the other ranks.
        """
        source = self._place.coordinator
        header, pairs = torch.zeros(2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
        if self._place.is_coordinator:
            self._coordinator = Coordinator(self._context, self._channel, deadline)
            self._coordinator.begin(self._progress.version, self._progress.step, deadline)
            pairs = torch.tensor(list(self._coordinator.resumed_at.items()))
            header += torch.tensor([self._coordinator.incarnation, len(pairs)])
        dist.broadcast(header, src=source, group=self._ranks.group)
        incarnation, count = header.tolist()
        if not self._place.is_coordinator:
            pairs = pairs.new_zeros(count, 2)
        dist.broadcast(pairs, src=source, group=self._ranks.group)
        self._resumed_at = dict(pairs.tolist())
        self._progress = structs.replace(self._progress, incarnation=incarnation)

    # --- the loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._progress.step < self._config.num_steps:
            step = self._progress.step + 1
            requested_s = wall_time()
            received = self._next_batch(step)
            if received is None:
                break
            self._take_step(step, received, requested_s)
        self._finish()

    def _next_batch(self, step: int) -> Batch | bytes | None:
        """Return the batch on the coordinator, its bytes on other stages, or None to stop."""
        if self._coordinator is None:
            return self._receive_batch()
        try:
            self._release_draws()
            allowed = None if self._control is None else self._control.allowed
            batch = self._coordinator.draw(step, self._progress.version, self._stop, self._publish_skipped, allowed)
            if batch is not None:
                self._coordinator.check_age(batch, self._progress.version)
        except (TimeoutError, BufferError, CheckpointFailed, PublishFailed, StaleTokens) as error:
            # without this message, the other ranks would only report a closed connection
            self._channel.send(Kind.FAILED, str(error).encode())
            raise
        if batch is None:
            self._channel.send(Kind.STOP)
        else:
            self._channel.send(Kind.BATCH, batch.body)
        return batch

    def _receive_batch(self) -> bytes | None:
        while True:
            kind, payload = self._channel.receive()
            if kind is Kind.PUBLISH:
                self._publish(self._progress.version)
            else:
                return payload if kind is Kind.BATCH else None

    def _publish_skipped(self) -> None:
        """Publish a skipped version on all ranks; called on the coordinator. New leases may wait for the version."""
        if self._is_due(self._progress.version) and not self._is_full():
            self._channel.send(Kind.PUBLISH)
            self._publish(self._progress.version)

    def _take_step(self, step: int, received: Batch | bytes, requested_s: float) -> None:
        started_s = wall_time()
        own = received if isinstance(received, Batch) else None  # only the coordinator receives a Batch
        rows, body = (read_stream(received), None) if isinstance(received, bytes) else (received.rows, received.body)
        batch = StepBatch.build(
            rows, self._progress.version, self._resumed_at, self._packing, self._context.facts.normalised_rewards
        )
        newest = self._coordinator.newest_published if self._coordinator is not None else None
        try:
            check_samples(batch, self._context.config.algorithm.needs, None if own is None else own.record_ids)
        except BadSample as error:
            kept = self._bad_batches.keep(step, body)
            dist.barrier()  # wait until the batch is saved: the first rank that raises ends the others
            raise BadSample(f"step {step}: {error}; {kept}") from None
        result = self._train_step.run(batch, step - 1, self._publish_if_due)
        control = None if self._control is None else self._control.state
        self._progress = structs.replace(self._progress, step=step, version=result.version, lag_control=control)
        times = StepTimes(requested_s, started_s, wall_time())
        if self._coordinator is not None and own is not None:
            if result.new_scores:
                records = [own.record_ids[i] for i in result.new_scores]
                self._coordinator.write_scores(records, list(result.new_scores.values()))
            self._coordinator.step_finished(step, result.version, skipped=result.skipped)
        publish_s = self._publish_if_due(result.version)
        if self._coordinator is not None and own is not None:
            report = step_report(batch, result, step, newest, times, own.ledger, own.fidelity)
            report["restarts"] = self._progress.incarnation
            report["time/publish"] = (result.metrics.get("time/publish") or 0.0) + publish_s
            self._coordinator.metrics.append(report)
        try:
            self._bad_batches.record(step, result, body)
        except TrainingDiverged:
            dist.barrier()  # wait until the batch is saved, as in the barrier above
            raise
        if step % self._config.checkpoint_every == 0:
            self._save()

    def _publish_if_due(self, version: int) -> float:
        """Publish a version if it is due, also between updates of a step; return the duration in seconds.

        While earlier versions are still being written, this version is skipped, and the next version is due. So a full
        disk or slow network does not stop training until the staleness bound is reached.
        """
        started_s = time.perf_counter()
        if self._is_due(version) and self._may_publish():
            self._publish(version)
        return time.perf_counter() - started_s

    def _is_due(self, version: int) -> bool:
        every = self._contract.config.publish_every
        return version // every > self._published_version // every

    def _is_full(self) -> bool:
        return self._publisher is not None and self._publisher.is_full

    def _may_publish(self) -> bool:
        """Return whether a version can be published, the same on all ranks: a version needs a part from every stage."""
        # the coordinator waits for the parts of the other stages, so a version that it finished is finished on all
        is_full = torch.tensor([self._is_full()])
        if self._place.num_ranks > 1:
            dist.broadcast(is_full, src=self._place.coordinator)
        return not bool(is_full)

    def _publish(self, version: int) -> None:
        """Publish the current weights as this version, unless it was published before."""
        if version == self._published_version:
            return
        self._published_version = version
        if self._publisher is not None:
            on_committed = self._coordinator.published if self._coordinator is not None else None
            # modules compute with these rounded weights, which are half the bytes to copy
            rounded = set(self._context.serving_dtypes) == {"bfloat16"}
            tensors = self._networks.policy.published_tensors(rounded=rounded)
            self._publisher.publish(PolicyVersion(self._progress.incarnation, version), tensors, on_committed)

    def _save(self) -> None:
        """Start writing a checkpoint in the background, unless this step was saved before."""
        if self._saved_step == self._progress.step:
            return
        self._progress = structs.replace(self._progress, non_finite_steps=self._bad_batches.non_finite_steps)
        self._checkpoints.save(self._networks, self._progress)
        self._saved_step = self._progress.step

    def _release_draws(self, *, heartbeats: bool = True) -> None:
        """Release in the buffer the batches up to the oldest checkpoint; a restart may request later ones again."""
        released = self._checkpoints.released()
        if released is not None and self._coordinator is not None:
            self._coordinator.release_draws(released, heartbeats=heartbeats)

    def _finish(self) -> None:
        """Write the checkpoint, commit the weights and flush all reports."""
        self._save()  # first: weights can be published again, but an unsaved step would be lost
        self._publish(self._progress.version)
        self._checkpoints.close()
        self._release_draws(heartbeats=False)
        if self._publisher is not None:
            self._publisher.close(PUBLISH_TIMEOUT_S + 60.0)
        if self._coordinator is not None:
            self._coordinator.metrics.write()
            self._coordinator.flush(heartbeats=False)
            self._coordinator.close()

    # --- export and errors --------------------------------------------------------------------------

    def _export(self, folder: Path) -> None:
        place, tensors = self._place, self._networks.policy.exported_tensors()
        if place.publishes:
            write_shard(folder, place.stage, place.num_stages, tensors)
        self._ranks.all_gather("")  # wait for all shards, whose sizes and disks differ
        if place.is_coordinator:
            dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
            complete_folder(folder, self._context.model_path, place.num_stages, dtype)
        self._ranks.all_gather("")
        dist.destroy_process_group()

    def _guard(self, action: Callable[[], None], what: str) -> None:
        """Run an action; convert communication errors to StageLost and hardware faults to GpuFailed."""
        _make_current(self._device)
        try:
            action()
        except (CheckpointFailed, StageLost):
            raise  # checkpoint errors have their own timeout and remedy, even if one of their collectives failed
        except (RuntimeError, UserFileError) as error:  # including errors raised by a user's loss
            place = self._place
            if is_gpu_fault(error):
                raise GpuFailed(
                    f"{place.name} could not {what}: its GPU {self._device} failed: {first_line(error)}. Check dmesg "
                    "on its host for Xid errors, and nvidia-smi -q; if the error recurs, remove the GPU from the pool"
                ) from error
            if is_rank_loss(error):
                others = [rank for rank in range(place.num_ranks) if rank != place.rank]
                raise StageLost(
                    f"{place.name} could not {what}: one of the ranks {others} died or did not answer "
                    f"within {COLLECTIVE_TIMEOUT_S:g} s "
                    f"(loading and exporting: {self._context.startup_timeout_s:g} s); "
                    f"check the end of that rank's log. Original error: {error}"
                ) from error
            raise


def _make_current(device: torch.device) -> None:
    """Set the CUDA device of this thread: the setting is per thread, and Ray calls a stage from several threads."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
