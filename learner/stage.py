"""Stage: one process of the pipeline; its last rank leads and talks to the buffer.

    setup   process group, model, optimizer, newest checkpoint; publishes the version it starts at
    run     batch -> step -> publish -> (checkpoint), until num_steps are finished or a stop is requested
    export  the policy as a Hugging Face folder; the stages part with it

All stages call the same methods. The lead decides (which batch, when to stop) and the others follow.
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

from algorithms.registry import needs_reference
from buffer.client import Draw, decode_draw
from buffer.errors import BufferError
from learner.batch import StepBatch, trainable
from learner.channel import Channel, Kind
from learner.checkpoint import Checkpoints, Progress
from learner.hf_files import write_folder, write_shard
from learner.lead import Lead
from learner.model import StageModule, load_stage
from learner.optimizer import StageOptimizer, tied_group
from learner.pipeline import Pipeline
from learner.report import Report, StepTimes, step_report
from learner.spec import LearnerSpec
from learner.step import StepResult, TrainStep
from weight_sync.publisher import Publisher
from weight_sync.staleness import PolicyVersion

logger = logging.getLogger(__name__)

SKIPS_IN_A_ROW = 3
"""So many steps without a finite loss and gradient end the run: a model that broke does not mend itself."""


class TrainingDiverged(RuntimeError):
    """Several steps in a row had no finite loss or gradient."""


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
        self._skips_in_a_row = 0

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
            TrainingDiverged: three steps in a row were skipped.
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
        self._module = self._load(spec.model_path, device)
        reference = None
        if needs_reference(spec.algorithm):
            frozen = self._load(spec.reference_path, device).requires_grad_(False)
            reference = Pipeline(frozen, config.schedule, None)
        self._optimizer = StageOptimizer(self._module, config, None, tied_group(self._module))
        pipeline = Pipeline(self._module, config.schedule, None)
        self._train_step = TrainStep(pipeline, reference, self._optimizer, spec.algorithm)
        self._checkpoints = Checkpoints(
            spec.run_folder / "checkpoints", config.keep_checkpoints, spec.rank, spec.num_stages
        )
        self._channel = Channel(spec.rank, spec.num_stages)
        resumed = self._checkpoints.restore(self._module, self._optimizer)
        if resumed is not None:
            self._progress, self._saved_step = resumed, resumed.step
        self._begin_incarnation()
        self._publisher = Publisher(
            spec.run_folder / "weights", spec.rank, spec.num_stages, spec.weight_sync.keep_versions
        )
        self._publish()

    def _load(self, path: Path, device: torch.device) -> StageModule:
        spec = self.spec
        module = load_stage(path, spec.rank, spec.num_stages, temperature=spec.temperature, device=device)
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
        version = self._progress.version
        started_s = time.time()
        rows = decode_draw(draw) if isinstance(draw, bytes) else draw.trajectories
        chosen = trainable(rows)
        # lags are the lead's to report; no other stage knows where earlier incarnations ended
        resumed_at = self._lead.resumed_at if self._lead is not None else {}
        token_budget = self.spec.config.token_budget
        batch = StepBatch.build(
            [rows[i] for i in chosen], version, resumed_at, token_budget, min_micro_batches=self.spec.num_stages
        )
        newest = self._lead.newest_published if self._lead is not None else 0
        result = self._train_step.run(batch, step - 1, version, token_budget)
        self._progress = Progress(step, version + (0 if result.skipped else 1), self._progress.incarnation)
        times = StepTimes(asked_s, started_s, time.time())
        if self._lead is not None and isinstance(draw, Draw):
            if result.new_scores:
                records = [draw.record_ids[chosen[i]] for i in result.new_scores]
                self._lead.write_scores(records, list(result.new_scores.values()))
            self._lead.step_finished(step, self._progress.version, skipped=result.skipped)
            report = step_report(batch, result, step, version, newest, times, draw.ledger, draw.fidelity_ks)
            with self._reports_lock:
                self._reports.append(report)
        self._handle_skip(step, result, draw)
        if self._progress.version % self.spec.weight_sync.publish_every == 0:
            self._publish()
        if step % self.spec.config.checkpoint_every == 0:
            self._save()

    def _handle_skip(self, step: int, result: StepResult, draw: Draw | bytes) -> None:
        if not result.skipped:
            self._skips_in_a_row = 0
            return
        self._skips_in_a_row += 1
        folder = self.spec.run_folder / "bad_batches"
        if isinstance(draw, Draw):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"step-{step}.arrow").write_bytes(draw.body)
            logger.warning("step %d skipped: loss or gradient not finite; batch kept in %s", step, folder)
        if self._skips_in_a_row >= SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"steps {step - SKIPS_IN_A_ROW + 1} to {step} had no finite loss or gradient, so the run stops at "
                f"version {self._progress.version}. The batches are in {folder}. Usual causes: a learning rate "
                "(learner.learning_rate) too high, or rewards that are not finite"
            )

    def _publish(self) -> None:
        """Publish the present version, unless it is."""
        version = self._progress.version
        if version == self._published_version:
            return
        on_committed = self._lead.published if self._lead is not None else None
        tensors = self._module.published_tensors()
        self._publisher.publish(PolicyVersion(self._progress.incarnation, version), tensors, on_committed)
        self._published_version = version

    def _save(self) -> None:
        if self._saved_step == self._progress.step:
            return
        self._checkpoints.save(self._module, self._optimizer, self._progress)
        self._saved_step = self._progress.step
        if self._lead is not None:
            self._lead.checkpoint_durable(self._progress.step)

    def _finish(self) -> None:
        """Leave nothing half done: weights committed, checkpoint written, everything reported."""
        self._publish()
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
