"""Tripwires: alerts on what goes wrong without failing, checked at every poll.

    mismatch    an actor and the learner compute other log-probabilities of the same tokens at the same version
    stuck       the learner takes updates and publishes none
    behind      an actor stays more than max_actor_lag behind the newest published version
    publishing  published weights wait for something, such as space on the disk
    refused     an actor refused an update and keeps its version
    failing     a reward function of an actor fails on one sample after the other, always for the same reason
    unstable    the reward falls while the samples are old, or the policy moves away from them (`Stability`)
    fidelity    the lengths trained are not those generated
    damage      blocks of records of the buffer are damaged

Each is reported once, and once more as `..._ended`; a refusal has no end of its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, NamedTuple

from actors.report import ActorReport
from algorithms.corrections import WeighedSection
from buffer.protocol import Status
from common.staleness import PolicyVersion, StalenessContract
from launch.config import Action, Config
from launch.observe.status import PollResult
from launch.pools import actor_pools

LEARNER = "learner"
STUCK_AFTER_S = 300.0
"""Seconds without a new version, which takes seconds, and minutes of a large model."""
BEHIND_AFTER_S = 30.0
"""Seconds beyond the bound, in which an actor starts no sample; most are in the middle of an update."""
MISMATCH_TOKENS = 32
"""Fewer tokens are kept for the next step before they are judged."""
MISMATCH_ENDS = 0.5
"""Share of the limit below which a mismatch is over: around the limit it would come and go."""
FAILING_SAMPLES = 200
"""Samples in a row, in one actor and for one reason, after which a reward function counts as broken."""
FAILING_TIMEOUTS = 5
"""The same for samples, and time limits, of a function that times out: each costs a whole limit."""
PUBLISHING_S = 3.0
"""Shorter waits of a publisher are not reported."""


@dataclass(frozen=True)
class Trip:
    """An alert that begins or ends."""

    kind: str
    who: str
    text: str
    action: Action | None = None
    """What is to be done beyond the report."""


class Tripwires:
    """Looks at every poll and returns what tripped; acting on it is its caller's part."""

    def __init__(
        self, config: Config, contract: StalenessContract, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is monotonic seconds."""
        self._config, self._contract, self._clock = config.launch, contract, clock
        self._mismatch_limits = {
            pool.name: mismatch_limit(pool.config.dtype, config.learner.precision) for pool in actor_pools(config)
        }
        """Of the mean absolute difference of log-probabilities, by pool of actors."""
        self._stability = Stability(config)
        self.foreseen = self._stability.foreseen
        """What is known to go wrong before the first step; empty if nothing is."""
        self._standing: dict[tuple[str, str], Trip] = {}
        self._since: dict[tuple[str, str], tuple[object, float]] = {}
        self._reports: dict[str, tuple[ActorReport, float]] = {}
        self._differences: dict[str, tuple[float, int]] = {}
        self._newest = PolicyVersion(0, 0)
        self._refused: dict[str, str] = {}

    @property
    def standing(self) -> list[Trip]:
        """What tripped and is not over, oldest first, in its newest words."""
        return list(self._standing.values())

    def look(self, news: PollResult, *, evaluating: bool = False) -> list[Trip]:
        """Take in a poll; return what tripped or ended with it.

        An evaluation in progress holds actors at one version, which is no alert.
        """
        now = self._clock()
        for report in news.actors:
            self._reports[report.name] = report, now
        if news.working is not None:
            self._forget(set(self._reports) - news.working)
        trips = [*self._look_at_rows(news), *self._look_at_learner(news, now), *self._look_at_buffer(news.status)]
        for report, heard_s in list(self._reports.values()):
            trips += self._look_at_actor(report, now - heard_s, now, evaluating)
        return trips

    # --- mismatch ---------------------------------------------------------------------------------

    def _look_at_rows(self, news: PollResult) -> Iterator[Trip]:
        for row in news.steps:
            for who, (difference, num_tokens) in row.get("lag0_by_actor", {}).items():
                if num_tokens and (news.working is None or who in news.working):
                    yield from self._judge(who, math.nan if difference is None else difference, num_tokens)
            self._stability.take_in(row)
            yield from self._hold("unstable", LEARNER, self._stability.text, None, self._stability.ended)

    def _judge(self, who: str, difference: float, num_tokens: int) -> Iterator[Trip]:
        total, count = self._differences.pop(who, (0.0, 0))
        total, count = total + difference * num_tokens, count + num_tokens
        if count < MISMATCH_TOKENS:
            self._differences[who] = total, count
            return
        # that of its pool; the widest for an actor that has not reported
        pool, widest = self._reports[who][0].pool if who in self._reports else "", max(self._mismatch_limits.values())
        mean, limit = total / count, self._mismatch_limits.get(pool, widest)
        text = (
            f"{who} and the learner differ by {mean:.2g} in the mean absolute log-probability of {count} tokens of "
            f"the same version, and at most {limit:g} is expected: other weights, or another arithmetic"
        )
        # not below is above: a difference that is no number is one
        trips = not mean <= (limit * MISMATCH_ENDS if ("mismatch", who) in self._standing else limit)
        ended = f"{who} and the learner agree again"
        yield from self._hold("mismatch", who, text if trips else "", self._config.on_mismatch, ended)

    # --- the learner ------------------------------------------------------------------------------

    def _look_at_learner(self, news: PollResult, now: float) -> Iterator[Trip]:
        status = news.status
        if status is not None:
            self._newest = PolicyVersion(*status.newest)
            is_due = status.version - self._newest.version >= self._contract.config.publish_every
            lasts_s = self._lasts("stuck", LEARNER, self._newest if is_due else None, now)
            text = (
                f"the learner is at version {status.version}, and the newest published is {self._newest} for "
                f"{lasts_s:.0f} s{_because(news.publishing, ', waiting for ')}; see the logs of the stages"
            )
            stuck = text if lasts_s >= STUCK_AFTER_S else ""
            yield from self._hold("stuck", LEARNER, stuck, None, f"version {self._newest} is published")
        if news.publishing is not None:
            lasts_s = self._lasts("publishing", LEARNER, news.publishing and "waits", now)
            text = f"published weights wait for {news.publishing}; training goes on as far as the bound allows"
            waits = text if news.publishing and lasts_s >= PUBLISHING_S else ""
            yield from self._hold("publishing", LEARNER, waits, None, "published weights wait for nothing any more")

    def _look_at_buffer(self, status: Status | None) -> Iterator[Trip]:
        if status is None:
            return
        lengths = (
            f"the lengths trained are not those generated (distance {status.fidelity.ks:.2f}): raise "
            "weight_sync.max_lag, or set buffer.sampler = 'fifo' or buffer.refill_uninformative = 0"
        )
        damaged = f"{status.num_damaged} blocks of records of the buffer are damaged; see `leeway buffer verify`"
        ended = "the lengths trained are those generated again"
        yield from self._hold("fidelity", "buffer", lengths if status.fidelity_alarm else "", None, ended)
        yield from self._hold("damage", "buffer", damaged if status.num_damaged else "", None, "no record is damaged")

    # --- an actor ---------------------------------------------------------------------------------

    def _look_at_actor(self, report: ActorReport, silent_s: float, now: float, evaluating: bool) -> Iterator[Trip]:
        name, served = report.name, PolicyVersion(*report.version)
        if report.refused and self._refused.get(name) != report.refused:
            yield Trip("refused", name, f"{name} keeps version {served} and did not take an update: {report.refused}")
        self._refused[name] = report.refused
        yield from self._look_at_rewards(report)
        is_behind = not evaluating and served < self._newest and self._contract.is_behind(served, self._newest)
        behind_s = self._lasts("behind", name, "behind" if is_behind else None, now)
        if evaluating:
            return  # nothing begins and nothing ends
        why = _because(report.refused, "; it refused ") or _because(report.waiting, "; it says: ")
        if silent_s > 2.0:
            why = f"; it has not answered for {silent_s:.0f} s"
        serves = f"{name} serves version {served}"
        behind = (
            f"{serves} and the newest published is {self._newest}; it has been more than max_actor_lag = "
            f"{self._contract.actor_lag} behind for {behind_s:.0f} s{why}"
        )
        yield from self._hold("behind", name, behind if behind_s >= BEHIND_AFTER_S else "", None, serves)

    def _look_at_rewards(self, report: ActorReport) -> Iterator[Trip]:
        text = ""
        for failing in report.failing:
            is_slow = failing.timeout_s and failing.for_s >= FAILING_TIMEOUTS * failing.timeout_s
            if failing.num_samples >= (FAILING_TIMEOUTS if is_slow else FAILING_SAMPLES):
                text = (
                    f"reward {failing.name} failed in {report.name} on {failing.num_samples} samples in a row: "
                    f"{failing.why}; the last had the prompt {failing.prompt!r} and the completion "
                    f"{failing.completion!r}. Try it with leeway check-reward, mend it, then go on with leeway resume"
                )
        ended = f"the rewards of {report.name} score samples again"
        yield from self._hold("failing", report.name, text, "stop", ended)

    def _forget(self, names: set[str]) -> None:
        """Forget actors that are out of the run, or are being restarted."""
        for name in names:
            for table in (self._reports, self._differences, self._refused):
                table.pop(name, None)
            for kind in ("mismatch", "behind", "failing"):
                self._standing.pop((kind, name), None)
                self._since.pop((kind, name), None)

    # --- what lasts -------------------------------------------------------------------------------

    def _lasts(self, kind: str, who: str, state: object, now: float) -> float:
        """Return for how many seconds it has been in this state; 0 if that is empty."""
        key = kind, who
        if not state:
            self._since.pop(key, None)
            return 0.0
        before, since_s = self._since.get(key, (None, now))
        if before != state:
            since_s = now
        self._since[key] = state, since_s
        return now - since_s

    def _hold(self, kind: str, who: str, text: str, action: Action | None, ended: str) -> Iterator[Trip]:
        """Yield what begins, if there is a text, and what ends, if there no longer is one."""
        key = kind, who
        if text:
            trip = Trip(kind, who, text, action)
            if key not in self._standing:
                yield trip
            self._standing[key] = trip
        elif self._standing.pop(key, None) is not None:
            yield Trip(f"{kind}_ended", who, ended)


def mismatch_limit(*dtypes: str) -> float:
    """Return the limit of the mean absolute difference between log-probabilities that are computed in these."""
    return 1e-3 if all(dtype in ("float32", "float64") for dtype in dtypes) else 0.2


def _because(text: str | None, before: str) -> str:
    return f"{before}{text}" if text else ""


WINDOW = 20
"""Steps whose mean reward is compared."""
FELL_BY_ERRORS, FELL_BY_STD = 4.0, 0.2
"""How far the mean of a window is below that of the best: standard errors, and standard deviations of single rewards. A
healthy run swings by less than half of the second."""
ENDS_AT = 0.5
"""Share of these limits below which it is over."""
LOW_ESS = 0.8
"""Share of the sequences that count; above it the data are nearly the policy's own."""
LARGE_DRIFT = 0.1
"""Nats a token between the policy and its samples (mismatch/k3); a tenth of that is much."""


class _Window(NamedTuple):
    """Means over steps in a row; NaN if unknown."""

    first: int
    last: int
    reward: float
    squared_error: float
    """Of that mean."""
    std: float
    """Of the rewards of a step's samples."""
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
    """Takes in the rows of the steps, and has a sentence while they are unstable."""

    def __init__(self, config: Config) -> None:
        self._config = config
        algorithm = config.algorithm
        self._is_unweighted = isinstance(algorithm, WeighedSection) and not algorithm.corrections
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=2 * WINDOW)
        self._best: _Window | None = None
        self.text = self.ended = ""
        """What is wrong, with what to try (empty if nothing is), and the text for when it is over."""

    @property
    def foreseen(self) -> str:
        config = self._config
        if not self._is_unweighted or config.weight_sync.max_lag == 0:
            return ""
        return (
            f"algorithm.corrections = [] with weight_sync.max_lag = {config.weight_sync.max_lag}: without weights this "
            'loss may collapse under delay. Try algorithm.corrections = ["token_tis"], or max_lag = 0'
        )

    def take_in(self, row: Mapping[str, Any]) -> None:
        """Take in the row of a step; a skipped one counts as none."""
        if row.get("skipped") or row.get("reward/mean") is None:
            return
        if self._rows and row["step"] <= self._rows[-1]["step"]:
            self._rows.clear()  # the learner was restarted, and takes these steps again
        self._rows.append(row)
        if len(self._rows) < 2 * WINDOW:
            return
        rows = tuple(self._rows)
        before, now = _Window.of(rows[:WINDOW]), _Window.of(rows[WINDOW:])
        if self._best is None or before.reward > self._best.reward:
            self._best = before
        self._judge(self._best, now)

    def _judge(self, best: _Window, now: _Window) -> None:
        error = (best.squared_error + now.squared_error) ** 0.5
        scale = ENDS_AT if self.text else 1.0
        limit = scale * max(FELL_BY_ERRORS * error, FELL_BY_STD * best.std)
        what = ""
        # a comparison with what is not known is false
        if now.ess < LOW_ESS and best.reward - now.reward > limit:
            what = f"the reward fell from {best} to {now}, while {now.ess:.0%} of the samples count"
        elif now.drift > scale * LARGE_DRIFT:
            what = f"the policy is {now.drift:.2g} nats a token away from its samples, at a reward of {now}"
        self.text = f"{what}: they are too old for the pace of the learner. Try {self._remedy()}" if what else ""
        self.ended = f"the reward is {now}, and the policy near enough to its samples"

    def _remedy(self) -> str:
        """Return what to try next: weights first, which cost nothing."""
        config = self._config
        if self._is_unweighted:
            return 'algorithm.corrections = ["token_tis"], of which this run has none'
        slower = f"a smaller learner.learning_rate (now {config.learner.learning_rate:g})"
        if config.weight_sync.max_lag == 0:
            return slower
        if config.weight_sync.controls_lag:
            allowed, scale = (self._rows[-1].get(name) for name in ("lag/allowed", "brake/lr_scale"))
            if allowed is None or scale is None:
                return slower
            return (
                f"{slower}: lag control already lets new samples be no older than {allowed:g} versions, and takes "
                f"{scale:.0%} of the rate"
            )
        said = f"{slower} or weight_sync.max_lag (now {config.weight_sync.max_lag})"
        return said + (', or lag_control = "on"' if config.weight_sync.max_lag != "unbounded" else "")
