"""Alerts: faults that raise no error, checked at every poll.

    mismatch    an actor and the learner compute different log-probabilities of the same tokens at the same version
    stuck       the learner applies updates but publishes no version
    behind      an actor stays more than max_actor_lag behind the newest published version
    publishing  the weight publisher waits for something, such as disk space
    refused     an actor refused an update and keeps its version
    failing     a reward function of an actor fails on successive samples for the same reason
    unstable    the reward falls while the samples are stale, or the policy moves away from its samples (`Stability`)
    fidelity    the lengths of completions used for training differ from those of all generated completions
    damage      blocks of buffer records are damaged

The module `learning` describes more alerts: signs that a run cannot learn.
Each alert is reported once when it starts, and once as `..._ended` when it ends; `refused` has no end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, NamedTuple

from leeway.actors.report import ActorReport
from leeway.algorithms.corrections import WeighedSection
from leeway.buffer.protocol import Status
from leeway.common.staleness import PolicyVersion, StalenessContract
from leeway.launch.config import Action, Config
from leeway.launch.observe.learning import LearningSigns, Sign
from leeway.launch.observe.status import Accuracy, PollResult
from leeway.launch.pools import actor_pools

LEARNER = "learner"
STUCK_AFTER_S = 300.0
"""Seconds without a new published version before `stuck` starts; publishing a large model can take minutes."""
BEHIND_AFTER_S = 30.0
"""Seconds that an actor exceeds max_actor_lag before `behind` starts; an update usually ends earlier."""
MISMATCH_TOKENS = 32
"""Minimum number of tokens for the mismatch check; fewer tokens are carried over to the next step."""
MISMATCH_ENDS = 0.5
"""Fraction of the limit below which a mismatch ends; this hysteresis avoids repeated alerts near the limit."""
FAILING_SAMPLES = 200
"""Failed samples in a row, in one actor and for one reason, after which a reward function counts as broken."""
FAILING_TIMEOUTS = 5
"""Timed-out samples in a row, and multiples of the timeout, after which a reward function counts as broken."""
PUBLISHING_S = 3.0
"""Seconds after which a wait of the weight publisher is reported."""


@dataclass(frozen=True)
class Alert:
    """The start or the end of an alert."""

    kind: str
    source: str
    """The process that has the fault: an actor, "learner" or "buffer"."""
    text: str
    action: Action | None = None  # what the launcher does besides the report


class Alerts:
    """Derives alerts from polls; the caller executes the actions of the alerts."""

    def __init__(
        self, config: Config, contract: StalenessContract, clock: Callable[[], float] = time.monotonic, run: str = "RUN"
    ) -> None:
        """`clock` returns monotonic seconds; `run` is the run folder."""
        self._config, self._contract, self._clock = config.launch, contract, clock
        self._mismatch_limits = {
            pool.name: mismatch_limit(pool.config.dtype, config.learner.precision) for pool in actor_pools(config)
        }
        """Maps a pool of actors to its limit of the mean absolute difference of log-probabilities."""
        self._stability = Stability(config)
        self._learning = LearningSigns(config, run)
        self.startup_warning = self._stability.startup_warning
        """Known risk of the config, to report before the first step; '' if no risk is known."""
        self._active: dict[tuple[str, str], Alert] = {}
        self._since: dict[tuple[str, str], tuple[object, float]] = {}
        self._reports: dict[str, tuple[ActorReport, float]] = {}
        self._differences: dict[str, tuple[float, int]] = {}
        self._newest = PolicyVersion(0, 0)
        self._refused: dict[str, str] = {}

    @property
    def active(self) -> list[Alert]:
        """Alerts that have not ended, oldest first, with their newest text."""
        return list(self._active.values())

    def check(self, poll: PollResult, *, evaluating: bool = False) -> list[Alert]:
        """Process a poll; return the alerts that start or end with it.

        An evaluation in progress holds actors at one version, so `behind` neither starts nor ends.
        """
        now = self._clock()
        for report in poll.actors:
            self._reports[report.name] = report, now
        if poll.working is not None:
            self._forget(set(self._reports) - poll.working)
        alerts = [*self._check_rows(poll), *self._check_learner(poll, now), *self._check_buffer(poll.status)]
        for report, received_s in list(self._reports.values()):
            alerts += self._check_actor(report, now - received_s, now, evaluating)
        return alerts

    def evaluated(self, evaluations: Sequence[Accuracy]) -> list[Alert]:
        """Process the newest of all evaluations of the run; return the alerts that start or end with it."""
        return list(self._update_signs(self._learning.evaluated(evaluations, self._newest_reports())))

    def _newest_reports(self) -> list[ActorReport]:
        return [report for report, _ in self._reports.values()]

    def _update_signs(self, signs: Iterator[Sign]) -> Iterator[Alert]:
        for kind, text in signs:
            yield from self._update(kind, LEARNER, text, None, f"the alert {kind} has ended")

    # --- mismatch ---------------------------------------------------------------------------------

    def _check_rows(self, poll: PollResult) -> Iterator[Alert]:
        for row in poll.steps:
            for actor, (difference, num_tokens) in row.get("lag0_by_actor", {}).items():
                if num_tokens and (poll.working is None or actor in poll.working):
                    yield from self._check_mismatch(actor, math.nan if difference is None else difference, num_tokens)
            self._stability.ingest(row)
            yield from self._update("unstable", LEARNER, self._stability.text, None, self._stability.ended)
            yield from self._update_signs(self._learning.ingest(row, self._newest_reports()))

    def _check_mismatch(self, actor: str, difference: float, num_tokens: int) -> Iterator[Alert]:
        total, count = self._differences.pop(actor, (0.0, 0))
        total, count = total + difference * num_tokens, count + num_tokens
        if count < MISMATCH_TOKENS:
            self._differences[actor] = total, count
            return
        # use the limit of the actor's pool, or the largest limit for an actor that has not reported
        pool = self._reports[actor][0].pool if actor in self._reports else ""
        mean, limit = total / count, self._mismatch_limits.get(pool, max(self._mismatch_limits.values()))
        text = (
            f"{actor} and the learner differ by {mean:.2g} nats in log-probability on average (limit {limit:g}) over "
            f"{count} tokens of the same version: their weights or numerics differ"
        )
        # with "not <=" instead of ">", NaN raises the alert
        exceeds = not mean <= (limit * MISMATCH_ENDS if ("mismatch", actor) in self._active else limit)
        ended = f"{actor} and the learner agree again"
        yield from self._update("mismatch", actor, text if exceeds else "", self._config.on_mismatch, ended)

    # --- the learner ------------------------------------------------------------------------------

    def _check_learner(self, poll: PollResult, now: float) -> Iterator[Alert]:
        status = poll.status
        if status is not None:
            self._newest = PolicyVersion(*status.newest)
            is_due = status.version - self._newest.version >= self._contract.config.publish_every
            lasts_s = self._duration_s("stuck", LEARNER, self._newest if is_due else None, now)
            text = (
                f"the learner is at version {status.version}, but the newest published version has been {self._newest} "
                f"for {lasts_s:.0f} s{_prefixed(', waiting for ', poll.publishing)}; see the logs of the stages"
            )
            stuck = text if lasts_s >= STUCK_AFTER_S else ""
            yield from self._update("stuck", LEARNER, stuck, None, f"version {self._newest} is published")
        if poll.publishing is not None:
            lasts_s = self._duration_s("publishing", LEARNER, poll.publishing and "waits", now)
            text = f"the weight publisher waits for {poll.publishing}; training continues within the staleness bound"
            waits = text if poll.publishing and lasts_s >= PUBLISHING_S else ""
            yield from self._update("publishing", LEARNER, waits, None, "the weight publisher no longer waits")

    def _check_buffer(self, status: Status | None) -> Iterator[Alert]:
        if status is None:
            return
        lengths = (
            f"completion lengths differ between training and generation (distance {status.fidelity.ks:.2f}): "
            "raise weight_sync.max_lag, or set buffer.sampler = 'fifo' or buffer.refill_uninformative = 0"
        )
        damaged = f"{status.num_damaged} blocks of buffer records are damaged: run `leeway buffer verify`"
        ended = "completion lengths agree again between training and generation"
        yield from self._update("fidelity", "buffer", lengths if status.fidelity_alarm else "", None, ended)
        yield from self._update("damage", "buffer", damaged if status.num_damaged else "", None, "no record is damaged")

    # --- an actor ---------------------------------------------------------------------------------

    def _check_actor(self, report: ActorReport, silent_s: float, now: float, evaluating: bool) -> Iterator[Alert]:
        name, served = report.name, PolicyVersion(*report.version)
        if report.refused and self._refused.get(name) != report.refused:
            yield Alert("refused", name, f"{name} refused an update and keeps version {served}: {report.refused}")
        self._refused[name] = report.refused
        yield from self._check_rewards(report)
        is_behind = not evaluating and served < self._newest and self._contract.is_behind(served, self._newest)
        behind_s = self._duration_s("behind", name, "behind" if is_behind else None, now)
        if evaluating:
            return
        why = _prefixed("; it refused ", report.refused) or _prefixed("; it reports: ", report.waiting)
        if silent_s > 2.0:
            why = f"; it has not responded for {silent_s:.0f} s"
        serves = f"{name} serves version {served}"
        behind = (
            f"{serves}, but the newest published is {self._newest}; the actor has been more than max_actor_lag = "
            f"{self._contract.actor_lag} behind for {behind_s:.0f} s{why}"
        )
        yield from self._update("behind", name, behind if behind_s >= BEHIND_AFTER_S else "", None, serves)

    def _check_rewards(self, report: ActorReport) -> Iterator[Alert]:
        text = ""
        for failing in report.failing:
            is_slow = failing.timeout_s and failing.for_s >= FAILING_TIMEOUTS * failing.timeout_s
            if failing.num_samples >= (FAILING_TIMEOUTS if is_slow else FAILING_SAMPLES):
                text = (
                    f"reward {failing.name} failed in {report.name} on {failing.num_samples} samples in a row: "
                    f"{failing.why}; the last sample had the prompt {failing.prompt!r} and the completion "
                    f"{failing.completion!r}. Test the reward with leeway check-reward, fix it, then run leeway resume"
                )
        ended = f"the reward functions of {report.name} score samples again"
        yield from self._update("failing", report.name, text, "stop", ended)

    def _forget(self, names: set[str]) -> None:
        """Drop the state of actors that left the run or are restarting."""
        for name in names:
            for table in (self._reports, self._differences, self._refused):
                table.pop(name, None)
            for kind in ("mismatch", "behind", "failing"):
                self._active.pop((kind, name), None)
                self._since.pop((kind, name), None)

    # --- state of alerts --------------------------------------------------------------------------

    def _duration_s(self, kind: str, source: str, state: object, now: float) -> float:
        """Return the seconds since the source entered `state`; 0 if `state` is empty or None."""
        key = kind, source
        if not state:
            self._since.pop(key, None)
            return 0.0
        before, since_s = self._since.get(key, (None, now))
        if before != state:
            since_s = now
        self._since[key] = state, since_s
        return now - since_s

    def _update(self, kind: str, source: str, text: str, action: Action | None, ended: str) -> Iterator[Alert]:
        """Start or update an alert, or end the alert if `text` is empty; yield its start or end."""
        key = kind, source
        if text:
            alert = Alert(kind, source, text, action)
            if key not in self._active:
                yield alert
            self._active[key] = alert
        elif self._active.pop(key, None) is not None:
            yield Alert(f"{kind}_ended", source, ended)


def mismatch_limit(*dtypes: str) -> float:
    """Return the limit of the mean absolute difference between log-probabilities computed in these dtypes."""
    return 1e-3 if all(dtype in ("float32", "float64") for dtype in dtypes) else 0.2


def _prefixed(prefix: str, text: str | None) -> str:
    return f"{prefix}{text}" if text else ""


WINDOW = 20
"""Number of steps per window; the mean rewards of two windows are compared."""
FELL_BY_ERRORS, FELL_BY_STD = 4.0, 0.2
"""Limits in standard errors and in standard deviations of single rewards. The mean reward of a window must fall by more
than both below the best window. In a stable run, the mean varies by less than half of the second limit."""
ENDS_AT = 0.5
"""Fraction of the limits of `unstable` below which the alert ends."""
LOW_ESS = 0.8
"""Effective sample size over sequences, as a fraction; above this value, the data are nearly on-policy."""
LARGE_DRIFT = 0.1
"""Limit of mismatch/k3, the distance of the policy from its samples in nats per token; a tenth is already large."""


class _Window(NamedTuple):
    """Means of metrics over consecutive steps; NaN if a metric has no value."""

    first: int
    last: int
    reward: float
    squared_error: float
    """Squared standard error of `reward`."""
    std: float
    """Standard deviation of the rewards within a step."""
    ess: float
    drift: float

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> _Window:
        def mean(name: str) -> float:
            known = [row[name] for row in rows if row.get(name) is not None and not math.isnan(row[name])]
            return fmean(known) if known else math.nan

        rewards = [float(row["reward/mean"]) for row in rows]
        means = (mean("reward/std"), mean("off_policy/ess_sequence"), mean("mismatch/k3"))
        return cls(rows[0]["step"], rows[-1]["step"], fmean(rewards), variance(rewards) / len(rewards), *means)

    def __str__(self) -> str:
        return f"{self.reward:.3f} (steps {self.first} to {self.last})"


class Stability:
    """Detects instability from the rows of the steps; `text` describes the instability while it lasts."""

    def __init__(self, config: Config) -> None:
        self._config = config
        algorithm = config.algorithm
        self._is_unweighted = isinstance(algorithm, WeighedSection) and not algorithm.corrections
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=2 * WINDOW)
        self._best: _Window | None = None
        self.text = self.ended = ""
        """`text` is the problem and its remedy, '' if stable; `ended` is the text to report when the problem ends."""

    @property
    def startup_warning(self) -> str:
        config = self._config
        if not self._is_unweighted or config.weight_sync.max_lag == 0:
            return ""
        return (
            f"algorithm.corrections = [] with weight_sync.max_lag = {config.weight_sync.max_lag}: without importance "
            'weights this loss may collapse on stale samples. Try algorithm.corrections = ["token_tis"], or max_lag = 0'
        )

    def ingest(self, row: Mapping[str, Any]) -> None:
        """Process the row of a step; skipped steps are ignored."""
        if row.get("skipped") or row.get("reward/mean") is None:
            return
        if self._rows and row["step"] <= self._rows[-1]["step"]:
            self._rows.clear()  # the learner was restarted, and repeats these steps
        self._rows.append(row)
        if len(self._rows) < 2 * WINDOW:
            return
        rows = tuple(self._rows)
        before, now = _Window.of(rows[:WINDOW]), _Window.of(rows[WINDOW:])
        if self._best is None or before.reward > self._best.reward:
            self._best = before
        self._compare(self._best, now)

    def _compare(self, best: _Window, now: _Window) -> None:
        error = (best.squared_error + now.squared_error) ** 0.5
        scale = ENDS_AT if self.text else 1.0
        limit = scale * max(FELL_BY_ERRORS * error, FELL_BY_STD * best.std)
        what = ""
        # a comparison with NaN is false, so an unknown metric raises no alert
        if now.ess < LOW_ESS and best.reward - now.reward > limit:
            what = f"the reward fell from {best} to {now} at an effective sample size of {now.ess:.0%}"
        elif now.drift > scale * LARGE_DRIFT:
            what = f"the policy is {now.drift:.2g} nats per token away from its samples, at a reward of {now}"
        self.text = f"{what}: the samples are too old for the learner. Try {self._remedy()}" if what else ""
        self.ended = f"the reward is {now}, and the policy is close to its samples again"

    def _remedy(self) -> str:
        """Return the next remedy to try: importance weights first, because they do not slow down training."""
        config = self._config
        if self._is_unweighted:
            return 'algorithm.corrections = ["token_tis"] (this run has no corrections)'
        slower = f"a smaller learner.learning_rate (now {config.learner.learning_rate:g})"
        if config.weight_sync.max_lag == 0:
            return slower
        if config.weight_sync.controls_lag:
            allowed, scale = (self._rows[-1].get(name) for name in ("lag/allowed", "brake/lr_scale"))
            if allowed is None or scale is None:
                return slower
            return (
                f"{slower}: lag control already limits the lag of new samples to {allowed:g} versions, and the "
                f"learning rate to {scale:.0%}"
            )
        remedy = f"{slower} or weight_sync.max_lag (now {config.weight_sync.max_lag})"
        return remedy + (', or lag_control = "on"' if config.weight_sync.max_lag != "unbounded" else "")
