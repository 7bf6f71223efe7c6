"""timeline.json: the events that a poll adds, and the size limit of the file."""

import json

import pytest

from leeway.actors.report import WeightUpdate
from leeway.launch.observe import trace as module
from leeway.launch.observe.status import PollResult
from leeway.launch.observe.trace import Trace, read
from tests.unit.report_run import START_S, process, report, row, status


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def lines(path, *kinds):
    """Return spans and counter values, each with its source, category and arguments."""
    found = [event for event in read(path) if event.ph in ("X", "C")]
    shown = [
        {"start_s": e.start_s, "end_s": e.end_s, "name": e.name, **e.args, "who": e.who, "what": e.cat} for e in found
    ]
    return [line for line in shown if not kinds or line["what"] in kinds or line["name"] in kinds]


def ingest(timeline, **fields) -> None:
    timeline.ingest(PollResult(**fields), fields.get("steps", []))


def test_a_step_and_its_wait_are_spans_of_the_learner(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        ingest(timeline, steps=[row(7, START_S + 1)])
    wait, step = lines(tmp_path / "t", "wait_for_batch", "step")
    assert (wait["who"], wait["what"], step["what"], step["step"]) == ("learner", "wait_for_batch", "step", 7)
    assert (wait["start_s"], wait["end_s"]) == (START_S + 1, START_S + 1.4)
    assert (step["start_s"], step["end_s"], step["lag_mean"]) == (START_S + 1.4, START_S + 2, 1.5)
    assert json.loads((tmp_path / "t").read_text().rstrip(",\n") + "]"), "with a bracket, the file is valid JSON"


def test_adjacent_intervals_are_one_span_with_their_totals(tmp_path, clock):
    clock.now_s += 10.0
    with Trace(tmp_path / "t", clock) as timeline:
        for poll in range(4):
            clock.now_s = START_S + 10 + poll
            busy = [(clock.now_s - 1, clock.now_s)]
            ingest(timeline, actors=[report("actor-0", num_tokens=40 * (poll + 1), busy=busy)])
    (span,) = lines(tmp_path / "t", "generate")
    assert (span["start_s"], span["end_s"]) == (START_S + 9, START_S + 13)
    assert (span["num_tokens"], span["num_samples"], span["pool"]) == (160, 40, "actors")


def test_a_visible_pause_separates_spans(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        clock.now_s += 5
        busy = [(START_S, START_S + 1), (START_S + 1.2, START_S + 2)]
        updates = [WeightUpdate(START_S + 1, START_S + 1.2, 0.1, (0, 3))]
        ingest(timeline, actors=[report("actor-0", num_tokens=8, busy=busy, updates=updates)])
    assert [span["end_s"] for span in lines(tmp_path / "t", "generate")] == [START_S + 1, START_S + 2]
    (update,) = lines(tmp_path / "t", "update")
    assert (update["start_s"], update["end_s"], update["version"], update["start"], update["load_s"]) == (
        *(START_S + 1, START_S + 1.2),
        *(3, 0, 0.1),
    )


def test_a_restarted_actor_counts_from_zero(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        for poll, num_tokens in enumerate((100, 40)):
            clock.now_s += 5
            busy = [(START_S + 5 * poll, START_S + 5 * poll + 1)]
            ingest(timeline, actors=[report("actor-0", num_tokens=num_tokens, busy=busy)])
    assert [span["num_tokens"] for span in lines(tmp_path / "t", "generate")] == [100, 40]


def test_the_time_that_a_process_does_not_work_is_a_span_with_its_state(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        for state in ("starting", "starting", "working", "lost: given up"):
            ingest(timeline, processes=(process("actor-1", state),))
            clock.now_s += 2
    states = [(line["who"], line["name"], line["end_s"] - line["start_s"]) for line in lines(tmp_path / "t", "state")]
    assert states == [("actor-1", "starting", 4.0), ("actor-1", "lost: given up", 2.0)]


def test_the_last_state_of_an_actor_ends_when_it_leaves(tmp_path, clock):
    stays = process("actor-0", "starting")
    with Trace(tmp_path / "t", clock) as timeline:
        for present in ((stays, process("actor-1", "leaving")), (stays,), ()):  # a poll may list no process
            ingest(timeline, processes=present)
            clock.now_s += 3
    states = {line["who"]: line["end_s"] - line["start_s"] for line in lines(tmp_path / "t", "state")}
    assert states == {"actor-1": 3.0, "actor-0": 9.0}


def test_the_queue_is_sampled_at_every_poll(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        for ready in (1, 5, 5, 2):
            clock.now_s += 0.5
            ingest(timeline, status=status(ready=ready))
    assert [line["ready"] for line in lines(tmp_path / "t", "groups ready")] == [1, 5, 2], "one entry per change"


def test_phases_and_evaluations_have_durations(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        timeline.phase("starting")
        clock.now_s += 3
        timeline.phase("training")
        timeline.evaluating()
        clock.now_s += 2
        timeline.evaluated("0.4")
        timeline.evaluated("0.4")  # ignored, because no evaluation is running
    assert [(line["name"], line["end_s"] - START_S) for line in lines(tmp_path / "t", "phase")] == [
        ("starting", 3.0),
        ("training", 5.0),
    ]
    (evaluation,) = lines(tmp_path / "t", "evaluate")
    assert (evaluation["version"], evaluation["end_s"] - evaluation["start_s"]) == ("0.4", 2.0)


def test_a_full_file_is_rotated_and_both_files_are_readable_traces(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(module, "ROTATE_BYTES", 50_000)
    num_polls = 400
    with Trace(tmp_path / "t", clock) as timeline:
        for poll in range(num_polls):
            clock.now_s += 8.0
            busy = [(clock.now_s - 8, clock.now_s - 6), (clock.now_s - 5, clock.now_s - 4)]
            actors = [report("actor-0", num_tokens=4 * poll, busy=busy)]
            ingest(timeline, steps=[row(poll + 1, clock.now_s - 8)], actors=actors, status=status())
            assert len(timeline._generating) <= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.1"]
    for path in tmp_path.iterdir():
        assert path.stat().st_size < 55_000
        events = json.loads(path.read_text().rstrip(",\n") + "]")
        named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
        assert {(event["pid"], event["tid"]) for event in events} == named, "each file names its processes and tracks"
    steps = [line["step"] for line in lines(tmp_path / "t", "step")]
    assert steps == list(range(steps[0], num_polls + 1)), "no step is missing up to the end"
    assert len(steps) > 100


def test_the_next_launch_continues_the_trace_and_removes_a_torn_line(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        ingest(timeline, steps=[row(1, START_S + 1)])
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole + b'{"ph":"X","na')
    with Trace(tmp_path / "t", clock) as timeline:
        ingest(timeline, steps=[row(2, START_S + 3)])
    assert (tmp_path / "t").read_bytes().startswith(whole)
    assert json.loads((tmp_path / "t").read_text().rstrip(",\n") + "]")
    assert [line["step"] for line in lines(tmp_path / "t", "step")] == [1, 2]


def test_a_long_span_is_written_periodically(tmp_path, clock):
    timeline = Trace(tmp_path / "t", clock)
    for _ in range(120):
        clock.now_s += 1
        ingest(timeline, actors=[report("actor-0", busy=[(clock.now_s - 1, clock.now_s)])])
    written = lines(tmp_path / "t", "generate")  # before the trace is closed
    assert clock.now_s - written[-1]["end_s"] < 25
    timeline.close()


def test_a_full_disk_loses_lines_but_does_not_end_the_run(clock):
    from pathlib import Path

    with Trace(Path("/dev/full"), clock) as timeline:
        timeline.phase("training")
        ingest(timeline, steps=[row(1, START_S)], status=status())


def test_a_torn_last_line_is_skipped_by_the_reader(tmp_path, clock):
    with Trace(tmp_path / "t", clock) as timeline:
        ingest(timeline, steps=[row(1, START_S + 1), row(2, START_S + 3)])
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole[:-20])
    assert len(list(read(tmp_path / "t"))) == len(whole.splitlines()) - 2, "the bracket and the torn line are skipped"
