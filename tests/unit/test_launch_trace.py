"""timeline.json: a trace that Perfetto displays correctly."""

import json
from collections import defaultdict

import pytest

from leeway.actors.report import WeightUpdate
from leeway.launch.observe.status import PollResult
from leeway.launch.observe.trace import ROLES, Trace, read
from tests.unit.report_run import NASTY, START_S, make_run, report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "sums")


@pytest.fixture(scope="module")
def events(run):
    # The file may lack the closing bracket, which Perfetto does not need.
    return json.loads(run.timeline.read_text().rstrip(",\n") + "]")


def pick(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_process_and_every_track_has_a_name(events):
    processes = {event["pid"]: event["args"]["name"] for event in pick(events, "M") if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]) for event in pick(events, "M") if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} <= set(processes)
    assert {(event["pid"], event["tid"]) for event in pick(events, "X")} <= tracks
    names = [name for _, name in sorted(processes.items())]
    assert names == ["launch", "evaluation", "learner", "buffer-0", "actor-0", "actor-1"]


def test_every_process_has_its_own_number(tmp_path):
    names = [f"{role}-{number}" for role in ROLES for number in (0, 10, 40, 90, 800, 5000)]
    with Trace(tmp_path / "trace.json") as trace:
        for name in names:
            trace._switch(name, "state", "starting")
    found = {event.pid: event.args["name"] for event in read(tmp_path / "trace.json") if event.name == "process_name"}
    assert sorted(found.values()) == sorted(names)


def test_spans_of_a_track_follow_each_other(events):
    ended_us = defaultdict(float)
    for span in pick(events, "X"):
        track = span["pid"], span["tid"]
        assert span["ts"] >= ended_us[track]
        assert span["dur"] > 0
        ended_us[track] = span["ts"] + span["dur"]
    assert min(span["ts"] for span in pick(events, "X")) == 1e6 * START_S
    assert max(ended_us.values()) == pytest.approx(1e6 * (START_S + 51.1), abs=1e5)


def test_steps_generation_updates_evaluations_and_states_are_spans(events):
    spans = pick(events, "X")
    names = {span["cat"] for span in spans}
    assert names == {"step", "wait_for_batch", "generate", "update", "evaluate", "state", "phase"}
    steps = [span for span in spans if span["cat"] == "step"]
    assert [span["name"] for span in steps] == [f"step {number}" for number in range(1, 41)]
    assert steps[0]["dur"] == pytest.approx(0.6e6)
    assert steps[0]["args"]["lag_mean"] == 1.5
    assert {span["name"] for span in spans if span["cat"] == "state"} == {"starting"}


def test_the_queue_is_a_counter(events):
    ready = [event["args"]["ready"] for event in pick(events, "C") if event["name"] == "groups ready"]
    assert ready[:5] == [0, 1, 2, 3, 4]


def test_an_event_is_an_instant(events):
    names = [event["name"] for event in pick(events, "i")]
    assert f"restart: actor.1 died of {NASTY}" in names


def test_overlapping_spans_of_clocks_that_disagree_are_made_consecutive(tmp_path):
    now_s = START_S + 10
    with Trace(tmp_path / "timeline.json", lambda: now_s) as trace:
        for start_s, end_s in ((1.0, 3.0), (2.5, 4.0)):
            update = WeightUpdate(START_S + start_s, START_S + end_s, 0.1, (0, 1))
            trace.ingest(PollResult(actors=[report("actor-7", updates=[update])]), [])
    spans = [(e.start_s - START_S, e.end_s - START_S) for e in read(tmp_path / "timeline.json") if e.ph == "X"]
    assert spans == [(1.0, 3.0), (3.0, 4.0)]


def test_the_trace_of_a_killed_run_is_read_without_its_torn_line(tmp_path):
    run = make_run(tmp_path / "sums", num_steps=1)
    whole = list(read(run.timeline))
    with run.timeline.open("a") as file:
        file.write('{"ph":"X","torn')
    assert list(read(run.timeline)) == whole
    with Trace(run.timeline) as trace:
        trace.phase("training")
    assert len(run.timeline.read_text().splitlines()) > len(whole)
    assert "torn" not in run.timeline.read_text()
