"""What becomes of a step: its row of metrics.jsonl; and its draw, where that could not be trained."""

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

from algorithms.base import BadInputs, Needs, check_inputs
from buffer.ledger import LEDGER_METRICS
from buffer.lengths import LengthFidelity
from learner.batch import Lag0ByActor, LagByActor, Leaves, StepBatch, lag_by_actor
from learner.packing import IntArray

if TYPE_CHECKING:  # with Transformers, which the launcher does not need
    from learner.step import Metrics, StepResult

logger = logging.getLogger(__name__)

NON_FINITE_STEPS_IN_A_ROW = 3
"""Steps in a row without a finite loss and gradient that end the run: what broke stays broken.
Steps are counted and not updates, for the updates of one bad draw fail together."""

Report = dict[str, float | int | bool | Lag0ByActor | LagByActor | None]
"""Metrics by name; and tables by actor, which a reader joins with the pools of the actors."""

MAX_PARTS = 16
"""Reward functions that have a metric each."""


@dataclass(frozen=True)
class StepTimes:
    """Wall times of a step, seconds since the epoch: its batch was asked for, was there, and its update was done."""

    asked_s: float
    started_s: float
    finished_s: float


def lag_metrics(
    updates: Sequence[StepBatch], start: StepBatch, newest_published: int | None, started_s: float
) -> Metrics:
    """Return the lags over the tokens and trajectories that were trained.

    Updates are at their own versions, and a sample counts once for each; `start` is the draw, at the version that the
    step began with. `newest_published` could be pulled then; None: this learner had published nothing yet.
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
    """Return how often samples are used, and their age then, by the buffer's counts as the batch was drawn."""
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
    """Return the share of the draw's groups, of several samples, whose rewards are all equal."""
    rewards = np.asarray(start.rows.column("reward"))
    low_G, high_G = np.full(start.num_groups, np.inf), np.full(start.num_groups, -np.inf)
    np.minimum.at(low_G, start.group_B, rewards)
    np.maximum.at(high_G, start.group_B, rewards)
    return float(((low_G == high_G) & (np.bincount(start.group_B, minlength=start.num_groups) > 1)).mean())


def part_metrics(start: StepBatch) -> Metrics:
    """Return the mean of each of several reward functions, over the samples that it applies to."""
    names, values = start.rows.column("reward_parts").flatten().flatten()
    parts = pa.table({"name": names, "value": values})
    means = parts.group_by("name", use_threads=False).aggregate([("value", "mean")])  # in order of appearance
    found = dict(zip(means["name"].to_pylist(), means["value_mean"].to_pylist(), strict=True))
    return {f"reward/part/{name}": found[name] for name in [*found][:MAX_PARTS]} if len(found) > 1 else {}


def _ends(batch: StepBatch) -> tuple[IntArray, IntArray]:
    """Return the lag of the first and of the last token of each sequence that has any."""
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
    """Return the row of one step (from 1); the arguments as for `lag_metrics` and `replay_metrics`."""
    rewards = np.asarray(batch.rows.column("reward"))
    duration_s = times.finished_s - times.started_s
    trained = [update.batch for update in result.counted]
    trained_tokens = 0 if result.skipped else len(batch.sequence_T)
    return {
        **result.metrics,  # first: names of a user's loss replace none of these
        "step": step,
        "version": result.version,
        "skipped": result.skipped,
        "started_s": times.started_s,
        "finished_s": times.finished_s,
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        **part_metrics(batch),
        "length/trained_mean": float(np.mean(np.diff(batch.bounds_T()))),
        "length/fidelity_ks": fidelity.ks,
        "length/p95_ratio": fidelity.p95_ratio,
        "length/covered": fidelity.covered,
        "length/foretold": fidelity.foretold,
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
        "time/wait_for_batch": times.started_s - times.asked_s,
        "time/step": duration_s,
        "perf/learner_tokens_per_s": batch.packed.num_tokens / max(duration_s, 1e-9),
        "perf/trained_tokens_per_s": trained_tokens / max(times.finished_s - times.asked_s, 1e-9),
        **lag_metrics(trained, batch, newest_published, times.started_s),
        **replay_metrics(batch, ledger),
        "buffer/uninformative_frac": uninformative_frac(batch),
        **{metric: ledger[name] for metric, name in LEDGER_METRICS.items()},
        "lag0_by_actor": result.lag0_by_actor,
        "lag_by_actor": {} if result.skipped else lag_by_actor(trained),
    }


class MetricsFile:
    """metrics.jsonl of a run: one row per step, in their order. The coordinator alone writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._unwritten = b""

    def go_back(self, step: int) -> None:
        """Cut off the rows after `step`, which is trained again from there, and a row that a crash cut off.

        OSError if the file, which the launcher makes, cannot be read or written; ValueError if a line is no JSON.
        """
        try:
            with self._path.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n") or msgspec.json.decode(line)["step"] > step:
                        break
                    self._size += len(line)
                file.truncate(self._size)
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._path} has a line that is no JSON: {error}; remove that line") from None
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self._path} is not there: the learner's hosts must share the folder of the run (docs/cluster.md)"
            ) from None

    def append(self, row: Report) -> None:
        """Append a row; null stands for what is not finite. On a full disk rows wait for the next call."""
        self._unwritten += msgspec.json.encode(row, enc_hook=float) + b"\n"
        self.write()

    def write(self) -> None:
        try:
            # opened anew: NFS shows a reader on another host what was written before a file was closed
            with self._path.open("r+b") as file:
                file.seek(self._size)  # over what is left of a write that failed
                file.write(self._unwritten)
        except OSError as error:
            logger.warning("%s cannot be written; its rows wait for the next step: %s", self._path, error)
            return
        self._size += len(self._unwritten)
        self._unwritten = b""


class BadSample(ValueError):
    """No loss can be right on a drawn sample."""


class TrainingDiverged(RuntimeError):
    """Several steps in a row had no finite loss or gradient."""


def check_samples(batch: StepBatch, needs: Needs, record_ids: Sequence[int] | None) -> None:
    """Check what came from outside, as the loss with these needs will see it; every rank finds the same.

    BadSample names the trajectory, its record in the buffer if known, and what is wrong.
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
    """One run's folder of them. `keep` is the coordinator's; all ranks count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.non_finite_steps: Sequence[int] = ()
        """Steps in a row, up to the newest, without a finite loss or gradient; a restart takes them from the
        checkpoint."""

    def keep(self, step: int, body: bytes | memoryview | None) -> str:
        """Write the draw of a step down, as the Arrow IPC stream that the buffer sent; return where, or why not.

        A full disk is no reason to end a run that leaves a step out. Without the `body`, which the coordinator has,
        return where that has written it.
        """
        path = self._folder / f"step-{step}.arrow"
        try:
            if body is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)
        except OSError as error:
            return f"the draw is not kept: {error}"
        return f"the draw is kept in {path}"

    def note(self, step: int, result: StepResult, body: bytes | memoryview | None) -> None:
        """Count a step without a finite loss or gradient, and keep its draw; TrainingDiverged if one too many."""
        num_skipped = sum(not update.result.taken for update in result.updates)
        if body is not None and num_skipped:
            text = "step %d: loss or gradient not finite, %d of %d updates not taken; %s"
            logger.warning(text, step, num_skipped, len(result.updates), self.keep(step, body))
        self.non_finite_steps = (*self.non_finite_steps, step) if result.skipped else ()
        if len(self.non_finite_steps) >= NON_FINITE_STEPS_IN_A_ROW:
            raise TrainingDiverged(
                f"steps {', '.join(map(str, self.non_finite_steps))} had no finite loss or gradient, so the run stops "
                f"at version {result.version}. The draws are in {self._folder}. Usual causes: a learning rate "
                "(learner.learning_rate) too high, or rewards that are very large"
            )
