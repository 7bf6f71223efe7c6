"""The content of status.json, and how this file is written."""

import contextlib
import json
import os
import stat
import threading
import time
from dataclasses import replace

import msgspec
import pytest

from leeway.launch.observe.observer import Observer
from leeway.launch.observe.status import (
    FORMAT,
    NUM_EVENTS,
    Accuracy,
    PollResult,
    StatusError,
    read_status,
    write_status,
)
from tests.unit.made_up_run import plan, process, report, status, step_row, write_rows
from tests.world.waiting import wait_until


@pytest.fixture
def run(tmp_path):
    """An observed run with a fake clock."""

    class Run:
        def __init__(self) -> None:
            self.now_s = 1000.0
            self.plan = plan(tmp_path / "run")
            self.plan.folder.create(self.plan.config)
            self.observer = Observer(self.plan, wall=lambda: self.now_s, clock=lambda: self.now_s)

        def poll(self, **fields: object):
            self.observer.ingest(PollResult(**fields))
            return self.observer.polled()

        @property
        def path(self):
            return self.plan.folder.status

    return Run()


def two_pools() -> dict:
    actors = [report("actor-0", "big", num_running=30, version=(0, 7)), report("actor-1", "small", version=(0, 5))]
    processes = (
        process("buffer.0"),
        process("weights.0"),
        process("stage.0"),
        process("stage.1"),
        process("actor.0", "big", restarts=1),
        process("actor.1", "small"),
        process("actor.2", "small", "waiting for resources", host="", pid=0),
        process("actor.3", "big", "lost: given up: out of memory"),
    )
    return {
        "actors": actors,
        "processes": processes,
        "desired": {"big": 1, "small": 2},
        "working": frozenset({"actor-0", "actor-1"}),
        "status": status(),
    }


# --- the file -----------------------------------------------------------------------------------------


def test_a_snapshot_round_trips_and_only_its_owner_may_read_it(run):
    before = os.umask(0)
    try:
        written = run.poll(**two_pools())
    finally:
        os.umask(before)
    assert read_status(run.path) == written
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o600
    assert [each.name for each in run.path.parent.iterdir() if "status" in each.name] == ["status.json"]
    assert json.loads(run.path.read_text())["format"] == FORMAT


def test_a_reader_never_sees_a_partial_snapshot(run):
    short = run.poll()
    long = msgspec.structs.replace(short, phase="x" * 100_000)
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            write_status(run.path, long)
            write_status(run.path, short)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {len(read_status(run.path).phase) for _ in range(500)}
    finally:
        over.set()
        writer.join()
    assert seen <= {len(short.phase), len(long.phase)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "does not exist"),
        (b"", "is not a valid status file"),
        (b'{"format": 999, "run": 3}', "has format 999, but this Leeway reads"),
        (b'{"format": %d, "run": 3}' % FORMAT, "is not a valid status file"),
    ],
)
def test_an_invalid_snapshot_is_refused_with_the_reason(run, text, why):
    if text is not None:
        run.path.write_bytes(text)
    with pytest.raises(StatusError, match=why):
        read_status(run.path)


def test_fields_of_a_newer_leeway_are_ignored(run):
    document = json.loads(msgspec.json.encode(run.poll()))
    run.path.write_text(json.dumps(document | {"a_new_field": [1, 2]}))
    assert read_status(run.path).run == "run"


def test_a_file_of_an_older_leeway_is_read_or_refused_with_the_missing_field(run):
    document = json.loads(msgspec.json.encode(run.poll(**two_pools())))
    without_new = {name: value for name, value in document.items() if name not in ("wall_s", "ledger_gap")}
    run.path.write_text(json.dumps(without_new | {"buffer": document["buffer"] | {"sampler_kind": "fifo"}}))
    assert read_status(run.path).wall_s == 0.0
    document["buffer"]["groups_ready"] = document["buffer"].pop("ready_groups")
    run.path.write_text(json.dumps(document))
    with pytest.raises(StatusError, match=r"is not a valid status file: .*`ready_groups`"):
        read_status(run.path)


def test_the_largest_ledger_gap_and_the_reasons_of_quarantine_are_kept(run):
    ledger = status().ledger
    run.poll(status=status(ledger={**ledger, "gap": -2}, quarantined_by_reason={"no reward": 3}))
    snapshot = run.poll(status=status(ledger=ledger, quarantined_by_reason={"no reward": 3}))
    assert (snapshot.ledger_gap, snapshot.buffer.quarantined_by_reason) == (2, {"no reward": 3})


def test_a_status_that_cannot_be_written_is_logged_once(run, caplog):
    run.path.parent.rename(run.path.parent.with_name("moved"))
    for _ in range(3):
        run.poll()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text


# --- content ------------------------------------------------------------------------------------------


def test_the_status_lists_every_pool_actor_and_process(run):
    run.poll(**two_pools())
    run.now_s += 10.0
    poll = two_pools()
    slow = replace(poll["actors"][1], num_tokens=100, num_tokens_lost=7, requeue_at=420)
    poll["actors"] = [replace(poll["actors"][0], num_tokens=500), slow]
    snapshot = run.poll(**poll)
    assert [(pool.engines.tokens_lost, pool.engines.requeue_at) for pool in snapshot.pools] == [(0, 0), (7, 420)]
    pools = [(p.name, p.working, p.wanted, p.running, p.tokens_per_s) for p in snapshot.pools]
    assert pools == [("big", 1, 1, 30, 50.0), ("small", 1, 2, 0, 10.0)], "replaced actors add no throughput"
    facts = [(a.name, a.pool, a.version, a.behind, a.restarts) for a in snapshot.actors]
    assert facts[:2] == [("actor-0", "big", "7", 0, 1), ("actor-1", "small", "5", 2, 0)]
    assert [a.state for a in snapshot.actors[2:]] == ["waiting for resources", "lost: given up: out of memory"]
    assert [a.since_s for a in snapshot.actors] == [1000.0] * 4
    assert [each.name for each in snapshot.stages] == ["stage.0", "stage.1"]
    assert [each.name for each in snapshot.services] == ["buffer.0", "weights.0"]
    assert snapshot.generated_tokens_per_s == 60.0


def test_trained_tokens_are_counted_by_lag_and_pool_and_once_per_step(run):
    run.poll(**two_pools())
    lags = {"actor-0": {0: 60, 1: 40}, "actor-1": {2: 10}}
    other = {"actor-0": {1: 100}, "actor-1": {3: 10}, "actor-9": {0: 1}}
    first, second = step_row(1, 110, 0.5, lag_by_actor=lags), step_row(2, 111, 1.0, lag_by_actor=other)
    snapshot = run.poll(steps=[first, second])
    assert snapshot.lags == {"big": {0: 60, 1: 140}, "small": {2: 10, 3: 10}, "unknown": {0: 1}}
    assert [pool.lag_mean for pool in snapshot.pools] == [pytest.approx(0.7), 2.5]
    write_rows(run.plan.folder, first)
    snapshot = run.poll(resumed_at=1, resumed_version=1, processes=two_pools()["processes"])
    assert snapshot.lags == {"big": {0: 60, 1: 40}, "small": {2: 10}}
    snapshot = run.poll(steps=[step_row(2, 110, 1.0, lag_by_actor=lags)])
    assert snapshot.lags["big"] == {0: 120, 1: 80}


def test_lags_and_bounds_of_recent_steps_are_kept_if_lag_is_controlled(run):
    assert run.poll(steps=[step_row(1, 2, 2.0)]).recent_lags == {}
    steps = [step_row(step, 2, float(step), **{"lag/allowed": 3, "lag/drift": None}) for step in range(2, 70)]
    kept = run.poll(steps=steps).recent_lags
    assert kept["lag/token_mean"] == list(range(10, 70))
    assert (kept["lag/allowed"], kept["lag/drift"]) == ([3] * 60, [None] * 60)


def test_a_row_has_the_metrics_of_each_pool_and_of_waiting_actors(run):
    poll = two_pools()
    run.poll(**poll)
    run.now_s += 4.0
    poll["actors"] = [poll["actors"][0], replace(poll["actors"][1], waiting="waiting for policy 0.9", num_tokens=80)]
    rows = {"lag_by_actor": {"actor-0": {0: 1, 4: 1}}, "lag0_by_actor": {"actor-0": (1e-6, 1)}}
    (row,) = run.observer.ingest(PollResult(**poll, steps=[step_row(1, 2, 2.0, **rows)]))
    assert (row["pool/big/lag_mean"], row["pool/small/lag_mean"]) == (2.0, None)
    assert (row["pool/big/mismatch_lag0_abs"], row["pool/small/mismatch_lag0_abs"]) == (1e-6, None)
    assert (row["pool/big/actors"], row["pool/small/tokens_per_s"]) == (1, 20.0)
    assert (row["actors/waiting"], row["time/wait_for_policy"]) == (1, 2.0)
    assert not {"lag_by_actor", "lag0_by_actor"} & row.keys()


def test_the_status_has_the_last_events_the_evaluations_and_the_end(run):
    for number in range(NUM_EVENTS + 5):
        run.observer.event("restart", f"event {number}")
    run.observer.evaluated(Accuracy(versions="0.0", greedy=0.5, sampled=0.4, num_problems=64))
    run.observer.phase("training")
    run.now_s += 3.0
    run.observer.end("no actor is left", 1)
    snapshot = read_status(run.path)
    assert [event.text for event in snapshot.events][::19] == ["event 5", "event 24"]
    assert (snapshot.evaluations[0].greedy, snapshot.phase, snapshot.phase_since_s) == (0.5, "training", 1000.0)
    assert (snapshot.ended.text, snapshot.ended.exit_status, snapshot.ended.at_s) == ("no actor is left", 1, 1003.0)


def test_an_unexpected_error_is_recorded_as_the_end(run):
    with contextlib.suppress(ZeroDivisionError), run.observer:
        run.observer.phase("training")
        raise ZeroDivisionError("a bug")
    assert read_status(run.path).ended.text == "ZeroDivisionError: a bug"


def test_without_polls_the_status_is_still_written_with_starting_processes(tmp_path):
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    errors = iter([ValueError("removed meanwhile")])
    seen: list = []

    def list_processes():
        for error in errors:
            raise error
        return (process("actor.0", "actors", "starting"),)

    with Observer(made, list_processes=list_processes, on_write=seen.append, quiet_s=0.05) as observer:
        observer.phase("starting")
        wait_until(lambda: seen and seen[-1].waits)
    assert seen[-1].waits[0].startswith("actor.0 has been starting for 0 s; see ")
    assert read_status(made.folder.status).waits == seen[-1].waits
    last = seen[-1].written_s
    time.sleep(0.3)
    assert read_status(made.folder.status).written_s == last, "nothing is written after the observer exits"


def test_a_failing_view_is_logged_once_and_the_status_is_still_written(tmp_path, caplog):
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    shown: list = []

    def on_write(snapshot):
        shown.append(snapshot)
        raise RuntimeError("no exporter" if snapshot.phase == "training" else "no screen")

    with Observer(made, on_write=on_write, quiet_s=0.05) as observer:
        observer.phase("starting")
        wait_until(lambda: len(shown) > 3)
        observer.phase("training")
        first = read_status(made.folder.status)
        wait_until(lambda: read_status(made.folder.status).written_s > first.written_s)
    assert first.phase == "training"
    assert [record.message.split(": ")[-1] for record in caplog.records] == ["no screen", "no exporter"]


# --- waits --------------------------------------------------------------------------------------------


@pytest.fixture
def waits_of(run):
    def waits_of(*reports, learner: str = "", publishing: str = "", processes=(), **fields) -> list[str]:
        actors = tuple(process(each.name.replace("-", "."), each.pool) for each in reports)
        working = frozenset(each.name for each in reports)
        poll = {"actors": list(reports), "processes": (*processes, *actors), "working": working}
        poll |= {"learner_waits_for": learner, "publishing": publishing, "status": status(**fields)}
        return run.poll(**poll, resumed_at=7, resumed_version=7).waits

    return waits_of


def test_every_wait_is_described_with_its_cause(waits_of):
    closed = "waiting for a lease: admission closed"
    leases = [report(f"actor-{number}", waiting=closed) for number in range(5)]
    found = waits_of(
        *leases,
        report("actor-5", waiting="waiting for policy 0.9"),
        report("actor-6", waiting="evaluating policy 0.7"),
        report("actor-7"),
        learner="the batch of step 8: 3 groups of actor-7",
        publishing="space in /disk/weights",
    )
    assert found == [
        "the learner waits for the batch of step 8: 3 groups of actor-7",
        "the weight publisher waits for space in /disk/weights",
        "5 actors (actor-0, actor-1, ...) wait for the learner: the staleness bound grants no lease until the "
        "learner advances past version 7 (2 groups are ready)",
        "actor-5 waits for policy 0.9 (newest published: 7)",
        "actor-6 evaluates policy 0.7",
    ]


def test_a_slow_reward_is_named_with_its_longest_wait(waits_of):
    found = waits_of(
        report("actor-0", waiting="waiting for reward judge", waiting_s=12.4),
        report("actor-1", waiting="waiting for reward judge", waiting_s=4.0),
        report("actor-2", waiting="evaluating policy 0.7, waiting for reward judge", waiting_s=6.0),
    )
    assert found == [
        "actor-0, actor-1 wait for reward judge, 12 s",
        "actor-2 evaluates policy 0.7, waiting for reward judge, 6 s",
    ]


def test_a_draining_run_is_described(waits_of):
    assert waits_of(report("actor-0", waiting="waiting for a lease: admission closed"), draining=True) == [
        "actor-0 waits for the run to finish draining"
    ]


def test_starting_waiting_and_leaving_processes_are_described(waits_of):
    processes = [
        process("stage.1", state="starting"),
        process("actor.0", "big", "waiting for resources"),
        process("actor.1", "big", "leaving"),
    ]
    found = waits_of(processes=processes)
    assert found[0] == "stage.1 has been starting for 0 s; see /runs/x/logs/stage.1.log"
    assert "host of pool 'big'" in found[1]
    assert "requeues its leased samples" in found[2]
