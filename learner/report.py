"""Results of a step: its row of metrics.jsonl, and its batch if training could not use the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import torch

from leeway.algorithms.base import BadInputs, Needs, check_inputs
from leeway.algorithms.corrections import Metrics
from leeway.buffer.ledger import LEDGER_METRICS
from leeway.buffer.lengths import LengthFidelity
from leeway.common.run import LOGGED
from leeway.learner.batch import Lag0ByActor, LagByActor, Leaves, StepBatch, lag_by_actor
from leeway.learner.packing import IntArray

if TYPE_CHECKING:  # imports Transformers, which the launcher does not need
    from leeway.learner.step import StepResult

logger = logging.getLogger(__name__)

NON_FINITE_STEPS_IN_A_ROW = 3
"""Number of consecutive steps without a finite loss and gradient that ends the run, because the failure persists.
Steps are counted instead of updates, because the updates of one bad batch fail together."""

Report = dict[str, float | int | bool | Lag0ByActor | LagByActor | None]
"""Metrics by name, and tables by actor, which readers join with the pools of the actors."""

MAX_PARTS = 16
"""Maximum number of reward functions, and of logged values, that get a metric each."""


@dataclass(frozen=True)
class StepTimes:
    """Times of a step in seconds since the epoch: batch requested, batch received, step finished."""

    requested_s: float
    started_s: float
    finished_s: float


def lag_metrics(
    updates: Sequence[StepBatch], start: StepBatch, newest_published: int | None, started_s: float
) -> Metrics:
    """Return lag metrics over the tokens and trajectories that the step trained on.

    `updates` holds the batch of each update, at its own version; a sample counts once per update. `start` is the whole
    batch, at the initial version. `newest_published` is the newest version published before the step, or None.
    """
    lag_T = np.concatenate([batch.lag_T for batch in updates])
    first_B, last_B = (np.concatenate(ends) for ends in zip(*map(_ends, updates), strict=True))
    waited_s = started_s - np.asarray(start.rows.column("finished_s"))
    return {
        "lag/token_mean": float(lag_T.mean()),
        "lag/token_p50": float(np.percentile(lag_T, 50)),
        "lag/token_p95": float(np.percentile(lag_T, 95)),
        "lag/token_max": float(lag_T.max()),
        "lag/in_flight": float((first_B - last_B).mean()),
        "lag/in_queue": float(last_B.mean()),
        "lag/publish": None if newest_published is None else float(start.version - newest_published),
        "lag/wall_s": float(np.mean(waited_s)),
        "lag/abandoned": float(start.abandoned_T.sum()),
    }


def replay_metrics(start: StepBatch, ledger: Mapping[str, int]) -> Metrics:
    """Return metrics of sample reuse and of the age at use; `ledger` has the buffer counts at the draw."""
    bounds_T = start.bounds_T()
    written_B = np.flatnonzero(bounds_T[1:] > bounds_T[:-1])
    age_G = np.zeros(start.num_groups, np.int64)
    np.maximum.at(age_G, start.group_B[written_B], start.lag_T[bounds_T[:-1][written_B]])
    uses = ledger["uses"] - ledger["redone_uses"]
    return {
        "buffer/effective_uses": uses,
        "buffer/uses_per_sample": uses / ledger["trained"] if ledger["trained"] else None,
        "buffer/age_at_use": float(age_G.mean()),
        "buffer/on_policy_share": float((start.lag_T == 0).mean()) if len(start.lag_T) else None,
    }


def uninformative_frac(start: StepBatch) -> float:
    """Return the fraction of groups in the batch that have several samples and only equal rewards."""
    rewards = np.asarray(start.rows.column("reward"))
    low_G, high_G = np.full(start.num_groups, np.inf), np.full(start.num_groups, -np.inf)
    np.minimum.at(low_G, start.group_B, rewards)
    np.maximum.at(high_G, start.group_B, rewards)
    return float(((low_G == high_G) & (np.bincount(start.group_B, minlength=start.num_groups) > 1)).mean())


def part_metrics(start: StepBatch) -> Metrics:
    """Return the means of logged values, and of several reward functions over the samples they apply to."""
    names, values = start.rows.column("reward_parts").flatten().flatten()
    parts = pa.table({"name": names, "value": values})
    means = parts.group_by("name", use_threads=False).aggregate([("value", "mean")])  # keeps the order of appearance
    found = dict(zip(means["name"].to_pylist(), means["value_mean"].to_pylist(), strict=True))
    logged = [name for name in found if name.startswith(LOGGED)][:MAX_PARTS]
    own = [name for name in found if not name.startswith(LOGGED)][:MAX_PARTS]
    metrics = {f"reward/part/{name}": found[name] for name in own} if len(own) > 1 else {}
    return metrics | {f"reward/{name.removeprefix(LOGGED)}": found[name] for name in logged}


def _ends(batch: StepBatch) -> tuple[IntArray, IntArray]:
    """Return the lags of the first and last token of each non-empty sequence."""
    bounds_T = batch.bounds_T()
    written = bounds_T[1:] > bounds_T[:-1]
    return batch.lag_T[bounds_T[:-1][written]], batch.lag_T[bounds_T[1:][written] - 1]


def step_report(
    batch: StepBatch,
    result: StepResult,
    step: int,
    newest_published: int | None,
    times: StepTimes,
    ledger: Mapping[str, int],
    fidelity: LengthFidelity,
) -> Report:
    """Return the metrics row of one step (from 1); `lag_metrics` and `replay_metrics` describe the arguments."""
    rewards = np.asarray(batch.rows.column("reward"))
    duration_s = times.finished_s - times.started_s
    trained = [update.batch for update in result.counted]
    trained_tokens = 0 if result.skipped else len(batch.sequence_T)
    return {
        **result.metrics,  # first, so that metrics of a user's loss cannot override the others
        "step": step,
        "version": result.version,
        "skipped": result.skipped,
        "started_s": times.started_s,
        "finished_s": times.finished_s,
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/max": float(np.max(rewards)),
        **part_metrics(batch),
        "length/trained_mean": float(np.mean(np.diff(batch.bounds_T()))),
        "length/cut_frac": float(np.mean(np.asarray(batch.rows.column("finish_reason")) == "length")),
        "length/fidelity_ks": fidelity.ks,
        "length/p95_ratio": fidelity.p95_ratio,
        "length/covered": fidelity.covered,
        "length/predicted": fidelity.predicted,
        "length/late": fidelity.late,
        "batch/trajectories": batch.rows.num_rows,
        "batch/groups": batch.num_groups,
        "batch/tokens": batch.packed.num_tokens,
        "batch/completion_tokens": len(batch.sequence_T),
        "batch/micro_batches": batch.packed.num_micro_batches // batch.rule.num_replicas,
        "batch/empty_micro_batches": batch.packed.num_empty,
        "batch/pack_efficiency": batch.packed.efficiency,
        "batch/shared_frac": batch.packed.shared_frac,
        "batch/cost_balance": batch.packed.cost_balance(batch.rule.num_replicas),
        "time/wait_for_batch": times.started_s - times.requested_s,
        "time/step": duration_s,
        "perf/learner_tokens_per_s": batch.packed.num_tokens / max(duration_s, 1e-9),
        "perf/trained_tokens_per_s": trained_tokens / max(times.finished_s - times.requested_s, 1e-9),
        **lag_metrics(trained, batch, newest_published, times.started_s),
        **replay_metrics(batch, ledger),
        "buffer/uninformative_frac": uninformative_frac(batch),
        **{metric: ledger[name] for metric, name in LEDGER_METRICS.items()},
        "lag0_by_actor": result.lag0_by_actor,
        "lag_by_actor": {} if result.skipped else lag_by_actor(trained),
    }


class MetricsFile:
    """Writer of metrics.jsonl: one row per step, in order. Used only on the coordinator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._unwritten = b""

    def truncate(self, step: int) -> None:
        """Remove the rows after `step`, where training resumes, and an incomplete row left by a crash.

        Raises OSError if the file, which the launcher creates, cannot be read or written, and ValueError if a line is
        not JSON.
        """
        try:
            with self._path.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n") or msgspec.json.decode(line)["step"] > step:
                        break
                    self._size += len(line)
                file.truncate(self._size)
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._path} has a line that is not JSON: {error}; remove that line") from None
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self._path} does not exist: share the run folder with all hosts of the learner (docs/cluster.md)"
            ) from None

    def append(self, row: Report) -> None:
        """Append a row, with null for non-finite values. If the disk is full, rows are written with the next call."""
        self._unwritten += msgspec.json.encode(row, enc_hook=float) + b"\n"
        self.write()

    def write(self) -> None:
        try:
            # reopened on every write: on NFS, readers on other hosts see data only after the file is closed
            with self._path.open("r+b") as file:
                file.seek(self._size)  # overwrites the remains of a failed write
                file.write(self._unwritten)
        except OSError as error:
            logger.warning("%s cannot be written; retrying with the next step: %s", self._path, error)
            return
        self._size += len(self._unwritten)
        self._unwritten = b""


class BadSample(ValueError):
    """A sample has invalid values that no loss can use."""


class TrainingDiverged(RuntimeError):
    """Several consecutive steps had no finite loss or gradient."""


def check_samples(batch: StepBatch, needs: Needs, record_ids: Sequence[int] | None) -> None:
    """Validate the external data that a loss with these needs reads; the result is the same on all ranks.

    Raises BadSample, which names the trajectory, its buffer record if known, and the problem.
    """
    unknown_T = torch.zeros(len(batch.sequence_T), dtype=torch.float32)
    leaves = Leaves(unknown_T)
    try:
        check_inputs(batch.loss_inputs(leaves, leaves, unknown_T), needs)
    except BadInputs as error:
        (row,) = batch.rows.slice(error.sequence, 1).to_pylist()
        record = "" if record_ids is None else f", record {record_ids[error.sequence]}"
        raise BadSample(
            f"sample {row['sample_index']} of group {row['group_id']} (prompt {row['prompt_id']}, actor "
            f"'{row['actor']}', reward {row['reward']}{record}) cannot be trained on: {error.what}"
        ) from None


class BadBatches:
    """Folder of batches that training could not use. Only the coordinator writes; all ranks count non-finite steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.non_finite_steps: tuple[int, ...] = ()
        """Most recent consecutive steps without a finite loss or gradient; restored from the checkpoint after a
        restart."""

    def keep(self, step: int, body: bytes | memoryview | None) -> str:
        """Save the batch of a step as the Arrow IPC stream from the buffer; return a sentence with the path or error.

        A full disk does not end the run. If `body` is None (on ranks other than the coordinator), only return the
        sentence.
        """
        path = self._folder / f"step-{step}.arrow"
        try:
            if body is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)
        except OSError as error:
            return f"the batch could not be saved: {error}"
        return f"the batch is saved in {path}"

    def record(self, step: int, result: StepResult, body: bytes | memoryview | None) -> None:
        """Count a step without a finite loss or gradient and save its batch; raise TrainingDiverged at the limit."""
        num_skipped = sum(not update.result.taken for update in result.updates)
        if body is not None and num_skipped:
            text = "step %d: loss or gradient is not finite, so %d of %d updates were skipped; %s"
            logger.warning(text, step, num_skipped, len(result.updates), self.keep(step, body))
        self.non_finite_steps = (*self.non_finite_steps, step) if result.skipped else ()
        if len(self.non_finite_steps) >= NON_FINITE_STEPS_IN_A_ROW:
            raise TrainingDiverged(
                f"steps {', '.join(map(str, self.non_finite_steps))} had no finite loss or gradient; stopped at "
                f"version {result.version}. The batches are in {self._folder}. Lower learner.learning_rate, or check "
                "the rewards for very large values"
            )
