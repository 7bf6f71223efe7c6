"""`leeway trace`: a trace that Perfetto reads as it is meant."""

import json
import os
from collections import defaultdict

import pytest

from launch.cli import main
from tests.unit.report_run import NASTY, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "sums")


@pytest.fixture(scope="module")
def events(run):
    assert main(["trace", str(run.root)]) == 0
    return json.loads((run.root / "trace.json").read_text())["traceEvents"]


def test_a_trace_is_its_owners_alone_as_all_files_of_a_run_are(run):
    before = os.umask(0o022)
    try:
        assert main(["trace", str(run.root)]) == 0
        assert (run.root / "trace.json").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def of(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_process_and_every_track_has_a_name(events):
    processes = {event["pid"]: event["args"]["name"] for event in of(events, "M") if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]) for event in of(events, "M") if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} <= set(processes)
    assert {(event["pid"], event["tid"]) for event in of(events, "X")} <= tracks
    assert list(processes.values()) == ["launch", "evaluation", "learner", "buffer", "actor-0", "actor-1"]


def test_spans_of_a_track_follow_each_other_and_times_grow(events):
    ended_us = defaultdict(float)
    for span in of(events, "X"):
        track = span["pid"], span["tid"]
        assert span["ts"] >= ended_us[track]
        assert span["dur"] > 0
        ended_us[track] = span["ts"] + span["dur"] - 0.05
    assert min(span["ts"] for span in of(events, "X")) == 0
    assert max(ended_us.values()) == pytest.approx(51.1e6, rel=0.01)


def test_steps_generation_updates_evaluations_and_states_are_there(events):
    spans = of(events, "X")
    names = {span["cat"] for span in spans}
    assert names == {"step", "wait_for_batch", "generate", "update", "evaluate", "state", "phase"}
    steps = [span for span in spans if span["cat"] == "step"]
    assert [span["name"] for span in steps] == [f"step {number}" for number in range(1, 41)]
    assert steps[0]["dur"] == pytest.approx(0.6e6)
    assert steps[0]["args"]["lag_mean"] == 1.5
    assert {span["name"] for span in spans if span["cat"] == "state"} == {"starting"}


def test_queue_lag_and_throughput_are_counters(events):
    counters = defaultdict(list)
    for event in of(events, "C"):
        counters[event["name"]].append(event["args"])
    assert counters["lag (versions)"][0] == {"mean": 1.5, "greatest": 3.0}
    assert counters["tokens per second"][0] == {"generated": 1200.0, "trained": 1000.0}
    assert [args["ready"] for args in counters["groups ready"][:5]] == [0, 1, 2, 3, 4]
    assert counters["samples running"][0] == {"running": 64}


def test_what_happened_is_a_moment(events):
    names = [event["name"] for event in of(events, "i")]
    assert f"restart: actor.1 died of {NASTY}" in names


def test_spans_of_clocks_that_disagree_are_shown_one_after_the_other(tmp_path):
    run = make_run(tmp_path / "sums", num_steps=1)
    span = {"who": "actor-7", "what": "generate"}
    with run.timeline.open("a") as file:
        file.write(json.dumps(span | {"start_s": 1_800_000_001.0, "end_s": 1_800_000_003.0}) + "\n")
        file.write(json.dumps(span | {"start_s": 1_800_000_002.5, "end_s": 1_800_000_004.0}) + "\n{torn")
    assert main(["trace", str(run.root), "--out", str(tmp_path / "t.json")]) == 0
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    spans = [(e["ts"], e["dur"]) for e in found if e["ph"] == "X" and names[e["pid"]] == "actor-7"]
    assert spans == [(1e6, 2e6), (3e6, 1e6)]


def test_a_run_without_a_timeline_is_one_sentence(tmp_path, capsys):
    run = make_run(tmp_path / "sums")
    run.timeline.write_text("")
    assert main(["trace", str(run.root)]) == 1
    assert "has no line" in capsys.readouterr().err
    run.timeline.unlink()
    assert main(["trace", str(run.root)]) == 1
    assert "is not there" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nothing")]) == 2
    assert main(["trace", str(run.root), "--out", str(tmp_path)]) == 2
    assert not list(run.root.glob("*trace*"))


def test_only_the_owner_can_read_a_trace(run, events):
    assert (run.root / "trace.json").stat().st_mode & 0o777 == 0o600
    assert not list(run.root.glob(".*tmp"))
