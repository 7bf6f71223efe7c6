"""The learner: real optimizer steps, every one of them published."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from benchmarks.weights_parts.training import Trainer
from common.staleness import PolicyVersion
from weight_sync.config import WeightSyncConfig
from weight_sync.publisher import Publisher
from weight_sync.upload import open_sink

FLUSH_S = 120.0


class Role:
    """Trains and publishes."""

    def __init__(
        self,
        *,
        model: str,
        samples: str,
        scratch: str,
        learning_rate: float,
        groups_per_step: int,
        folder: str,
        dtypes: list[str],
    ) -> None:
        """Load the model.

        Args:
            model: checkpoint folder.
            samples: file of `samples_role`.
            scratch: a folder of this measurement.
            learning_rate: of AdamW.
            groups_per_step: prompts of a step.
            folder: of the weight store.
            dtypes: to publish in.
        """
        self._trainer = Trainer(
            Path(model), Path(samples), Path(scratch), learning_rate=learning_rate, groups_per_step=groups_per_step
        )
        knobs = WeightSyncConfig(transport="folder")
        sink = open_sink(knobs, folder=Path(folder), address="", run_id="benchmark", name="learner")
        self._publisher = Publisher(sink, 0, 1, dtypes, keep_versions=knobs.keep_versions)
        self._rounds: list[dict[str, float]] = []

    def train(self, *, num_steps: int) -> None:
        """Steps, each followed by its publishing; the last may still be on its way when this returns."""
        for _ in range(num_steps):
            start = time.perf_counter()
            norm = self._trainer.step()
            stepped = time.perf_counter()
            found = {"step": stepped - start, "norm": norm}
            self._rounds.append(found)
            version = PolicyVersion(0, self._trainer.version)
            self._publisher.publish(version, self._trainer.tensors(), functools.partial(_note_commit, found, stepped))
            found["publish"] = time.perf_counter() - stepped

    def finish(self) -> list[dict[str, float]]:
        """Wait until all is published.

        Returns:
            Of each step, in seconds: `step` without publishing, `publish` the call alone, `committed` from the call
            until the version could be pulled; and the gradient norm, as `norm`.
        """
        self._publisher.flush(FLUSH_S)
        return self._rounds

    def close(self) -> None:
        """End publisher and process group."""
        self._publisher.close()
        self._trainer.close()


def _note_commit(found: dict[str, float], began_s: float, version: PolicyVersion) -> None:
    found["committed"] = time.perf_counter() - began_s
