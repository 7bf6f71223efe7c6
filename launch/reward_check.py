"""Tries the reward functions of a task on completions whose worth is known, before a run spends hours on them.

Each function scores each completion as an actor would: in a process of its own, with the same limit of time. Starts no
engine and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from actors.reward_process import CallFailed
from actors.rewards import RewardFailed, Scorer, ScorerLimits
from actors.tasks import Problem, RewardFunction, Task
from actors.tasks.task import OPEN_TAG, PromptCodec
from common.hf_folder import CONFIG_NAME
from launch.config import Config
from launch.model_folder import STARTED_NOTE
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

NUM_PROBLEMS = 64
"""Where nobody says how many: what a function breaks on may be one answer in a hundred."""
BUDGET_S = 60.0
"""Of a function, where nobody says how many problems: a slow one is tried on fewer."""
LOAD_S = 60.0
"""How long a function's file may take to load, beyond the limit of a call."""
MOST_LOST = 3
"""Calls that end their process, after which a function is tried no further."""
NUM_EXAMPLES = 3
"""Of failures that are shown of a function, each of another kind."""
_SHOWN_CHARACTERS = 40
_LEGEND = f"reward: least to most, and mean; ms: the median call; odd: {', '.join(ODD)}"


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
    lost: bool = False
    """Did it cost the process of the function?"""


@dataclass
class RewardCheck:
    """All that was tried, and what is to be thought of it."""

    problems: Sequence[Problem]
    timeout_s: float
    correct_at: float
    results: list[Result] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)
    """Function -> why it was not tried on all completions, where it was not."""

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
    found: RewardCheck,
    *,
    given: Sequence[str],
    budget_s: float | None,
    progress: Callable[[str, float], None] = lambda function, share: None,
) -> None:
    """Score completions of the problems of `found`, these `given` ones of each too, and enter them there.

    Args:
        task: its functions are tried.
        found: what is entered stays there where this is interrupted.
        given: completions of every problem.
        budget_s: of a function; None where it is to be tried on all, however long that takes.
        progress: told the function and its share that is done.

    Raises:
        TaskError: a function cannot be loaded.
    """
    quiet = logging.getLogger("actors.rewards")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)  # what it would log is in the results
    trial = _Trial(found, budget_s, progress)
    try:
        for function in task.rewards:
            texts = [
                (number, completion)
                for number, problem in enumerate(found.problems)
                for completion in _completions(problem, _other(found.problems, number), _tag(function), given)
            ]
            asyncio.run(trial.of(function, texts))
    finally:
        quiet.setLevel(level)


def spread(task: Task, num_problems: int) -> list[Problem]:
    """So many of its training problems, evenly spaced, or all where it has fewer."""
    step = max(1, len(task.train) // num_problems)
    return list(task.train[::step][:num_problems])


def start_note(config: Config, prompt: str) -> str:
    """Return a note if prompts have the start of the answer; of a chat template only if the model is there."""
    start = "".join(OPEN_TAG.findall(prompt))
    if config.task.chat:
        folder, system_prompt = Path(config.model.path or ""), config.task.system_prompt
        is_there = (folder / CONFIG_NAME).is_file()
        start = PromptCodec(folder, True, system_prompt).answer_start(prompt) if is_there else ""
    return STARTED_NOTE.format(start) if start else ""


def _other(problems: Sequence[Problem], number: int) -> Problem:
    return problems[(number + 1) % len(problems)]


@dataclass
class _Trial:
    found: RewardCheck
    budget_s: float | None
    progress: Callable[[str, float], None]

    async def of(self, function: RewardFunction, texts: Sequence[tuple[int, Completion]]) -> None:
        """One call after the other, so that each has its own time."""
        started_s, num_lost = time.perf_counter(), 0
        scorer = await self._scorer(function)
        try:
            for done, (number, completion) in enumerate(texts):
                self.progress(function.name, done / len(texts))
                if self.budget_s is not None and time.perf_counter() - started_s > self.budget_s:
                    self._cut(function, done, f"in {self.budget_s:g} s; --num N tries N problems, however long")
                    return
                result = await _score(scorer, function, number, self.found.problems[number], completion)
                self.found.results.append(result)
                num_lost += result.lost
                if num_lost == MOST_LOST or (result.lost and result.took_s >= self.found.timeout_s):
                    self._cut(function, done + 1, f"because {num_lost} of them cost its process")
                    return
                if result.lost:
                    await scorer.close()
                    scorer = await self._scorer(function)
        finally:
            await scorer.close()

    def _cut(self, function: RewardFunction, num_tried: int, why: str) -> None:
        self.found.cut[function.name] = f"{function.name} was tried on {num_tried} completions alone, {why}"

    async def _scorer(self, function: RewardFunction) -> Scorer:
        limit_s = self.found.timeout_s
        scorer = Scorer([function], ScorerLimits(1, limit_s, start_timeout_s=LOAD_S + limit_s), retries=0)
        await scorer.start()  # now, so that no call is the slower for it
        return scorer


def _completions(problem: Problem, other: Problem, tag: str | None, given: Sequence[str]) -> Iterator[Completion]:
    answer, another = answer_of(problem), answer_of(other)
    if answer is not None:
        yield Completion("right", _tagged(answer, tag))
        wrong = another if another not in (None, answer) else f"{answer}0, or not"
        yield Completion("wrong", _tagged(str(wrong), tag))
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


def _tag(function: RewardFunction) -> str | None:
    """Between whose ends a rule, or else the task, looks for an answer."""
    task = getattr(function.task, "answer_tag", None)
    rule: str | None = getattr(function.named, "answer_tag", task)
    return rule


def _tagged(answer: str, tag: str | None) -> str:
    return f"<{tag}>{answer}</{tag}>" if tag else answer


async def _score(
    scorer: Scorer, function: RewardFunction, number: int, problem: Problem, completion: Completion
) -> Result:
    started = time.perf_counter()
    reward, error, lost = None, "", False
    try:
        reward = (await scorer.score(problem, completion.text)).reward
    except RewardFailed as failed:
        error, lost = str(failed), False
        if isinstance(call := failed.__cause__, CallFailed):
            error, lost = f"{call} ({call.where})" if call.where else str(call), call.lost
    return Result(function.name, number, completion, reward, time.perf_counter() - started, error, lost)


# --- shown ---------------------------------------------------------------------------------------------


def show(checked: RewardCheck) -> None:
    """Print a table of what each function gave to each kind of completion, and examples of where it failed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("function", "completion", "tried", "failed", "reward", "ms", "longest"):
        table.add_column(name, justify="left" if name in ("function", "completion") else "right", overflow="fold")
    for name in dict.fromkeys(result.function for result in checked.results):
        own = [result for result in checked.results if result.function == name]
        for kind in dict.fromkeys(_row_of(result.completion) for result in own):
            table.add_row(name, kind, *_figures([each for each in own if _row_of(each.completion) == kind]))
    if checked.results:
        console.print(table)
        console.print(_LEGEND, soft_wrap=True)
    for line in (*_examples(checked), *checked.cut.values()):
        console.print(line, soft_wrap=True)


def _row_of(completion: Completion) -> str:
    if completion.kind == "given":
        return f"given: {shortened(completion.text, _SHOWN_CHARACTERS)}"
    return "odd" if completion.kind in ODD else completion.kind


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


def _examples(checked: RewardCheck) -> Iterator[str]:
    shown: dict[tuple[str, str], Result] = {}
    for result in checked.results:
        if result.error:
            shown.setdefault((result.function, result.error), result)
    for name in dict.fromkeys(function for function, _ in shown):
        for result in [each for each in shown.values() if each.function == name][:NUM_EXAMPLES]:
            prompt = shortened(checked.problems[result.problem].text, 2 * _SHOWN_CHARACTERS)
            text = shortened(result.completion.text, _SHOWN_CHARACTERS)
            yield f"FAILED   {name}, {result.completion.kind}: {result.error}"
            yield f"         prompt: {prompt!r}; completion: {text!r}"
