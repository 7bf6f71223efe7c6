"""Rewards in processes of their own: what hangs, crashes or eats memory there costs its sample alone, and is named.

Real processes, because only they can be ended: the rules by which they are used are in tests/unit/test_actors_rewards.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from actors.rewards import RewardFailed, Scorer, ScorerLimits
from actors.tasks import Problem, RewardFunction, TaskError, load_task
from actors.tasks.config import FileTask, ReasoningGymTask

REWARD = """
import asyncio, os, re, resource, signal, subprocess, sys, time

calls = 0
client = None

def judge(prompts, completions, answer, **_):
    return [DO.get(completion, lambda: float(completion == right))() for completion, right in zip(completions, answer)]

def alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(60)

def leaves_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0

def naps():
    time.sleep(0.4)
    return 1.0

def handled():
    def stop(*_):
        raise TimeoutError("by its own alarm")
    signal.signal(signal.SIGALRM, stop)
    alarm()

def child():
    pid = subprocess.Popen(["sleep", "1000"]).pid
    open(PID, "w").write(str(pid))
    time.sleep(1e6)

def count():
    global calls
    calls += 1
    return calls

def forever():
    open(PID, "w").write(str(os.getpid()))
    time.sleep(1e6)

DO = {
    "sleep": lambda: time.sleep(1e6),
    "regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "sum": lambda: sum(range(10**10)),
    "exit": lambda: os._exit(3),
    "alarm": alarm,
    "handled": handled,
    "leaves an alarm": leaves_an_alarm,
    "naps": naps,
    "memory": lambda: len(bytearray(30 * 2**30)),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "child": child,
    "count": count,
    "forever": forever,
    "heavy": lambda: len({"torch", "vllm", "ray", "transformers"} & set(sys.modules)),
    "stdin": lambda: float(sys.stdin.read() == ""),
}

async def ask(completions, **_):
    global client
    client = client or asyncio.get_running_loop()
    assert client is asyncio.get_running_loop(), "a connection would be of another loop"
    if "blocked" in completions:
        time.sleep(1e6)
    await asyncio.sleep(0.01)
    return [None if completion == "" else 1.0 for completion in completions]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "judge.py").write_text(f"PID = {str(tmp_path / 'pid')!r}\n{REWARD}")
    return tmp_path


@pytest.fixture
async def scorer(folder):
    made = []

    async def make(name="judge", timeout_s=20.0, file="judge.py"):
        reference = f"{folder / file}:{name}"
        task = FileTask(type="file", path="rows.jsonl", rewards=(reference,))
        function = RewardFunction(name, task, ["question", "answer"], reference)
        made.append(Scorer([function], ScorerLimits(2, timeout_s, start_timeout_s=20.0)))
        await made[-1].start()
        return made[-1]

    yield make
    for each in made:
        await each.close()


def problem(answer="42"):
    return Problem("q", "q?", {"question": "q", "answer": answer})


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("sleep", "took longer than 0.5 s"),
        ("regex", "took longer than 0.5 s"),
        ("sum", "took longer than 0.5 s"),
        ("exit", "the reward's process ended with exit status 3"),
        ("alarm", "the reward's process ended with signal SIGALRM"),
        ("crash", "the reward's process ended with signal SIGSEGV"),
        ("handled", "TimeoutError"),
        ("memory", "MemoryError"),
    ],
)
async def test_whatever_a_reward_does_costs_its_own_sample_alone(scorer, caplog, completion, reason):
    scores = await scorer(timeout_s=0.5)
    asked = ["42", completion, "41"]
    results = await asyncio.gather(*(scores.score(problem(), each) for each in asked), return_exceptions=True)
    assert [getattr(each, "reward", None) for each in results] == [1.0, None, 0.0]
    assert isinstance(results[1], RewardFailed)
    assert str(results[1]) == f"reward failed: judge: {reason}"
    assert f"prompt: 'q?'\n  completion: '{completion}'" in caplog.text
    if completion == "memory":
        assert "a reward's process may allocate 16 GiB" in caplog.text


async def test_a_process_lasts_from_call_to_call_reads_no_terminal_and_imports_nothing_heavy(scorer):
    scores = await scorer()
    assert [(await scores.score(problem(), "count")).reward for _ in range(3)] == [1.0, 2.0, 3.0]
    assert (await scores.score(problem(), "heavy")).reward == 0.0
    assert (await scores.score(problem(), "stdin")).reward == 1.0


async def test_an_alarm_that_a_call_leaves_does_not_strike_the_next_sample(scorer, caplog):
    scores = await scorer()
    assert [(await scores.score(problem(), each)).reward for each in ("leaves an alarm", "naps")] == [1.0, 1.0]
    assert caplog.text == "", "nor is it tried again"


async def test_an_async_function_keeps_one_loop_and_is_ended_where_it_blocks(scorer):
    scores = await scorer("ask", timeout_s=1.0)
    results = await asyncio.gather(*(scores.score(problem(), each) for each in ("a", "")))
    assert [each.reward for each in results] == [1.0, None]
    assert (await scores.score(problem(), "b")).reward == 1.0
    with pytest.raises(RewardFailed, match=r"took longer than 1 s"):
        await scores.score(problem(), "blocked")


async def test_what_a_reward_has_started_ends_with_it(scorer, folder):
    scores = await scorer(timeout_s=0.5)
    with pytest.raises(RewardFailed, match=r"took longer"):
        await scores.score(problem(), "child")
    await gone(int((folder / "pid").read_text()))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos._exit(7)", "the reward's process ended with exit status 7"),
        ("import no_such_thing", "importing .*broken.py failed: ModuleNotFoundError"),
        ("raise SystemExit(1)", "importing .*broken.py failed: SystemExit: 1"),
    ],
)
async def test_a_file_that_cannot_be_loaded_is_known_at_the_start(scorer, folder, code, reason):
    (folder / "broken.py").write_text(f"{code}\n\ndef f(completions):\n    return []\n")
    with pytest.raises(TaskError, match=f"reward f: its process did not start: .*{reason}"):
        await scorer("f", file="broken.py")


async def test_a_dataset_scores_as_it_does_here():
    config = ReasoningGymTask(type="reasoning_gym", name="spiral_matrix", num_train=8, num_heldout=2)
    task = load_task(config)
    scores = Scorer(task.rewards, ScorerLimits(1, 20.0, start_timeout_s=60.0))
    try:
        right = [(await scores.score(each, each.columns["answer"])).reward for each in task.train]
        wrong = await scores.score(task.train[0], "1 2")
        # the dataset evaluates what looks like a list, which a model may say
        with pytest.raises(RewardFailed, match="exit status 5"):
            await scores.score(task.train[0], "[__import__('os')._exit(5)]")
    finally:
        await scores.close()
    assert (right, wrong.reward) == ([1.0] * 8, 0.0)


ACTOR = """
import asyncio, sys
from actors.rewards import Scorer, ScorerLimits
from actors.tasks import Problem, RewardFunction
from actors.tasks.config import FileTask

async def main(reference):
    task = FileTask(type="file", path="rows.jsonl", rewards=(reference,))
    function = RewardFunction("judge", task, ["answer"], reference)
    await Scorer([function], ScorerLimits(1, 600.0, start_timeout_s=60.0)).score(Problem("q", "q", {}), "forever")

asyncio.run(main(sys.argv[1]))
"""


async def test_it_ends_with_an_actor_that_is_killed(folder):
    with subprocess.Popen([sys.executable, "-c", ACTOR, f"{folder / 'judge.py'}:judge"]) as actor:
        await wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
        pid = int((folder / "pid").read_text())
        assert psutil.Process(pid).ppid() == actor.pid
        os.kill(actor.pid, signal.SIGKILL)
    await gone(pid)


async def wait_for(is_so, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def gone(pid):
    def is_gone():
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await wait_for(is_gone)


CHECKED = """
import os, re, signal, time

def loops(completions, **_):
    open(PID, "w").write(str(os.getpid()))
    return [float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))]

def exits(completions, **_):
    os._exit(0)

def alarms(completions, **_):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(60)

def eats(completions, **_):
    return [float(len(bytearray(30 * 2**30)))]
"""
CONFIG = """
model.path = "model"
algorithm.type = "online_dpo"
actors.reward_timeout_s = {limit}
task.type = "file"
task.path = "rows.jsonl"
task.rewards = [{rewards}]
"""


@pytest.fixture
def check(tmp_path):
    """Starts `leeway check-reward` of these functions; what still runs at the end of the test is killed."""
    started = []

    def start(*names, limit=1.0):
        (tmp_path / "checked.py").write_text(f"PID = {str(tmp_path / 'pid')!r}\n{CHECKED}")
        rows = [{"question": f"{number}+1", "answer": str(number + 1)} for number in range(80)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        rewards = ", ".join(f'"checked.py:{name}"' for name in names)
        (tmp_path / "task.toml").write_text(CONFIG.format(limit=limit, rewards=rewards))
        command = [sys.executable, "-m", "launch.cli", "check-reward", str(tmp_path / "task.toml")]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # a shell has its background jobs ignore it, these tests perhaps among them
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        return started[-1]

    yield start
    for command in started:
        command.kill()
        command.communicate(timeout=20)


def test_the_check_survives_all_of_it_and_names_it(check):
    out, error = check("loops", "exits", "alarms", "eats").communicate(timeout=120)
    said = " ".join(out.split())
    assert "FAILED loops, right: took longer than 1 s" in said
    assert "FAILED exits, right: the reward's process ended with exit status 0" in said
    assert "FAILED alarms, right: the reward's process ended with signal SIGALRM" in said
    assert "eats failed on 384 of 384 completions" in said
    assert "MemoryError: out of memory; a reward's process may allocate 16 GiB" in said
    assert len(out.splitlines()) < 50
    assert error == "", "no progress where nobody looks"


async def test_the_check_ends_at_once_when_it_is_interrupted_and_shows_what_it_has(check, tmp_path):
    command = check("exits", "loops", limit=600.0)
    await wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    command.send_signal(signal.SIGINT)
    out, error = await asyncio.to_thread(command.communicate, timeout=20)
    assert command.returncode == 130, error
    assert "PROBLEM  exits failed on 3 of 3 completions" in out
    assert error.strip() == "leeway: interrupted after 3 completions"
    await gone(pid)
