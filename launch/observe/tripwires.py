"""Tripwires: what the roles report is looked at, poll by poll, for what goes wrong without failing.

    mismatch    an actor and the learner give the same tokens at the same version other log-probabilities
    stuck       the learner takes updates and none is published; or an actor serves an old version all the time
    behind      an actor is more than max_actor_lag behind the newest published version all the time
    publishing  published weights wait for something, such as space on the disk
    refused     an actor refused an update and keeps the version that it has
    failing     a reward function of an actor fails on one sample after the other, always for the same reason
    unstable    the reward falls while the samples are old, or the policy moves away from them (`Stability`)

Each is told once, and once more as `..._ended`; a refusal has no end of its own.
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
from common.staleness import PolicyVersion, StalenessContract
from launch.config import Action, Config, LaunchConfig
from launch.observe.status import PollResult
from launch.pools import actor_pools

LEARNER = "learner"
STUCK_AFTER_S = 300.0
"""A learner that publishes nothing, or an actor that serves one old version, for so long. A version takes seconds, of a
large model minutes."""
BEHIND_AFTER_S = 30.0
"""An actor beyond its bound for so long: it starts no sample meanwhile, and is mostly in the middle of an update."""
MISMATCH_TOKENS = 32
"""So few tokens are not judged, but kept for the next look."""
MISMATCH_ENDS = 0.5
"""Share of the limit below which a mismatch is over: around the limit it would come and go."""
FAILING_SAMPLES = 200
"""In a row, in one actor and for one reason: no function that works now and then is taken for one that does not."""
FAILING_TIMEOUTS = 5
"""Limits of time, and samples in a row, after which nobody waits for a function that takes too long: each costs a
whole limit, and hundreds of them hours."""
PUBLISHING_S = 3.0
"""Shorter waits of a publisher are nothing to tell."""


@dataclass(frozen=True)
class Trip:
    """Something tripped, or is over."""

    kind: str
    who: str
    text: str
    action: Action | None = None
    """What is to be done; None where telling is all."""


class Tripwires:
    """Looks at every poll; says what tripped, and leaves acting to its caller."""

    def __init__(
        self, config: Config, contract: StalenessContract, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing has tripped. `clock` is monotonic seconds."""
        self._config = config.launch
        self._contract = contract
        self._mismatch_limits = {
            pool.name: mismatch_limit(config.launch, pool.config.dtype, config.learner.precision)
            for pool in actor_pools(config)
        }
        """By pool of actors: of the mean absolute difference of log-probabilities."""
        self._stability = Stability(config)
        self._clock = clock
        self._standing: dict[tuple[str, str], Trip] = {}
        self._since: dict[tuple[str, str], tuple[object, float]] = {}
        self._reports: dict[str, tuple[ActorReport, float]] = {}
        self._differences: dict[str, tuple[float, int]] = {}
        self._newest = PolicyVersion(0, 0)
        self._refused: dict[str, str] = {}

    @property
    def foreseen(self) -> str:
        """What can be said before the first step; empty where there is nothing to say."""
        return self._stability.foreseen

    @property
    def standing(self) -> list[Trip]:
        """What tripped and is not over, oldest first, in its newest words."""
        return list(self._standing.values())

    def look(self, news: PollResult, *, evaluating: bool = False) -> list[Trip]:
        """Take in a poll; returns what tripped or ended with it.

        An evaluation that goes on holds actors at one version: that is not held against them.
        """
        now = self._clock()
        for report in news.actors:
            self._reports[report.name] = report, now
        if news.working is not None:
            self._forget(set(self._reports) - news.working)
        trips = [*self._look_at_rows(news), *self._look_at_learner(news, now)]
        for report, heard_s in list(self._reports.values()):
            trips += self._look_at_actor(report, now - heard_s, now, evaluating)
        return trips

    # --- mismatch ---------------------------------------------------------------------------------

    def _look_at_rows(self, news: PollResult) -> Iterator[Trip]:
        for row in news.steps:
            for who, (difference, num_tokens) in _differences(row).items():
                if who == LEARNER or news.working is None or who in news.working:
                    yield from self._judge(who, difference, num_tokens)
            self._stability.take_in(row)
            yield from self._hold("unstable", LEARNER, self._stability.text, None, self._stability.ended)

    def _judge(self, who: str, difference: float, num_tokens: int) -> Iterator[Trip]:
        total, count = self._differences.pop(who, (0.0, 0))
        total, count = total + difference * num_tokens, count + num_tokens
        if count < MISMATCH_TOKENS:
            self._differences[who] = total, count
            return
        mean, limit, config = total / count, self._mismatch_limit_of(who), self._config
        is_standing = ("mismatch", who) in self._standing
        name, action = (who, config.on_mismatch) if who != LEARNER else ("the engines", _for_all(config.on_mismatch))
        text = (
            f"{name} and the learner differ by {mean:.2g} in the mean absolute log-probability of {count} tokens of "
            f"the same version, and launch.mismatch_limit is {limit:g}: other weights, or another arithmetic"
        )
        # not below is above: a difference that is no number is one
        trips = not mean <= (limit * MISMATCH_ENDS if is_standing else limit)
        yield from self._hold("mismatch", who, text if trips else "", action, f"{name} and the learner agree again")

    def _mismatch_limit_of(self, who: str) -> float:
        """That of its pool; of all together, or of one that has not reported yet, the widest."""
        widest = max(self._mismatch_limits.values())
        report, _ = self._reports.get(who, (None, 0.0))
        return widest if report is None else self._mismatch_limits.get(report.pool, widest)

    # --- the learner ------------------------------------------------------------------------------

    def _look_at_learner(self, news: PollResult, now: float) -> Iterator[Trip]:
        config, status = self._config, news.status
        if status is not None:
            self._newest = PolicyVersion(*status.newest)
            is_due = status.version - self._newest.version >= self._contract.config.publish_every
            lasts_s = self._lasts("stuck", LEARNER, self._newest if is_due else None, now)
            text = (
                f"the learner is at version {status.version}, and the newest published is {self._newest} for "
                f"{lasts_s:.0f} s{_because(news.publishing, ', waiting for ')}; see the logs of the stages"
            )
            stuck = text if lasts_s >= STUCK_AFTER_S else ""
            yield from self._hold(
                "stuck", LEARNER, stuck, _for_all(config.on_stuck), f"version {self._newest} is published"
            )
        if news.publishing is not None:
            lasts_s = self._lasts("publishing", LEARNER, news.publishing and "waits", now)
            text = f"published weights wait for {news.publishing}; training goes on as far as the bound allows"
            waits = text if news.publishing and lasts_s >= PUBLISHING_S else ""
            yield from self._hold("publishing", LEARNER, waits, None, "published weights wait for nothing any more")

    # --- an actor ---------------------------------------------------------------------------------

    def _look_at_actor(self, report: ActorReport, silent_s: float, now: float, evaluating: bool) -> Iterator[Trip]:
        config, name, served = self._config, report.name, PolicyVersion(*report.version)
        if report.refused and self._refused.get(name) != report.refused:
            yield Trip("refused", name, f"{name} keeps version {served} and did not take an update: {report.refused}")
        self._refused[name] = report.refused
        yield from self._look_at_rewards(report)
        is_old = served < self._newest and not evaluating
        old_s = self._lasts("stuck", name, served if is_old else None, now)
        is_behind = is_old and self._contract.is_behind(served, self._newest)
        behind_s = self._lasts("behind", name, "behind" if is_behind else None, now)
        if evaluating:
            return  # nothing begins and nothing ends
        ended = f"{name} serves version {served}"
        facts = f"{ended} and the newest published is {self._newest}"
        why = _because(report.refused, "; it refused ") or _because(report.waiting, "; it says: ")
        if silent_s > 2.0:
            why = f"; it has not answered for {silent_s:.0f} s"
        stuck = f"{facts}; it has served that one for {old_s:.0f} s{why}"
        bound = f"more than max_actor_lag = {self._contract.actor_lag} behind"
        behind = f"{facts}; it has been {bound} for {behind_s:.0f} s{why}"
        yield from self._hold("stuck", name, stuck if old_s >= STUCK_AFTER_S else "", config.on_stuck, ended)
        yield from self._hold("behind", name, behind if behind_s >= BEHIND_AFTER_S else "", config.on_behind, ended)

    def _look_at_rewards(self, report: ActorReport) -> Iterator[Trip]:
        config, text = self._config, ""
        for failing in report.failing:
            is_slow = failing.timeout_s and failing.for_s >= FAILING_TIMEOUTS * failing.timeout_s
            if failing.num_samples >= (FAILING_TIMEOUTS if is_slow else FAILING_SAMPLES):
                text = (
                    f"reward {failing.name} failed in {report.name} on {failing.num_samples} samples in a row: "
                    f"{failing.why}; the last had the prompt {failing.prompt!r} and the completion "
                    f"{failing.completion!r}. Try it with leeway check-reward, mend it, then go on with leeway resume"
                )
        ended = f"the rewards of {report.name} score samples again"
        yield from self._hold("failing", report.name, text, config.on_failing, ended)

    def _forget(self, names: set[str]) -> None:
        """These are out of the run, or are being started again."""
        for name in names:
            for table in (self._reports, self._differences, self._refused):
                table.pop(name, None)
            for kind in ("mismatch", "stuck", "behind", "failing"):
                self._standing.pop((kind, name), None)
                self._since.pop((kind, name), None)

    # --- what lasts -------------------------------------------------------------------------------

    def _lasts(self, kind: str, who: str, state: object, now: float) -> float:
        """For how many seconds it has been in this state; 0 where that is empty."""
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
        """Tell what begins, where there is a text, and what ends, where there is none any more."""
        key = kind, who
        if text:
            trip = Trip(kind, who, text, action)
            if key not in self._standing:
                yield trip
            self._standing[key] = trip
        elif self._standing.pop(key, None) is not None:
            yield Trip(f"{kind}_ended", who, ended)


def mismatch_limit(config: LaunchConfig, *dtypes: str) -> float:
    """The limit that the config gives, else one for the dtypes in which engines and learner compute."""
    if config.mismatch_limit is not None:
        return config.mismatch_limit
    return 1e-3 if all(dtype in ("float32", "float64") for dtype in dtypes) else 0.2


def _differences(row: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """The mean difference at lag 0 and of how many tokens: by actor, or of all together where the step does not say."""
    all_together = {LEARNER: (row.get("mismatch/lag0_abs"), row.get("mismatch/lag0_tokens") or 0)}
    by_actor: Mapping[str, tuple[float | None, int]] = row.get("lag0_by_actor", all_together)
    return {
        who: (math.nan if value is None else value, num_tokens)
        for who, (value, num_tokens) in by_actor.items()
        if num_tokens
    }


def _for_all(action: Action) -> Action:
    """Only an actor can be taken out of the run."""
    return "warn" if action == "quarantine" else action


def _because(text: str | None, before: str) -> str:
    return f"{before}{text}" if text else ""


WINDOW = 20
"""Steps whose mean reward is compared; with a few hundred samples each, little noise is left in it."""
FELL_BY_ERRORS = 4.0
"""Standard errors that the mean of a window has to be below that of the best one."""
FELL_BY_STD = 0.2
"""And standard deviations of the rewards of single samples: a healthy run swings by less than half of that."""
ENDS_AT = 0.5
"""Share of these limits below which it is over: around one limit it would come and go."""
LOW_ESS = 0.8
"""Share of the sequences that count; above it the data are nearly the policy's own."""
LARGE_DRIFT = 0.1
"""Nats a token between the policy and its samples (mismatch/k3); a tenth of that is much."""


class _Window(NamedTuple):
    """So many steps in a row; NaN is not known."""

    first: int
    last: int
    reward: float
    """Mean over the steps, as all that follows it."""
    squared_error: float
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
        """Nothing has been seen; `config` says what the run has not tried."""
        self._config = config
        algorithm = config.algorithm
        self._is_unweighted = isinstance(algorithm, WeighedSection) and not algorithm.corrections
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=2 * WINDOW)
        self._best: _Window | None = None
        self.text = ""
        """What is wrong, and what to try; empty while nothing is."""
        self.ended = ""
        """What is said when it is over."""

    @property
    def foreseen(self) -> str:
        """What can be said before the first step; empty where there is nothing to say."""
        config = self._config
        if not self._is_unweighted or config.weight_sync.max_lag == 0:
            return ""
        return (
            f"algorithm.corrections = [] with weight_sync.max_lag = {config.weight_sync.max_lag}: without weights this "
            'loss may collapse under delay. Try algorithm.corrections = ["token_tis"], or max_lag = 0'
        )

    def take_in(self, row: Mapping[str, Any]) -> None:
        """A step was taken; a skipped one says nothing."""
        if row.get("skipped") or row.get("reward/mean") is None:
            return
        if self._rows and row["step"] <= self._rows[-1]["step"]:
            self._rows.clear()  # the learner was started again, and takes these steps anew
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
        """The next thing to try; weights first, for they cost nothing."""
        config = self._config
        if self._is_unweighted:
            return 'algorithm.corrections = ["token_tis"], of which this run has none'
        slower = f"a smaller learner.learning_rate (now {config.learner.learning_rate:g})"
        if config.weight_sync.max_lag != 0:
            slower += f" or weight_sync.max_lag (now {config.weight_sync.max_lag})"
        return slower + (", or learner.ess_budget = 0.5" if config.learner.ess_budget is None else "")
