"""Tries the reward functions of a task on completions whose worth is known, before a run spends hours on them.

Each function scores each completion as an actor would: in the same `Scorer`, with the same limit of time. Starts no
engine and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

from actors.rewards import RewardFailed, Scorer
from actors.tasks import Problem, RewardFunction, Task
from actors.tasks.config import FileTask, ReasoningGymTask
from launch.text import shortened

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "reference", "completion")
"""Where a row usually has the right answer, in the order in which they are looked for."""
LONG_CHARACTERS = 100_000
ODD = {
    "empty": "",
    "garbage": "\x00\x07 <|im_end|> ]]>{{%s}} \\boxed{ -1e999 NaN ../../etc",
    "unicode": "\uff17\uff12 \u2260 \u4e03\u5341\u4e8c \u202e\U0001f916\u0301\U0010ffff",
    "very long": "7 " * (LONG_CHARACTERS // 2),
}
"""What a model says now and then, and what no reward function may break on."""
SLOW_SHARE = 0.25
"""A call that takes more than this share of its limit would run over it on a busy machine."""

_SHOWN_CHARACTERS = 40


class Completion(NamedTuple):
    """One text that is scored."""

    kind: str
    """'right', 'wrong', 'given', or a key of `ODD`."""
    text: str


class Result(NamedTuple):
    """What one function said of one completion."""

    function: str
    problem: int
    completion: Completion
    reward: float | None
    took_s: float
    error: str = ""
    """Why there is no reward, with the line of the function that failed; '' where it answered."""


@dataclass
class RewardCheck:
    """All that was tried, and what is to be thought of it."""

    problems: Sequence[Problem]
    timeout_s: float
    """Of one call: actors.reward_timeout_s."""
    correct_at: float
    """task.correct_at."""
    results: list[Result] = field(default_factory=list)

    def totals(self, kind: str) -> list[float]:
        """The summed rewards of completions of a kind, problem by problem; those without one are left out."""
        sums: dict[tuple[int, str], float] = {}
        for result in self.results:
            if result.completion.kind == kind and result.reward is not None:
                key = result.problem, result.completion.text
                sums[key] = sums.get(key, 0.0) + result.reward
        return list(sums.values())

    def problems_found(self) -> list[str]:
        """Sentences; each is a reason not to train with these functions yet."""
        return [*self._of_functions(), *self._of_sums()]

    def _of_functions(self) -> Iterator[str]:
        for name in dict.fromkeys(result.function for result in self.results):
            own = [result for result in self.results if result.function == name]
            failed = [result for result in own if result.error]
            kinds = ", ".join(dict.fromkeys(result.completion.kind for result in failed))
            if failed:
                yield (
                    f"{name} failed on {len(failed)} of {len(own)} completions ({kinds}), which a run counts as failed "
                    f"and does not train: {failed[0].error}"
                )
            if len(failed) < len(own) and all(result.reward is None for result in own):
                yield f"{name} answered None to everything: it never applies to this task"
            slowest = max(own, key=lambda result: result.took_s)
            if not slowest.error and slowest.took_s > SLOW_SHARE * self.timeout_s:
                yield (
                    f"{name} is slow: {slowest.took_s:.1f} s for a completion ({slowest.completion.kind}) of the "
                    f"{self.timeout_s:g} s that actors.reward_timeout_s allows; make it faster, or raise the limit"
                )

    def _of_sums(self) -> Iterator[str]:
        right, wrong = self.totals("right"), self.totals("wrong")
        everything = [value for kind in {each.completion.kind for each in self.results} for value in self.totals(kind)]
        if not right and not self.totals("given") and len(set(everything)) == 1:
            yield (
                f"the reward is {everything[0]:g} for all that was tried, and no column of the task "
                f"({', '.join(ANSWER_COLUMNS)}) holds an answer: give a right one with --completion TEXT"
            )
        elif len(everything) > 1 and len(set(everything)) == 1:
            yield (
                f"the reward is {everything[0]:g} whatever the completion: it carries no signal, and nothing can be "
                "learned from it"
            )
        elif right and wrong and mean(right) <= mean(wrong):
            yield (
                f"right answers are rewarded {mean(right):.3g} on average and wrong ones {mean(wrong):.3g}: training "
                "would not prefer the right ones"
            )
        if right and not any(value >= self.correct_at for value in right):
            yield (
                f"no right answer reaches task.correct_at = {self.correct_at:g} (the best has {max(right):.3g}): each "
                "evaluation would show an accuracy of 0; lower correct_at, or mend the function"
            )


def check_rewards(
    task: Task,
    config: ReasoningGymTask | FileTask,
    *,
    num_problems: int,
    given: Sequence[str],
    timeout_s: float,
) -> RewardCheck:
    """Score completions of a few problems, spread over the training prompts, and these `given` ones of each."""
    spread = max(1, len(task.train) // num_problems)
    problems = list(task.train[::spread][:num_problems])
    found = RewardCheck(problems, timeout_s, config.correct_at)
    quiet = logging.getLogger("actors.rewards")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)  # what it would log is in the results
    try:
        asyncio.run(_score_all(task, config, given, found))
    finally:
        quiet.setLevel(level)
    return found


async def _score_all(task: Task, config: ReasoningGymTask | FileTask, given: Sequence[str], found: RewardCheck) -> None:
    for function in task.rewards:
        scorer = Scorer([function], retries=0, timeout_s=found.timeout_s)
        try:
            for number, problem in enumerate(found.problems):
                other = found.problems[(number + 1) % len(found.problems)]
                for completion in _completions(problem, other, config, given):
                    result = await _score(scorer, function, number, problem, completion)
                    found.results.append(result)
                    if result.error and result.took_s >= found.timeout_s:
                        break  # the next call would hang as well
                else:
                    continue
                break
        finally:
            scorer.close()


def _completions(
    problem: Problem, other: Problem, config: ReasoningGymTask | FileTask, given: Sequence[str]
) -> Iterator[Completion]:
    answer, another = answer_of(problem), answer_of(other)
    if answer is not None:
        yield Completion("right", _tagged(answer, config))
        wrong = another if another not in (None, answer) else f"{answer}0, or not"
        yield Completion("wrong", _tagged(str(wrong), config))
    for text in given:
        yield Completion("given", text)
    for kind, text in ODD.items():
        yield Completion(kind, text)


def answer_of(problem: Problem) -> str | None:
    """The right answer as its row has it; None where it has none, or keeps it under a name of its own."""
    for name in ANSWER_COLUMNS:
        value = problem.columns.get(name)
        if isinstance(value, str | int | float):
            return str(value)
    return None


def _tagged(answer: str, config: ReasoningGymTask | FileTask) -> str:
    tag = getattr(config, "answer_tag", None)
    return f"<{tag}>{answer}</{tag}>" if tag else answer


async def _score(
    scorer: Scorer, function: RewardFunction, number: int, problem: Problem, completion: Completion
) -> Result:
    started = time.perf_counter()
    reward, error = None, ""
    try:
        reward = (await scorer.score(problem, completion.text)).reward
    except RewardFailed as failed:
        error = _where(failed)
    return Result(function.name, number, completion, reward, time.perf_counter() - started, error)


def _where(failed: RewardFailed) -> str:
    """The reason, and the line of the user's function that raised."""
    call = failed.__cause__
    raised = call.__cause__ if call is not None else None
    text = str(call or failed)
    frames: list[Any] = traceback.extract_tb(raised.__traceback__) if raised is not None else []
    ours = ("/actors/", "/asyncio/", "/concurrent/")
    own = [frame for frame in frames if not any(folder in frame.filename for folder in ours)]
    if not own or isinstance(raised, TimeoutError | asyncio.CancelledError):
        return text
    last = own[-1]
    return f"{text} ({last.filename}, line {last.lineno}: {last.line})"


def show(checked: RewardCheck) -> None:
    """Print a table for each problem."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for number, problem in enumerate(checked.problems):
        table = Table(title=Text(f"prompt: {shortened(problem.text, 90)}"), title_justify="left")
        for name in ("completion", "text", "function", "reward", "ms", "error"):
            table.add_column(name, justify="right" if name in ("reward", "ms") else "left", overflow="fold")
        for result in (each for each in checked.results if each.problem == number):
            reward = "" if result.error else "None" if result.reward is None else f"{result.reward:.4g}"
            text = shortened(result.completion.text, _SHOWN_CHARACTERS)
            milliseconds = f"{1000 * result.took_s:.1f}"
            table.add_row(result.completion.kind, text, result.function, reward, milliseconds, result.error)
        console.print(table)
