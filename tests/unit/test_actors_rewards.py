"""Rewards: a failing function is counted under its name, and a failure is never scored 0."""

import asyncio
import concurrent.futures
import sys
import threading

import numpy as np
import pytest
import torch

from leeway.actors.reward_process import CallFailed
from leeway.actors.rewards import RewardFailed, Scored, Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction, TaskError
from leeway.actors.tasks.config import FileTask
from leeway.actors.tasks.task import SAMPLED, TOOK_TOO_LONG, NoScore
from leeway.common.process import DaemonThreads, ThreadsExhausted
from tests.unit.fake_actor import Clock, jump, until
from tests.world.reward_callers import TASK, InThisProcess, scorer

PROBLEM = Problem("q", "q", {})


class Odd:
    """Value that converts neither to a list nor to a number, like a tensor of another library."""

    def tolist(self):
        raise KeyError("values")

    def __float__(self):
        raise RuntimeError("it has 2 elements")


async def test_values_are_summed_and_kept_by_name_and_none_is_skipped():
    def length(problems, completions):
        return np.array([len(one) for one in completions])

    async def polite(problems, completions):
        return [1 if "please" in one else None for one in completions]

    both = scorer(length, polite)
    assert await both.score(PROBLEM, "please") == Scored(7.0, {"length": 6.0, "polite": 1.0})
    assert await both.score(PROBLEM, "now") == Scored(3.0, {"length": 3.0, "polite": None})
    assert await scorer(polite).score(PROBLEM, "now") == Scored(None, {"polite": None})


async def test_weights_scale_the_sum_but_not_the_values_of_functions():
    def length(problems, completions):
        return [len(one) for one in completions]

    def polite(problems, completions):
        return [1 if "please" in one else None for one in completions]

    task = TASK.model_copy(update={"reward_weights": {"length": -0.5}})
    weighed = scorer(length, polite, task=task)
    assert await weighed.score(PROBLEM, "please") == Scored(-2.0, {"length": 6.0, "polite": 1.0})
    assert await weighed.score(PROBLEM, "now") == Scored(-1.5, {"length": 3.0, "polite": None})


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        ("[1, True]", [1.0, 1.0]),
        ("(0.5, None)", [0.5, None]),
        ("numpy.array([0.5, 2])", [0.5, 2.0]),
        ("torch.tensor([0.5, 2.0])", [0.5, 2.0]),
        ("['0.5', numpy.float32(2)]", [0.5, 2.0]),
        ("1.0", "did not return a list"),
        ("None", "did not return a list"),
        ("{'a': 1.0, 'b': 1.0}", "did not return a list"),
        ("[1.0]", "wrong number of values"),
        ("[[1.0], [2.0]]", "did not return a number"),
        ("['good', 'bad']", "did not return a number"),
        ("[float('nan'), 1.0]", "returned a value that is not finite"),
        ("[float('inf'), 1.0]", "returned a value that is not finite"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_return_values_of_the_table_in_the_docs(returned, reward, is_async):
    names = {"numpy": np, "torch": torch}
    exec(f"{'async ' if is_async else ''}def judge(problems, completions):\n    return {returned}\n", names)
    call = InThisProcess(names["judge"]).call([PROBLEM] * 2, ["a", "b"], [None] * 2)
    if isinstance(reward, list):
        assert await call == reward
    else:
        with pytest.raises(CallFailed, match=f"^{reward}"):
            await call


async def test_a_function_receives_the_sampled_tokens_that_it_names_and_logs_metrics(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def tokens(completion_ids, prompt_ids, finish_reasons, completions_with_special_tokens, log_metric):\n"
        "    log_metric('num_ids', len(completion_ids[0]))\n"
        "    log_metric('num_ids', 4)\n"
        "    seen = [completion_ids, prompt_ids, finish_reasons, completions_with_special_tokens]\n"
        "    assert seen == [[[7, 2]], [[3, 4]], ['length'], ['7<eos>']], seen\n"
        "    return [1.0]\n"
        "def text(completions, **columns):\n"
        "    assert set(columns) == {'prompts', 'answer'}, columns\n"
        "    return [0.5]\n"
        "def wrong(log_metric):\n"
        "    log_metric('mean', 1)\n"
    )
    values = [3, 4], [7, 2], "length", "7<eos>"
    problem, sampled = Problem("q", "q", {"answer": "7"}), dict(zip(SAMPLED, values, strict=True)).__getitem__

    async def scored(*names):
        rewards = tuple(f"{path}:{name}" for name in names)
        task = FileTask(type="file", path="rows.jsonl", rewards=rewards)
        functions = [RewardFunction(each.rpartition(":")[2], task, ["answer"], each) for each in rewards]
        limits = ScorerLimits(1, 20.0, start_timeout_s=20.0)
        scores = Scorer(functions, limits, retries=0, start=InThisProcess.load)
        return await scores.score(problem, "7", sampled)

    assert await scored("tokens", "text") == Scored(1.5, {"tokens": 1.0, "text": 0.5, "log/num_ids": 3.0})
    with pytest.raises(RewardFailed, match="log_metric got an invalid name"):
        await scored("wrong")


async def test_a_sum_that_is_not_finite_fails_the_sample():
    def veto(problems, completions):
        return [-sys.float_info.max] * len(completions)

    def another(problems, completions):
        return veto(problems, completions)

    vetoes = scorer(veto, another)
    with pytest.raises(RewardFailed, match="the sum of the rewards is not finite"):
        await vetoes.score(PROBLEM, "now")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ZeroDivisionError("x"), "ZeroDivisionError"),
        ([1.0, 2.0], "wrong number of values"),
        ([float("nan")], "returned a value that is not finite"),
        (["good"], "did not return a number"),
        (1.0, "did not return a list"),
        (SystemExit(), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StopIteration(), "StopIteration"),
        (asyncio.CancelledError(), "CancelledError"),
        (concurrent.futures.CancelledError(), "CancelledError"),
        ([10**400], "OverflowError"),
        ([Odd()], "RuntimeError"),
        (Odd(), "KeyError"),
    ],
)
async def test_any_fault_of_a_function_is_a_failure_with_its_name(result, reason):
    def judge(problems, completions):
        if isinstance(result, BaseException):
            raise result
        return result

    with pytest.raises(RewardFailed, match=f"^reward failed: judge: {reason}$"):
        await scorer(judge, retries=0).score(PROBLEM, "a")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1), KeyError("x")])
@pytest.mark.parametrize("num_samples", [1, 3])
async def test_an_exception_of_an_async_function_fails_only_its_samples(error, num_samples):
    async def judge(problems, completions):
        raise error

    scores = scorer(judge)
    pending = [scores.score(PROBLEM, str(number)) for number in range(num_samples)]
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 60)
    assert {str(result) for result in results} == {f"reward failed: judge: {type(error).__name__}"}


async def test_a_failed_call_is_retried_and_logged_with_its_prompt(caplog):
    calls = []

    def flaky(problems, completions):
        calls.append(1)
        if len(calls) < 3:
            raise OSError("sandbox is busy")
        return [0.5]

    assert (await scorer(flaky, retries=2).score(PROBLEM, "a")).reward == 0.5
    assert "sandbox is busy" in caplog.text
    assert "prompt: 'q'" in caplog.text


async def test_concurrent_samples_share_a_call_and_only_the_faulty_one_fails():
    sizes = []

    def picky(problems, completions):
        sizes.append(len(completions))
        if "bad" in completions:
            raise ValueError("bad")
        return [1.0] * len(completions)

    scores = scorer(picky, retries=0)
    answers = ["a", "bad", "c"]
    results = await asyncio.gather(*(scores.score(PROBLEM, one) for one in answers), return_exceptions=True)
    assert sizes == [3, 1, 1, 1]
    assert [getattr(one, "reward", None) for one in results] == [1.0, None, 1.0]
    assert isinstance(results[1], RewardFailed)


@pytest.mark.parametrize("fails_together", [False, True])
async def test_unscored_samples_are_retried_together_and_alone_only_if_that_fails(
    fails_together,
):
    calls = []

    def judge(problems, completions):
        calls.append("".join(completions))
        if fails_together and calls[-1] == "bd":
            raise OSError("gone")
        unrated = "bd" if len(calls) == 1 else "d"
        return [NoScore("unrated") if one in unrated else 1.0 for one in completions]

    scores = scorer(judge)
    results = await asyncio.gather(*(scores.score(PROBLEM, one) for one in "abcd"), return_exceptions=True)
    assert calls == ["abcd", "bd", *("bd" if fails_together else "")]
    assert [getattr(one, "reward", None) for one in results] == [1.0, 1.0, 1.0, None]
    assert str(results[3]) == "reward failed: judge: unrated"


async def test_a_sample_past_its_own_limit_is_not_retried_and_counts_as_timed_out():
    calls = []

    def judge(problems, completions):
        calls.append(completions)
        return [NoScore(TOOK_TOO_LONG, "0.1 s")] * len(completions)

    scores = scorer(judge)
    await asyncio.gather(*(scores.score(PROBLEM, one) for one in "ab"), return_exceptions=True)
    assert calls == [["a", "b"]]
    assert [(each.num_samples, each.timeout_s) for each in scores.failing] == [(2, 60.0)]


async def test_each_completion_is_passed_with_its_problem():
    seen = []

    def look(problems, completions):
        for one, completion in zip(problems, completions, strict=True):
            seen.append((one.text, one.columns["n"], completion))
        return [one.index for one in problems]

    big = 10**30  # JSON can represent this integer; formats with 64-bit integers cannot
    one, other = Problem("a", "a?", {"n": big}, 7), Problem("b", "b?", {"n": None}, 8)
    scores = scorer(look)
    scored = await asyncio.gather(*(scores.score(each, str(k)) for k, each in enumerate([one, other, one])))
    assert seen == [("a?", big, "0"), ("b?", None, "1"), ("a?", big, "2")]
    assert [each.reward for each in scored] == [7, 8, 7]


class Process:
    """Fake reward process that awaits `behave(completion)` for each completion."""

    def __init__(self, behave):
        self._behave = behave
        self.calls = []
        self.is_alive = True
        self.ended, self.logged = False, {}

    async def call(self, problems, completions, sampled):
        self.calls.append(list(completions))
        for completion in completions:
            await self._behave(completion)
        return [1.0] * len(completions)

    async def end(self):
        self.is_alive, self.ended = False, True


@pytest.fixture
def processes():
    """Return the list that collects all started fake processes."""
    return []


def with_processes(processes, behave, **options):
    """Return a scorer of one function, `f`, whose fake processes run `behave`."""

    def f(problems, completions):
        pytest.fail("the processes are fakes")

    async def start(function, timeout_s):
        processes.append(Process(behave))
        return processes[-1]

    return scorer(f, start=start, **options)


async def hang_on_stuck(completion):
    await asyncio.sleep(0)  # let other tasks run
    if completion == "stuck":
        await asyncio.Event().wait()


async def die_on_bad(completion):
    if completion == "bad":
        raise CallFailed("the reward process ended with exit status 3", lost=True)


async def test_a_call_that_times_out_ends_its_process_and_fails_only_its_sample(processes, monkeypatch):
    def tries():
        return [call for process in processes for call in process.calls if "stuck" in call]

    scores = with_processes(processes, hang_on_stuck)
    answers = ["a", "stuck", "c"]
    pending = [asyncio.create_task(scores.score(PROBLEM, one)) for one in answers]
    await until(tries)
    jump(monkeypatch, 60.0)
    await until(lambda: len(tries()) == 2 and pending[0].done() and pending[2].done())
    jump(monkeypatch, 120.0)
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert [getattr(one, "reward", None) for one in results] == [1.0, None, 1.0]
    assert str(results[1]) == "reward failed: f: took longer than 60 s"
    assert tries() == [answers, ["stuck"]], (
        "scored once with the others and once in its own call; each try takes a full timeout"
    )
    assert all(process.ended == any("stuck" in call for call in process.calls) for process in processes)
    await scores.close()
    assert all(process.ended for process in processes)


async def test_a_process_that_exits_is_replaced_and_reported(processes, caplog):
    scores = with_processes(processes, die_on_bad)
    answers = ["a", "bad", "c"]
    results = await asyncio.gather(*(scores.score(PROBLEM, one) for one in answers), return_exceptions=True)
    assert [getattr(one, "reward", None) for one in results] == [1.0, None, 1.0]
    assert str(results[1]) == "reward failed: f: the reward process ended with exit status 3"
    assert "prompt: 'q'\n  completion: 'bad'" in caplog.text
    tries = [call for process in processes for call in process.calls if "bad" in call]
    assert tries == [answers, ["bad"]], "scored once with the others and once in its own call; each try kills a process"
    assert (await scores.score(PROBLEM, "d")).reward == 1.0


async def test_a_process_that_exits_between_calls_fails_no_sample(processes):
    scores = with_processes(processes, die_on_bad)
    await scores.score(PROBLEM, "a")
    processes[0].is_alive = False
    assert (await scores.score(PROBLEM, "b")).reward == 1.0
    assert [process.calls for process in processes] == [[["a"]], [["b"]]]


async def test_one_process_serves_short_calls_and_waiting_calls_start_more_to_a_limit(processes, monkeypatch):
    scores = with_processes(processes, hang_on_stuck, num_processes=3)
    with monkeypatch.context() as patched:
        patched.setattr("leeway.actors.rewards._PATIENCE_S", 60.0)  # a call counts as short even on a busy machine
        for _ in range(20):
            await asyncio.gather(*(scores.score(PROBLEM, "a") for _ in range(70)))
    assert len(processes) == 1
    stuck = []
    for count in (1, 2, 3):
        stuck.append(asyncio.create_task(scores.score(PROBLEM, "stuck")))
        async with asyncio.timeout(60):
            while sum(["stuck"] in process.calls for process in processes) < count:
                await asyncio.sleep(0.005)
        assert len(processes) == count
    stuck.append(asyncio.create_task(scores.score(PROBLEM, "stuck")))
    await asyncio.sleep(0.25)
    assert len(processes) == 3
    await scores.close()
    assert await asyncio.wait(stuck, timeout=60) == (set(stuck), set())


async def test_samples_do_not_wait_for_an_extra_process_that_fails_to_start(processes):
    may_end, may_fail = asyncio.Event(), asyncio.Event()

    async def wait_on_slow(completion):
        if completion == "slow":
            await may_end.wait()

    def f(problems, completions):
        pytest.fail("the processes are fakes")

    async def start(function, timeout_s):
        processes.append(Process(wait_on_slow))
        if len(processes) > 1:
            await may_fail.wait()
            raise CallFailed("its process did not start", "no memory")
        return processes[0]

    scores = scorer(f, start=start)
    slow = asyncio.create_task(scores.score(PROBLEM, "slow"))
    await until(lambda: processes and processes[0].calls)
    quick = asyncio.create_task(scores.score(PROBLEM, "quick"))
    await until(lambda: len(processes) == 2)
    may_end.set()
    assert [(await asyncio.wait_for(each, 20)).reward for each in (slow, quick)] == [1.0, 1.0]
    may_fail.set()
    assert (await scores.score(PROBLEM, "another")).reward == 1.0
    await scores.close()


async def test_a_pending_call_is_reported_with_its_age_until_the_scorer_closes(processes):
    clock = Clock()
    scores = with_processes(processes, hang_on_stuck, clock=clock)
    assert scores.waits_for is None
    open_call = asyncio.create_task(scores.score(PROBLEM, "stuck"))
    await until(lambda: processes and processes[0].calls)
    clock.now_s += 2.0
    assert scores.waits_for is None
    clock.now_s += 10.0
    assert (await scores.score(PROBLEM, "a")).reward == 1.0
    assert scores.waits_for == ("f", 12.0)
    await scores.close()
    assert await asyncio.wait({open_call}, timeout=60) == ({open_call}, set())
    assert scores.waits_for is None


async def test_consecutive_failures_are_counted_by_reason_and_reset_by_a_score():
    clock = Clock()

    def judge(problems, completions):
        if completions[0] == "good":
            return [1.0]
        raise (KeyError if completions[0] == "key" else ValueError)(completions[0])

    async def fail(*completions):
        for completion in completions:
            clock.now_s += 1.0
            with pytest.raises(RewardFailed):
                await scores.score(PROBLEM, completion)

    scores = scorer(judge, clock=clock)
    assert scores.failing == []
    await fail("key", "key", "key")
    clock.now_s += 5.0
    (failing,) = scores.failing
    assert (failing.name, failing.why, failing.num_samples, failing.for_s) == ("judge", "KeyError: 'key'", 3, 7.0)
    assert (failing.prompt, failing.completion, failing.timeout_s) == ("q", "key", 0.0)
    await fail("a", "b")
    (failing,) = scores.failing
    assert (failing.why, failing.num_samples, failing.for_s) == ("ValueError: b", 2, 1.0)
    await scores.score(PROBLEM, "good")
    assert scores.failing == []
    await fail("a")
    assert [each.num_samples for each in scores.failing] == [1]


async def test_consecutive_timeouts_are_reported_with_the_limit(processes):
    scores = with_processes(processes, hang_on_stuck, timeout_s=0.05)
    with pytest.raises(RewardFailed):
        await scores.score(PROBLEM, "stuck")
    (failing,) = scores.failing
    assert (failing.why, failing.num_samples, failing.timeout_s) == ("took longer than 0.05 s", 1, 0.05)
    await scores.close()


async def test_a_function_that_cannot_be_loaded_fails_at_start(processes):
    def f(problems, completions):
        pytest.fail("the reward function must not be called")

    async def start(function, timeout_s):
        raise CallFailed("its process did not start", "task.rewards: importing f.py failed")

    with pytest.raises(TaskError, match=r"reward f: its process did not start: .*importing f.py failed"):
        await scorer(f, start=start).start()


async def test_a_thread_ends_with_its_call_and_makes_room_for_another():
    released, threads = threading.Event(), DaemonThreads("busy", 1)
    call = threads.submit(released.wait, 20)
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("busy")]
    with pytest.raises(ThreadsExhausted, match="1 calls of busy"):
        threads.submit(released.wait)
    released.set()
    assert call.result(60)
    assert threads.submit(released.wait).result(60)
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_samples_without_any_reward_count_as_failures_until_a_function_applies():
    def one(problems, completions):
        return [1.0 if "good" in text else None for text in completions]

    def other(problems, completions):
        return [2.0 if "fine" in text else None for text in completions]

    scores = scorer(one, other)
    for _ in range(3):
        assert (await scores.score(PROBLEM, "bad")).reward is None
    (failing,) = scores.failing
    assert (failing.name, failing.why, failing.num_samples) == ("one, other", "None instead of a reward", 3)
    assert (failing.prompt, failing.completion, failing.timeout_s) == ("q", "bad", 0.0)
    await scores.score(PROBLEM, "fine")
    assert scores.failing == []
