"""Reward processes: a hang, a crash or an allocation failure fails only its own sample and is reported.

The processes are real, because fakes cannot be killed; tests/unit/test_actors_rewards.py covers the scheduling.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from leeway.actors import reward_process, sandbox
from leeway.actors.config import ADDED_ENV
from leeway.actors.rewards import RewardFailed, Scored, Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction, TaskError, load_task
from leeway.actors.tasks.config import FileTask, ReasoningGymTask
from tests.unit.fake_actor import FakeBuffer, K, make_actor, run_to_end
from tests.unit.test_actors_classifier import make as make_classifier

REWARD = """
import asyncio, os, re, resource, signal, socket, subprocess, sys, threading, time

calls = 0
client = None

def by_prompt(prompts, completions, **_):
    return [DO.get(KINDS.get(prompt), lambda: 1.0)() for prompt in prompts]

def threaded_alarm():
    threading.Thread(target=lambda: signal.setitimer(signal.ITIMER_REAL, 0.05)).start()
    time.sleep(60)

def connects(completions, **_):
    with socket.create_connection(("127.0.0.1", int(completions[0])), 5):
        return [1.0]

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

def sessions():
    # a child in its own session, an orphan in its own session, and an orphan that ignores signals
    pids = [subprocess.Popen(["sleep", "1000"], start_new_session=True).pid]
    for ignores in (False, True):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if ignores:
                    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                        signal.signal(number, signal.SIG_IGN)
                os.write(writer, str(os.getpid()).encode())
                time.sleep(1000)
            os._exit(0)
        pids.append(int(os.read(reader, 20)))
        os.wait()
    open(f"{PID}.new", "w").write(" ".join(map(str, pids)))
    os.rename(f"{PID}.new", PID)

def closes():
    os.closerange(3, 4096)
    return 1.0

def reopens():
    os.closerange(3, 256)
    for number in range(64):
        os.open(f"{PID}.{number}", os.O_RDWR | os.O_CREAT)
    return 1.0

def leaves():
    sessions()
    return 1.0

def then(end):
    sessions()
    end()

def forks():
    if os.fork() == 0:
        os.setsid()
        time.sleep(25)
        os._exit(0)
    time.sleep(0.2)
    os._exit(4)

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
    "threaded alarm": threaded_alarm,
    "handled": handled,
    "leaves an alarm": leaves_an_alarm,
    "naps": naps,
    "memory": lambda: len(bytearray(30 * 2**30)),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "child": child,
    "forks": forks,
    "closes": closes,
    "reopens": reopens,
    "sessions, then hangs": lambda: then(lambda: time.sleep(1e6)),
    "sessions, then exits": lambda: then(lambda: os._exit(3)),
    "sessions, then is killed": lambda: then(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "sessions, then ends its group": lambda: then(lambda: os.killpg(0, signal.SIGKILL)),
    "sessions": leaves,
    "waits": lambda: float(os.waitpid(-1, os.WNOHANG) == (0, 0)),
    "count": count,
    "forever": forever,
    "heavy": lambda: len({"torch", "vllm", "ray", "transformers"} & set(sys.modules)),
    "stdin": lambda: float(sys.stdin.read() == ""),
}

KINDS = {"q0": "sleep", "q1": "exit", "q2": "memory", "q3": "threaded alarm"}

async def ask(completions, **_):
    global client
    client = client or asyncio.get_running_loop()
    assert client is asyncio.get_running_loop(), "a connection would belong to another loop"
    if "blocked" in completions:
        time.sleep(1e6)
    await asyncio.sleep(0.01)
    return [None if completion == "" else 1.0 for completion in completions]
"""

REFUSES = """
class Refusing(CDLL):
    def __init__(self, name, *args, **keys):
        super().__init__(name, *args, **keys)
        if name is None:
            self.unshare = lambda flags: ctypes.set_errno(1) or 1
ctypes.CDLL = Refusing
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "judge.py").write_text(f"PID = {str(tmp_path / 'pid')!r}\n{REWARD}")
    return tmp_path


@pytest.fixture
async def scorer(folder):
    made = []

    async def make(name="judge", timeout_s=20.0, file="judge.py", has_network=True):
        reference = f"{folder / file}:{name}"
        task = FileTask(type="file", path="rows.jsonl", rewards=(reference,), reward_network=has_network)
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
        ("sleep, regex", "took longer than 5 s"),
        pytest.param("sum", "took longer than 5 s", marks=pytest.mark.full),
        ("exit", "the reward process ended with exit status 3"),
        ("forks", "the reward process ended with exit status 4"),
        ("waits", "ChildProcessError"),
        ("closes", "the reward closed the descriptor through which its process replies"),
        ("reopens", "the reward closed the descriptor through which its process replies"),
        ("alarm", "the reward process ended with signal SIGALRM"),
        ("threaded alarm", "the reward process ended with signal SIGALRM"),
        ("crash", "the reward process ended with signal SIGSEGV"),
        ("handled", "TimeoutError"),
        ("memory", "MemoryError"),
    ],
)
async def test_a_faulty_reward_fails_only_its_own_sample(scorer, caplog, completion, reason):
    # the time limit also applies to the valid samples, which take longer on busy cores
    scores = await scorer(timeout_s=5.0 if "took longer" in reason else 20.0)
    bad = completion.split(", ")
    completions = ["42", *bad, "41"]
    results = await asyncio.gather(*(scores.score(problem(), each) for each in completions), return_exceptions=True)
    assert [getattr(each, "reward", None) for each in results] == [1.0, *[None] * len(bad), 0.0]
    for each, result in zip(bad, results[1:-1], strict=True):
        assert isinstance(result, RewardFailed)
        assert str(result) == f"reward failed: judge: {reason}"
        assert f"prompt: 'q?'\n  completion: '{each}'" in caplog.text
    if completion == "memory":
        assert "the limit of a reward process is 16 GiB" in caplog.text


async def test_a_process_is_reused_and_has_no_stdin_and_no_heavy_imports(scorer):
    scores = await scorer()
    assert [(await scores.score(problem(), "count")).reward for _ in range(3)] == [1.0, 2.0, 3.0]
    assert (await scores.score(problem(), "heavy")).reward == 0.0
    assert (await scores.score(problem(), "stdin")).reward == 1.0


async def test_a_pending_alarm_of_one_call_does_not_affect_the_next_sample(scorer, caplog):
    scores = await scorer()
    assert [(await scores.score(problem(), each)).reward for each in ("leaves an alarm", "naps")] == [1.0, 1.0]
    assert caplog.text == "", "the second sample was retried"


async def test_an_async_function_keeps_one_event_loop_and_times_out_if_it_blocks(scorer):
    scores = await scorer("ask")
    results = await asyncio.gather(*(scores.score(problem(), each) for each in ("a", "")))
    assert [each.reward for each in results] == [1.0, None]
    assert (await scores.score(problem(), "b")).reward == 1.0
    scores._lanes[0]._timeout_s = 1.0  # the earlier calls needed a longer limit, because cores may be busy
    with pytest.raises(RewardFailed, match=r"took longer than 1 s"):
        await scores.score(problem(), "blocked")


async def test_child_processes_end_with_their_reward_process(scorer, folder):
    scores = await scorer(timeout_s=2.0)
    with pytest.raises(RewardFailed, match=r"took longer"):
        await scores.score(problem(), "child")
    await wait_for_exit(int((folder / "pid").read_text()))


@pytest.mark.parametrize(
    "completion",
    ["sessions", *(f"sessions, then {each}" for each in ("hangs", "exits", "is killed", "ends its group"))],
)
async def test_children_in_other_sessions_end_with_their_reward_process(scorer, folder, completion):
    scores = await scorer(timeout_s=2.0 if "hangs" in completion else 20.0)
    try:
        assert (await scores.score(problem(), completion)).reward == 1.0
    except RewardFailed:
        assert "then" in completion
    pids = [int(each) for each in (folder / "pid").read_text().split()]
    assert len(pids) == 3
    if completion == "sessions":
        assert all(psutil.pid_exists(each) for each in pids), "a child ended before its reward: the test proves nothing"
        await scores.close()
    for pid in pids:
        await wait_for_exit(pid)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos._exit(7)", "importing .*broken.py exited the process with status 7"),
        ("import no_such_thing", "importing .*broken.py failed: ModuleNotFoundError"),
        ("raise SystemExit(1)", "importing .*broken.py exited the process with status 1"),
        ("quit()", "importing .*broken.py exited the process with status 0"),
        ("raise SystemExit('no key')", "importing .*broken.py exited the process with status 1: no key"),
        ("import os\nos.abort()", "importing .*broken.py: the reward process ended with signal SIGABRT"),
        ("import os\nos.closerange(3, 4096)", "importing .*broken.py: the reward closed the descriptor"),
        ("import os\nif os.fork() == 0:\n    os._exit(0)\nraise SystemExit(5)", "the process with status 5"),
    ],
)
async def test_a_file_that_cannot_be_loaded_fails_at_start(scorer, folder, code, reason):
    (folder / "broken.py").write_text(f"{code}\n\ndef f(completions):\n    return []\n")
    with pytest.raises(TaskError, match=f"reward f: its process did not start: .*{reason}"):
        await scorer("f", file="broken.py")


@pytest.mark.parametrize("by_us", [True, False])
async def test_a_reward_may_use_the_hub_unless_the_user_set_offline_mode(scorer, folder, monkeypatch, by_us):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(ADDED_ENV, "HF_HUB_OFFLINE,TRANSFORMERS_OFFLINE" if by_us else "")
    code = "import os\n\ndef online(completions):\n    return [float('HF_HUB_OFFLINE' not in os.environ)]\n"
    (folder / "hub.py").write_text(code)
    scores = await scorer("online", file="hub.py")
    assert (await scores.score(problem(), "x")).reward == by_us


@pytest.mark.parametrize("has_network", [True, False])
async def test_a_reward_without_network_cannot_connect(scorer, has_network):
    if why := sandbox.cut_network_error():
        pytest.skip(why)
    with socket.create_server(("127.0.0.1", 0)) as server:
        scores = await scorer("connects", has_network=has_network)
        port = str(server.getsockname()[1])
        if has_network:
            assert (await scores.score(problem(), port)).reward == 1.0
        else:
            with pytest.raises(RewardFailed, match="ConnectionRefusedError"):
                await scores.score(problem(), port)


async def test_a_kernel_that_cannot_cut_the_network_is_an_error_at_start(scorer, tmp_path):
    # simulate a kernel that forbids namespaces, because only root could forbid namespaces in the real kernel
    site = tmp_path / "sitecustomize.py"
    site.write_text("import ctypes\nCDLL = ctypes.CDLL\n" + REFUSES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(TaskError, match=r"network = false, but the kernel refuses isolation: .*permitted.*user"):
            await scorer(has_network=False)


async def test_a_classifier_may_allocate_more_than_a_user_reward(tmp_path, monkeypatch):
    make_classifier(tmp_path)
    imports = "import sys; sys.path.append(sys.argv[1]); from leeway.actors import reward_process as here;"
    monkeypatch.setattr(reward_process, "_PROGRAM", f"{imports} here.MEMORY_BYTES = 2**20; here.serve(*sys.argv[2:])")
    models = {"helpful": {"type": "classifier", "path": str(tmp_path)}}
    task = FileTask(type="file", path="rows.jsonl", rewards=("helpful",), reward_models=models)
    process = await reward_process.RewardProcess.start(RewardFunction("helpful", task, ["answer"]), 60.0)
    try:
        assert len(await process.call([problem()], ["1"], [None])) == 1
    finally:
        await process.end()


async def test_a_pattern_that_backtracks_forever_fails_only_its_own_sample(folder):
    rules = {"form": {"type": "regex", "pattern": "(a+)+$"}}
    task = FileTask(type="file", path="rows.jsonl", rewards=("form",), reward_rules=rules)
    scores = Scorer([RewardFunction("form", task, ["answer"])], ScorerLimits(2, 3.0, start_timeout_s=20.0))
    completions = ["aaa", "a" * 64 + "b", "b"]
    try:
        results = await asyncio.gather(*(scores.score(problem(), each) for each in completions), return_exceptions=True)
    finally:
        await scores.close()
    assert [getattr(each, "reward", None) for each in results] == [1.0, None, 0.0]
    assert str(results[1]) == "reward failed: form: took longer than 3 s"


async def test_an_actor_loses_only_faulty_samples_and_accounts_for_all(folder):
    reference = f"{folder / 'judge.py'}:by_prompt"
    task = FileTask(type="file", path="rows.jsonl", rewards=(reference,))
    buffer = FakeBuffer(8)
    config = {"reward_timeout_s": 5.0, "max_running_samples": K}
    actor = make_actor(buffer, rewards=(RewardFunction("by_prompt", task, ["question"], reference),), config=config)
    report = await run_to_end(actor, timeout_s=240)
    reasons = {
        0: "took longer than 5 s",
        1: "the reward process ended with exit status 3",
        2: "MemoryError",
        3: "the reward process ended with signal SIGALRM",
    }
    failed = [(lease % 8, reason) for lease, _, reason in buffer.failed]  # prompt 0 belongs to lease 8
    assert sorted(failed) == [
        (key, f"reward failed: by_prompt: {why}") for key, why in reasons.items() for _ in range(K)
    ]
    assert sorted(each.prompt_id for each in buffer.pushed) == sorted([4, 5, 6, 7] * K)
    assert all(each.reward == 1.0 for each in buffer.pushed)
    assert sum(report.num_outcomes.values()) + len(buffer.failed) == 8 * K, "no sample is lost"


async def test_messages_reach_the_function_in_its_process(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def reward(prompts, completions, prompt_ids, completion_ids, log_metric):\n"
        "    log_metric('num_prompt_ids', len(prompt_ids[0]))\n"
        "    return [len(prompts[0]) + len(completions[0][0]['content']) + len(completion_ids[0])]\n"
    )
    task = FileTask(type="file", path="rows.jsonl", rewards=(f"{path}:reward",))
    function = RewardFunction("reward", task, [], f"{path}:reward", has_messages=True)
    scores = Scorer([function], ScorerLimits(1, 20.0, start_timeout_s=20.0))
    await scores.start()
    try:
        chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        sampled = {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5]}
        assert await scores.score(Problem("q", chat, {}), "four", sampled.__getitem__) == Scored(
            8.0, {"reward": 8.0, "log/num_prompt_ids": 3.0}
        )
    finally:
        await scores.close()


async def test_a_dataset_is_scored_in_a_reward_process():
    config = ReasoningGymTask(type="reasoning_gym", name="spiral_matrix", num_train=8, num_heldout=2)
    task = load_task(config)
    scores = Scorer(task.rewards, ScorerLimits(1, 20.0, start_timeout_s=60.0))
    try:
        right = [(await scores.score(each, each.columns["answer"])).reward for each in task.train]
        wrong = await scores.score(task.train[0], "1 2")
        # the dataset evaluates text that looks like a list, which a model may generate
        with pytest.raises(RewardFailed, match="exit status 5"):
            await scores.score(task.train[0], "[__import__('os')._exit(5)]")
    finally:
        await scores.close()
    assert (right, wrong.reward) == ([1.0] * 8, 0.0)


ACTOR = """
import asyncio, sys
from leeway.actors.rewards import Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction
from leeway.actors.tasks.config import FileTask

async def main(reference):
    task = FileTask(type="file", path="rows.jsonl", rewards=(reference,))
    function = RewardFunction("judge", task, ["answer"], reference)
    await Scorer([function], ScorerLimits(1, 600.0, start_timeout_s=60.0)).score(Problem("q", "q", {}), sys.argv[2])

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("completion", ["forever", "child", "sessions, then hangs"])
async def test_reward_processes_and_their_children_end_with_a_killed_actor(folder, completion):
    with subprocess.Popen([sys.executable, "-c", ACTOR, f"{folder / 'judge.py'}:judge", completion]) as actor:
        await wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
        pids = [int(each) for each in (folder / "pid").read_text().split()]
        assert all(actor.pid in [each.pid for each in psutil.Process(pid).parents()] for pid in pids)
        os.kill(actor.pid, signal.SIGKILL)
    for pid in pids:
        await wait_for_exit(pid)


async def wait_for(condition, timeout_s=180.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def wait_for_exit(pid):
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
    """Return `check(*names)`, which starts `leeway check-reward` on functions; the process is killed after the test."""
    started = []

    def start(*names, limit=5.0):
        (tmp_path / "checked.py").write_text(f"PID = {str(tmp_path / 'pid')!r}\n{CHECKED}")
        rows = [{"question": f"{number}+1", "answer": str(number + 1)} for number in range(80)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        rewards = ", ".join(f'"checked.py:{name}"' for name in names)
        (tmp_path / "task.toml").write_text(CONFIG.format(limit=limit, rewards=rewards))
        command = [sys.executable, "-m", "leeway", "check-reward", str(tmp_path / "task.toml")]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # a shell lets background jobs ignore SIGINT, and these tests may run in a background job
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        return started[-1]

    yield start
    for command in started:
        command.kill()
        command.communicate(timeout=20)


def test_check_reward_survives_and_reports_all_failures(check):
    out, error = check("loops", "exits", "alarms", "eats").communicate(timeout=120)
    text = " ".join(out.split())
    assert "FAILED loops, correct: took longer than 5 s" in text
    assert "FAILED exits, correct: the reward process ended with exit status 0" in text
    assert "FAILED alarms, correct: the reward process ended with signal SIGALRM" in text
    assert "eats failed on 384 of 384 completions" in text
    assert "MemoryError: out of memory; the limit of a reward process is 16 GiB" in text
    assert len(out.splitlines()) < 50
    assert error == "", "progress is shown only on a terminal"


async def test_check_reward_exits_immediately_on_sigint(check, tmp_path):
    command = check("exits", "loops", limit=600.0)
    await wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    command.send_signal(signal.SIGINT)
    _, error = await asyncio.to_thread(command.communicate, timeout=20)
    assert command.returncode == 130, error
    assert error.strip() == "leeway: interrupted"
    await wait_for_exit(pid)
