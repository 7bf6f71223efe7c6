"""Kill each process of a run in turn: the run recovers within a minute, or ends within a minute and reports the cause.

For actors and engines, the bound is a minute or twice the start-up time of the run, whichever is longer. An import of
vLLM in two processes takes half a minute of CPU time, on cores that the training processes use too.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from tests.world.live_run import LiveRun, command_of, descendants, wait_for_end

pytestmark = pytest.mark.timeout(900)

BOUND_S = 60.0
NUM_PROCESSES = 7
"""Number of processes of the run: two actors, two stages, two services, and the ranker."""
STEPS_AFTER = 5
"""Steps after which a run counts as recovered, if all of its processes work."""


@pytest.fixture
def start_run(tmp_path):
    """Return `start_run(*overrides)`, which starts a run and waits until it trains; runs are closed after the test."""
    runs = []

    def start(*overrides: str) -> LiveRun:
        endless = ("--learner.num_steps", "100000", "--learner.checkpoint_every", "10")
        runs.append(LiveRun(tmp_path / str(len(runs)), *endless, *overrides))
        runs[-1].wait_for_steps(3)
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def at_work(run: LiveRun) -> dict[str, int]:
    """Return the working processes with their pids, as reported by the run."""
    status = json.loads((run.folder / "status.json").read_text())
    each = [*status["services"], *status["stages"], *status["actors"]]
    return {process["name"]: process["pid"] for process in each if process["state"] == "working" and process["pid"]}


def seconds_to_recover(run: LiveRun, kill: Callable[[], None], bound_s: float) -> float:
    """Kill a process; return the seconds until all processes work again and take steps. Fail after `bound_s`."""
    run.wait_for("all processes to work", lambda: len(at_work(run)) == NUM_PROCESSES)
    before, num_restarts = at_work(run), len(run.events("restart"))
    killed_s = time.monotonic()
    kill()
    run.wait_for("the restart event", lambda: len(run.events("restart")) > num_restarts, BOUND_S)
    left_s = bound_s - (time.monotonic() - killed_s)
    run.wait_for("all to work again", lambda: len(at_work(run)) == NUM_PROCESSES and at_work(run) != before, left_s)
    run.wait_for_steps(STEPS_AFTER)
    return time.monotonic() - killed_s


@pytest.mark.fault("K", "kill -9 of each role in turn, in one run", full=True)
def test_a_run_recovers_from_a_kill_of_any_role(start_run, show):
    began_s = time.monotonic()
    run = start_run("--weight_sync.transport", "network", "--buffer.dispatch", "longest_first")
    run.wait_for("all processes to work", lambda: len(at_work(run)) == NUM_PROCESSES)
    started_s = time.monotonic() - began_s
    actor_bound_s = max(BOUND_S, 2 * started_s)
    deaths = {
        "buffer": lambda: run.kill("buffer"),
        "weights": lambda: run.kill("weights"),
        "ranker": lambda: run.kill("ranker"),
        "first stage": lambda: run.kill("stage", 0),
        "last stage": lambda: run.kill("stage", 1),
        "actor": lambda: run.kill("actor", 1),
    }
    bounds_s = {role: actor_bound_s if "actor" in role else BOUND_S for role in deaths}
    recovered_s = {role: seconds_to_recover(run, kill, bounds_s[role]) for role, kill in deaths.items()}
    texts = [event["text"] for event in run.events("restart")]
    assert len(texts) == len(deaths), texts
    summary = run.end(now=True)
    assert (summary["ledger_gap"], summary["lag_max"] <= 4) == (0, True)
    each = ", ".join(f"{role} {seconds:.0f} s" for role, seconds in recovered_s.items())
    show(f"recovered after {each} (the run had started in {started_s:.0f} s); ledger gap 0")


RAY_PROCESSES = {
    "Ray GCS": "gcs_server",
    "Ray node manager": "raylet/raylet",
}


@pytest.mark.fault("K", "kill -9 of Ray's own processes", full=True)
@pytest.mark.parametrize("name", RAY_PROCESSES)
def test_a_run_ends_within_a_minute_if_ray_is_killed_and_reports_it(start_run, show, name):
    run = start_run()
    family = descendants(run.process)
    (victim,) = [each for each in family if RAY_PROCESSES[name] in command_of(each)]
    killed_s = time.monotonic()
    victim.kill()
    output, _ = run.process.communicate(timeout=BOUND_S)
    ended_s = time.monotonic() - killed_s
    assert run.process.returncode == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("leeway: ")]
    assert re.search(rf"the Ray .* pid {victim.pid}\) died, .*; see .*/logs/", error), output
    assert "Traceback" not in output
    assert wait_for_end(family) == []
    show(f"{name}: ended after {ended_s:.0f} s: '{error.removeprefix('leeway: ').split(', and')[0]}'")


@pytest.mark.fault("K", "kill -9 of the command itself", full=True)
def test_all_processes_exit_within_a_minute_after_the_command_is_killed(start_run, show):
    run = start_run()
    family = descendants(run.process)
    os.kill(run.process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    run.process.communicate(timeout=BOUND_S)
    assert wait_for_end(family, timeout_s=BOUND_S) == []
    ended_s = time.monotonic() - killed_s
    with_store = run.ledger()
    assert with_store["committed"] > 0
    show(f"all of its {len(family)} processes ended after {ended_s:.0f} s")
