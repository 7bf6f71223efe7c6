"""Real runs with pools: actors come and go while it trains, and a pool that fits nowhere is told at once."""

import json
import subprocess
import sys

import pytest

from tests.e2e.real_run import ROOT, descendants, start, wait_for_end
from tests.faults.live_run import LiveRun

pytestmark = pytest.mark.timeout(600)

SMALL_POOL = ("--actors.num_actors", "1", "--pools.small.role", "actors", "--pools.small.cpus", "0.25")


@pytest.fixture
def run(tmp_path):
    """A run with one actor in its only pool, for as long as the test wants."""
    live = LiveRun(tmp_path, "--learner.num_steps", "100000", *SMALL_POOL)
    live.wait_for_steps(3)
    yield live
    live.close()


def states(run: LiveRun) -> dict[str, str]:
    status = json.loads((run.folder / "status.json").read_text())
    return {actor["name"]: actor["state"] for actor in status["actors"]}


def scale(run: LiveRun, count: int, pool: str = "small") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", "scale", str(run.folder), "--pool", pool, "--count", str(count)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_actors_come_and_go_while_the_run_trains_and_nothing_is_lost(run):
    more = scale(run, 2)
    assert (more.returncode, more.stdout) == (0, "pool 'small' had 1 actors and is to have 2\n"), more.stderr
    run.wait_for("a second actor", lambda: states(run) == {"actor-0": "working", "actor-1": "working"})
    run.wait_for("its samples", lambda: any(each["actor"] == "actor-1" for each in run.trajectories()), every_s=2.0)
    assert scale(run, 1).returncode == 0
    run.wait_for("it to leave", lambda: states(run) == {"actor-0": "working"})
    assert [event["kind"] for event in run.events("left")] == ["left"]
    for count, pool, why in ((0, "small", "keep 1"), (2, "large", "no pool 'large'")):
        refused = scale(run, count, pool)
        assert refused.returncode == 2
        assert why in refused.stderr
    run.wait_for_steps(5)
    summary = run.end(now=True)
    assert (summary["ledger_gap"], summary["lag_max"] <= 4) == (0, True)
    assert "lease expired" not in summary["failed_by_reason"], "what it had leased was not handed back"


def test_a_pool_that_no_host_has_room_for_ends_the_start_with_what_was_asked_for_and_what_there_is(tmp_path):
    process = start(tmp_path, *SMALL_POOL, "--pools.small.gpus", "8")
    family = descendants(process)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    (why,) = [line for line in output.splitlines() if line.startswith("leeway: ")]
    assert "pool 'small' asks for 1 x {CPU: 0.25, GPU: 8, pool_small: 0.001}" in why
    assert "Free are: " in why
    assert "of 1 pool_small" in why
    assert wait_for_end(family, timeout_s=10) == []
