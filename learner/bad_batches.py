"""BadBatches: draws that could not be trained on, kept for inspection, and the end of a run that yields no others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from algorithms.base import BadInputs, Needs, check_inputs
from learner.batch import Leaves, StepBatch
from learner.step import StepResult

logger = logging.getLogger(__name__)

NON_FINITE_STEPS_IN_A_ROW = 3
"""Steps in a row without a finite loss and gradient that end the run: what broke stays broken.

Steps are counted and not updates, for the updates of one bad draw fail together. A step whose updates were dropped for
their small effective sample size is none of these, and does not end a row of them either.
"""


class BadSample(ValueError):
    """A sample was drawn that no loss can be right on."""


class TrainingDiverged(RuntimeError):
    """Several steps in a row had no finite loss or gradient."""


def check_samples(batch: StepBatch, needs: Needs, record_ids: Sequence[int] | None) -> None:
    """Check what came from outside, as the loss with these needs will see it; every rank finds the same.

    Raises:
        BadSample: names the trajectory, its record in the buffer where that is known, and what is wrong.
    """
    unknown_T = torch.zeros(len(batch.sequence_T), dtype=torch.float32)
    leaves = Leaves(unknown_T)
    try:
        check_inputs(batch.loss_inputs(leaves, leaves, unknown_T, batch.version), needs)
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
        """Keep draws in `bad_batches/` of the run, which is made when there is something to keep."""
        self._folder = folder
        self.non_finite_steps: Sequence[int] = ()
        """Steps in a row, up to the newest, without a finite loss or gradient; a restart, which is no cure, takes them
        from the checkpoint."""

    def path(self, step: int) -> Path:
        """Where the draw of a step is kept."""
        return self._folder / f"step-{step}.arrow"

    def keep(self, step: int, body: bytes) -> None:
        """Write the draw of a step down, as the Arrow IPC stream that the buffer sent."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path(step).write_bytes(body)

    def note(self, step: int, result: StepResult, body: bytes | None) -> None:
        """Count a step without a finite loss or gradient, and on the coordinator, which has the `body`, keep its draw.

        What is read of the result is the same on all ranks.

        Raises:
            TrainingDiverged: this was one too many.
        """
        if body is not None and result.num_non_finite:
            self.keep(step, body)
            logger.warning(
                "step %d: loss or gradient not finite, %d of %d updates not taken; draw kept in %s",
                step,
                result.num_non_finite,
                len(result.updates),
                self.path(step),
            )
        if not result.skipped:
            self.non_finite_steps = ()
        elif result.num_non_finite:
            self.non_finite_steps = (*self.non_finite_steps, step)
        if len(self.non_finite_steps) >= NON_FINITE_STEPS_IN_A_ROW:
            raise TrainingDiverged(
                f"steps {', '.join(map(str, self.non_finite_steps))} had no finite loss or gradient, so the run stops "
                f"at version {result.version}. The draws are in {self._folder}. Usual causes: a learning rate "
                "(learner.learning_rate) too high, or rewards that are very large"
            )
