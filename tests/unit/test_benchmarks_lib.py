"""benchmarks/lib: calls in processes, failed calls and their cleanup, stored results, and pages with their targets."""

import subprocess
import sys
import time

import psutil
import pytest
from benchmarks.lib import small_tasks
from benchmarks.lib.page import judged, origin
from benchmarks.lib.processes import MeasurementFailed, call_in_processes, environment
from benchmarks.lib.rounds import means, median_ratio, spread
from benchmarks.lib.runs import KeptResults
from transformers import AutoTokenizer

from leeway.actors.tasks import load_reward, load_task
from leeway.launch.config import load_config

SLEEPING = {"args": ["sleep", "60"]}


@pytest.mark.process
def test_calls_in_processes_return_results_in_order():
    assert call_in_processes("means", "statistics:fmean", [{"data": [1, 2]}, {"data": [4]}], limit_s=60) == [1.5, 4]


@pytest.mark.process
def test_a_failed_call_names_its_process_and_error_and_ends_the_others():
    calls = [SLEEPING, {"args": ["no-such-program"]}]
    with pytest.raises(
        MeasurementFailed, match=r"process 1 of programs ended with status 1: FileNotFoundError: .*no-such"
    ):
        call_in_processes("programs", "subprocess:run", calls, limit_s=60)
    assert not sleepers_of(psutil.Process())


@pytest.mark.process
def test_calls_that_time_out_end_with_all_their_processes():
    with pytest.raises(MeasurementFailed, match=r"sleep took longer than 1 s"):
        call_in_processes("sleep", "subprocess:run", [SLEEPING], limit_s=1)
    assert not sleepers_of(psutil.Process())


@pytest.mark.process
def test_a_call_ends_when_its_parent_is_killed():
    code = "from benchmarks.lib.processes import call_in_processes as call; "
    code += f"call('sleep', 'subprocess:run', [{SLEEPING}], limit_s=60)"
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment())
    deadline = time.monotonic() + 60
    while not (sleepers := sleepers_of(psutil.Process(parent.pid))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (call,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(60)
    call.wait(60)
    for sleeper in sleepers:
        sleeper.kill()


def sleepers_of(process):
    return [child for child in process.children(recursive=True) if child.name() == "sleep"]


def test_results_are_computed_once_and_reused_only_for_the_same_facts(tmp_path):
    def make(folder):
        folder.mkdir(parents=True)
        return {"accuracy": 0.5}

    kept = KeptResults(tmp_path, "facts.json", ["--a", "1"])
    assert kept.result("first", make) == {"accuracy": 0.5}
    assert kept.result("first", lambda _: pytest.fail("the result is stored")) == {"accuracy": 0.5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "first.json", "runs"]
    with pytest.raises(SystemExit, match=r"holds runs of \['--a', '1'\], not of \['--a', '2'\]: choose another folder"):
        KeptResults(tmp_path, "facts.json", ["--a", "2"])


def test_a_failed_run_is_not_stored(tmp_path):
    def fail(folder):
        raise MeasurementFailed("no figures")

    kept = KeptResults(tmp_path, "facts.json", {})
    with pytest.raises(MeasurementFailed):
        kept.result("first", fail)
    assert kept.result("first", lambda folder: folder.mkdir(parents=True) or {"a": 1}) == {"a": 1}


def test_a_bar_is_judged_only_at_full_size():
    def met(value, word="at least", *, at_full_size=True):
        return judged({"figure": value}, {"figure": 0.97}, word, at_full_size=at_full_size)["figure"]["met"]

    assert met(0.96) is False
    assert met(0.98) is True
    assert met(0.98, "at most") is False
    assert met(0.96, "at most") is True
    assert met(0.98, at_full_size=False) is None
    assert judged({}, {"figure": 0.97}, "at least", at_full_size=True)["figure"] == {
        "at least": 0.97,
        "measured": None,
        "met": None,
    }


def test_a_page_names_its_command_machine_and_commit():
    machine = {"cores": 2, "processor": "x86_64", "python": "3.11.7", "load_before": 0.25, "commit": "abc"}
    rest = "on 2 cores (x86_64), no GPU, Python 3.11.7; load average of the machine before the measurement: 0.2."
    assert origin("make bench", machine) == f"Written by `make bench` {rest}"
    assert origin("make bench", machine, "abc") == f"Written by `make bench`, commit abc, {rest}"


def test_means_skip_missing_values_and_a_spread_is_shown_if_values_differ():
    assert means([{"a": 1.0, "b": None}, {"a": 2.0, "b": 3.0}]) == {"a": 1.5, "b": 3.0}
    assert means([{"a": None}]) == {"a": None}
    assert spread([0.5, 0.5], "{:.1f}") == "0.5"
    assert spread([0.2, 0.4], "{:.1f}") == "0.3 (0.2 to 0.4)"
    assert median_ratio([1.0, 6.0, 2.0], [1.0, 2.0, 1.0]) == 2.0


@pytest.mark.parametrize("name", small_tasks.TASKS)
def test_a_small_task_has_a_valid_config_and_rewards_only_the_right_answer(tmp_path, monkeypatch, name):
    monkeypatch.setattr(small_tasks, "half_teach", lambda *args: None)
    config = load_config(small_tasks.make(name, tmp_path), [])
    problem, codec = load_task(config.task).heldout[0], AutoTokenizer.from_pretrained(config.model.path)
    answer = small_tasks.TASKS[name].answer(problem.text)
    (reward,) = map(load_reward, load_task(config.task).rewards)
    assert reward([problem] * 2, [answer, f"{answer}0"]) == [1.0, 0.0]
    tokens = codec.encode(answer, add_special_tokens=False)
    assert codec.decode(tokens).replace(" ", "") == answer
    assert len(tokens) < config.actors.max_new_tokens
