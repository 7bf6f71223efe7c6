"""Real runs with failing weight transfers continue within the lag bound and report the failures."""

import itertools
import json
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.disks import fill
from tests.full import pick
from tests.world.live_run import GROUP_SIZE, GROUPS_PER_STEP, LiveRun

from leeway.common.staleness import PolicyVersion
from leeway.launch.observe.alerts import BEHIND_AFTER_S
from leeway.weight_sync.manifest import Manifest
from leeway.weight_sync.store import WeightStore

pytestmark = pytest.mark.timeout(900)

LEASE_S = 3.0
CAPACITY = 4 * GROUPS_PER_STEP * GROUP_SIZE
"""Maximum number of outstanding samples at max_lag = 4 and max_actor_lag = 1."""


@pytest.fixture
def start_run(tmp_path):
    """Return `start_run(*overrides)`, which starts a run; runs are closed after the test."""
    runs = []

    def start(*overrides: str) -> LiveRun:
        runs.append(LiveRun(tmp_path, *overrides))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def outstanding(ledger: dict[str, int]) -> int:
    return ledger["in_flight"] + ledger["waiting"] + ledger["drawn"]


def samples_of_epoch(run: LiveRun, actor: str, epoch: int) -> list[dict]:
    """Return the samples of one process of an actor; `epoch` is the number of the process, from 1 on."""
    return [each for each in run.trajectories() if (each["actor"], each["epoch"]) == (actor, epoch)]


def flip_a_byte(manifest: Manifest, folder: Path) -> str:
    """Flip a bit of the largest tensor of a version on disk; return the tensor's name."""
    entry = max(manifest.tensors, key=lambda each: each.size_bytes)
    path = folder / entry.file
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[entry.name]["data_offsets"]
        place = 8 + size + (begin + end) // 2
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x01]))
    return entry.name


def damage_an_unseen_version(run: LiveRun, stops: ExitStack) -> tuple[PolicyVersion, str]:
    """Stop the stages after a version that no actor has fetched, and damage that version.

    Returns:
        The version and the name of the damaged tensor. The stages stay stopped until `stops` closes.
    """
    store = WeightStore(run.folder / "weights")
    for _ in range(20):
        with run.stopped(("actor", 0), ("actor", 1)):
            before, deadline = run.newest(), time.monotonic() + 3.0
            while run.newest() == before and time.monotonic() < deadline:
                time.sleep(0.02)
            with ExitStack() as these:
                these.enter_context(run.stopped(("stage", 0), ("stage", 1)))
                if (newest := run.newest()) != before:
                    stops.push(these.pop_all())
                    return newest, flip_a_byte(store.manifest(newest), store.version_folder(newest))
        time.sleep(0.5)
    pytest.fail("no version was published while the actors were stopped")


def stop_at_work(run: LiveRun, actor: int) -> ExitStack:
    """Stop an actor until its leases are issued again; the actor continues when the returned stack closes."""
    for _ in range(10):
        failed = run.ledger()["failed"]
        with ExitStack() as stops:
            stops.enter_context(run.stopped(("actor", actor)))
            time.sleep(LEASE_S + 1.5)
            if run.ledger()["failed"] > failed:
                return stops.pop_all()
        time.sleep(0.3)
    pytest.fail("the actor held no lease each time it was stopped")


@pytest.mark.fault(14, "none: a whole run at max_lag = 0", full=True)
def test_at_max_lag_0_training_is_synchronous(start_run, show):
    run = start_run("--weight_sync.max_lag", "0")
    summary = run.end()
    steps = run.steps()
    assert (summary["lag_max"], summary["lag_mean"], len(steps)) == (0, 0, 12)
    for row in steps:
        assert row["mismatch/lag0_tokens"] == row["batch/completion_tokens"], "a step trained on stale tokens"
        assert row["mismatch/lag0_abs"] < 1e-3
    assert summary["overlap_frac"] < 0.01
    began = {0: 0.0} | {row["version"]: row["finished_s"] for row in steps}
    ends = {row["version"] - 1: row["started_s"] for row in steps}
    trajectories = run.trajectories()
    for each in trajectories:
        (version,) = {span["version"] for span in each["spans"]}
        assert began[version] < each["started_s"], "generation began before its version was published"
        assert each["finished_s"] < ends.get(version, float("inf")), "a step began before its samples were complete"
    assert summary["ledger"]["dropped_stale"] == 0
    show(
        f"12 steps, {len(trajectories)} samples, greatest lag 0, generation during "
        f"{summary['overlap_frac']:.3f} of step time"
    )


@pytest.mark.fault(14, "none: whole runs at max_lag = 1 and 4", full=True)
@pytest.mark.parametrize(("max_lag", "max_actor_lag", "overlaps"), [(1, 1, False), (1, 0, True), (4, 1, True)])
def test_a_run_stays_within_its_lag_bound(start_run, show, max_lag, max_actor_lag, overlaps):
    knobs = ("--weight_sync.max_lag", str(max_lag), "--weight_sync.max_actor_lag", str(max_actor_lag))
    run = start_run("--learner.num_steps", "120", *knobs)
    summary = run.end()
    trained = [each["lag"] for each in run.trajectories() if each["lag"] is not None]
    assert len(trained) == 120 * GROUPS_PER_STEP * GROUP_SIZE
    assert 0 < max(trained) <= summary["lag_max"] <= max_lag
    assert (summary["overlap_frac"] > 0.1) == overlaps, "phases overlap unless max_actor_lag equals max_lag"
    assert summary["ledger_gap"] == 0
    show(
        f"max_lag = {max_lag}, max_actor_lag = {max_actor_lag}: 120 steps, greatest lag {summary['lag_max']}, mean "
        f"{summary['lag_mean']:.2f}, generation during {summary['overlap_frac']:.2f} of step time"
    )


@pytest.mark.fault(
    14, "both stages stopped, the newest version damaged; then an actor stopped and continued", full=True
)
def test_stopped_stages_a_damaged_version_and_a_stopped_actor_keep_the_lag_bound(start_run, constants, show):
    constants({"leeway.buffer.leases.LEASE_TIMEOUT_S": LEASE_S, "leeway.weight_sync.store.KEPT_VERSIONS": 2})
    run = start_run("--learner.num_steps", "100000")
    run.wait_for_steps(4)
    with ExitStack() as stops:
        damaged, tensor = damage_an_unseen_version(run, stops)
        stopped_at = time.monotonic()
        run.wait_for("both actors to refuse", lambda: len(run.events("refused")) >= 2)
        refused = run.events("refused")
        assert {event["who"] for event in refused} == {"actor-0", "actor-1"}
        for event in refused:
            assert str(damaged) in event["text"]
            assert tensor in event["text"]
        time.sleep(max(0.0, 6.0 - (time.monotonic() - stopped_at)))
        first = run.ledger()
        time.sleep(max(0.0, 10.0 - (time.monotonic() - stopped_at)))
        second = run.ledger()
        assert first["issued"] == second["issued"], "leases were granted although no stage trains"
        assert outstanding(second) <= CAPACITY
    run.wait_for_steps(10)
    run.wait_for("the next version to load", lambda: run.steps()[-1].get("weights/refused") == 0)

    # a stopped actor: its leases are issued again, and it fetches the newest version before it starts new samples
    stop_s = pick(8, 60)
    with stop_at_work(run, 1):
        began_s = time.time()
        run.wait_for("the event about the actor", lambda: run.events("behind", "actor-1"), BEHIND_AFTER_S + 30)
        time.sleep(max(0.0, stop_s - (time.time() - began_s)))
        newest, continued_s = run.newest(), time.time()
    run.wait_for("the actor to catch up", lambda: run.events("behind_ended", "actor-1"))
    run.wait_for_steps(10)
    summary = run.end(now=True)
    assert (summary["ledger_gap"], summary["lag_max"] <= 4) == (0, True)
    assert summary["failed_by_reason"].get("lease expired", 0) > 0, summary["failed_by_reason"]
    later = [each for each in run.trajectories() if each["actor"] == "actor-1" and each["started_s"] > continued_s]
    assert later, "the actor generated nothing after it continued"
    assert min(each["spans"][0]["version"] for each in later) >= newest.version - 1
    assert not run.events("restart")
    show(
        f"10 s: {outstanding(second)} of at most {CAPACITY} samples outstanding, none leased after 6 s; version "
        f"{damaged} refused by both actors for {tensor}; an actor stopped for {stop_s} s at version {newest} began "
        f"{len(later)} samples later, none below {newest.version - 1}; greatest lag {summary['lag_max']} of 4"
    )


@pytest.mark.fault(26, "over ZeroMQ: kill -9 of the weight service, and of an actor at version 50", full=True)
def test_a_run_survives_a_killed_weight_service_and_an_actor_that_joins_late(start_run, show):
    run = start_run("--learner.num_steps", "100000", "--weight_sync.transport", "network")
    run.wait_for("version 50", lambda: run.newest().version >= 50)
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    staged = f"leeway-{os.geteuid()}-{run_id}-*/**/*.safetensors"
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    assert [file for root in roots for file in root.glob(staged)], "no staged weights were found"
    assert list((run.folder / "weights").glob("*/*.delta")), "no deltas were published"
    run.kill("actor", 1)
    joined_after = run.newest()
    (old,) = run.processes("weights")
    run.kill("weights")
    killed_s, killed_at = time.monotonic(), run.newest()
    run.wait_for("newer versions", lambda: run.newest().version > killed_at.version + 10)
    recovered_s = time.monotonic() - killed_s
    run.wait_for("both restart events", lambda: len(run.events("restart")) >= 2)
    ended = sorted(event["text"].split(" (")[0] for event in run.events("restart"))
    assert ended == ["actor.1 died", "the weight service exited"]
    (new,) = run.processes("weights")
    assert new.pid != old.pid
    run.wait_for("the actor to be back", lambda: samples_of_epoch(run, "actor-1", 2), every_s=2.0)
    run.wait_for_steps(10)
    summary = run.end(now=True)
    assert (summary["ledger_gap"], summary["lag_max"] <= 4) == (0, True)
    fresh = samples_of_epoch(run, "actor-1", 2)
    oldest = min(span["version"] for each in fresh for span in each["spans"])
    assert oldest >= joined_after.version
    assert [file for root in roots for file in root.glob(staged)] == [], "staged weights outlive the run"
    show(
        f"weight service killed at version {killed_at}: 10 more versions after {recovered_s:.1f} s; an actor that died "
        f"at version {joined_after} generated {len(fresh)} samples after its restart, none below version {oldest}; "
        f"greatest lag {summary['lag_max']} of 4"
    )


@pytest.mark.fault(6, "the weights folder's disk full, then freed", tools=("fallocate",), root=True, full=True)
def test_a_full_weights_disk_only_makes_the_run_wait(start_run, show, mounts):
    folder = mounts.tmpfs("weights", size_mib=32)
    run = start_run("--learner.num_steps", "60", "--weight_sync.folder", str(folder / "w"))
    run.wait_for_steps(5)
    ballast = []
    for number in itertools.count():
        if shutil.disk_usage(folder).free > 2**16:
            ballast.append(fill(folder, leave_bytes=0).rename(folder / f"ballast-{number}"))
        if run.events("publishing"):
            break
        assert number < 600, "the full disk was never reported"
        time.sleep(0.1)
    (event,) = run.events("publishing")
    assert str(folder) in event["text"]
    assert "No space left on device" in event["text"]
    time.sleep(5.0)
    full_at, ledger = run.newest(folder / "w"), run.ledger()
    time.sleep(3.0)
    assert run.newest(folder / "w") == full_at
    assert run.ledger()["issued"] == ledger["issued"], "leases were granted although no version can be published"
    assert outstanding(ledger) <= CAPACITY
    for each in ballast:
        each.unlink()
    freed_s = time.monotonic()
    run.wait_for("the next version", lambda: run.newest(folder / "w") > full_at)
    resumed_s = time.monotonic() - freed_s
    summary = run.end()
    assert (summary["ledger_gap"], summary["num_steps"], summary["lag_max"] <= 4) == (0, 60, True)
    debt = max(row["lag/publish"] or 0 for row in run.steps())
    assert debt >= 1
    assert run.events("publishing_ended")
    assert not run.events("restart")
    show(
        f"publish debt up to {debt:.0f} versions, admission closed, the folder named; next version {resumed_s:.1f} s "
        f"after space was freed, greatest lag {summary['lag_max']} of 4"
    )
