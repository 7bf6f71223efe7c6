"""One real run from its first step to its report: observed, scaled, interrupted, killed and resumed.

Ray, vLLM, LMDB and ZeroMQ are real; the sockets require keys, and weights are sent over the network. All tests use one
run, in the order of this file, and read its files. After a failed test, all later tests are skipped.
"""

import contextlib
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import zmq
from safetensors.torch import load_file

import leeway
from leeway.buffer import protocol as p
from leeway.buffer.offline.inspect import Inspection, check_store, export
from leeway.launch.observe.trace import read
from leeway.learner.checkpoint_files import steps_in
from tests.constants import environment
from tests.full import FULL
from tests.world.command import leeway_here
from tests.world.files import json_rows
from tests.world.live_run import LIMIT_S, ROOT, LiveRun, assert_ended_in_order, descendants, wait_for_end
from tests.world.ports import free_port
from tests.world.terminal import Terminal

pytestmark = pytest.mark.timeout(1200)

COLLECTIVE_TIMEOUT_S = 12
ENDLESS = (
    *("--learner.num_steps", "100000", "--learner.checkpoint_every", "5"),
    *("--launch.host", "127.0.0.1", "--weight_sync.transport", "network"),
    *("--actors.num_actors", "1"),
    *("--pools.first.role", "actors", "--pools.first.count", "1", "--pools.first.cpus", "0.25"),
    *("--actors.eval_every", "10"),
)
LAST_STEPS = 32
"""Number of steps of the run after its last resume; the profile of the run needs 50 measured steps of the engine."""
REWARD = """
import time
from pathlib import Path

SLOW = Path(__file__).with_name("slow")

def exact(prompts, completions, answer, **columns):
    if SLOW.exists():
        time.sleep(2)
    return [float(given.strip() == right) for given, right in zip(completions, answer)]
"""
"""Code of the task's reward, which slows down the run while its folder contains a file `slow`."""
LOSS = """
from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np

from leeway.algorithms.base import Algorithm, LossInputs, LossOutput
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig, trajectory_balance
from beside import Shares


class Mine(TrajectoryBalanceConfig):
    type: str
    shares: Shares = Shares(0.25)


def mine(config: Mine, inputs: LossInputs) -> LossOutput:
    found = trajectory_balance(config, inputs)
    assert type(config.shares) is Shares
    own = {"mine/share": Decimal(config.shares.of_mine), "mine/samples": np.int64(inputs.num_sequences)}
    return replace(found, measured={**found.measured, **own})


class Oldest:
    def choose(self, candidates, num_groups, random, taken=frozenset()):
        return [key.group_id for key in candidates.ready if key.group_id not in taken][:num_groups]


MINE, oldest = Algorithm(Mine, mine), Oldest()
"""
"""A user's file that defines the loss of the demo and the default sampler."""
BESIDE = """
from dataclasses import dataclass


@dataclass
class Shares:
    of_mine: float
"""


class Life(LiveRun):
    """The run, and state that a test passes to later tests."""

    def __init__(self, folder: Path) -> None:
        self.prometheus_port = free_port()
        reward, self._slow = folder / "reward.py", folder / "slow"
        reward.write_text(REWARD)
        (folder / "mine.py").write_text(LOSS)
        (folder / "beside.py").write_text(BESIDE)
        own = ("--algorithm.type", f"{folder}/mine.py:MINE", "--buffer.sampler", f"{folder}/mine.py:oldest")
        rewarded = ("--task.rewards", json.dumps([f"{reward}:exact"]), "--actors.reward_processes", "1")
        super().__init__(folder, *ENDLESS, *rewarded, *own, "--tracking.prometheus_port", str(self.prometheus_port))
        self.failed = ""
        """Name of the test that failed; '' if no test failed."""
        self.family: list[psutil.Process] = []
        self.acknowledged: dict[tuple, dict] = {}
        self.step_when_killed = 0
        self.output = ""

    def resume(self, *overrides: object) -> None:
        """Start `leeway resume`, as `start` does for `leeway train`."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leeway", "resume", str(self.folder), *map(str, overrides)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def last_step(self) -> int:
        return self.steps()[-1]["step"]

    def wait_for_restart(self, text: str) -> None:
        """Wait until the run reports the restart of a role and then trains three more steps."""
        self.wait_for(f"the restart: {text}", lambda: any(text in each["text"] for each in self.events("restart")))
        self.wait_for_steps(3)

    def actors(self) -> dict[str, dict]:
        """Return the status of each actor by name."""
        return {each["name"]: each for each in json.loads((self.folder / "status.json").read_text())["actors"]}

    @contextlib.contextmanager
    def slowed_down(self) -> Iterator[None]:
        """Slow down rewards within the block, so that the run leaves enough CPU time for an engine that starts."""
        self._slow.touch()
        yield
        self._slow.unlink()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment({"leeway.learner.mesh.COLLECTIVE_TIMEOUT_S": COLLECTIVE_TIMEOUT_S}).items():
            patched.setenv(name, value)
        life = Life(tmp_path_factory.mktemp("life"))
        yield life
        life.close()


@pytest.fixture(autouse=True)
def needs_earlier_tests(run: Life, request):
    """Skip the test if an earlier test failed."""
    if run.failed:
        pytest.skip(f"{run.failed} failed")
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failed_before:
        run.failed = request.node.name


def acknowledged(run: Life, capsys: pytest.CaptureFixture[str]) -> dict[tuple, dict]:
    """Return every stored trajectory by actor, epoch and sequence number, which identify its acknowledgement."""
    out = run.folder.parent / "acknowledged.parquet"
    status, *output = leeway_here(capsys, "buffer", "export", run.folder, out)
    assert status == 0, output
    return {(row["actor"], row["epoch"], row["seq"]): row for row in pq.read_table(out).to_pylist()}


# --- training -----------------------------------------------------------------------------------------


def test_a_run_trains_on_concurrent_samples_within_the_bound(run: Life):
    run.wait_for_steps(12)
    # If steps are short, few samples run during an update of the weights: actors get leases after a publication, and
    # most samples end before the next publication.
    run.wait_for("a sample across an update", lambda: any(row["lag/in_flight"] > 0 for row in run.steps()))
    rows = run.steps()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["buffer/ledger_gap"] for row in rows} == {0}
    assert 0 < max(row["lag/token_max"] for row in rows) <= 4
    assert rows[0]["mismatch/lag0_tokens"] > 0, "step 1 trains only on version 0"
    assert {(row["mine/share"], row["mine/samples"]) for row in rows} == {(0.25, 64)}
    for row in rows:
        assert (row["mismatch/lag0_abs"] is None) == (row["mismatch/lag0_tokens"] == 0)
        assert row["mismatch/lag0_abs"] is None or row["mismatch/lag0_abs"] < 1e-3


def test_files_and_ports_of_a_run_are_private(run: Life):
    family = [psutil.Process(run.process.pid), *descendants(run.process)]
    listening = {address for each in family for address in listening_on(each)}
    assert listening, "no process listens: the test proves nothing"
    assert not [ip for ip, _ in listening if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
    # unlike rglob, os.walk tolerates a version of weights that is deleted during the walk
    everything = [Path(at, name) for at, folders, files in os.walk(run.folder) for name in (*folders, *files)]
    ports = {port for ip, port in listening if ip == "127.0.0.1"}
    services = {int((run.folder / name).read_text()) for name in ("buffer/port", "weights/PORT")}
    assert services <= ports, "a service does not listen on its port"
    assert ports_without_keys(ports) == []
    assert len(everything) > 50
    assert not [path for path in (run.folder, *everything) if is_open_to_others(path)]


def test_status_metrics_top_and_export_work_during_a_run(run: Life, tmp_path, request, capsys):
    status, output, errors = leeway_here(capsys, "status", run.folder, "--json")
    assert status == 0, errors
    document = json.loads(output)
    assert (document["phase"], document["gone"], document["ended"]) == ("training", "", None)
    assert [each["state"] for each in document["actors"]] == ["working"]
    assert all(each["pid"] and each["host"] for each in document["actors"] + document["stages"])
    assert [pool["wanted"] for pool in document["pools"]] == [1]
    assert sum(document["lags"]["first"].values()) > 0
    assert max(map(int, document["lags"]["first"])) <= document["max_lag"]
    assert document["buffer"]["ledger"]["gap"] == 0

    with urllib.request.urlopen(f"http://127.0.0.1:{run.prometheus_port}/metrics", timeout=60) as answer:
        served = answer.read().decode()
    assert 'leeway_actor_tokens_per_s{actor="actor-0",pool="first"}' in served
    assert "\nleeway_lag_token_max " in served

    terminal = Terminal([sys.executable, "-m", "leeway", "top", str(run.folder)], 80, 24)
    request.addfinalizer(terminal.close)
    terminal.wait_for(lambda grid: any("groups ready" in line for line in grid.lines))
    step = terminal.grid.lines[1]
    assert step.startswith("step ")
    terminal.wait_for(lambda grid: grid.lines[1].startswith("step ") and grid.lines[1] != step)
    assert not terminal.grid.overflowed
    terminal.press("q")
    assert terminal.end() == 0

    status, _, errors = leeway_here(capsys, "export", run.folder, tmp_path / "model")
    assert status == 0, errors
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "model").iterdir()}
    assert run.process.poll() is None, "the export ended the run"


def is_back(actor: dict, old: psutil.Process) -> bool:
    """Return whether the actor works in a new process; the status may still describe the old process."""
    return actor["state"] == "working" and actor["pid"] != old.pid


def test_actors_can_be_added_terminated_and_removed(run: Life, capsys):
    with run.slowed_down():
        more = leeway_here(capsys, "scale", run.folder, "--pool", "first", "--count", 2)
        assert more[:2] == (0, "pool 'first' scales from 1 to 2 actors\n"), more
        run.wait_for("samples of the new actor", lambda: run.actors().get("actor-1", {}).get("acknowledged"))
        old, *_ = run.processes("actor", 1)
        before = run.steps()[-1]
        old.terminate()  # while its samples wait for slow rewards; the actor restarts after its exit
        (left,) = run.wait_for("an actor to leave", lambda: run.events("left"))
    # on a busy machine, the grace period can end before the buffer responds
    lost = r"()" if FULL else r"(, [\d,]+ tokens lost)?"
    match = re.fullmatch(rf"actor\.1 exited on SIGTERM, (\d+) samples? requeued{lost}", left["text"])
    assert wait_for_end([old], timeout_s=30) == []
    if not match[2]:
        assert (count := int(match[1])) > 0
        run.wait_for("the ledger", lambda: run.steps()[-1]["buffer/requeued"] >= before["buffer/requeued"] + count)
        row = run.steps()[-1]
        assert row["buffer/requeued"] == before["buffer/requeued"] + count
        assert row["buffer/failed_lease"] == before["buffer/failed_lease"]
    with run.slowed_down():
        run.wait_for("the actor's restart", lambda: is_back(run.actors()["actor-1"], old))
    assert (run.actors()["actor-1"]["restarts"], run.events("restart")) == (0, []), "a planned exit counts as a restart"
    before = run.steps()[-1]
    assert leeway_here(capsys, "scale", run.folder, "--pool", "first", "--count", 1)[0] == 0
    for count, pool, why in ((0, "first", "keep at least 1"), (2, "second", "unknown pool 'second'")):
        status, _, refused = leeway_here(capsys, "scale", run.folder, "--pool", pool, "--count", count)
        assert status == 2
        assert why in refused
    run.wait_for("an actor to leave", lambda: run.actors().keys() == {"actor-0"})
    assert run.actors()["actor-0"]["state"] == "working"
    left = [each["text"] for each in run.events("left")]
    assert len(left) == 2
    run.wait_for_steps(3)
    after = run.wait_for("the actors' columns", lambda: [row for row in run.steps() if "overlap/frac" in row])[-1]
    if FULL or "lost" not in " ".join(left):
        assert after["buffer/failed_lease"] == before["buffer/failed_lease"]
        assert after["pool/first/tokens_lost"] == 0


# --- restarts of roles ---------------------------------------------------------------------------------


def test_a_killed_service_or_actor_is_restarted(run: Life):
    for role, text in (("buffer", "the buffer service exited"), ("weights", "the weight service exited")):
        (old, *_) = run.processes(role)
        run.kill(role)
        run.wait_for_restart(text)
        # a new process may have no command line yet
        run.wait_for(f"another {role}", lambda role=role, old=old: [e for e in run.processes(role) if e.pid != old.pid])
    run.kill("actor", 0)
    run.wait_for_restart("actor.0 died")


def test_stages_restart_together_and_without_other_roles(run: Life):
    others = [each for role in ("buffer", "weights", "actor") for each in run.processes(role)]
    killed = run.processes("stage", 0)[0]
    killed.kill()
    run.wait_for("the stages' restart", lambda: run.steps()[-1]["restarts"] == 1)
    hung = run.processes("stage", 1)[0]
    hung.suspend()
    run.wait_for("their second restart", lambda: run.steps()[-1]["restarts"] == 2)
    assert all(other.is_running() for other in others), "another role was restarted"
    assert wait_for_end([killed, hung]) == [], "a replaced process is still alive"
    restarts = [each["text"] for each in run.events("restart") if each["text"].startswith("stage")]
    died = "died" if FULL else "(died|did not respond to the other ranks)"  # a busy Ray reports a death late
    assert re.match(rf"stage\.[01] {died} .* all stages restart from the checkpoint of step", restarts[0])
    assert re.match(rf"stage\.[01] did not respond to the other ranks .* within {COLLECTIVE_TIMEOUT_S} s", restarts[1])


# --- end and resume -------------------------------------------------------------------------------------


def test_an_interrupt_ends_a_run_with_a_checkpoint_and_without_a_process(run: Life):
    family = descendants(run.process)
    os.killpg(run.process.pid, signal.SIGINT)  # every process gets the signal, as from a terminal
    output, _ = run.process.communicate(timeout=LIMIT_S)
    assert run.process.returncode == 130, output
    assert wait_for_end(family) == []
    assert_ended_in_order(run.folder)


def test_status_of_a_killed_run_names_the_command_to_resume_it(run: Life, request, capsys):
    run.resume("--learner.checkpoint_every", 4)
    run.wait_for_steps(8)
    terminal = Terminal([sys.executable, "-m", "leeway", "top", str(run.folder)], 80, 24)
    request.addfinalizer(terminal.close)
    terminal.wait_for(lambda grid: any("groups ready" in line for line in grid.lines))
    family = descendants(run.process)
    assert family
    run.process.kill()
    run.process.communicate(timeout=LIMIT_S)
    terminal.wait_for(lambda grid: "exited at" in grid.lines[0])
    terminal.press("q")
    assert terminal.end() == 0
    assert wait_for_end(family) == []
    status, output, _ = leeway_here(capsys, "status", run.folder)
    assert status == 1
    assert f"without a final status: run `leeway resume {run.folder}`" in output
    # a checkpoint may be of a later step than the last reported step
    run.acknowledged, run.step_when_killed = (
        acknowledged(run, capsys),
        max(run.last_step, *steps_in(run.folder / "checkpoints")),
    )
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "l')  # a partial row, as after a power failure


def test_a_run_resumed_on_another_layout_trains_to_its_end(run: Life):
    num_steps = run.step_when_killed + LAST_STEPS
    # these overrides keep the other keys of the run's config
    run.resume("--learner.num_stages", 1, "--learner.num_steps", num_steps)
    run.output, _ = run.process.communicate(timeout=LIMIT_S)
    assert run.process.returncode == 0, run.output
    assert "changed: learner.num_stages = 1 (was 2)" in run.output
    assert len(json.loads((run.folder / "run.json").read_text())["started_s"]) == 3
    kept = tomllib.loads((run.folder / "config.toml").read_text())
    assert kept["learner"]["checkpoint_every"] == 4, "the first resume set this key"


# --- results --------------------------------------------------------------------------------------------


def test_no_acknowledged_sample_is_lost_or_counted_twice(run: Life, capsys):
    names = ("group_id", "sample_index", "prompt_id", "token_ids", "logprobs", "reward", "spans")
    before, after = run.acknowledged, acknowledged(run, capsys)
    assert len(before) > 1000
    assert {actor for actor, _, _ in before} == {"actor-0", "actor-1"}
    lost = [key for key in before if key not in after or any(before[key][n] != after[key][n] for n in names)]
    assert lost == []
    status, *output = leeway_here(capsys, "buffer", "verify", run.folder)
    assert status == 0, output


def test_the_api_reads_the_status_metrics_samples_and_model_of_a_run(run: Life, capsys):
    found = leeway.load_run(run.folder).wait()
    assert found.status().ended.exit_status == 0
    assert found.metrics()["step"].to_pylist() == [row["step"] for row in run.steps()]
    rewards = {(row["actor"], row["epoch"], row["seq"]): row["reward"] for row in acknowledged(run, capsys).values()}
    samples = found.samples(["actor", "epoch", "seq", "reward"]).to_pylist()
    assert {(row["actor"], row["epoch"], row["seq"]): row["reward"] for row in samples} == rewards
    with pytest.raises(leeway.LeewayError, match=r"no such column: .*rewards"):
        found.samples(["rewards"])
    assert (found.model_path / "model.safetensors").is_file()


def test_the_output_of_a_run_names_what_starts_and_each_path_once(run: Life):
    assert "loading vLLM in 1 actor and the model in 1 learner stage" in run.output
    named = [line for line in run.output.splitlines() if str(run.folder) in line and "/logs/" not in line]
    assert [line.rpartition(str(run.folder))[2] for line in named] == ["", "/model", "/report.html"]


def test_the_summary_covers_all_launches_of_a_run(run: Life):
    summary = json.loads((run.folder / "summary.json").read_text())
    num_steps = run.step_when_killed + LAST_STEPS
    assert (summary["num_steps"], summary["ledger_gap"], summary["num_heldout"]) == (num_steps, 0, 16)
    assert [row["step"] for row in run.steps()] == list(range(1, num_steps + 1)), "one row per step"
    assert {row["buffer/ledger_gap"] for row in run.steps()} == {0}
    counted = [row["restarts"] for row in run.steps()]
    assert counted == sorted(counted), "a row of a replaced learner follows a row of its successor"
    assert summary["trained_trajectories"] == summary["ledger"]["uses"] - summary["ledger"]["redone_uses"]
    # a sample whose attempts were all lost with killed processes is missing from its group
    missing = num_steps * 8 * 8 - summary["trained_trajectories"]
    assert missing <= summary["ledger"]["failed"]
    assert 0 < summary["lag_mean"] <= summary["lag_max"] <= summary["max_lag"] == 4
    assert summary["overlap_frac"] > 0
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["in_flight"] + ledger["committed"] + ledger["failed"] + ledger["requeued"]
    evaluations = json_rows(run.folder / "eval.jsonl")
    assert all(type(value) in (int, float) for row in evaluations for value in row.values())
    assert (evaluations[0]["policy_version"], evaluations[-1]["policy_version"]) == (0, num_steps)
    assert evaluations[0]["start"] == 0 < evaluations[-1]["start"]
    assert len(evaluations) >= 3, "no evaluation during the run"
    status = json.loads((run.folder / "status.json").read_text())
    assert status["buffer"]["ledger"] == ledger, "status.json must hold the final ledger"
    assert status["published"] == f"{num_steps} (start {evaluations[-1]['start']})"


def test_a_profile_of_a_run_predicts_its_throughput(run: Life, monkeypatch):
    from leeway.launch.config import load_config
    from leeway.launch.run_folder import RunFolder
    from leeway.planning import profiling
    from leeway.planning.plans import predict, world_of

    monkeypatch.setattr(profiling, "MOST_UNKNOWN", math.inf)  # the loads of a single run may be too alike
    profile = profiling.profile_of([RunFolder(run.folder)])
    assert profile.engines["first"].law.seconds(8, 80) > 0
    assert 2 <= profile.samples.lengths.mean <= 8
    assert profile.learner.score_token_s > 0, "the reference of trajectory balance must have a cost"
    predicted = predict(world_of(load_config(run.folder / "config.toml"), profile), samples=8000)
    rows = run.steps()[-LAST_STEPS + 3 :]
    seconds = rows[-1]["finished_s"] - rows[0]["finished_s"]
    measured = sum(row["batch/trajectories"] for row in rows[1:]) / seconds
    most = 2.5 if FULL else 10  # the cores may be busy during some steps
    assert 1 / most < predicted.samples_per_s / measured < most, (predicted.samples_per_s, measured)


def test_the_model_loads_in_plain_transformers_with_the_reported_accuracy(run: Life):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from leeway.actors.tasks import load_task
    from leeway.launch.config import load_config

    summary = json.loads((run.folder / "summary.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    problems = load_task(load_config(run.folder / "config.toml").task).heldout
    correct = 0
    for problem in problems:
        prompt = tokenizer(problem.text, return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        correct += tokenizer.decode(answer, skip_special_tokens=True).strip() == problem.columns["answer"]
    assert correct / len(problems) == pytest.approx(summary["accuracy_after"], abs=0.07)


def test_an_export_equals_that_of_the_run_and_skips_a_damaged_checkpoint(run: Life, tmp_path, capsys):
    status, _, error = leeway_here(capsys, "resume", run.folder)
    assert status == 2
    assert "raise it to continue, as in --learner.num_steps" in error
    assert leeway_here(capsys, "export", run.folder, tmp_path / "newest")[0] == 0
    same_weights(tmp_path / "newest", run.folder / "model")
    newest = sorted((run.folder / "checkpoints").glob("step-*"))[-1]
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, _, error = leeway_here(capsys, "export", run.folder, tmp_path / "out", "--step", int(newest.name[5:]))
    assert status == 2
    assert "is damaged: checksum mismatch; give a step that has a checkpoint" in error
    status, _, error = leeway_here(capsys, "export", run.folder, tmp_path / "out")
    assert status == 0
    assert "using the previous checkpoint" in error


def test_the_last_lines_are_report_and_verdict_and_the_timeline_has_every_role(run: Life):
    verdict = json.loads((run.folder / "summary.json").read_text())["verdict"]
    assert verdict.startswith(("learned: greedy 0.", "no improvement: greedy 0.", "worse: greedy 0."))
    assert run.output.splitlines()[-2:] == [f"report: {run.folder / 'report.html'}", verdict]
    assert "Missing data" not in (run.folder / "report.html").read_text()
    events = list(read(run.folder / "timeline.json"))
    kinds = {(event.who, event.cat) for event in events if event.ph == "X"}
    of_actors = {(f"actor-{number}", kind) for number in (0, 1) for kind in ("generate", "update")}
    assert kinds >= of_actors | {("learner", "step"), ("learner", "wait_for_batch"), ("evaluation", "evaluate")}
    assert ("launch", "phase") in kinds
    assert ("buffer-0", "groups ready") in {(event.who, event.name) for event in events if event.ph == "C"}


def test_the_folder_of_a_run_cannot_be_reused(run: Life, capsys):
    place = ("--run.dir", run.folder.parent, "--run.name", run.folder.name)
    status, _, error = leeway_here(capsys, "train", "examples/demo.toml", *place)
    assert status == 2
    assert "already exists" in error


# --- reuse of its samples -------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("loss", ["trajectory_balance", "oapl"])
def test_another_run_trains_on_the_samples_of_a_run_with_any_loss_and_without_actors(run: Life, tmp_path, loss):
    store = run.folder / "buffer" / "data.mdb"
    before = store.read_bytes()
    command = (
        *(sys.executable, "-m", "leeway"),
        *("train", "examples/demo.toml", "--from", run.folder, "--run.dir", tmp_path, "--run.name", "offline"),
        *("--algorithm.type", loss, "--weight_sync.max_lag", "unbounded", "--actors.num_actors", 0),
        *("--learner.num_steps", 3, "--learner.groups_per_step", 8, "--learner.num_stages", 1),
        *("--tracking.to", "[]"),
    )
    trained = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert store.read_bytes() == before
    folder = tmp_path / "offline"
    assert not list((folder / "logs").glob("actor.*"))
    steps = [row for row in json_rows(folder / "metrics.jsonl") if "loss" in row]
    assert [(row["lag/token_max"], row["buffer/ledger_gap"]) for row in steps] == [(1, 0), (2, 0), (3, 0)]
    names = ("group_id", "sample_index", "token_ids", "logprobs", "reward", "spans")
    recorded, samples = (trajectories(each, tmp_path / "samples.parquet") for each in (run.folder, folder))
    assert samples.select(names).equals(recorded.select(names))
    first = samples.filter(pc.equal(samples["trained_step"], 1)).to_pylist()
    assert len({row["group_id"] for row in first}) == 8
    by_hand = loss_and_gradient(first, folder)
    assert (steps[0]["loss"], steps[0]["grad_norm"]) == pytest.approx(by_hand, rel=2e-3)
    with pytest.raises(AssertionError):
        same_weights(folder / "model", ROOT / "examples" / "demo_model")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_steps"], summary["accuracy_before"], summary["accuracy_after"]) == (3, None, None)


# --- helpers --------------------------------------------------------------------------------------------


def is_open_to_others(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # just deleted
        mode = path.lstat().st_mode
        return not stat.S_ISLNK(mode) and bool(mode & 0o077)
    return False


def listening_on(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        return [tuple(each.laddr) for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []  # just exited


def ports_without_keys(ports: set[int]) -> list[int]:
    """Return the ports that reply to a request without a key."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = {port: stack.enter_context(context.socket(zmq.DEALER)) for port in ports}
        for port, socket in sockets.items():
            socket.linger = 0
            socket.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):  # the service may have refused the socket already
                socket.send(p.encode(1, p.StatusRequest()), zmq.NOBLOCK)
        time.sleep(2.0)
        answers = {port: socket.recv_multipart() for port, socket in sockets.items() if socket.poll(0)}
        # a web server of Ray answers any peer with an error that says it expects HTTP
        return [
            port for port, frames in answers.items() if b"HTTP" not in b"".join(frames) and b"Server:" not in frames[0]
        ]


def trajectories(run: Path, out: Path) -> pa.Table:
    """Return all stored trajectories in the order of their groups; assert that the store has no faults."""
    with Inspection.open(run) as inspection:
        assert check_store(inspection.store)["faults"] == []
        export(inspection, out)
    return pq.read_table(out)


def loss_and_gradient(samples: list[dict], folder: Path) -> tuple[float, float]:
    """Return loss and gradient norm on these samples at the first version, computed with plain Transformers."""
    from transformers import AutoModelForCausalLM

    from leeway.algorithms.base import LossInputs
    from leeway.algorithms.registry import loss_for
    from leeway.launch.config import load_config

    config = load_config(folder / "config.toml")
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    logprobs = []
    for row in samples:
        tokens, start = torch.tensor(row["token_ids"]), row["prompt_length"]
        scores = model(tokens[None]).logits[0].log_softmax(-1)[start - 1 : -1]
        logprobs.append(scores.gather(1, tokens[start:, None])[:, 0])
    logprobs_T = torch.cat(logprobs)
    groups = sorted({row["group_id"] for row in samples})
    now_T = logprobs_T.detach()
    inputs = LossInputs(
        logprobs_T=logprobs_T,
        proximal_logprobs_T=now_T,
        behaviour_logprobs_T=torch.tensor([each for row in samples for each in row["logprobs"]], dtype=torch.float64),
        reference_logprobs_T=now_T,  # the initial model
        sequence_T=torch.tensor([number for number, each in enumerate(logprobs) for _ in each]),
        group_B=torch.tensor([groups.index(row["group_id"]) for row in samples]),
        rewards_B=torch.tensor([row["reward"] for row in samples], dtype=torch.float64),
        finished_B=torch.tensor([row["finish_reason"] == "stop" for row in samples]),
        num_groups=len(groups),
        prompt_B=torch.tensor([row["prompt_id"] for row in samples]),
    )
    loss = loss_for(config.algorithm)(inputs).loss
    loss.backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


def same_weights(ours: Path, theirs: Path) -> None:
    """Assert that the weights of two Hugging Face folders are equal, tensor by tensor."""
    found, expected = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
