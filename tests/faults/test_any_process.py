"""Every process of a run is killed in turn: the run heals soon, or ends within a minute and says who died.

Soon is a minute. An engine has twice the time of its run's start where that is longer: to import vLLM in two processes
is half a minute of work, for which it now competes with all that trains.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.world.live_run import LiveRun, command_of, descendants, wait_for_end

pytestmark = pytest.mark.timeout(900)

BOUND_S = 60.0
NUM_PROCESSES = 7
"""Two actors, two stages, two services, and the ranker."""
STEPS_AFTER = 5
"""So many further steps, and every process at work, are what healed means."""


@pytest.fixture
def start_run(tmp_path):
    """`start_run(*overrides)`: a run that trains, and ends with the test."""
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
    """The processes that work, with their pids, as the run itself says."""
    status = json.loads((run.folder / "status.json").read_text())
    each = [*status["services"], *status["stages"], *status["actors"]]
    return {process["name"]: process["pid"] for process in each if process["state"] == "working" and process["pid"]}


def seconds_to_heal(run: LiveRun, kill: Callable[[], None], bound_s: float) -> float:
    """Kill, and wait until all of the run works as before, with steps to show for it; a failed test past the bound."""
    run.wait_for("all to work", lambda: len(at_work(run)) == NUM_PROCESSES)
    before, num_restarts = at_work(run), len(run.events("restart"))
    killed_s = time.monotonic()
    kill()
    run.wait_for("the death to be told", lambda: len(run.events("restart")) > num_restarts, BOUND_S)
    left_s = bound_s - (time.monotonic() - killed_s)
    run.wait_for("all to work again", lambda: len(at_work(run)) == NUM_PROCESSES and at_work(run) != before, left_s)
    run.wait_for_steps(STEPS_AFTER)
    return time.monotonic() - killed_s


@pytest.mark.fault("K", "kill -9 of each role in turn, in one run", full=True)
def test_a_run_heals_from_the_death_of_any_role(start_run, show):
    began_s = time.monotonic()
    run = start_run("--weight_sync.transport", "network", "--buffer.dispatch", "longest_first")
    run.wait_for("all to work", lambda: len(at_work(run)) == NUM_PROCESSES)
    started_s = time.monotonic() - began_s
    engine_bound_s = max(BOUND_S, 2 * started_s)
    deaths = {
        "buffer": lambda: run.kill("buffer"),
        "weights": lambda: run.kill("weights"),
        "ranker": lambda: run.kill("ranker"),
        "first stage": lambda: run.kill("stage", 0),
        "last stage": lambda: run.kill("stage", 1),
        "actor": lambda: run.kill("actor", 1),
        "engine of an actor": lambda: engine_of(run, 0).kill(),
    }
    bounds_s = {who: engine_bound_s if "actor" in who else BOUND_S for who in deaths}
    healed_s = {who: seconds_to_heal(run, kill, bounds_s[who]) for who, kill in deaths.items()}
    told = [event["text"] for event in run.events("restart")]
    assert len(told) == len(deaths), told
    summary = run.end(now=True)
    assert (summary["ledger_gap"], summary["lag_max"] <= 4) == (0, True)
    each = ", ".join(f"{who} {seconds:.0f} s" for who, seconds in healed_s.items())
    show(f"healed after {each} (the run had started in {started_s:.0f} s); ledger gap 0")


def engine_of(run: LiveRun, actor: int) -> psutil.Process:
    return next(each for each in run.processes("actor", actor) if "EngineCore" in command_of(each))


RAYS_OWN = {
    "Ray's control store": "gcs_server",
    "Ray's node manager": "raylet/raylet",
}


@pytest.mark.fault("K", "kill -9 of Ray's own processes", full=True)
@pytest.mark.parametrize("who", RAYS_OWN)
def test_a_run_whose_ray_is_killed_ends_within_a_minute_and_says_so(start_run, show, who):
    run = start_run()
    family = descendants(run.process)
    (victim,) = [each for each in family if RAYS_OWN[who] in command_of(each)]
    killed_s = time.monotonic()
    victim.kill()
    output, _ = run.process.communicate(timeout=BOUND_S)
    ended_s = time.monotonic() - killed_s
    assert run.process.returncode == 1, output
    (why,) = [line for line in output.splitlines() if line.startswith("leeway: ")]
    assert re.search(rf"Ray's .* process {victim.pid}\) died, .*; see .*/logs/", why), output
    assert "Traceback" not in output
    assert wait_for_end(family) == []
    show(f"{who}: ended after {ended_s:.0f} s: '{why.removeprefix('leeway: ').split(', and')[0]}'")


@pytest.mark.fault("K", "kill -9 of the command itself", full=True)
def test_when_the_command_is_killed_all_else_ends_within_a_minute(start_run, show):
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
