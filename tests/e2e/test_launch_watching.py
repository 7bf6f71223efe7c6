"""Looking into a real run from outside: its files, a terminal, Prometheus; and after its command was killed."""

import json
import subprocess
import sys
import urllib.request

from tests.e2e.real_run import ROOT, command_of, descendants, start, wait_for_end, wait_for_steps
from tests.ports import free_port
from tests.terminal import Terminal


def leeway(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_live_run_is_seen_from_outside_and_one_whose_command_is_killed_is_said_to_be_gone(tmp_path, request):
    port = free_port()
    run = str(tmp_path / "run")
    process = start(tmp_path, "--learner.num_steps", "100000", "--tracking.prometheus_port", str(port))
    request.addfinalizer(process.kill)
    wait_for_steps(process, tmp_path, 6, timeout_s=150)  # the first checkpoint is of step 5

    asked = leeway("status", run, "--json")
    assert asked.returncode == 0, asked.stderr
    document = json.loads(asked.stdout)
    assert (document["phase"], document["gone"], document["ended"]) == ("training", "", None)
    assert [each["state"] for each in document["actors"]] == ["working", "working"]
    assert all(each["pid"] and each["host"] for each in document["actors"] + document["stages"])
    assert [pool["wanted"] for pool in document["pools"]] == [2]
    assert sum(document["lags"]["actors"].values()) > 0
    assert max(map(int, document["lags"]["actors"])) <= document["max_lag"]
    assert document["buffer"]["ledger"]["gap"] == 0

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        served = answer.read().decode()
    assert 'leeway_actor_tokens_per_s{actor="actor-1",pool="actors"}' in served
    assert "\nleeway_lag_token_max " in served

    terminal = Terminal([sys.executable, "-m", "launch.cli", "top", run], 80, 24)
    request.addfinalizer(terminal.close)
    terminal.wait_for(lambda grid: any("groups ready" in line for line in grid.lines))
    step = terminal.grid.lines[1]
    assert " step " in step
    terminal.wait_for(lambda grid: " step " in grid.lines[1] and grid.lines[1] != step)
    assert not terminal.grid.overflowed

    exported = leeway("export", run, str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "model").iterdir()}
    assert process.poll() is None, "the run ended when it was exported from"

    family = descendants(process)
    assert any("EngineCore" in command_of(each) for each in family)
    process.kill()
    process.communicate(timeout=30)
    terminal.wait_for(lambda grid: "is gone since" in grid.lines[0])
    terminal.press("q")
    assert terminal.end() == 0
    asked = leeway("status", run)
    assert asked.returncode == 1
    assert f"nothing runs; `leeway resume {run}` goes on" in asked.stdout
    assert wait_for_end(family, timeout_s=60) == []
