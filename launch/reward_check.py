"""`leeway check-reward`: test the reward functions of a task on completions of known quality.

Each function scores each completion as in an actor: in its own process, with the same timeout.
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

from leeway.actors.reward_process import CallFailed
from leeway.actors.rewards import RewardFailed, Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction, Task, TaskError, codec_of, load_task
from leeway.actors.tasks.chat import OPEN_TAG, PromptCodec
from leeway.actors.tasks.prompts import value_at
from leeway.actors.tasks.task import SAMPLED
from leeway.launch.config import Config
from leeway.launch.errors import ExitStatus, as_config_error
from leeway.launch.text import progress_line, shortened

ANSWER_COLUMNS = (
    "answer", "solution", "ground_truth", "reward_model[ground_truth]", "target", "reference", "completion",
)  # fmt: skip
"""Columns that may contain the correct answer, in order of preference."""
LONG_CHARACTERS = 100_000
MALFORMED = {
    "empty": "",
    "garbage": "\x00\x07 <|im_end|> ]]>{{%s}} \\boxed{ -1e999 NaN ../../etc",
    "unicode": "\uff17\uff12 \u2260 \u4e03\u5341\u4e8c \u202e\U0001f916\u0301\U0010ffff",
    "very long": "7 " * (LONG_CHARACTERS // 2),
}
"""Malformed completions, which models produce occasionally; reward functions must not fail on them."""
SLOW_SHARE = 0.25
"""Share of the timeout above which a call counts as slow, because it would time out on a busy machine."""
NUM_PROBLEMS = 64
"""Default number of problems; large, because a function may fail on only one answer in a hundred."""
BUDGET_S = 60.0
"""Time limit per function, in seconds, if --num is not given; a slow function is tested on fewer problems."""
LOAD_S = 60.0
"""Seconds to load the file of a function, in addition to the timeout of a call."""
MAX_LOST = 3
"""Number of calls that may end the process of a function; then the test of the function stops."""
NUM_EXAMPLES = 3
"""Maximum number of distinct failures shown per function."""
_SHOWN_CHARACTERS = 40
_LEGEND = f"reward: minimum to maximum, mean; ms: median and longest call; malformed: {', '.join(MALFORMED)}"

Completion = tuple[str, str]
"""Kind ('correct', 'wrong', 'given' or a key of `MALFORMED`) and text of a completion."""


class Result(NamedTuple):
    """The reward of one completion by one function."""

    function: str
    problem: int
    kind: str
    text: str
    reward: float | None
    took_s: float
    error: str
    """Reason for the missing reward, with the line of the function that failed; empty if there is a reward."""
    lost: bool
    """Whether the call ended the process of the function."""

    @property
    def row(self) -> str:
        if self.kind == "given":
            return f"given: {shortened(self.text, _SHOWN_CHARACTERS)}"
        return "malformed" if self.kind in MALFORMED else self.kind


def check_rewards(config: Config, num: int | None, given: Sequence[str]) -> ExitStatus:
    """Test the reward functions of a task, print the results and return the exit status of the command.

    Use `num` problems; if `num` is None, as many of `NUM_PROBLEMS` as fit in `BUDGET_S`. Also score the `given`
    completions for each problem. Raise ConfigError if the task or one of its functions cannot be loaded.
    """
    logger = logging.getLogger("leeway.actors.rewards")
    with as_config_error("[task] ", TaskError):
        task = load_task(config.task)
        limit = num or NUM_PROBLEMS
        problems = task.train[:: max(1, len(task.train) // limit)][:limit]
        codec, limit_s = _codec(config, task), None if num else BUDGET_S
        check = RewardCheck(problems, config.actors.reward_timeout_s, config.task.correct_at, limit_s, codec)
        logger.setLevel(logging.CRITICAL)  # the results contain the messages of this logger
        try:
            with progress_line() as progress:
                for function in task.rewards:
                    asyncio.run(check.run(function, given, progress))
        finally:
            logger.setLevel(logging.NOTSET)
    show(check)
    sentences = [*check.problems_of_functions(), *check.problems_of_sums()]
    for sentence in sentences:
        print(f"PROBLEM  {sentence}")
    if not sentences:
        print(f"All reward checks passed on {len(problems)} problems.")
    return ExitStatus.FAILED if sentences else ExitStatus.OK


def _codec(config: Config, task: Task) -> PromptCodec | None:
    """Return the codec of the model's folder if rewards may need it: for tokens, or for the start of an answer."""
    folder, files = Path(config.model.path), {each.reference.rpartition(":")[0] for each in task.rewards} - {""}
    may_read = any(name in Path(file).read_text(errors="replace") for file in files for name in SAMPLED)
    may_read |= config.task.chat or task.has_messages or bool(OPEN_TAG.search(task.train[0].text))
    if not (may_read and folder.is_dir()):
        return None
    codec = codec_of(config.task, folder)
    codec.is_chat |= task.has_messages
    return codec


@dataclass
class RewardCheck:
    """Results of the tests, and the problems found in them."""

    problems: Sequence[Problem]
    timeout_s: float
    correct_at: float
    budget_s: float | None = None
    """Time limit per function, in seconds; None means no limit."""
    codec: PromptCodec | None = None
    """Makes the tokens that rewards see; None if rewards see only text."""
    results: list[Result] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)
    """Function -> sentence with the reason why its test stopped early."""

    async def run(self, function: RewardFunction, given: Sequence[str], progress: Callable[[str, float], None]) -> None:
        """Score all completions with one function, one at a time; raise TaskError if the function cannot be loaded."""
        numbers = range(len(self.problems))
        texts = [(number, each) for number in numbers for each in self._completions(number, function, given)]
        started_s, num_lost = time.perf_counter(), 0
        scorer = await self._scorer(function)
        try:
            for done, (number, completion) in enumerate(texts):
                progress(function.name, done / len(texts))
                if self.budget_s is not None and time.perf_counter() - started_s > self.budget_s:
                    self._cut(function, done, f"after {self.budget_s:g} s; set the number of problems with --num N")
                    return
                result = await self._score(scorer, function, number, completion)
                self.results.append(result)
                num_lost += result.lost
                if num_lost == MAX_LOST or (result.lost and result.took_s >= self.timeout_s):
                    self._cut(function, done + 1, f"because {num_lost} completions ended the reward's process")
                    return
                if result.lost:
                    await scorer.close()
                    scorer = await self._scorer(function)
        finally:
            await scorer.close()

    def _cut(self, function: RewardFunction, num_tested: int, why: str) -> None:
        self.cut[function.name] = f"{function.name} was tested on only {num_tested} completions: stopped {why}"

    async def _scorer(self, function: RewardFunction) -> Scorer:
        limits = ScorerLimits(1, self.timeout_s, start_timeout_s=LOAD_S + self.timeout_s)
        scorer = Scorer([function], limits, retries=0)
        await scorer.start()  # start now, so that the first call is not slower
        return scorer

    def _completions(self, number: int, function: RewardFunction, given: Sequence[str]) -> Iterator[Completion]:
        answer, other = (_answer(self.problems[each % len(self.problems)]) for each in (number, number + 1))
        # a rule or the task may expect the answer between tags
        tag = getattr(function.named, "answer_tag", getattr(function.task, "answer_tag", None))
        if answer is not None:
            wrong = other if other not in (None, answer) else f"{answer}0, or not"
            for kind, text in (("correct", answer), ("wrong", wrong)):
                yield kind, f"<{tag}>{text}</{tag}>" if tag else str(text)
        yield from (("given", text) for text in given)
        yield from MALFORMED.items()

    async def _score(self, scorer: Scorer, function: RewardFunction, number: int, completion: Completion) -> Result:
        started_s = time.perf_counter()
        reward, error, lost = None, "", False
        problem, text, sampled = self.problems[number], completion[1], None
        if self.codec is not None:
            (prompt_ids,), (ids,) = self.codec.encode([problem.prompt]), self.codec.ids([text], special=False)
            start = self.codec.prefill(prompt_ids) * function.task.prefill_in_completion
            start += "</think>" * start.rstrip().endswith("<think>")  # a completion of known quality ends its thoughts
            text = start + text
            sampled = dict(zip(SAMPLED, (prompt_ids, ids, "stop", text), strict=True)).__getitem__
        try:
            reward = (await scorer.score(problem, text, sampled)).reward
        except RewardFailed as failed:
            error = str(failed)
            if isinstance(call := failed.__cause__, CallFailed):
                error, lost = f"{call} ({call.where})" if call.where else str(call), call.lost
        return Result(function.name, number, *completion, reward, time.perf_counter() - started_s, error, lost)

    def problems_of_functions(self) -> Iterator[str]:
        """Yield a sentence for each problem of a single function to fix before training."""
        for name, own in self.by_function().items():
            failed = [result for result in own if result.error]
            if failed:
                kinds = ", ".join(dict.fromkeys(result.kind for result in failed))
                yield (
                    f"{name} failed on {len(failed)} of {len(own)} completions ({kinds}); a run counts them as failed "
                    f"and does not train on them: {failed[0].error}"
                )
            if len(failed) < len(own) and all(result.reward is None for result in own):
                yield f"{name} returned None for every completion: it does not apply to this task"
            slowest = max(own, key=lambda result: result.took_s)
            if not slowest.error and slowest.took_s > SLOW_SHARE * self.timeout_s:
                yield (
                    f"{name} is slow: it took {slowest.took_s:.1f} s for a completion ({slowest.kind}), with the "
                    f"timeout actors.reward_timeout_s = {self.timeout_s:g}: make it faster, or raise the timeout"
                )

    def problems_of_sums(self) -> Iterator[str]:
        """Yield a sentence for each problem of the summed rewards of all functions to fix before training."""
        sums: dict[str, dict[tuple[int, str], float]] = {}
        for each in self.results:
            if each.reward is not None:
                of_kind = sums.setdefault(each.kind, {})
                of_kind[each.problem, each.text] = of_kind.get((each.problem, each.text), 0.0) + each.reward
        correct, wrong = ([*sums.get(kind, {}).values()] for kind in ("correct", "wrong"))
        everything = [value for of_kind in sums.values() for value in of_kind.values()]
        if not correct and "given" not in sums and len(set(everything)) == 1:
            yield (
                f"the reward is {everything[0]:g} for every completion, but no column of the task "
                f"({', '.join(ANSWER_COLUMNS)}) has an answer: give a correct answer with --completion TEXT"
            )
        elif len(everything) > 1 and len(set(everything)) == 1:
            yield f"the reward is {everything[0]:g} for every completion: it carries no signal"
        elif correct and wrong and mean(correct) <= mean(wrong):
            yield (
                f"the mean reward is {mean(correct):.3g} for correct answers and {mean(wrong):.3g} for wrong ones: "
                "training would not prefer correct answers"
            )
        if correct and max(correct) < self.correct_at:
            yield (
                f"no correct answer reaches task.correct_at = {self.correct_at:g} (maximum: {max(correct):.3g}), so "
                "every evaluation would show an accuracy of 0: lower correct_at, or fix the function"
            )

    def by_function(self) -> dict[str, list[Result]]:
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.function, []).append(result)
        return found


def _answer(problem: Problem) -> str | None:
    """Return the correct answer of a row, or None if no column of `ANSWER_COLUMNS` has it."""
    values = (value_at(problem.columns, name) for name in ANSWER_COLUMNS)
    return next((str(value) for value in values if isinstance(value, str | int | float)), None)


def show(check: RewardCheck) -> None:
    """Print a table of the rewards of each function by kind of completion, and examples of its failures."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("function", "completion", "tested", "failed", "reward", "ms", "longest"):
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
