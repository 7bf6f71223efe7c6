"""`leeway check-reward`: tries the reward functions of a task on completions whose worth is known.

Each function scores each completion as an actor would: in a process of its own, with the same time limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import NamedTuple

from actors.reward_process import CallFailed
from actors.rewards import RewardFailed, Scorer, ScorerLimits
from actors.tasks import Problem, RewardFunction, TaskError, load_task
from launch.config import Config
from launch.errors import ExitStatus, as_config_error
from launch.text import progress_line, shortened

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "reference", "completion")
"""Columns that may hold the right answer, in order of preference."""
LONG_CHARACTERS = 100_000
ODD = {
    "empty": "",
    "garbage": "\x00\x07 <|im_end|> ]]>{{%s}} \\boxed{ -1e999 NaN ../../etc",
    "unicode": "\uff17\uff12 \u2260 \u4e03\u5341\u4e8c \u202e\U0001f916\u0301\U0010ffff",
    "very long": "7 " * (LONG_CHARACTERS // 2),
}
"""Completions that a model produces now and then, and on which no reward function may fail."""
SLOW_SHARE = 0.25
"""A call that takes more than this share of its limit would exceed it on a busy machine."""
NUM_PROBLEMS = 64
"""Default number of problems: a function may fail on one answer in a hundred."""
BUDGET_S = 60.0
"""Seconds per function unless a number of problems is given; a slow one is tried on fewer."""
LOAD_S = 60.0
"""Seconds to load a function's file, beyond the limit of a call."""
MOST_LOST = 3
"""Calls that end their process, after which a function is tried no further."""
NUM_EXAMPLES = 3
"""Failures that are shown per function, each of another kind."""
_SHOWN_CHARACTERS = 40
_LEGEND = f"reward: least to most, and mean; ms: the median call; odd: {', '.join(ODD)}"

Completion = tuple[str, str]
"""'right', 'wrong', 'given' or a key of `ODD`, and the text."""


class Result(NamedTuple):
    """The reward of one completion by one function."""

    function: str
    problem: int
    kind: str
    text: str
    reward: float | None
    took_s: float
    error: str
    """Why there is no reward, with the line of the function that failed; else empty."""
    lost: bool
    """It ended the process of the function."""

    @property
    def row(self) -> str:
        if self.kind == "given":
            return f"given: {shortened(self.text, _SHOWN_CHARACTERS)}"
        return "odd" if self.kind in ODD else self.kind


def check_rewards(config: Config, num: int | None, given: Sequence[str]) -> ExitStatus:
    """Try the reward functions of a task, print the result and return the exit status of the command.

    `num` problems are tried; None: as many of `NUM_PROBLEMS` as fit `BUDGET_S`. The `given` completions are scored for
    each too. ConfigError if the task, or one of its functions, cannot be loaded.
    """
    logger = logging.getLogger("actors.rewards")
    with as_config_error("[task] ", TaskError):
        task = load_task(config.task)
        most = num or NUM_PROBLEMS
        problems = task.train[:: max(1, len(task.train) // most)][:most]
        check = RewardCheck(problems, config.actors.reward_timeout_s, config.task.correct_at, None if num else BUDGET_S)
        logger.setLevel(logging.CRITICAL)  # the results have what it would log
        try:
            with progress_line() as progress:
                for function in task.rewards:
                    asyncio.run(check.run(function, given, progress))
        finally:
            logger.setLevel(logging.NOTSET)
    show(check)
    sentences = check.problems_found()
    for sentence in sentences:
        print(f"PROBLEM  {sentence}")
    if not sentences:
        print(f"The rewards of {len(problems)} problems are as they should be.")
    return ExitStatus.FAILED if sentences else ExitStatus.OK


@dataclass
class RewardCheck:
    """All that was tried, and what is wrong with it."""

    problems: Sequence[Problem]
    timeout_s: float
    correct_at: float
    budget_s: float | None = None
    """Of a function; None: it is tried on everything."""
    results: list[Result] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)
    """Function -> why it was not tried on everything."""

    async def run(self, function: RewardFunction, given: Sequence[str], progress: Callable[[str, float], None]) -> None:
        """Score all completions by one function, one after the other; TaskError if it cannot be loaded."""
        numbers = range(len(self.problems))
        texts = [(number, each) for number in numbers for each in self._completions(number, function, given)]
        started_s, num_lost = time.perf_counter(), 0
        scorer = await self._scorer(function)
        try:
            for done, (number, completion) in enumerate(texts):
                progress(function.name, done / len(texts))
                if self.budget_s is not None and time.perf_counter() - started_s > self.budget_s:
                    self._cut(function, done, f"in {self.budget_s:g} s; --num N tries N problems, however long")
                    return
                result = await self._score(scorer, function, number, completion)
                self.results.append(result)
                num_lost += result.lost
                if num_lost == MOST_LOST or (result.lost and result.took_s >= self.timeout_s):
                    self._cut(function, done + 1, f"because {num_lost} of them cost its process")
                    return
                if result.lost:
                    await scorer.close()
                    scorer = await self._scorer(function)
        finally:
            await scorer.close()

    def _cut(self, function: RewardFunction, num_tried: int, why: str) -> None:
        self.cut[function.name] = f"{function.name} was tried on {num_tried} completions alone, {why}"

    async def _scorer(self, function: RewardFunction) -> Scorer:
        limits = ScorerLimits(1, self.timeout_s, start_timeout_s=LOAD_S + self.timeout_s)
        scorer = Scorer([function], limits, retries=0)
        await scorer.start()  # now, so that no call is slower for it
        return scorer

    def _completions(self, number: int, function: RewardFunction, given: Sequence[str]) -> Iterator[Completion]:
        answer, another = (_answer(self.problems[each % len(self.problems)]) for each in (number, number + 1))
        # a rule, or else the task, may look for the answer between tags
        tag = getattr(function.named, "answer_tag", getattr(function.task, "answer_tag", None))
        if answer is not None:
            wrong = another if another not in (None, answer) else f"{answer}0, or not"
            for kind, text in (("right", answer), ("wrong", wrong)):
                yield kind, f"<{tag}>{text}</{tag}>" if tag else str(text)
        yield from (("given", text) for text in given)
        yield from ODD.items()

    async def _score(self, scorer: Scorer, function: RewardFunction, number: int, completion: Completion) -> Result:
        started_s = time.perf_counter()
        reward, error, lost = None, "", False
        try:
            reward = (await scorer.score(self.problems[number], completion[1])).reward
        except RewardFailed as failed:
            error = str(failed)
            if isinstance(call := failed.__cause__, CallFailed):
                error, lost = f"{call} ({call.where})" if call.where else str(call), call.lost
        return Result(function.name, number, *completion, reward, time.perf_counter() - started_s, error, lost)

    def problems_found(self) -> list[str]:
        """Return a sentence for each reason not to train with these functions yet."""
        return [*self._of_functions(), *self._of_sums()]

    def _of_functions(self) -> Iterator[str]:
        for name, own in self.by_function().items():
            failed = [result for result in own if result.error]
            if failed:
                kinds = ", ".join(dict.fromkeys(result.kind for result in failed))
                yield (
                    f"{name} failed on {len(failed)} of {len(own)} completions ({kinds}), which a run counts as failed "
                    f"and does not train: {failed[0].error}"
                )
            if len(failed) < len(own) and all(result.reward is None for result in own):
                yield f"{name} answered None to everything: it never applies to this task"
            slowest = max(own, key=lambda result: result.took_s)
            if not slowest.error and slowest.took_s > SLOW_SHARE * self.timeout_s:
                yield (
                    f"{name} is slow: {slowest.took_s:.1f} s for a completion ({slowest.kind}) of the "
                    f"{self.timeout_s:g} s that actors.reward_timeout_s allows; make it faster, or raise the limit"
                )

    def _of_sums(self) -> Iterator[str]:
        sums: dict[str, dict[tuple[int, str], float]] = {}
        for each in self.results:
            if each.reward is not None:
                of_kind = sums.setdefault(each.kind, {})
                of_kind[each.problem, each.text] = of_kind.get((each.problem, each.text), 0.0) + each.reward
        right, wrong = ([*sums.get(kind, {}).values()] for kind in ("right", "wrong"))
        everything = [value for of_kind in sums.values() for value in of_kind.values()]
        if not right and "given" not in sums and len(set(everything)) == 1:
            yield (
                f"the reward is {everything[0]:g} for all that was tried, and no column of the task "
                f"({', '.join(ANSWER_COLUMNS)}) holds an answer: give a right one with --completion TEXT"
            )
        elif len(everything) > 1 and len(set(everything)) == 1:
            yield f"the reward is {everything[0]:g} whatever the completion: it carries no signal"
        elif right and wrong and mean(right) <= mean(wrong):
            yield (
                f"right answers are rewarded {mean(right):.3g} on average and wrong ones {mean(wrong):.3g}: training "
                "would not prefer the right ones"
            )
        if right and max(right) < self.correct_at:
            yield (
                f"no right answer reaches task.correct_at = {self.correct_at:g} (the best has {max(right):.3g}): each "
                "evaluation would show an accuracy of 0; lower correct_at, or correct the function"
            )

    def by_function(self) -> dict[str, list[Result]]:
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.function, []).append(result)
        return found


def _answer(problem: Problem) -> str | None:
    """Return the right answer of a row, or None if no column of `ANSWER_COLUMNS` holds it."""
    values = (problem.columns.get(name) for name in ANSWER_COLUMNS)
    return next((str(value) for value in values if isinstance(value, str | int | float)), None)


def show(check: RewardCheck) -> None:
    """Print a table of what each function gave to each kind of completion, and examples of its failures."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("function", "completion", "tried", "failed", "reward", "ms", "longest"):
        table.add_column(name, justify="left" if name in ("function", "completion") else "right", overflow="fold")
    examples: list[str] = []
    for name, own in check.by_function().items():
        for row in dict.fromkeys(result.row for result in own):
            table.add_row(name, row, *_figures([each for each in own if each.row == row]))
        first_of_kind: dict[str, Result] = {}
        for result in own:
            if result.error:
                first_of_kind.setdefault(result.error, result)
        for result in [*first_of_kind.values()][:NUM_EXAMPLES]:
            prompt = shortened(check.problems[result.problem].text, 2 * _SHOWN_CHARACTERS)
            examples.append(f"FAILED   {name}, {result.kind}: {result.error}")
            text = shortened(result.text, _SHOWN_CHARACTERS)
            examples.append(f"         prompt: {prompt!r}; completion: {text!r}")
    if check.results:
        console.print(table)
        console.print(_LEGEND, soft_wrap=True)
    for line in (*examples, *check.cut.values()):
        console.print(line, soft_wrap=True)


def _figures(results: Sequence[Result]) -> Iterator[str]:
    rewards = [result.reward for result in results if result.reward is not None]
    milliseconds = [1000 * result.took_s for result in results]
    yield str(len(results))
    yield str(sum(bool(result.error) for result in results))
    if len(set(rewards)) > 1:
        yield f"{min(rewards):.3g} to {max(rewards):.3g}, {mean(rewards):.3g}"
    else:
        yield f"{rewards[0]:.4g}" if rewards else "None"
    yield f"{median(milliseconds):.1f}"
    yield f"{max(milliseconds):.1f}"
