"""LLM judges: the rating is the reward, busy endpoints are retried, and a missing rating is never a reward of 0."""

import asyncio
import logging
import socket
from dataclasses import replace
from email.utils import formatdate

import pytest
from openai._constants import MAX_RETRY_AFTER_DELAY

from leeway.actors.rewards import RewardFailed, Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction, TaskError, check_task, load_reward, load_task, reward_models
from leeway.actors.tasks.config import ReasoningGymTask
from leeway.actors.tasks.task import TOOK_TOO_LONG, NoScore
from tests.unit.fake_actor import jump, until
from tests.world.judge_server import judge_server
from tests.world.reward_callers import InThisProcess

PROBLEM = Problem("q", "What is 2+2?", {"answer": "4"})


def task(endpoint, *, rewards=("helpful",), **changes):
    judge = {
        "type": "judge",
        "endpoint": endpoint,
        "model": "judge-8b",
        "prompt": "Rate {completion} to {prompt} (right: {answer})",
        "timeout_s": 60.0,
        **changes,
    }
    return ReasoningGymTask(
        type="reasoning_gym",
        name="chain_sum",
        num_train=8,
        num_heldout=2,
        rewards=rewards,
        reward_models={"helpful": judge},
    )


def rate(config, *completions):
    """Return the rewards of all completions from one call."""
    (function,) = load_task(config).rewards
    return asyncio.run(load_reward(function)([PROBLEM] * len(completions), completions))


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7", 0.7),
        ("It is right, so: 10.", 1.0),
        ("Rating: 8/10", 0.8),
        ("Rating: .5", 0.05),
        ("Rating: **.5**/10", 0.05),
        ("Rating: -.5", None),
        ("Rating...7", 0.7),
        ("It is right.7", 0.7),
        ("Of version 1.2.3, so 7", 0.7),
        ("Of 3 points two are met.\n\n**2.5 / 10**", 0.25),
        ("**8**/10", 0.8),
        ("Rating: **3**/10", 0.3),
        ("3 out of 10", 0.3),
        ("Score: 3 (of 10)", 0.3),
        ("7.5/10.0", 0.75),
        ("`3`/10", 0.3),
        (r"\boxed{3}/10", 0.3),
        ("[[3]]/10", 0.3),
        ("It meets 2 of 3 criteria, so 7", 0.7),
        ("On a scale from 0 to 10 I give 7", 0.7),
        ("Facts 7/10, style 9/10. Overall: 8", 0.8),
        ("Facts 10/10, style 10/10.\nOverall: 10", 1.0),
        ("3/10, where 10 is best", None),
        ("3/10. (10 is the best)", None),
        ("3/10 because of 2 errors", None),
        ("Score: 8/10. The response misses 2 of the steps.", None),
        ("**Rating: 9/10**\n\nThe answer covers all 4 points well.", None),
        ("Score: 10/10. Well done in 3 steps.", None),
        ("Score: 8/10\n\nReasons:\n1. It is short.\n2. It is wrong in part.", 0.8),
        ("8/10. Issues:\n1) a\n2) b", 0.8),
        ("**Rating: 8/10**\n\nErrors found: 2", None),
        ("Score: 8/10\n- Step: 3\n", None),
        ("8. It is right.", 0.8),
        ("Clarity: 8/10, style: 7/10. Final: **6**", 0.6),
        ("3 (10 is best, 0 is worst)", None),
        ("Rating: 6\n\n(0 = worst, 10 = best)", None),
        ("Rating: 6\n0: worst\n10: best", None),
        ("Rating: 7. A perfect answer would get 10.", None),
        ("Rating: 7. (10 is the best)", None),
        ("I'd rate it 3. It could be 10 with more detail.", None),
        ("1. Correct\n2. Clear\n\nRating: 10", 1.0),
        ("1. Correct\n2. Clear\n\nRating: **10**. It is right.", 1.0),
        ("1. Wrong\n2. Unclear\n\nFinal rating: 0", 0.0),
        ("Final rating: 0", 0.0),
        ("2/3", None),
        ("7 or 8", None),
        ("3,5", None),
        ("-1 of them", None),
        ("11", None),
        ("I cannot say", None),
        ("", None),
        ("CUT:9", None),
    ],
)
def test_only_a_rating_at_the_end_of_a_reply_is_a_reward(answer, reward):
    with judge_server(lambda text: answer) as server:
        (value,) = rate(task(server.endpoint), "4")
    if reward is None:
        assert isinstance(value, NoScore)
    else:
        assert value == pytest.approx(reward)


def test_a_request_has_prompt_completion_and_columns_and_the_rating_is_scaled():
    with judge_server(lambda text: "2") as server:
        config = task(server.endpoint, worst=5, best=1, system_prompt="Be strict.", request={"seed": 7}, max_tokens=9)
        assert rate(config, "four") == [pytest.approx(0.75)]
        (request,) = server.requests
    assert [turn["content"] for turn in request["messages"]] == ["Be strict.", "Rate four to What is 2+2? (right: 4)"]
    assert (request["model"], request["temperature"], request["max_tokens"], request["seed"]) == ("judge-8b", 0.0, 9, 7)


def test_busy_and_failed_requests_are_retried_and_do_not_delay_others():
    tries = {}

    def answer(text):
        word = text.split()[1]
        tries[word] = tries.get(word, 0) + 1
        if word == "busy" and tries[word] < 3:
            return 429, {"Retry-After": "0.1"}
        if word == "broken" and tries[word] < 2:
            return 503, {"Retry-After": "0.1"}
        return "10"

    with judge_server(answer) as server:
        assert rate(task(server.endpoint), "busy", "broken", "well") == [1.0, 1.0, 1.0]
    assert tries == {"busy": 3, "broken": 2, "well": 1}


@pytest.mark.parametrize(
    "header",
    [
        {"Retry-After": "130"},
        {"Retry-After": "1e999"},
        {"Retry-After": formatdate(2e9, usegmt=True)},
        {"Retry-After-Ms": "1e6", "Retry-After": "130"},
    ],
)
def test_a_retry_after_beyond_the_limit_of_the_client_library_is_retried(monkeypatch, header):
    assert reward_models._MAX_PAUSE_S <= MAX_RETRY_AFTER_DELAY
    monkeypatch.setattr(reward_models, "_MAX_PAUSE_S", 0.05)
    answers = ["10", (429, header)]
    with judge_server(lambda text: answers.pop()) as server:
        assert rate(task(server.endpoint), "busy") == [1.0]
    assert answers == []


def test_a_row_without_a_column_of_the_prompt_gets_no_score_and_others_keep_theirs():
    with judge_server(lambda text: "10") as server:
        (function,) = load_task(task(server.endpoint)).rewards
        call = load_reward(replace(function, columns=["answer"]))
        lacking, complete = asyncio.run(call([Problem("q", "q", {}), PROBLEM], ["a", "b"]))
    assert (lacking.why, complete) == ("the judge's prompt cannot be rendered", 1.0)
    assert "the item has no 'answer'" in lacking.detail


async def test_a_sample_past_its_time_limit_gets_no_score_and_a_reason(monkeypatch):
    rated, reward = [], reward_models._reward
    monkeypatch.setattr(reward_models, "_reward", lambda *of: rated.append(len(server.requests)) or reward(*of))

    def answer(text):
        return (429, {"Retry-After": "0.05"}) if "busy" in text else "10"

    with judge_server(answer) as server:
        (function,) = load_task(task(server.endpoint)).rewards
        scores = asyncio.create_task(load_reward(function)([PROBLEM, PROBLEM], ["busy", "well"]))
        await until(lambda: rated and len(server.requests) > rated[0] + 1)  # waits for one more reply with status 429
        jump(monkeypatch, 60.0)
        busy, idle = await asyncio.wait_for(scores, 60)
    assert (busy, idle) == (NoScore(TOOK_TOO_LONG, "60 s, the endpoint last answered 429"), 1.0)


def test_a_rejected_request_is_not_retried():
    with judge_server(lambda text: (400, {})) as server:
        (value,) = rate(task(server.endpoint), "too long")
        assert len(server.requests) == 1
    assert value.why == "the judge answered 400"


async def test_a_sample_without_a_rating_fails_and_others_keep_their_rewards():
    rated = []

    def answer(text):
        rated.append(text.split()[1])
        return "no idea" if "bad" in text else "10"

    async def start(function, timeout_s):
        return InThisProcess(load_reward(function))

    with judge_server(answer) as server:
        rewards = load_task(task(server.endpoint)).rewards
        scorer = Scorer(rewards, ScorerLimits(1, 5.0, 5.0), start=start, retries=1)
        scores = [scorer.score(PROBLEM, word) for word in ("a", "bad", "b")]
        results = await asyncio.gather(*scores, return_exceptions=True)
        await scorer.close()
    assert [getattr(one, "reward", None) for one in results] == [1.0, None, 1.0]
    assert isinstance(results[1], RewardFailed)
    assert str(results[1]) == "reward failed: helpful: the judge gave no rating"
    assert sorted(rated) == ["a", "b", "bad", "bad"]


def test_samples_that_arrive_during_a_call_share_the_next_call():
    sizes, called, may_rate = [], asyncio.Event(), asyncio.Event()

    class Slow:
        is_alive, logged = True, {}

        async def call(self, problems, completions, sampled):
            sizes.append(len(completions))
            called.set()
            await may_rate.wait()
            return [1.0] * len(completions)

        async def end(self):
            self.is_alive = False

    async def start(function, timeout_s):
        return Slow()

    async def run():
        function = RewardFunction("helpful", task("http://nowhere/v1"), ())
        scorer = Scorer([function], ScorerLimits(1, 5.0, 5.0), start=start)
        scores = []
        for number in range(20):
            scores.append(asyncio.create_task(scorer.score(PROBLEM, str(number))))
            await called.wait()
            await asyncio.sleep(0.001)
        may_rate.set()
        await asyncio.gather(*scores)
        await scorer.close()

    asyncio.run(run())
    assert sizes == [1, 19]


def rejection(config, **options):
    with pytest.raises(TaskError) as error:
        check_task(config, **options)
    return str(error.value)


def test_config_mistakes_are_task_errors_before_start(monkeypatch):
    with judge_server(lambda text: "1", key="secret") as server:
        options = {"import_limit_s": 30.0}
        assert "rejects the key (401): set api_key_env" in rejection(task(server.endpoint), **options)
        monkeypatch.setenv("JUDGE_KEY", "secret")
        check_task(task(server.endpoint, api_key_env="JUDGE_KEY"), **options)
        wrong = task(server.endpoint, api_key_env="JUDGE_KEY", model="judge-7b")
        assert "has no model 'judge-7b'; known: judge-8b; did you mean" in rejection(wrong, **options)
        gone = server.endpoint
    assert "does not answer" in rejection(task(gone), **options)
    check_task(task(gone))  # no error: actors on other hosts check the endpoint
    assert "JUDGE_KAY' is not set in the environment" in rejection(task(gone, api_key_env="JUDGE_KAY"))
    assert "lacks {completion}" in rejection(task(gone, prompt="{prompt}"))
    assert "names {anwser}, but no row has that column; known:" in rejection(task(gone, prompt="{completion} {anwser}"))
    misspelt = rejection(task(gone, rewards=("helpful", "helpfull")))
    assert "'helpfull' is not of the form FILE.py:FUNCTION, and no rule or table has that name" in misspelt
    assert "did you mean 'helpful'" in misspelt


DEAD_PROXY = "http://127.0.0.1:9"


@pytest.fixture
def proxies(monkeypatch):
    """Return `proxies(NAME=value)`, which sets these proxy variables and deletes all others."""

    def set_all(**variables):
        for name in ("http", "https", "all", "no"):
            monkeypatch.delenv(f"{name}_proxy", raising=False)
            monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0", "judge.localhost"])
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", [DEAD_PROXY, "socks5://127.0.0.1:9", "no url"])
def test_requests_to_a_local_judge_bypass_the_proxy(proxies, monkeypatch, host, variable, proxy):
    proxies(**{variable: proxy})
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **more: real("127.0.0.1", *rest, **more))
    with judge_server(lambda text: "7") as server:
        config = task(server.endpoint.replace("127.0.0.1", host))
        check_task(config, import_limit_s=30.0)
        assert rate(config, "four") == [0.7]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HTTP_PROXY": DEAD_PROXY}, "; requests use the proxy of HTTP_PROXY: to bypass it, add judge."),
        ({"all_proxy": DEAD_PROXY}, "; requests use the proxy of all_proxy: to bypass it, add judge."),
        ({"HTTP_PROXY": DEAD_PROXY, "NO_PROXY": "a.b, .example"}, ""),
        ({"HTTPS_PROXY": DEAD_PROXY}, ""),
    ],
)
def test_the_error_for_an_unreachable_judge_names_the_proxy_variable(proxies, monkeypatch, variables, named):
    proxies(**variables)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", 9))])
    message = rejection(task("http://judge.example:8000/v1"), import_limit_s=30.0)
    assert "does not answer" in message
    assert ("use the proxy" in message, named in message) == (bool(named), True)


def test_the_error_for_a_rejected_request_names_the_proxy(proxies):
    with judge_server(lambda text: "7", key="another") as proxy:
        proxies(HTTP_PROXY=proxy.endpoint.removesuffix("/v1"))
        message = rejection(task("http://judge.example:8000/v1"), import_limit_s=30.0)
    assert "rejects the key (401)" in message
    assert "use the proxy of HTTP_PROXY" in message


@pytest.mark.parametrize("value", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])
def test_an_unsupported_proxy_is_a_task_error(proxies, value):
    proxies(ALL_PROXY=value)
    message = rejection(task("http://judge.example:8000/v1"), import_limit_s=30.0)
    assert "cannot query the judge" in message
    assert "use the proxy of ALL_PROXY" in message


def test_requests_to_a_judge_are_not_logged(caplog):
    caplog.set_level(logging.INFO)
    with judge_server(lambda text: "7") as server:
        check_task(task(server.endpoint), import_limit_s=30.0)
        assert rate(task(server.endpoint), "four") == [0.7]
    assert [record.getMessage() for record in caplog.records if "HTTP" in record.getMessage()] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ()}, "reward_models.helpful has no effect"),
        ({"worst": 1, "best": 1}, "so ratings cannot differ"),
        ({"endpoint": "localhost:8000"}, "pattern"),
    ],
)
def test_invalid_judge_sections_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        task(**{"endpoint": "http://x/v1", **changes})
