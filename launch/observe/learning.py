"""Whether a run learns: the verdict on a run, and signs that it cannot learn.

    equal_rewards  no group has two different rewards, and the loss compares the samples of a group
    no_gradient    the gradient is exactly 0
    all_cut        all answers reach the length limit, and none of them is correct
    collapsed      the entropy is below 10 % of its start, and neither held-out accuracy nor mean reward has risen
    fell           the held-out accuracy is below the first one by more than two standard errors

The first three signs start after `STREAK` steps in a row, or with the first evaluation, and end after as many steps
without them. The others end at a less strict limit than the one at which they start.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log10, sqrt
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from leeway.launch.observe.status import Accuracy, RunStatus
from leeway.launch.text import number

if TYPE_CHECKING:
    from leeway.actors.report import ActorReport
    from leeway.launch.config import Config

STREAK = 5
"""Steps in a row after which a sign starts or ends; single steps without any informative group are normal."""
NUM_ANSWERS = 32
"""Minimum number of answers of a first evaluation from which signs are derived."""
WINDOW = 10
"""Number of steps of a mean of entropies or rewards."""
COLLAPSED, RECOVERED = 0.1, 0.2
"""Fractions of the entropy of the first steps below which `collapsed` starts, and above which it ends."""
FEW_STEPS = 20
"""Number of steps below which mean rewards give no verdict."""

Sign = tuple[str, str]
"""Kind and text; the text is '' if the sign is absent."""


class Change(NamedTuple):
    """Change of a mean; `error` is the standard error of the gain."""

    before: float
    after: float
    error: float

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def has_risen(self) -> bool:
        return self.gain > 2 * self.error

    def __str__(self) -> str:
        places = max(2, min(6, ceil(-log10(2 * self.error)))) if self.error else 2
        before, after, error = (f"{value:.{places}f}" for value in self)
        return f"{before} -> {after} ({self.gain:+.{places}f} ± {error})"


def change_of(before: Sequence[float], after: Sequence[float]) -> Change:
    """Return the change of the mean between two samples of two or more values."""
    squared_error = sum(variance(values) / len(values) for values in (before, after))
    return Change(fmean(before), fmean(after), sqrt(squared_error))


def accuracy_change(evaluations: Sequence[Accuracy], which: str = "greedy") -> Change | None:
    """Return the change from the first to the last evaluation; None without two of them."""
    ends = [(getattr(each, which), each.num_problems) for each in (*evaluations[:1], *evaluations[1:][-1:])]
    if len(ends) < 2 or None in (ends[0][0], ends[1][0]):
        return None
    # with one correct and one wrong answer more, an accuracy of 0 or 1 has an error too (Agresti and Caffo, 2000)
    smoothed = [((share * num + 1) / (num + 2), num + 2) for share, num in ends]
    return Change(ends[0][0], ends[1][0], sqrt(sum(share * (1 - share) / num for share, num in smoothed)))


def verdict(status: RunStatus, rewards: Sequence[float]) -> str:
    """Return whether the run has learned, from its evaluations, else from the mean rewards of its steps.

    A run without actors trains on recorded samples, whose rewards do not depend on its policy.
    """
    changes = {which: accuracy_change(status.evaluations, which) for which in ("greedy", "sampled")}
    if status.actors and len(rewards) >= FEW_STEPS:
        num = len(rewards) // 4
        changes["reward"] = change_of(rewards[:num], rewards[-num:])
    known = {name: change for name, change in changes.items() if change is not None}
    if not known:
        return f"unknown: fewer than two evaluations, and fewer than {FEW_STEPS} steps with new rewards"
    first, *_ = known.values()
    outcome = "learned" if first.has_risen else "worse" if first.gain < -2 * first.error else "no improvement"
    return f"{outcome}: {', '.join(f'{name} {change}' for name, change in known.items())}"


@dataclass
class Streak:
    """A condition that starts after `STREAK` steps in a row, and ends after as many steps without it."""

    is_on: bool = False
    num_other: int = 0

    def ingest(self, is_met: bool) -> None:
        self.num_other = 0 if is_met == self.is_on else self.num_other + 1
        if self.num_other == STREAK:
            self.is_on, self.num_other = is_met, 0


class LearningSigns:
    """Derives signs from the rows of the steps and from evaluations; actors report the newest rewards and answers."""

    def __init__(self, config: Config, run: str) -> None:
        """`run` is the run folder."""
        self._config, self._run = config, run
        self._streaks: defaultdict[str, Streak] = defaultdict(Streak)
        self._first: list[Mapping[str, Any]] = []
        self._newest: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._accuracy: Change | None = None
        self._is_collapsed = self._has_fallen = False

    def ingest(self, row: Mapping[str, Any], reports: Sequence[ActorReport]) -> Iterator[Sign]:
        """Process the row of a step; skipped steps are ignored."""
        if row.get("skipped") or "reward/max" not in row:
            return
        is_equal, is_wrong = row["buffer/uninformative_frac"] == 1, row["reward/max"] < self._config.task.correct_at
        self._streaks["equal_rewards"].ingest(is_equal and self._config.algorithm.needs.groups)
        self._streaks["no_gradient"].ingest(row["grad_norm"] == 0)
        self._streaks["all_cut"].ingest(row["length/cut_frac"] == 1 and is_wrong)
        yield from self._streak_signs(reports)
        if row["policy/entropy"] is not None:
            yield self._entropy(row)

    def evaluated(self, evaluations: Sequence[Accuracy], reports: Sequence[ActorReport]) -> Iterator[Sign]:
        """Process the newest of all evaluations of the run."""
        rewards = _rewards(reports)
        if len(evaluations) == 1 and rewards.total() >= NUM_ANSWERS:
            is_wrong = all(reward is None or reward < self._config.task.correct_at for reward in rewards)
            is_cut = sum(report.num_cut for report in reports) == rewards.total()
            self._streaks["equal_rewards"].is_on = len(rewards) == 1 and self._config.algorithm.needs.groups
            self._streaks["all_cut"].is_on = is_cut and is_wrong
            yield from self._streak_signs(reports)
        self._accuracy = change = accuracy_change(evaluations)
        if change is not None:
            self._has_fallen = change.gain < -(1 if self._has_fallen else 2) * change.error
            text = f"the held-out accuracy fell: greedy {change}. Try a smaller learner.learning_rate"
            yield "fell", text if self._has_fallen else ""

    def _streak_signs(self, reports: Sequence[ActorReport]) -> Iterator[Sign]:
        counts = ", ".join(f"{reward} ({num})" for reward, num in _rewards(reports).most_common(5))
        answers = "; ".join([answer for report in reports for answer in report.answers][-3:])
        texts = {
            "equal_rewards": "all rewards of each group are equal, so the loss has nothing to compare. Newest rewards "
            f"(with counts): {counts}. Newest answers: {answers}. Run `leeway check-reward {self._run}/config.toml`",
            "no_gradient": "the gradient is exactly 0, so no parameter changes: check the rewards and [algorithm]",
            "all_cut": f"all answers reached the limit of {self._config.actors.max_new_tokens} tokens, and none is "
            "correct: raise actors.max_new_tokens, or check that the template makes the model end its answers",
        }
        for kind, text in texts.items():
            yield kind, text if self._streaks[kind].is_on else ""

    def _entropy(self, row: Mapping[str, Any]) -> Sign:
        self._newest.append(row)
        if len(self._first) < WINDOW:
            self._first.append(row)
        start, now = (fmean(each["policy/entropy"] for each in rows) for rows in (self._first, self._newest))
        if len(self._newest) == WINDOW:
            reward = change_of(*([each["reward/mean"] for each in rows] for rows in (self._first, self._newest)))
            has_risen = reward.has_risen or (self._accuracy is not None and self._accuracy.has_risen)
            self._is_collapsed = now < (RECOVERED if self._is_collapsed else COLLAPSED) * start and not has_risen
        text = (
            f"the entropy fell from {number(start)} to {number(now)} nats per token without a higher reward or "
            "accuracy, so answers repeat. Try a smaller learner.learning_rate"
        )
        return "collapsed", text if self._is_collapsed else ""


def _rewards(reports: Sequence[ActorReport]) -> Counter[float | None]:
    return sum((Counter(report.rewards) for report in reports), Counter())
