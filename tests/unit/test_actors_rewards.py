"""Rewards: a function that fails is counted under its name, and nothing is ever scored 0 for it."""

import asyncio
import concurrent.futures
import threading

import numpy as np
import pytest

from actors.rewards import RewardFailed, Scored, Scorer
from actors.tasks import Problem, RewardFunction
from common.threads import DaemonThreads, ThreadsExhausted

PROBLEM = Problem("q", "q", {}, {})


class Odd:
    """What a tensor of some library may be: neither a list nor a number can be made of it."""

    def tolist(self):
        raise KeyError("values")

    def __float__(self):
        raise RuntimeError("it has 2 elements")


def scorer(*functions, retries=0, timeout_s=5.0):
    rewards = [RewardFunction(function.__name__, function) for function in functions]
    return Scorer(rewards, retries=retries, timeout_s=timeout_s)


async def test_values_are_summed_and_kept_by_name_and_none_does_not_apply():
    def length(problems, completions):
        return np.array([len(one) for one in completions])

    async def polite(problems, completions):
        return [1 if "please" in one else None for one in completions]

    both = scorer(length, polite)
    assert await both.score(PROBLEM, "please") == Scored(7.0, {"length": 6.0, "polite": 1.0})
    assert await both.score(PROBLEM, "now") == Scored(3.0, {"length": 3.0, "polite": None})
    assert await scorer(polite).score(PROBLEM, "now") == Scored(None, {"polite": None})


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ZeroDivisionError("x"), "ZeroDivisionError"),
        ([1.0, 2.0], "wrong number of values"),
        ([float("nan")], "returned a value that is not finite"),
        (["good"], "returned no number"),
        (1.0, "returned no list"),
        (SystemExit(), "RuntimeError"),
        (StopIteration(), "RuntimeError"),
        (asyncio.CancelledError(), "RuntimeError"),
        (concurrent.futures.CancelledError(), "CancelledError"),
        ([10**400], "OverflowError"),
        ([Odd()], "RuntimeError"),
        (Odd(), "KeyError"),
    ],
)
async def test_whatever_a_function_does_wrong_is_a_failure_with_its_name(result, reason):
    def judge(problems, completions):
        if isinstance(result, BaseException):
            raise result
        return result

    with pytest.raises(RewardFailed, match=f"^reward failed: judge: {reason}$"):
        await scorer(judge).score(PROBLEM, "a")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1), KeyError("x")])
@pytest.mark.parametrize("num_samples", [1, 3])
async def test_whatever_an_async_function_lets_out_is_a_failure_of_its_samples_and_of_nothing_else(error, num_samples):
    async def judge(problems, completions):
        raise error

    scores = scorer(judge)
    asked = [scores.score(PROBLEM, str(number)) for number in range(num_samples)]
    results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
    assert {str(result) for result in results} == {f"reward failed: judge: {type(error).__name__}"}


async def test_a_function_that_cancels_its_own_call_fails_its_samples_instead_of_cancelling_them():
    async def judge(problems, completions):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(RewardFailed, match="its scoring ended early"):
        await asyncio.wait_for(scorer(judge).score(PROBLEM, "a"), 60)


async def test_a_failure_is_tried_again_and_logged_with_its_prompt(caplog):
    calls = []

    def flaky(problems, completions):
        calls.append(1)
        if len(calls) < 3:
            raise OSError("sandbox is busy")
        return [0.5]

    assert (await scorer(flaky, retries=2).score(PROBLEM, "a")).reward == 0.5
    assert "sandbox is busy" in caplog.text
    assert "prompt: 'q'" in caplog.text


async def test_what_completes_together_shares_a_call_and_a_failure_blames_only_its_own_sample():
    sizes = []

    def picky(problems, completions):
        sizes.append(len(completions))
        if "bad" in completions:
            raise ValueError("bad")
        return [1.0] * len(completions)

    scores = scorer(picky)
    answers = ["a", "bad", "c"]
    results = await asyncio.gather(*(scores.score(PROBLEM, one) for one in answers), return_exceptions=True)
    assert sizes == [3, 1, 1, 1]
    assert [getattr(one, "reward", None) for one in results] == [1.0, None, 1.0]
    assert isinstance(results[1], RewardFailed)


async def test_a_blocked_function_times_out_and_neither_the_loop_nor_other_samples_wait_for_it():
    released, entered = threading.Event(), threading.Event()

    def stuck(problems, completions):
        if completions == ["stuck"]:
            entered.set()
            released.wait(60)
        return [1.0] * len(completions)

    scores = scorer(stuck, timeout_s=2.0)
    blocked = asyncio.create_task(scores.score(PROBLEM, "stuck"))
    assert await asyncio.to_thread(entered.wait, 60)
    assert (await scores.score(PROBLEM, "fine")).reward == 1.0
    assert not blocked.done()
    with pytest.raises(RewardFailed, match=r"took longer than 2 s"):
        await blocked
    entered.clear()
    patient = scorer(stuck, timeout_s=600.0)
    waiting = asyncio.create_task(patient.score(PROBLEM, "stuck"))
    assert await asyncio.to_thread(entered.wait, 60)
    scores.close()
    patient.close()
    # well before its own limit
    assert await asyncio.wait({waiting}, timeout=60) == ({waiting}, set())
    released.set()


async def test_a_function_that_always_blocks_runs_out_of_threads_instead_of_starting_ever_more():
    released = threading.Event()

    def stuck(problems, completions):
        released.wait(60)
        return [1.0]

    scores = scorer(stuck, timeout_s=0.01)
    before = threading.active_count()
    reasons = []
    for _ in range(25):
        with pytest.raises(RewardFailed) as failure:
            await scores.score(PROBLEM, "a")
        reasons.append(str(failure.value))
    assert reasons[-1] == "reward failed: stuck: earlier calls never returned"
    assert threading.active_count() - before <= 20
    released.set()


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
