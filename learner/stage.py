"""Stage: one process of the learner; one of them, the last stage of replica 0, coordinates and talks to the buffer.

    setup   process groups, models, optimizers, newest checkpoint; publishes the version it starts at
    run     draw -> step of one or several updates, publishing between and after them -> (checkpoint), until
            num_steps are finished or a stop is requested
    export  the policy as a Hugging Face folder; the stages part with it

All stages call the same methods. The coordinator decides (which batch, when to stop) and the others follow.
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

from buffer.client import Draw
from buffer.errors import BufferError
from buffer.schema import read_stream
from common.hf_folder import complete_folder, model_identity
from common.process import wall_time
from common.run import RunContext
from common.staleness import PolicyVersion, StaleTokens
from common.user_input import UserFileError
from learner.batch import StepBatch
from learner.checkpoint import CheckpointFailed, Checkpoints
from learner.checkpoint_files import KEPT_CHECKPOINTS, TrainingProgress, write_shard
from learner.config import LearnerSections
from learner.coordinator import Channel, Coordinator, Kind
from learner.decoders import cost_of
from learner.device import device_of, settle
from learner.lag_control import LagControl
from learner.mesh import (
    COLLECTIVE_TIMEOUT_S,
    Agreement,
    GpuFailed,
    Mesh,
    MeshPlace,
    StageLost,
    first_line,
    join_group,
    tells_of_fault,
    tells_of_loss,
)
from learner.networks import build_reference, load_networks
from learner.packing import CostModel, PackingRule
from learner.report import BadBatches, BadSample, StepTimes, TrainingDiverged, check_samples, step_report
from learner.step import TrainStep
from weight_sync.client import PUBLISH_TIMEOUT_S, StoreAccess
from weight_sync.manifest import PublishFailed
from weight_sync.publisher import Publisher
from weight_sync.store import KEPT_VERSIONS

logger = logging.getLogger(__name__)

CHECKPOINT_TIMEOUT_S = 1800.0
"""A checkpoint that takes longer to write ends the learner: a terabyte at 600 MB/s takes less."""
GIVES_UP_EARLIER_S = 5.0
"""Margin to the startup timeout of the coordinator's wait for the buffer: its error names the service."""


class Stage:
    def __init__(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """Load nothing before `setup`. The rendezvous, tcp://HOST:PORT, is free on the host of rank 0."""
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

    # --- what a supervisor calls --------------------------------------------------------------------

    def setup(self) -> None:
        """Load everything, resume from the newest checkpoint and publish the version that training starts at.

        StageLost if not all stages come to the rendezvous or load in time; TimeoutError, which names it, if the buffer
        service does not answer the coordinator.
        """
        self._guard(self._setup, "set up")

    def run(self) -> None:
        """Train until `num_steps` steps are finished or a stop is requested; ends with a checkpoint and weights.

        A stage that raises has lost its place in the pipeline: end its process. NoBatch, PublishFailed and StaleTokens
        are the coordinator's; the other stages raise CoordinatorFailed then, or StageLost if a step was under way.
        StageLost: another stage died or hung; GpuFailed: the GPU of this one did. All stages raise BadSample, of a
        drawn sample that no loss can use, and TrainingDiverged after three steps in a row without a finite loss or
        gradient.
        """
        self._guard(self._run, "train")

    def request_stop(self) -> None:
        """Finish the step under way and end `run`. Counts on the coordinator; any thread may call it."""
        self._stop.set()

    @property
    def waiting_for(self) -> str:
        """Empty while the learner computes, and on other stages than the coordinator."""
        return self._coordinator.waiting_for if self._coordinator is not None else ""

    @property
    def publishing(self) -> str:
        """What delays a version's publication, which goes on beside training; empty if nothing does."""
        return self._publisher.waiting_for if self._publisher is not None else ""

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; all stages call it, after `run` and as the last."""
        self._guard(lambda: self._export(folder), "export")

    # --- setup --------------------------------------------------------------------------------------

    def _setup(self) -> None:
        context, config, place = self._context, self._config, self._place
        deadline = time.monotonic() + context.startup_timeout_s - GIVES_UP_EARLIER_S
        self._device = device = device_of(config, place.rank)
        _make_current(device)
        settle(config, device)
        torch.manual_seed(context.facts.seed)
        join_group(
            self._rendezvous,
            device,
            rank=place.rank,
            num_ranks=place.num_ranks,
            meets_within=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        mesh = Mesh.build(place, timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._ranks = Agreement(place.rank, context.startup_timeout_s)
        critic = context.config.algorithm.needs.critic
        self._networks = load_networks(context.model_path, config, critic, context.temperature, mesh, device)
        self._reference = build_reference(context, mesh, device)
        # a share that loads slowly is none that is lost: no collective of training may begin before all are there
        self._ranks.say("")
        logger.info("%s has loaded its weights", place.name)
        self._train_step = TrainStep(
            self._networks,
            self._reference,
            context.config.algorithm,
            config,
            context.facts.seed,
            control=self._control,
        )
        cost = CostModel(*cost_of(AutoConfig.from_pretrained(context.model_path, local_files_only=True)))
        unit = context.config.algorithm.needs.separable or "sequence"
        self._packing = PackingRule.of_schedule(
            config.schedule, config.num_stages, config.token_budget, config.num_replicas, cost, unit
        )
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
            # a little longer, so that a stage without space is the first to fail, and says why
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
        """Open one, and send all ranks from which version each resumed, for losses that read lags.

        The buffer may delay the coordinator: the others wait as long as while they load.
        """
        source = self._place.coordinator
        told, pairs = torch.zeros(2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
        if self._place.is_coordinator:
            self._coordinator = Coordinator(self._context, self._channel, deadline)
            self._coordinator.begin(self._progress.version, self._progress.step, deadline)
            pairs = torch.tensor(list(self._coordinator.resumed_at.items()))
            told += torch.tensor([self._coordinator.incarnation, len(pairs)])
        dist.broadcast(told, src=source, group=self._ranks.group)
        incarnation, count = told.tolist()
        if not self._place.is_coordinator:
            pairs = pairs.new_zeros(count, 2)
        dist.broadcast(pairs, src=source, group=self._ranks.group)
        self._resumed_at = dict(pairs.tolist())
        self._progress = structs.replace(self._progress, incarnation=incarnation)

    # --- the loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._progress.step < self._config.num_steps:
            step = self._progress.step + 1
            asked_s = wall_time()
            draw = self._next_batch(step)
            if draw is None:
                break
            self._take_step(step, draw, asked_s)
        self._finish()

    def _next_batch(self, step: int) -> Draw | bytes | None:
        """Return the coordinator's draw, the other stages' bytes of it, or None to stop."""
        if self._coordinator is None:
            return self._hear_of_batch()
        try:
            self._release_draws()
            allowed = None if self._control is None else self._control.allowed
            draw = self._coordinator.draw(step, self._progress.version, self._stop, self._make_up, allowed)
            if draw is not None:
                self._coordinator.check_age(draw, self._progress.version)
        except (TimeoutError, BufferError, CheckpointFailed, PublishFailed, StaleTokens) as error:
            # the others would otherwise only see a closed connection, and not learn why
            self._channel.send(Kind.FAILED, str(error).encode())
            raise
        if draw is None:
            self._channel.send(Kind.STOP)
        else:
            self._channel.send(Kind.BATCH, draw.body)
        return draw

    def _hear_of_batch(self) -> bytes | None:
        while True:
            kind, payload = self._channel.receive()
            if kind is Kind.PUBLISH:
                self._publish(self._progress.version)
            else:
                return payload if kind is Kind.BATCH else None

    def _make_up(self) -> None:
        """On the coordinator, while the others listen: publish what was left out. Admission may be waiting for it."""
        if self._is_due(self._progress.version) and not self._is_full():
            self._channel.send(Kind.PUBLISH)
            self._publish(self._progress.version)

    def _take_step(self, step: int, draw: Draw | bytes, asked_s: float) -> None:
        started_s = wall_time()
        own = draw if isinstance(draw, Draw) else None  # on the coordinator
        rows, body = (read_stream(draw), None) if isinstance(draw, bytes) else (draw.rows, draw.body)
        batch = StepBatch.build(rows, self._progress.version, self._resumed_at, self._packing)
        newest = self._coordinator.newest_published if self._coordinator is not None else None
        try:
            check_samples(batch, self._context.config.algorithm.needs, None if own is None else own.record_ids)
        except BadSample as error:
            kept = self._bad_batches.keep(step, body)
            dist.barrier()  # who raises first ends the others, and the draw must be on disk by then
            raise BadSample(f"step {step}: {error}; {kept}") from None
        result = self._train_step.run(batch, step - 1, self._publish_if_due)
        control = None if self._control is None else self._control.state
        self._progress = structs.replace(self._progress, step=step, version=result.version, lag_control=control)
        times = StepTimes(asked_s, started_s, wall_time())
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
            self._bad_batches.note(step, result, body)
        except TrainingDiverged:
            dist.barrier()  # as above
            raise
        if step % self._config.checkpoint_every == 0:
            self._save()

    def _publish_if_due(self, version: int) -> float:
        """Publish also between the updates of a step; return the seconds that it took.

        While earlier versions are still being written this one is left out, and the next is due: neither a full disk
        nor a slow network stops training before the staleness bound does.
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
        """Return whether another version can be taken, alike on all ranks: a version needs a part of every stage."""
        # the coordinator waits for the parts of the others, so what it has finished all have
        is_full = torch.tensor([self._is_full()])
        if self._place.num_ranks > 1:
            dist.broadcast(is_full, src=self._place.coordinator)
        return not bool(is_full)

    def _publish(self, version: int) -> None:
        """Publish the weights, which are those of this version, unless that was done."""
        if version == self._published_version:
            return
        self._published_version = version
        if self._publisher is not None:
            on_committed = self._coordinator.published if self._coordinator is not None else None
            # what modules compute with is the same rounding of the weights, and half as much to copy
            rounded = set(self._context.serving_dtypes) == {"bfloat16"}
            tensors = self._networks.policy.published_tensors(rounded=rounded)
            self._publisher.publish(PolicyVersion(self._progress.incarnation, version), tensors, on_committed)

    def _save(self) -> None:
        """Begin to write a checkpoint; training goes on meanwhile."""
        if self._saved_step == self._progress.step:
            return
        non_finite_steps = tuple(self._bad_batches.non_finite_steps)
        self._progress = structs.replace(self._progress, non_finite_steps=non_finite_steps)
        self._checkpoints.save(self._networks, self._progress)
        self._saved_step = self._progress.step

    def _release_draws(self, *, heartbeats: bool = True) -> None:
        """Tell the buffer which draws are used for good: those after the oldest checkpoint may be asked for again."""
        released = self._checkpoints.released()
        if released is not None and self._coordinator is not None:
            self._coordinator.release_draws(released, heartbeats=heartbeats)

    def _finish(self) -> None:
        """Commit the weights, write the checkpoint, report everything."""
        self._save()  # first: weights can be published again, a step cannot be had back
        self._publish(self._progress.version)
        self._checkpoints.close()
        self._release_draws(heartbeats=False)
        if self._publisher is not None:
            self._publisher.close(PUBLISH_TIMEOUT_S + 60.0)
        if self._coordinator is not None:
            self._coordinator.metrics.write()
            self._coordinator.settle(heartbeats=False)
            self._coordinator.close()

    # --- the rest -----------------------------------------------------------------------------------

    def _export(self, folder: Path) -> None:
        place, tensors = self._place, self._networks.policy.exported_tensors()
        if place.publishes:
            write_shard(folder, place.stage, place.num_stages, tensors)
        self._ranks.say("")  # shards are of unequal sizes, and may go to unequal disks
        if place.is_coordinator:
            dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
            complete_folder(folder, self._context.model_path, place.num_stages, dtype)
        self._ranks.say("")
        dist.destroy_process_group()

    def _guard(self, action: Callable[[], None], what: str) -> None:
        """Run an action; name the lost stage where the communication library says 'connection closed'."""
        _make_current(self._device)
        try:
            action()
        except (CheckpointFailed, StageLost):
            raise  # a checkpoint has its own limit and its own remedy, also where a collective of its own did not end
        except (RuntimeError, UserFileError) as error:  # also of what a user's loss raised
            place = self._place
            if tells_of_fault(error):
                raise GpuFailed(
                    f"{place.name} could not {what}: its GPU {self._device} failed: {first_line(error)}. Look for Xid "
                    "in its host's dmesg, and at nvidia-smi -q; if it comes again, take the GPU out of the pool"
                ) from error
            if tells_of_loss(error):
                others = [rank for rank in range(place.num_ranks) if rank != place.rank]
                raise StageLost(
                    f"{place.name} could not {what}: one of the ranks {others} died or did not answer "
                    f"within {COLLECTIVE_TIMEOUT_S:g} s "
                    f"(loading and exporting: {self._context.startup_timeout_s:g} s); "
                    f"look at the end of its log. Reported: {error}"
                ) from error
            raise


def _make_current(device: torch.device) -> None:
    """Make a device that of this thread: each has its own, and Ray calls a stage from several."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
