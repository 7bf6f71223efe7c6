"""Ranker: predict completion lengths of prompts without a group, from their tokens.

The features of a prompt are its hashed token n-grams (1 to 3), its length, and its numeric columns. A ridge regression
of the length posteriors of known prompts (`leeway.planning.lengths`) on these features gives the prior means of all
prompts; its residual variance gives the prior variance. `leeway.launch.processes.supervisor` loads RankerService for a
run that dispatches by length.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from leeway.actors.config import ActorSections
from leeway.actors.tasks import Problem, load_encoded
from leeway.buffer.client import BufferClient
from leeway.buffer.schema import POSTERIORS, read_stream
from leeway.common.process import fast_imports
from leeway.common.run import RunContext
from leeway.launch.checks import Plan
from leeway.launch.config import Config
from leeway.launch.processes.placement import PlacedProcess, PlacementGroup, here, spawn
from leeway.launch.processes.role_process import MAX_RESTARTS, Notify, Restarts, Role, done, outcome

_log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

NUM_HASHES = 2**18
LONGEST_NGRAM = 3
FOLDS = 4
PENALTIES = (1.0, 10.0, 100.0)
"""Ridge penalties; cross-validation selects the best."""
MOST_LEFT = 0.95
"""Maximum unexplained fraction of the variance: beyond it the predictions are noise and are discarded."""
FEWEST = 64
LEAST_COMMON = 5
"""Minimum number of known prompts with an n-gram; rarer n-grams do not generalize."""
_AT_ONCE = 20_000
"""Maximum number of prompts whose features are in memory at the same time."""
_LARGEST = 1e100
"""A column with NaN or a larger value than this is ignored, as its variance is not finite; JSON lines may have both."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_POLL_S = 10.0
_MORE = 1.25
"""Growth factor of the number of known prompts that triggers a refit."""
_NICE = 10
"""Niceness of the ranker, so that it only uses idle CPU time."""


class LengthPrior(NamedTuple):
    means: npt.NDArray[np.float32]
    """Prior mean of the log-token offset of each prompt."""
    variance: float
    """Variance of the offsets around the prior means."""


class Features:
    """Features of the prompts of a task."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        lengths = np.array([len(problem.token_ids) for problem in problems])
        self._tokens = np.concatenate([np.asarray(problem.token_ids, np.int32) for problem in problems])
        self._bounds = np.concatenate([[0], np.cumsum(lengths)])
        names = sorted(name for name in problems[0].columns if _is_number(problems, name))
        columns = [np.log1p(lengths), *([float(each.columns[name]) for each in problems] for name in names)]
        dense = np.stack([np.asarray(column, np.float64) for column in columns], axis=1)
        spread = dense.std(axis=0)
        self.numbers: Floats = (dense - dense.mean(axis=0)) / np.where(spread > 0.0, spread, 1.0)
        """(prompts, 1 + numeric columns): log length and the columns, normalized to mean 0 and variance 1."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def rows(self, prompts: npt.NDArray[np.int64]) -> csr_matrix:
        """Return a row per prompt: 1 for each n-gram of the prompt, then its numeric features."""
        lengths = np.diff(self._bounds)[prompts]
        starts = np.repeat(self._bounds[prompts] - np.cumsum(lengths) + lengths, lengths)
        tokens = self._tokens[starts + np.arange(len(starts))].astype(np.uint64)
        row_of = np.repeat(np.arange(len(prompts)), lengths)
        which, hashes, hashed = [], [], np.zeros(len(tokens), np.uint64)
        for order in range(LONGEST_NGRAM):
            # an n-gram extends the shorter one that ends a token earlier in the same prompt
            before = np.concatenate([np.zeros(1, np.uint64), hashed[:-1]]) if len(hashed) else hashed
            hashed = (before + tokens + np.uint64(order + 1)) * _MIX
            hashed ^= hashed >> np.uint64(29)
            is_whole = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths) >= order
            which.append(row_of[is_whole])
            hashes.append((hashed[is_whole] % np.uint64(NUM_HASHES)).astype(np.int64))
        rows, columns = np.concatenate(which), np.concatenate(hashes)
        num_dense = self.numbers.shape[1]
        dense_rows = np.repeat(np.arange(len(prompts)), num_dense)
        dense_columns = NUM_HASHES + np.tile(np.arange(num_dense), len(prompts))
        found = csr_matrix(
            (
                np.concatenate([np.ones(len(rows)), self.numbers[prompts].reshape(-1)]),
                (np.concatenate([rows, dense_rows]), np.concatenate([columns, dense_columns])),
            ),
            shape=(len(prompts), NUM_HASHES + num_dense),
        )  # the constructor sums repeated n-grams
        found.data[found.indices < NUM_HASHES] = 1.0
        return found


class Ranker:
    """Sender of length predictions to the buffer of a run. The ranker stores nothing, and no process waits for it."""

    def __init__(self, context: RunContext[ActorSections]) -> None:
        """Load the prompts and connect to the buffer; raise the errors of `load_encoded` and `BufferClient.connect`."""
        config = context.config
        task, _ = load_encoded(config.task, context.model_path, config.actors.max_prompt_tokens, all_columns=True)
        self._features = Features(task.train)
        self._client = BufferClient(
            context.buffer_address, run_id=context.facts.run_id, role="ranker", name="ranker", keys=context.keys
        )
        self._client.connect()
        self._num_known = 0
        """Number of known prompts at the last fit."""
        self._has_sent = False

    def run(self) -> None:
        """Call `refit` every `_POLL_S` seconds, forever; raise BufferUnavailable if the buffer does not answer."""
        try:
            while True:
                self.refit()
                time.sleep(_POLL_S)
        finally:
            self._client.close(1.0)

    def refit(self) -> LengthPrior | None:
        """Refit if enough new prompts are known or the buffer was restarted; return the predictions sent, if any."""
        reply = self._client.posteriors().result()
        was_restarted = self._has_sent and not reply.is_expecting
        if not was_restarted and reply.num_seen < max(FEWEST, _MORE * self._num_known):
            return None
        batch = read_stream(reply.body, POSTERIORS)
        known, means, variances = (batch.column(name).to_numpy() for name in POSTERIORS.names)
        prior = fit_prior(self._features, known, means.astype(np.float64), variances.astype(np.float64))
        self._num_known, self._has_sent = reply.num_seen, prior is not None
        if prior is None:
            _log.info("the tokens of %d prompts do not predict completion lengths", reply.num_seen)
            return None
        self._client.set_prior(*prior).result()
        share = 1.0 - prior.variance / max(1e-9, float(np.var(means)))
        _log.info("predictions of %d prompts explain %.0f%% of the length variance", reply.num_seen, 100 * share)
        return prior


def fit_prior(features: Features, known: npt.NDArray[np.int64], means: Floats, variances: Floats) -> LengthPrior | None:
    """Return the length prior of all prompts; None if too few prompts are known or their tokens predict nothing.

    `known` are the ids of prompts with a group, `means` and `variances` those of their log-token offsets.
    """
    from sklearn.linear_model import Ridge  # slow import (about a second), which the launcher does not need

    if len(known) < FEWEST:
        return None
    rows = features.rows(known)
    is_common = np.bincount(rows.indices, minlength=rows.shape[1]) >= LEAST_COMMON
    rows.data *= is_common[rows.indices]
    weights = 1.0 / (variances + max(1e-9, float(np.var(means)) / 4))
    total = float(np.average((means - np.average(means, weights=weights)) ** 2, weights=weights))
    folds = np.random.default_rng(0).permutation(len(known)) % FOLDS
    errors = {penalty: _error(rows, means, weights, folds, penalty) for penalty in PENALTIES}
    best = min(errors, key=lambda penalty: errors[penalty])
    if errors[best] > MOST_LEFT * total:
        return None
    ridge = Ridge(best, solver="sparse_cg").fit(rows, means, weights)
    found = [
        ridge.predict(features.rows(np.arange(first, min(first + _AT_ONCE, len(features)))))
        for first in range(0, len(features), _AT_ONCE)
    ]
    noise = float(np.average(variances, weights=weights))
    return LengthPrior(np.concatenate(found).astype(np.float32), max(1e-6, errors[best] - noise))


def _error(rows: csr_matrix, means: Floats, weights: Floats, folds: npt.NDArray[np.int64], penalty: float) -> float:
    """Return the cross-validated mean squared error for a penalty."""
    from sklearn.linear_model import Ridge

    squares = np.empty(len(means))
    for fold in range(FOLDS):
        others, these = folds != fold, folds == fold
        ridge = Ridge(penalty, solver="sparse_cg").fit(rows[others], means[others], weights[others])
        squares[these] = (ridge.predict(rows[these]) - means[these]) ** 2
    return float(np.average(squares, weights=weights))


def _is_number(problems: Sequence[Problem], name: str) -> bool:
    values = [each.columns.get(name) for each in problems]
    return all(isinstance(value, int | float) and abs(value) < _LARGEST for value in values)


# --- the process --------------------------------------------------------------------------------------


class RankerRole(Role):
    """Role of the ranker process."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        with fast_imports():
            import sklearn.linear_model  # noqa: F401 -- for `run`

    def run(self, context: RunContext[ActorSections]) -> None:
        """Load the prompts and run the ranker until the process is killed."""
        Ranker(context).run()


class RankerService:
    """Optional ranker process of a run; its failure never stops the run."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        self._plan, self._notify = plan, notify
        self.processes: list[PlacedProcess] = []

    def start(self, context: RunContext[Config]) -> None:
        self._context = context
        log, restarts = self._plan.folder.log("ranker", 0), Restarts(MAX_RESTARTS)
        process = PlacedProcess("ranker", 0, None, log, restarts, placement=PlacementGroup([], "the ranker"))
        self.processes.append(process)
        self._spawn(process)

    def watch(self) -> None:
        """Restart the process if it exited, up to `MAX_RESTARTS` times in a row."""
        for process in self.processes:
            if process.lost or not done(process.running):
                continue
            why = outcome(process.running) or "it exited"
            process.kill()  # its work may have failed while the process is alive
            if process.restarts.are_exhausted:
                why = f"{why}; {process.log_hint}"
                process.lose(f"given up: {why}")
                self._notify(
                    "given_up", f"{process.name} is given up; lengths of new prompts are no longer predicted: {why}"
                )
                continue
            text = f"{process.name} died ({why}) and is restarted; lengths of new prompts are not predicted meanwhile"
            self._notify("restart", text)
            process.forget()
            process.restarts.count()
            self._spawn(process)

    def stop(self) -> None:
        for process in self.processes:
            process.end()
        self.processes = []

    def _spawn(self, process: PlacedProcess) -> None:
        variables = self._plan.config.launch.env
        process.handle = spawn(RankerRole, process.log, on=here(), concurrency=2, variables=variables)
        process.begin_work(process.handle.run.remote(self._context))
