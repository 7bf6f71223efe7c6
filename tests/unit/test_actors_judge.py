"""A judge: its rating is the reward, it is waited for while it is busy, and what it does not rate is never 0."""

import asyncio
import logging
import socket
from dataclasses import replace
from email.utils import formatdate

import pytest
from openai._constants import MAX_RETRY_AFTER_DELAY

from actors.rewards import RewardFailed, Scorer, ScorerLimits
from actors.tasks import Problem, RewardFunction, TaskError, check_task, load_reward, load_task, reward_models
from actors.tasks.config import ReasoningGymTask
from actors.tasks.task import TOOK_TOO_LONG, NoScore
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
    """What the judge gives to each, in one call."""
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
def test_the_rating_that_ends_an_answer_is_the_reward_and_anything_else_none(answer, reward):
    with judge_server(lambda text: answer) as server:
        (value,) = rate(task(server.endpoint), "4")
    if reward is None:
        assert isinstance(value, NoScore)
    else:
        assert value == pytest.approx(reward)


def test_it_is_asked_with_prompt_completion_and_columns_and_its_rating_is_scaled():
    with judge_server(lambda text: "2") as server:
        config = task(
            server.endpoint, worst=5, best=1, weight=3, system_prompt="Be strict.", request={"seed": 7}, max_tokens=9
        )
        assert rate(config, "four") == [pytest.approx(3 * 0.75)]
        (asked,) = server.asked
    assert [turn["content"] for turn in asked["messages"]] == ["Be strict.", "Rate four to What is 2+2? (right: 4)"]
    assert (asked["model"], asked["temperature"], asked["max_tokens"], asked["seed"]) == ("judge-8b", 0.0, 9, 7)


def test_one_that_is_busy_or_fails_is_asked_again_and_others_do_not_wait_for_it():
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
def test_an_endpoint_that_asks_for_a_longer_pause_than_the_library_makes_is_asked_again_too(monkeypatch, header):
    assert reward_models._LONGEST_PAUSE_S <= MAX_RETRY_AFTER_DELAY
    monkeypatch.setattr(reward_models, "_LONGEST_PAUSE_S", 0.05)
    answers = ["10", (429, header)]
    with judge_server(lambda text: answers.pop()) as server:
        assert rate(task(server.endpoint), "busy") == [1.0]
    assert answers == []


def test_a_row_that_lacks_what_the_prompt_names_has_no_score_and_costs_no_other_its_own():
    with judge_server(lambda text: "10") as server:
        (function,) = load_task(task(server.endpoint)).rewards
        call = load_reward(replace(function, columns=["answer"]))
        lacking, whole = asyncio.run(call([Problem("q", "q", {}), PROBLEM], ["a", "b"]))
    assert (lacking.why, whole) == ("the judge's prompt cannot be made", 1.0)
    assert "the item has no 'answer'" in lacking.detail


async def test_past_its_limit_only_that_sample_has_no_score_and_the_reason_is_told(monkeypatch):
    rated, reward = [], reward_models._reward
    monkeypatch.setattr(reward_models, "_reward", lambda *of: rated.append(len(server.asked)) or reward(*of))

    def answer(text):
        return (429, {"Retry-After": "0.05"}) if "busy" in text else "10"

    with judge_server(answer) as server:
        (function,) = load_task(task(server.endpoint)).rewards
        asked = asyncio.create_task(load_reward(function)([PROBLEM, PROBLEM], ["busy", "well"]))
        await until(lambda: rated and len(server.asked) > rated[0] + 1)  # a 429 since
        jump(monkeypatch, 60.0)
        busy, well = await asyncio.wait_for(asked, 60)
    assert (busy, well) == (NoScore(TOOK_TOO_LONG, "60 s, its endpoint answered 429 last"), 1.0)


def test_a_request_that_is_refused_is_not_repeated():
    with judge_server(lambda text: (400, {})) as server:
        (value,) = rate(task(server.endpoint), "too long")
        assert len(server.asked) == 1
    assert value.why == "the judge answered 400"


async def test_a_sample_without_a_rating_fails_by_name_and_costs_no_other_its_reward():
    rated = []

    def answer(text):
        rated.append(text.split()[1])
        return "no idea" if "bad" in text else "10"

    async def start(function, timeout_s):
        return InThisProcess(load_reward(function))

    with judge_server(answer) as server:
        rewards = load_task(task(server.endpoint)).rewards
        scorer = Scorer(rewards, ScorerLimits(1, 5.0, 5.0), start=start, retries=1)
        asked = [scorer.score(PROBLEM, word) for word in ("a", "bad", "b")]
        results = await asyncio.gather(*asked, return_exceptions=True)
        await scorer.close()
    assert [getattr(one, "reward", None) for one in results] == [1.0, None, 1.0]
    assert isinstance(results[1], RewardFailed)
    assert str(results[1]) == "reward failed: helpful: the judge rated nothing"
    assert sorted(rated) == ["a", "b", "bad", "bad"]


def test_samples_that_come_while_a_judge_thinks_share_its_next_call():
    sizes, thinks, may_rate = [], asyncio.Event(), asyncio.Event()

    class Slow:
        is_alive = True

        async def call(self, problems, completions):
            sizes.append(len(completions))
            thinks.set()
            await may_rate.wait()
            return [1.0] * len(completions)

        async def end(self):
            self.is_alive = False

    async def start(function, timeout_s):
        return Slow()

    async def run():
        function = RewardFunction("helpful", task("http://nowhere/v1"), ())
        scorer = Scorer([function], ScorerLimits(1, 5.0, 5.0), start=start)
        asked = []
        for number in range(20):
            asked.append(asyncio.create_task(scorer.score(PROBLEM, str(number))))
            await thinks.wait()
            await asyncio.sleep(0.001)
        may_rate.set()
        await asyncio.gather(*asked)
        await scorer.close()

    asyncio.run(run())
    assert sizes == [1, 19]


def refused(config, **options):
    with pytest.raises(TaskError) as refusal:
        check_task(config, **options)
    return str(refusal.value)


def test_mistakes_are_one_sentence_before_anything_starts(monkeypatch):
    with judge_server(lambda text: "1", key="secret") as server:
        here = {"import_limit_s": 30.0}
        assert "refuses the key (401): set api_key_env" in refused(task(server.endpoint), **here)
        monkeypatch.setenv("JUDGE_KEY", "secret")
        check_task(task(server.endpoint, api_key_env="JUDGE_KEY"), **here)
        wrong = task(server.endpoint, api_key_env="JUDGE_KEY", model="judge-7b")
        assert "has no model 'judge-7b'; known: judge-8b; did you mean" in refused(wrong, **here)
        gone = server.endpoint
    assert "does not answer" in refused(task(gone), **here)
    check_task(task(gone))  # where actors are elsewhere, they ask
    assert "JUDGE_KAY' is not set in the environment" in refused(task(gone, api_key_env="JUDGE_KAY"))
    assert "does not name {completion}" in refused(task(gone, prompt="{prompt}"))
    assert "names {anwser}, which no row has; known:" in refused(task(gone, prompt="{completion} {anwser}"))
    misspelt = refused(task(gone, rewards=("helpful", "helpfull")))
    assert "'helpfull' is not of the form FILE.py:FUNCTION, and no rule or table has that name" in misspelt
    assert "did you mean 'helpful'" in misspelt


DEAD_PROXY = "http://127.0.0.1:9"


@pytest.fixture
def proxies(monkeypatch):
    """`proxies(NAME=value)`: the variables of proxies are these alone."""

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
def test_a_judge_on_this_machine_is_asked_without_a_proxy(proxies, monkeypatch, host, variable, proxy):
    proxies(**{variable: proxy})
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **more: real("127.0.0.1", *rest, **more))
    with judge_server(lambda text: "7") as server:
        there = task(server.endpoint.replace("127.0.0.1", host))
        check_task(there, import_limit_s=30.0)
        assert rate(there, "four") == [0.7]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HTTP_PROXY": DEAD_PROXY}, "; it is asked through the proxy of HTTP_PROXY: to ask it directly, add judge."),
        ({"all_proxy": DEAD_PROXY}, "; it is asked through the proxy of all_proxy: to ask it directly, add judge."),
        ({"HTTP_PROXY": DEAD_PROXY, "NO_PROXY": "a.b, .example"}, ""),
        ({"HTTPS_PROXY": DEAD_PROXY}, ""),
    ],
)
def test_where_a_judge_does_not_answer_the_variable_of_its_proxy_is_named(proxies, monkeypatch, variables, named):
    proxies(**variables)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", 9))])
    sentence = refused(task("http://judge.example:8000/v1"), import_limit_s=30.0)
    assert "does not answer" in sentence
    assert ("through the proxy" in sentence, named in sentence) == (bool(named), True)


def test_a_proxy_that_refuses_is_not_taken_for_the_judge_alone(proxies):
    with judge_server(lambda text: "7", key="another") as proxy:
        proxies(HTTP_PROXY=proxy.endpoint.removesuffix("/v1"))
        sentence = refused(task("http://judge.example:8000/v1"), import_limit_s=30.0)
    assert "refuses the key (401)" in sentence
    assert "through the proxy of HTTP_PROXY" in sentence


@pytest.mark.parametrize("value", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])
def test_a_proxy_that_the_library_cannot_use_is_a_sentence(proxies, value):
    proxies(ALL_PROXY=value)
    sentence = refused(task("http://judge.example:8000/v1"), import_limit_s=30.0)
    assert "cannot be asked" in sentence
    assert "through the proxy of ALL_PROXY" in sentence


def test_the_requests_of_a_judge_are_not_logged(caplog):
    caplog.set_level(logging.INFO)
    with judge_server(lambda text: "7") as server:
        check_task(task(server.endpoint), import_limit_s=30.0)
        assert rate(task(server.endpoint), "four") == [0.7]
    assert [record.getMessage() for record in caplog.records if "HTTP" in record.getMessage()] == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rewards": ()}, "reward_models.helpful is not in rewards"),
        ({"worst": 1, "best": 1}, "no rating says anything"),
        ({"endpoint": "localhost:8000"}, "pattern"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        task(**{"endpoint": "http://x/v1", **changes})
