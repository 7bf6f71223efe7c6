"""Stage: one process of the pipeline; its last rank leads and talks to the buffer.

    setup   process group, model, optimizer, newest checkpoint; publishes the version it starts at
    run     draw -> step of one or several updates, publishing between and after them -> (checkpoint), until
            num_steps are finished or a stop is requested
    export  the policy as a Hugging Face folder; the stages part with it

All stages call the same methods. The lead decides (which batch, when to stop) and the others follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from buffer.client import Draw, decode_draw
from buffer.errors import BufferError
from learner.bad_batches import BadBatches, BadSample, TrainingDiverged, check_samples
from learner.batch import StepBatch, trainable
from learner.channel import Channel, Kind
from learner.checkpoint import Checkpoints, Progress
from learner.hf_files import write_folder, write_shard
from learner.lead import Lead
from learner.model import Heads, StageModule, load_stage
from learner.networks import Network, Networks
from learner.pipeline import Pipeline
from learner.reference import Reference
from learner.report import Report, StepTimes, step_report
from learner.spec import LearnerSpec
from learner.step import TrainStep
from weight_sync.publisher import Publisher
from weight_sync.staleness import PolicyVersion


class StageLost(RuntimeError):
    """Another stage died or did not answer in time."""


class Stage:
    """One stage of the learner."""

    def __init__(self, spec: LearnerSpec) -> None:
        """Take orders; nothing is loaded before `setup`.

        Raises:
            ValueError: the orders contradict each other.
        """
        spec.check()
        self.spec = spec
        self._stop = threading.Event()
        self._reports: list[Report] = []
        self._reports_lock = threading.Lock()
        self._lead: Lead | None = None
        self._progress = Progress(step=0, version=0, incarnation=0)
        self._saved_step = -1
        self._published_version = -1
        self._bad_batches = BadBatches(spec.run_folder / "bad_batches")

    # --- what a supervisor calls --------------------------------------------------------------------

    def setup(self) -> None:
        """Load everything, resume from the newest checkpoint and publish the version that training starts at.

        Raises:
            StageLost: not all stages came to the rendezvous within `collective_timeout_s`.
        """
        self._guard(self._setup, "set up")

    def run(self) -> None:
        """Train until `num_steps` steps are finished or a stop is requested; ends with a checkpoint and weights.

        The conversation with the buffer ends with it. A stage that raises has lost its place in the
        pipeline: end its process.

        Raises:
            NoBatch: the lead got no batch within `batch_timeout_s`; LeadFailed on the other stages.
            StageLost: another stage died or hung.
            BadSample: a drawn sample has a reward or a log-probability that no loss can use. All stages raise it.
            TrainingDiverged: three steps in a row had no finite loss or gradient. All stages raise it.
        """
        self._guard(self._run, "train")

    def request_stop(self) -> None:
        """Finish the step under way and end `run`. Counts on the lead; any thread may call it."""
        self._stop.set()

    def poll(self) -> list[Report]:
        """Reports of the steps since the last poll (lead only; empty elsewhere). Any thread may call it."""
        with self._reports_lock:
            reports, self._reports = self._reports, []
        return reports

    @property
    def waiting_for(self) -> str:
        """Whom the learner waits for just now; empty while it computes, and on other stages than the lead."""
        return self._lead.waiting_for if self._lead is not None else ""

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; all stages call it, after `run` and as the last."""
        self._guard(lambda: self._export(folder), "export")

    # --- setup --------------------------------------------------------------------------------------

    def _setup(self) -> None:
        spec, config = self.spec, self.spec.config
        device = _device(config.device, spec.rank)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(spec.seed)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=spec.rendezvous,
            rank=spec.rank,
            world_size=spec.num_stages,
            timeout=timedelta(seconds=config.collective_timeout_s),
        )
        self._networks = self._build_networks(device)
        reference = None
        if spec.algorithm.needs.reference:
            frozen = self._load(spec.reference_path, device).requires_grad_(False)
            reference = Pipeline(frozen, config.schedule, None)
        self._train_step = TrainStep(
            self._networks, Reference(reference, self._module), spec.algorithm, config, spec.seed
        )
        self._checkpoints = Checkpoints(
            spec.run_folder / "checkpoints", config.keep_checkpoints, spec.rank, spec.num_stages
        )
        self._channel = Channel(spec.rank, spec.num_stages)
        resumed = self._checkpoints.restore(self._networks)
        if resumed is not None:
            self._progress, self._saved_step = resumed, resumed.step
        self._begin_incarnation()
        self._publisher = Publisher(
            spec.run_folder / "weights", spec.rank, spec.num_stages, spec.weight_sync.keep_versions
        )
        self._publish(self._progress.version)

    def _build_networks(self, device: torch.device) -> Networks:
        spec = self.spec
        kind = spec.algorithm.needs.critic
        policy = self._load(spec.model_path, device, "token_and_value" if kind == "head" else "token")
        critic = None
        if kind == "model":
            critic = Network.build(self._load(spec.model_path, device, "value"), spec.config)
        return Networks(Network.build(policy, spec.config), critic, spec.config)

    @property
    def _module(self) -> StageModule:
        return self._networks.policy.module

    def _load(self, path: Path, device: torch.device, heads: Heads = "token") -> StageModule:
        spec = self.spec
        module = load_stage(path, spec.rank, spec.num_stages, temperature=spec.temperature, device=device, heads=heads)
        if spec.config.precision == "bfloat16":
            module.autocast_dtype = torch.bfloat16
        return module

    def _begin_incarnation(self) -> None:
        incarnation = torch.zeros(1, dtype=torch.int64)
        if self.spec.is_lead:
            self._lead = Lead(self.spec, self._channel)
            self._lead.begin(self._progress.version, self._progress.step)
            incarnation += self._lead.incarnation
        dist.broadcast(incarnation, src=self.spec.num_stages - 1)
        self._progress = Progress(self._progress.step, self._progress.version, int(incarnation))

    # --- the loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._progress.step < self.spec.config.num_steps:
            step = self._progress.step + 1
            asked_s = time.time()
            draw = self._next_batch(step)
            if draw is None:
                break
            self._take_step(step, draw, asked_s)
        self._finish()

    def _next_batch(self, step: int) -> Draw | bytes | None:
        """The lead's draw, the other stages' bytes of it, or None to stop."""
        if self._lead is None:
            kind, payload = self._channel.receive()
            return payload if kind is Kind.BATCH else None
        try:
            draw = self._lead.draw(step, self._progress.version, self._stop)
        except (TimeoutError, BufferError) as error:
            # the others would otherwise only see a closed connection, and not learn why
            self._channel.send(Kind.FAILED, str(error).encode())
            raise
        if draw is None:
            self._channel.send(Kind.STOP)
        else:
            self._channel.send(Kind.BATCH, draw.body)
        return draw

    def _take_step(self, step: int, draw: Draw | bytes, asked_s: float) -> None:
        started_s = time.time()
        batch, record_ids = self._batch(draw)
        newest = self._lead.newest_published if self._lead is not None else 0
        try:
            check_samples(batch, self.spec.algorithm.needs, record_ids)
        except BadSample as error:
            if isinstance(draw, Draw):
                self._bad_batches.keep(step, draw.body)
            dist.barrier()  # who raises first ends the others, and the draw must be on disk by then
            raise BadSample(f"step {step}: {error}. The draw is kept in {self._bad_batches.path(step)}") from None
        result = self._train_step.run(batch, step - 1, self._publish_if_due)
        self._progress = Progress(step, result.version, self._progress.incarnation)
        times = StepTimes(asked_s, started_s, time.time())
        if self._lead is not None and isinstance(draw, Draw):
            if result.new_scores and record_ids is not None:
                self._lead.write_scores([record_ids[i] for i in result.new_scores], list(result.new_scores.values()))
            self._lead.step_finished(step, result.version, skipped=result.skipped)
            report = step_report(batch, result, step, newest, times, draw.ledger, draw.fidelity_ks)
            with self._reports_lock:
                self._reports.append(report)
        try:
            self._bad_batches.judge(step, result, draw.body if isinstance(draw, Draw) else None)
        except TrainingDiverged:
            dist.barrier()  # as above
            raise
        self._publish_if_due(result.version)
        if step % self.spec.config.checkpoint_every == 0:
            self._save()

    def _batch(self, draw: Draw | bytes) -> tuple[StepBatch, list[int] | None]:
        """The samples to train, and on the lead their records."""
        rows = decode_draw(draw) if isinstance(draw, bytes) else draw.trajectories
        chosen = trainable(rows)
        # lags are the lead's to report; no other stage knows where earlier incarnations ended
        resumed_at = self._lead.resumed_at if self._lead is not None else {}
        batch = StepBatch.build(
            [rows[i] for i in chosen],
            self._progress.version,
            resumed_at,
            self.spec.config.token_budget,
            min_micro_batches=self.spec.num_stages,
        )
        return batch, None if isinstance(draw, bytes) else [draw.record_ids[i] for i in chosen]

    def _publish_if_due(self, version: int) -> None:
        """Every version counts, also those between the updates of a step: what waits makes the actors staler."""
        if version % self.spec.weight_sync.publish_every == 0:
            self._publish(version)

    def _publish(self, version: int) -> None:
        """Publish the weights, which are those of this version, unless that was done."""
        if version == self._published_version:
            return
        on_committed = self._lead.published if self._lead is not None else None
        tensors = self._module.published_tensors()
        self._publisher.publish(PolicyVersion(self._progress.incarnation, version), tensors, on_committed)
        self._published_version = version

    def _save(self) -> None:
        if self._saved_step == self._progress.step:
            return
        self._checkpoints.save(self._networks, self._progress)
        self._saved_step = self._progress.step
        if self._lead is not None:
            self._lead.checkpoint_durable(self._progress.step)

    def _finish(self) -> None:
        """Leave nothing half done: weights committed, checkpoint written, everything reported."""
        self._publish(self._progress.version)
        self._save()
        self._publisher.close(self.spec.config.collective_timeout_s)
        if self._lead is not None:
            self._lead.settle(heartbeats=False)
            self._lead.close()

    # --- the rest -----------------------------------------------------------------------------------

    def _export(self, folder: Path) -> None:
        spec = self.spec
        write_shard(folder, spec.rank, spec.num_stages, self._module.exported_tensors())
        dist.barrier()
        if spec.is_lead:
            write_folder(folder, spec.model_path, spec.num_stages, self._module.dtype)
        dist.barrier()
        dist.destroy_process_group()

    def _guard(self, action: Callable[[], None], what: str) -> None:
        """Run an action; say which stage lost which where the communication library says 'connection closed'."""
        try:
            action()
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                others = [rank for rank in range(self.spec.num_stages) if rank != self.spec.rank]
                raise StageLost(
                    f"stage {self.spec.rank} could not {what}: one of the stages {others} died or did not answer "
                    f"within learner.collective_timeout_s = {self.spec.config.collective_timeout_s:g} s; "
                    f"look at the end of its log. Reported: {error}"
                ) from error
            raise


def _device(wanted: str, rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("learner.device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
