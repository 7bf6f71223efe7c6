"""How long the answers to prompts will be that no group was seen of: what their tokens say, by those that were seen.

Features are which tokens, pairs and triples of tokens a prompt has, hashed, its length, and its numeric columns. A
ridge regression of what is known of prompts (`planning.lengths`) on these is what others are expected to be like,
and what it leaves unexplained is how far they may be from that. `launch.processes.supervisor` loads RankerService for a
run that dispatches by lengths.
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

from actors.config import ActorSections
from actors.tasks import Problem, load_encoded
from buffer.client import BufferClient
from buffer.schema import VISITS, read_stream
from common.process import uncollected
from common.run import RunContext
from launch.checks import Plan
from launch.config import Config
from launch.processes.placement import PlacedProcess, PlacementGroup, here, spawn
from launch.processes.role_process import MAX_RESTARTS, Notify, Restarts, Role, done, outcome

_log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

NUM_HASHES = 2**18
LONGEST_NGRAM = 3
FOLDS = 4
PENALTIES = (1.0, 10.0, 100.0)
"""Of which the one that foretells best is taken."""
MOST_LEFT = 0.95
"""Of the variance: where more is left tokens tell nothing, and what they seem to tell is chance."""
FEWEST = 64
LEAST_COMMON = 5
"""N-grams that fewer of them have tell of these alone."""
_AT_ONCE = 20_000
"""Prompts whose features are in memory together."""
_LARGEST = 1e100
"""A column with a greater number has no variance, nor has one with NaN; JSON lines may hold either."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LOOK_EVERY_S = 10.0
_MORE = 1.25
"""Times the prompts that were known, after which it is fitted anew."""
_NICE = 10
"""The ranker takes what time the others leave."""


class Expected(NamedTuple):
    means: npt.NDArray[np.float32]
    """Of each prompt's own part of log tokens."""
    variance: float
    """By which the prompts are around that."""


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
        """(prompts, 1 + numeric columns): logarithm of the length and the columns, with mean 0 and variance 1."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def rows(self, prompts: npt.NDArray[np.int64]) -> csr_matrix:
        """Return a row for each of some prompts: 1 for each n-gram that it has, then its numbers."""
        lengths = np.diff(self._bounds)[prompts]
        starts = np.repeat(self._bounds[prompts] - np.cumsum(lengths) + lengths, lengths)
        tokens = self._tokens[starts + np.arange(len(starts))].astype(np.uint64)
        row_of = np.repeat(np.arange(len(prompts)), lengths)
        which, hashes, hashed = [], [], np.zeros(len(tokens), np.uint64)
        for order in range(LONGEST_NGRAM):
            # the n-gram that ends here goes on from the shorter one that ends a token before, in the same prompt
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
        )  # an n-gram that a prompt has twice is summed
        found.data[found.indices < NUM_HASHES] = 1.0
        return found


class Ranker:
    """Sends the buffer of a run predictions for prompts. It stores nothing, and nothing waits for it."""

    def __init__(self, context: RunContext[ActorSections]) -> None:
        """Load the prompts and connect to the buffer; errors as `load_encoded` and `BufferClient.connect`."""
        config = context.config
        task, _ = load_encoded(config.task, context.model_path, config.actors.max_prompt_tokens, all_columns=True)
        self._features = Features(task.train)
        self._client = BufferClient(
            context.buffer_address, run_id=context.facts.run_id, role="ranker", name="ranker", keys=context.keys
        )
        self._client.connect()
        self._num_known = 0
        """Prompts that were known when it was fitted last."""
        self._has_told = False

    def run(self) -> None:
        """Look now and then whether there is more to learn from; BufferUnavailable if the buffer does not answer."""
        try:
            while True:
                self.look()
                time.sleep(_LOOK_EVERY_S)
        finally:
            self._client.close(1.0)

    def look(self) -> Expected | None:
        """Fit anew if many more prompts are known, or the buffer was restarted; return the predictions sent, if any."""
        told = self._client.visits().result()
        has_forgotten = self._has_told and not told.is_expecting
        if not has_forgotten and told.num_seen < max(FEWEST, _MORE * self._num_known):
            return None
        batch = read_stream(told.body, VISITS)
        known, means, variances = (batch.column(name).to_numpy() for name in VISITS.names)
        expected = expect(self._features, known, means.astype(np.float64), variances.astype(np.float64))
        self._num_known, self._has_told = told.num_seen, expected is not None
        if expected is None:
            _log.info("the tokens of %d prompts do not predict lengths of answers", told.num_seen)
            return None
        self._client.expect(*expected).result()
        share = 1.0 - expected.variance / max(1e-9, float(np.var(means)))
        _log.info("%d prompts predict the lengths of others: %.0f%% of the variance", told.num_seen, 100 * share)
        return expected


def expect(features: Features, known: npt.NDArray[np.int64], means: Floats, variances: Floats) -> Expected | None:
    """Return what is expected of all prompts; None if too few are known, or their tokens tell nothing.

    `known` are the prompts that groups were seen of; `means` of their own part of log tokens; `variances` of these.
    """
    from sklearn.linear_model import Ridge  # takes a second, and the launcher does not fit

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
    return Expected(np.concatenate(found).astype(np.float32), max(1e-6, errors[best] - noise))


def _error(rows: csr_matrix, means: Floats, weights: Floats, folds: npt.NDArray[np.int64], penalty: float) -> float:
    """Return the mean squared error of a penalty on prompts that it was not fitted to."""
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


# --- its process --------------------------------------------------------------------------------------


class RankerRole(Role):
    """Hosts the ranker."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        with uncollected():
            import sklearn.linear_model  # noqa: F401 -- for `run`

    def run(self, context: RunContext[ActorSections]) -> None:
        """Load the prompts, and tell the buffer what to expect of them until it is killed."""
        Ranker(context).run()


class RankerService:
    """The ranker: one process beside the services, which a run neither waits for nor ends with."""

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
        """Start it again if it died, up to `MAX_RESTARTS` times in a row."""
        for process in self.processes:
            if process.lost or not done(process.running):
                continue
            why = outcome(process.running) or "it ended"
            process.kill()  # it may have failed without dying
            if process.restarts.are_spent:
                why = f"{why}; {process.see}"
                process.lose(f"given up: {why}")
                self._notify(
                    "given_up", f"{process.name} is given up, and new prompts are all alike from now on: {why}"
                )
                continue
            text = f"{process.name} died ({why}) and is started again; new prompts are all alike meanwhile"
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
