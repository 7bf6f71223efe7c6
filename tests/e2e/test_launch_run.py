"""One real run: Ray, vLLM, LMDB, ZeroMQ, two stages, updates in flight. Every test reads the same run."""

import json
import signal
from pathlib import Path

import pytest

from launch.observe.trace import read
from tests.e2e.real_run import assert_ended_in_order, descendants, start, wait_for_end, wait_for_steps


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run from its first to its last step, and the processes it had in its middle."""
    folder = tmp_path_factory.mktemp("runs")
    process = start(folder)
    wait_for_steps(process, folder, 2, timeout_s=150)
    family = descendants(process)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    return folder / "run", output, family


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[dict]:
    return [row for row in rows(run) if "loss" in row]


def test_every_step_is_recorded_and_the_ledger_closes_at_each(finished):
    run, output, _ = finished
    assert [row["step"] for row in steps(run)] == list(range(1, 13)), output
    assert {row["buffer/ledger_gap"] for row in steps(run)} == {0}


def test_it_was_asynchronous_and_within_the_bound(finished):
    run, _, _ = finished
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < summary["lag_mean"] <= summary["lag_max"] <= summary["max_lag"] == 4
    assert summary["overlap_frac"] > 0.2
    assert all(share > 0 for share in summary["overlap_frac_by_actor"].values())
    assert len(summary["overlap_frac_by_actor"]) == 2


def test_weights_were_applied_in_flight(finished):
    run, _, _ = finished
    assert any(row["lag/in_flight"] > 0 for row in steps(run)), "no trajectory lived through an update"


def test_actor_and_learner_agree_on_fresh_tokens(finished):
    run, _, _ = finished
    first = steps(run)[0]
    assert first["mismatch/lag0_tokens"] > 0, "step 1 trains on version 0 alone"
    assert first["mismatch/lag0_abs"] < 1e-3
    for row in steps(run):
        assert (row["mismatch/lag0_abs"] is None) == (row["mismatch/lag0_tokens"] == 0)
        assert row["mismatch/lag0_abs"] is None or row["mismatch/lag0_abs"] < 1e-3


def test_the_summary_is_complete(finished):
    run, _, _ = finished
    summary = json.loads((run / "summary.json").read_text())
    expected = "accuracy_before accuracy_after num_heldout wall_s trained_trajectories lag_mean lag_max max_lag"
    expected += " overlap_frac ledger_gap mismatch_lag0_abs"
    assert not [key for key in expected.split() if summary.get(key) is None]
    assert summary["num_heldout"] == 64
    assert summary["trained_trajectories"] == 12 * 8 * 8
    assert summary["ledger_gap"] == 0
    ledger = summary["ledger"]
    assert ledger["issued"] == ledger["in_flight"] + ledger["committed"] + ledger["failed"]


def test_evaluations_are_labelled_with_their_version(finished):
    run, _, _ = finished
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    versions = [event["eval/version"] for event in events if event["kind"] == "evaluated"]
    assert versions[0] == "0.0"
    assert versions[-1] == "0.12"
    assert len(versions) >= 3, "no evaluation during the run"


def test_the_export_loads_in_plain_transformers_and_answers_as_the_run_said(finished):
    run, _, _ = finished
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = json.loads((run / "summary.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    from actors.tasks import load_task
    from launch.load import load_config

    problems = load_task(load_config(run / "config.toml").task).heldout[:64]
    correct = 0
    for problem in problems:
        prompt = tokenizer(problem.text, return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        correct += tokenizer.decode(answer, skip_special_tokens=True).strip() == problem.columns["answer"]
    assert correct / len(problems) == pytest.approx(summary["accuracy_after"], abs=0.03)


def test_no_process_is_left_behind_after_the_end(finished):
    _, _, family = finished
    assert len(family) > 6, "the run should have had Ray, a buffer, two stages, two actors and their engines"
    assert wait_for_end(family, timeout_s=10) == []


def test_an_existing_run_folder_is_refused(finished):
    run, _, _ = finished
    again = start(run.parent)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 2
    assert "exists already" in output


@pytest.mark.full  # an interrupt is the same to the command, and ends the run of test_launch_locked.py
def test_sigterm_ends_with_a_checkpoint_and_without_processes(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "100000", "--learner.checkpoint_every", "100000")
    wait_for_steps(process, tmp_path, 2, timeout_s=150)
    family = descendants(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert wait_for_end(family, timeout_s=10) == []
    assert_ended_in_order(tmp_path / "run")


def test_the_last_line_names_its_report_and_the_timeline_has_every_role(finished):
    run, output, _ = finished
    assert output.splitlines()[-1] == f"report: {run / 'report.html'}"
    assert "What is missing" not in (run / "report.html").read_text()
    events = list(read(run / "timeline.json"))
    kinds = {(event.who, event.cat) for event in events if event.ph == "X"}
    of_actors = {(f"actor-{number}", what) for number in (0, 1) for what in ("generate", "update")}
    assert kinds >= of_actors | {("learner", "step"), ("learner", "wait_for_batch"), ("evaluation", "evaluate")}
    assert ("launch", "phase") in kinds
    counters = {(event.who, event.name) for event in events if event.ph == "C"}
    assert counters >= {("buffer", "groups ready"), ("actors", "samples running"), ("learner", "reward")}
