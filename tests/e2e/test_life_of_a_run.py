"""One real run from its first step to its report: watched, scaled, robbed of its roles, interrupted, killed, resumed.

Ray, vLLM, LMDB and ZeroMQ are real; the sockets are locked and weights travel over the network. The tests are the acts
of one life, in this order, and each reads what the run itself left behind. An act that fails ends the life: those
behind it are skipped.
"""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
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

from buffer import protocol as p
from buffer.offline.inspect import Inspection, check_store, export
from launch.observe.trace import read
from learner.checkpoint_files import steps_in
from tests.constants import environment
from tests.full import FULL
from tests.world.command import leeway_here
from tests.world.files import json_rows
from tests.world.live_run import LIMIT_S, ROOT, LiveRun, assert_ended_in_order, command_of, descendants, wait_for_end
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
LAST_STEPS = 20
"""That the run has left when it is resumed for the last time."""
REWARD = """
import time
from pathlib import Path

SLOW = Path(__file__).with_name("slow")

def exact(prompts, completions, answer, **columns):
    if SLOW.exists():
        time.sleep(2)
    return [float(given.strip() == right) for given, right in zip(completions, answer)]
"""
"""The task's own, which holds the run back where the file beside it is."""
LOSS = """
from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np

from algorithms.base import Algorithm, LossInputs, LossOutput
from algorithms.trajectory_balance import TrajectoryBalanceConfig, trajectory_balance
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
"""The demo's loss and the default sampler, out of a file of a user's."""
BESIDE = """
from dataclasses import dataclass


@dataclass
class Shares:
    of_mine: float
"""


class Life(LiveRun):
    """The run, and what an act leaves for those behind it."""

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
        """The act in which it ended."""
        self.family: list[psutil.Process] = []
        self.engine_sockets: list[Path] = []
        self.acknowledged: dict[tuple, dict] = {}
        self.step_when_killed = 0
        self.said = ""

    def resume(self, *overrides: object) -> None:
        """Start `leeway resume`, as `start` starts `leeway train`."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "resume", str(self.folder), *map(str, overrides)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def last_step(self) -> int:
        return self.steps()[-1]["step"]

    def wait_for_restart(self, who: str) -> None:
        """Until it is told that a role was started again, and the run has trained since."""
        self.wait_for(f"{who} to be started again", lambda: any(who in each["text"] for each in self.events("restart")))
        self.wait_for_steps(3)

    def actors(self) -> dict[str, dict]:
        """What is known of each, by name."""
        return {each["name"]: each for each in json.loads((self.folder / "status.json").read_text())["actors"]}

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Rewards take long for the length of a block: else an engine that starts has little of two cores."""
        self._slow.touch()
        yield
        self._slow.unlink()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment({"learner.mesh.COLLECTIVE_TIMEOUT_S": COLLECTIVE_TIMEOUT_S}).items():
            patched.setenv(name, value)
        life = Life(tmp_path_factory.mktemp("life"))
        yield life
        life.close()


@pytest.fixture(autouse=True)
def act(run: Life, request):
    """An act needs all those before it."""
    if run.failed:
        pytest.skip(f"the run's life ended in {run.failed}")
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failed_before:
        run.failed = request.node.name


def acknowledged(run: Life, capsys: pytest.CaptureFixture[str]) -> dict[tuple, dict]:
    """Every stored trajectory by the key that it was acknowledged under."""
    out = run.folder.parent / "acknowledged.parquet"
    status, *said = leeway_here(capsys, "buffer", "export", run.folder, out)
    assert status == 0, said
    return {(row["actor"], row["epoch"], row["seq"]): row for row in pq.read_table(out).to_pylist()}


# --- it lives -----------------------------------------------------------------------------------------


def test_it_trains_on_what_actors_sample_meanwhile_within_the_bound(run: Life):
    run.wait_for_steps(12)
    # rarely where steps are short: an actor that waits for a lease gets it when a version comes out
    run.wait_for("what lived through an update", lambda: any(row["lag/in_flight"] > 0 for row in run.steps()))
    rows = run.steps()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["buffer/ledger_gap"] for row in rows} == {0}
    assert 0 < max(row["lag/token_max"] for row in rows) <= 4
    assert rows[0]["mismatch/lag0_tokens"] > 0, "step 1 trains on version 0 alone"
    assert {(row["mine/share"], row["mine/samples"]) for row in rows} == {(0.25, 64)}
    for row in rows:
        assert (row["mismatch/lag0_abs"] is None) == (row["mismatch/lag0_tokens"] == 0)
        assert row["mismatch/lag0_abs"] is None or row["mismatch/lag0_abs"] < 1e-3


def test_it_is_its_owners_alone_and_a_stranger_is_not_answered(run: Life):
    family = [psutil.Process(run.process.pid), *descendants(run.process)]
    listening = {address for each in family for address in listening_on(each)}
    assert listening, "it listens on nothing: the test shows nothing"
    assert not [ip for ip, _ in listening if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
    # os.walk passes over a version of weights that goes meanwhile, which rglob does not
    everything = [Path(at, name) for at, folders, files in os.walk(run.folder) for name in (*folders, *files)]
    ports = {port for ip, port in listening if ip == "127.0.0.1"}
    services = {int((run.folder / name).read_text()) for name in ("buffer/port", "weights/PORT")}
    assert services <= ports, "the services of the buffer and of the weights listen"
    assert answered_a_stranger(ports) == []
    assert len(everything) > 50
    assert not [path for path in (run.folder, *everything) if is_open_to_others(path)]
    run.engine_sockets = folders_for_sockets(family)
    assert run.engine_sockets


def test_it_is_seen_from_outside(run: Life, tmp_path, request, capsys):
    status, said, errors = leeway_here(capsys, "status", run.folder, "--json")
    assert status == 0, errors
    document = json.loads(said)
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

    terminal = Terminal([sys.executable, "-m", "launch.cli", "top", str(run.folder)], 80, 24)
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
    assert run.process.poll() is None, "the run ended when it was exported from"


def caught_at_work(run: Life, engine: psutil.Process) -> bool:
    """Stop the engine of actor 1, so that what it runs is in the middle; one with nothing to run goes on at once.

    An engine that is stopped for longer than `UPDATE_TIMEOUT_S` counts as dead, and its actor with it.
    """

    def looked_at() -> int:
        return (run.folder / "status.json").stat().st_mtime_ns

    engine.suspend()
    stopped_at = looked_at()
    run.wait_for("a look at the actors", lambda: looked_at() > stopped_at)
    if at_work := run.actors()["actor-1"]["running"] > 0:
        return at_work
    engine.resume()
    return False


def is_back(actor: dict, told: psutil.Process) -> bool:
    """It works in another process: what is known of it is for a moment that of the one that left."""
    return actor["state"] == "working" and actor["pid"] != told.pid


def test_actors_come_and_go(run: Life, capsys):
    with run.held_back():
        more = leeway_here(capsys, "scale", run.folder, "--pool", "first", "--count", 2)
        assert more[:2] == (0, "pool 'first' had 1 actor and is to have 2\n"), more
        run.wait_for("samples of who came", lambda: run.actors().get("actor-1", {}).get("acknowledged"))
    told, *below = run.processes("actor", 1)
    (engine,) = [each for each in below if "EngineCore" in command_of(each)]
    run.wait_for("samples in its engine", lambda: caught_at_work(run, engine))
    before = run.steps()[-1]
    told.terminate()  # it is to be back once it has left
    engine.resume()
    (left,) = run.wait_for("an actor to leave", lambda: run.events("left"))
    # where others have the cores the buffer may not answer within a goodbye
    lost = r"()" if FULL else r"(, [\d,]+ tokens lost)?"
    told_us = re.fullmatch(rf"actor\.1 left by SIGTERM, (\d+) samples? handed on{lost}", left["text"])
    assert wait_for_end([told], timeout_s=30) == []
    run.wait_for("the ledger", lambda: run.steps()[-1]["buffer/handed_on"] > before["buffer/handed_on"])
    row = run.steps()[-1]
    if not told_us[2]:
        assert row["buffer/handed_on"] - before["buffer/handed_on"] == int(told_us[1])
        assert row["buffer/failed_lease"] == before["buffer/failed_lease"]
    with run.held_back():
        run.wait_for("who left to be back", lambda: is_back(run.actors()["actor-1"], told))
    assert (run.actors()["actor-1"]["restarts"], run.events("restart")) == (0, []), "it was planned"
    before = run.steps()[-1]
    assert leeway_here(capsys, "scale", run.folder, "--pool", "first", "--count", 1)[0] == 0
    for count, pool, why in ((0, "first", "keep 1"), (2, "second", "no pool 'second'")):
        status, _, refused = leeway_here(capsys, "scale", run.folder, "--pool", pool, "--count", count)
        assert status == 2
        assert why in refused
    run.wait_for("one to leave", lambda: run.actors().keys() == {"actor-0"})
    assert run.actors()["actor-0"]["state"] == "working"
    left = [each["text"] for each in run.events("left")]
    assert len(left) == 2
    run.wait_for_steps(3)
    after = run.wait_for("the actors' columns", lambda: [row for row in run.steps() if "overlap/frac" in row])[-1]
    if FULL or "lost" not in " ".join(left):
        assert after["buffer/failed_lease"] == before["buffer/failed_lease"]
        assert after["pool/first/tokens_lost"] == 0


# --- its roles die, and are started again --------------------------------------------------------------


def test_a_killed_service_or_actor_is_started_again(run: Life):
    for who, told in (("buffer", "the buffer service ended"), ("weights", "the weight service ended")):
        (old, *_) = run.processes(who)
        run.kill(who)
        run.wait_for_restart(told)
        # its process may have no command line yet
        run.wait_for(f"another {who}", lambda who=who, old=old: [e for e in run.processes(who) if e.pid != old.pid])
    run.kill("actor", 0)
    run.wait_for_restart("actor.0 died")


def test_a_stage_that_dies_or_hangs_is_started_again_with_the_others_while_all_else_carries_on(run: Life):
    others = [each for role in ("buffer", "weights", "actor") for each in run.processes(role)]
    killed = run.processes("stage", 0)[0]
    killed.kill()
    run.wait_for("the stages' restart", lambda: run.steps()[-1]["restarts"] == 1)
    hung = run.processes("stage", 1)[0]
    hung.suspend()
    run.wait_for("their second restart", lambda: run.steps()[-1]["restarts"] == 2)
    assert all(other.is_running() for other in others), "somebody else was started again"
    assert wait_for_end([killed, hung]) == [], "a process that was replaced is left behind"
    restarts = [each["text"] for each in run.events("restart") if each["text"].startswith("stage")]
    died = "died" if FULL else "(died|did not answer the others)"  # a busy Ray tells late of a death
    assert re.match(rf"stage\.[01] {died} .* all stages are started again from the checkpoint of step", restarts[0])
    assert re.match(rf"stage\.[01] did not answer the others .* within {COLLECTIVE_TIMEOUT_S} s", restarts[1])


# --- it ends, and is gone on with ------------------------------------------------------------------------


def test_one_interrupt_ends_it_with_a_checkpoint_and_without_a_process(run: Life):
    family = descendants(run.process)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does it: every process gets the signal
    output, _ = run.process.communicate(timeout=LIMIT_S)
    assert run.process.returncode == 130, output
    assert wait_for_end(family) == []
    assert_ended_in_order(run.folder)
    assert [path for path in run.engine_sockets if path.exists()] == []


def test_killed_with_its_command_it_is_gone_and_says_how_to_go_on(run: Life, request, capsys):
    run.resume("--learner.checkpoint_every", 4)
    run.wait_for_steps(8)
    terminal = Terminal([sys.executable, "-m", "launch.cli", "top", str(run.folder)], 80, 24)
    request.addfinalizer(terminal.close)
    terminal.wait_for(lambda grid: any("groups ready" in line for line in grid.lines))
    family = descendants(run.process)
    assert any("EngineCore" in command_of(each) for each in family)
    run.process.kill()
    run.process.communicate(timeout=LIMIT_S)
    terminal.wait_for(lambda grid: "is gone since" in grid.lines[0])
    terminal.press("q")
    assert terminal.end() == 0
    assert wait_for_end(family) == []
    status, said, _ = leeway_here(capsys, "status", run.folder)
    assert status == 1
    assert f"nothing runs; `leeway resume {run.folder}` goes on" in said
    # a checkpoint may be of a later step than the last that the command heard of
    run.acknowledged, run.step_when_killed = (
        acknowledged(run, capsys),
        max(run.last_step, *steps_in(run.folder / "checkpoints")),
    )
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "l')  # as a power cut leaves it


def test_resumed_on_another_layout_it_trains_to_its_end(run: Life):
    num_steps = run.step_when_killed + LAST_STEPS
    # nothing of the run's own config is lost by what is given here
    run.resume("--learner.num_stages", 1, "--learner.num_steps", num_steps)
    run.said, _ = run.process.communicate(timeout=LIMIT_S)
    assert run.process.returncode == 0, run.said
    assert "changed: learner.num_stages = 1 (was 2)" in run.said
    assert len(json.loads((run.folder / "run.json").read_text())["started_s"]) == 3
    kept = tomllib.loads((run.folder / "config.toml").read_text())
    assert kept["learner"]["checkpoint_every"] == 4, "it was said when it was resumed before"


# --- what it leaves -------------------------------------------------------------------------------------


def test_nothing_acknowledged_was_lost_and_nothing_was_counted_twice(run: Life, capsys):
    names = ("group_id", "sample_index", "prompt_id", "token_ids", "logprobs", "reward", "spans")
    before, after = run.acknowledged, acknowledged(run, capsys)
    assert len(before) > 1000
    assert {actor for actor, _, _ in before} == {"actor-0", "actor-1"}
    lost = [key for key in before if key not in after or any(before[key][n] != after[key][n] for n in names)]
    assert lost == []
    status, *said = leeway_here(capsys, "buffer", "verify", run.folder)
    assert status == 0, said


def test_the_summary_is_of_the_whole_life(run: Life):
    summary = json.loads((run.folder / "summary.json").read_text())
    num_steps = run.step_when_killed + LAST_STEPS
    assert (summary["num_steps"], summary["ledger_gap"], summary["num_heldout"]) == (num_steps, 0, 16)
    assert [row["step"] for row in run.steps()] == list(range(1, num_steps + 1)), "one row per step"
    assert {row["buffer/ledger_gap"] for row in run.steps()} == {0}
    counted = [row["restarts"] for row in run.steps()]
    assert counted == sorted(counted), "each row is that of the learner that counts"
    assert summary["trained_trajectories"] == summary["ledger"]["uses"] - summary["ledger"]["redone_uses"]
    # where all attempts at a sample were lost with those who were killed, its group goes on without it
    missing = num_steps * 8 * 8 - summary["trained_trajectories"]
    assert missing <= summary["ledger"]["failed"]
    assert 0 < summary["lag_mean"] <= summary["lag_max"] <= summary["max_lag"] == 4
    assert summary["overlap_frac"] > 0
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["in_flight"] + ledger["committed"] + ledger["failed"] + ledger["handed_on"]
    evaluations = json_rows(run.folder / "eval.jsonl")
    assert all(type(value) in (int, float) for row in evaluations for value in row.values())
    assert (evaluations[0]["policy_version"], evaluations[-1]["policy_version"]) == (0, num_steps)
    assert evaluations[0]["start"] == 0 < evaluations[-1]["start"]
    assert len(evaluations) >= 3, "no evaluation during the run"
    told = json.loads((run.folder / "status.json").read_text())
    assert told["buffer"]["ledger"] == ledger, "the ledger of the end"
    assert told["published"] == f"{num_steps} (start {evaluations[-1]['start']})"


def test_what_it_cost_is_a_profile_that_foretells_what_it_did(run: Life):
    from launch.config import load_config
    from launch.run_folder import RunFolder
    from planning.plans import predict, world_of
    from planning.profiling import profile_of

    profile = profile_of([RunFolder(run.folder)])
    assert profile.engines["first"].law.seconds(8, 80) > 0
    assert 2 <= profile.samples.lengths.mean <= 8
    assert profile.learner.score_token_s > 0, "trajectory balance has a reference"
    foretold = predict(world_of(load_config(run.folder / "config.toml"), profile), samples=8000)
    rows = run.steps()[-LAST_STEPS + 3 :]
    seconds = rows[-1]["finished_s"] - rows[0]["finished_s"]
    measured = sum(row["batch/trajectories"] for row in rows[1:]) / seconds
    most = 2.5 if FULL else 10  # others may have the cores for some of its steps
    assert 1 / most < foretold.samples_per_s / measured < most, (foretold.samples_per_s, measured)


def test_its_model_loads_in_plain_transformers_and_answers_as_the_run_said(run: Life):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actors.tasks import load_task
    from launch.config import load_config

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


def test_it_exports_as_it_did_itself_and_passes_over_a_damaged_checkpoint(run: Life, tmp_path, capsys):
    status, _, said = leeway_here(capsys, "resume", run.folder)
    assert status == 2
    assert "Give it more to go on: --learner.num_steps" in said
    assert leeway_here(capsys, "export", run.folder, tmp_path / "newest")[0] == 0
    same_weights(tmp_path / "newest", run.folder / "model")
    newest = sorted((run.folder / "checkpoints").glob("step-*"))[-1]
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, _, said = leeway_here(capsys, "export", run.folder, tmp_path / "out", "--step", int(newest.name[5:]))
    assert status == 2
    assert "does not have the checksum that it was written with; there are those of step" in said
    status, _, said = leeway_here(capsys, "export", run.folder, tmp_path / "out")
    assert status == 0
    assert "the checkpoint before it is used" in said


def test_the_last_line_names_its_report_and_the_timeline_has_every_role(run: Life):
    assert run.said.splitlines()[-1] == f"report: {run.folder / 'report.html'}"
    assert "What is missing" not in (run.folder / "report.html").read_text()
    events = list(read(run.folder / "timeline.json"))
    kinds = {(event.who, event.cat) for event in events if event.ph == "X"}
    of_actors = {(f"actor-{number}", what) for number in (0, 1) for what in ("generate", "update")}
    assert kinds >= of_actors | {("learner", "step"), ("learner", "wait_for_batch"), ("evaluation", "evaluate")}
    assert ("launch", "phase") in kinds
    assert ("buffer-0", "groups ready") in {(event.who, event.name) for event in events if event.ph == "C"}


def test_its_folder_is_not_trained_into_again(run: Life, capsys):
    place = ("--run.dir", run.folder.parent, "--run.name", run.folder.name)
    status, _, said = leeway_here(capsys, "train", "examples/demo.toml", *place)
    assert status == 2
    assert "exists already" in said


# --- what others make of it ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("loss", ["trajectory_balance", "oapl"])
def test_its_samples_train_another_run_by_any_loss_without_an_actor(run: Life, tmp_path, loss):
    store = run.folder / "buffer" / "data.mdb"
    before = store.read_bytes()
    command = (
        *(sys.executable, "-m", "launch.cli"),
        *("train", "examples/demo.toml", "--from", run.folder, "--run.dir", tmp_path, "--run.name", "offline"),
        *("--algorithm.type", loss, "--weight_sync.max_lag", "unbounded", "--actors.num_actors", 0),
        *("--learner.num_steps", 3, "--learner.groups_per_step", 8, "--learner.num_stages", 1),
        *("--tracking.wandb", "disabled"),
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


# --- looking closely ------------------------------------------------------------------------------------


def is_open_to_others(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it has just gone
        mode = path.lstat().st_mode
        return not stat.S_ISLNK(mode) and bool(mode & 0o077)
    return False


def folders_for_sockets(processes: list[psutil.Process]) -> list[Path]:
    """Those that vLLM's sockets in these processes lie in."""
    numbers = {str(process.pid) for process in processes}
    places = {Path(tempfile.gettempdir()), Path("/tmp")}
    found = (path for place in places for path in place.glob("leeway-*-vllm-*"))
    return [path for path in found if path.name.split("-")[3] in numbers]


def listening_on(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        return [tuple(each.laddr) for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []  # it has just ended


def answered_a_stranger(ports: set[int]) -> list[int]:
    """The ports that answer a request without a key."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        strangers = {port: stack.enter_context(context.socket(zmq.DEALER)) for port in ports}
        for port, stranger in strangers.items():
            stranger.linger = 0
            stranger.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):  # it was refused already, and has no line any more
                stranger.send(p.encode(1, p.StatusRequest()), zmq.NOBLOCK)
        time.sleep(2.0)
        answers = {port: stranger.recv_multipart() for port, stranger in strangers.items() if stranger.poll(0)}
        # a web server of Ray's tells any peer that it speaks no HTTP
        return [
            port for port, frames in answers.items() if b"HTTP" not in b"".join(frames) and b"Server:" not in frames[0]
        ]


def trajectories(run: Path, out: Path) -> pa.Table:
    """All that are stored, in the order of their groups; nothing in the store is wrong."""
    with Inspection.open(run) as inspection:
        assert check_store(inspection.store)["faults"] == []
        export(inspection, out)
    return pq.read_table(out)


def loss_and_gradient(samples: list[dict], folder: Path) -> tuple[float, float]:
    """The loss of a run on these samples at its first version, and the norm of its gradient, in plain Transformers."""
    from transformers import AutoModelForCausalLM

    from algorithms.base import LossInputs
    from algorithms.registry import loss_for
    from launch.config import load_config

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
        reference_logprobs_T=now_T,  # the model as it starts
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
    """The weights of two Hugging Face folders are equal, tensor by tensor."""
    found, expected = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
