"""Rows 1 to 3 of the fault matrix: kills of the service at any time and system call, and power cuts."""

import os
import random
import signal
import subprocess
import time
from collections import Counter

import pytest
from tests.faults.disks import copy_snapshot
from tests.faults.results import as_text
from tests.faults.service_process import CONFIG, FACTS, MANY, StoreContents, settle
from tests.faults.strace import COMMIT_CALLS, Strace
from tests.full import pick
from tests.world.buffer_process import serving
from tests.world.waiting import bound

from leeway.buffer.errors import StoreError

EARLY_ACKNOWLEDGEMENT = ("-m", "tests.world.service", "without_commit_before_acknowledgement")


def lost(folder, acknowledged) -> int:
    """Return how many acknowledged samples the store lacks; a store that cannot be read lacks all samples."""
    try:
        return len(acknowledged - StoreContents.read(folder).keys)
    except StoreError:
        return len(acknowledged)


@pytest.mark.fault(1, "kill -9 of the buffer at random times under load")
@pytest.mark.parametrize("durability", ["commit", "interval", "os"])
def test_a_killed_service_loses_nothing_acknowledged_and_recovers_at_once(durability, start_service, load_on, show):
    num_kills = pick(5, 50) if durability == "commit" else pick(1, 10)
    service = start_service(config=CONFIG.model_copy(update={"durability": durability}))
    load = load_on(service)
    chance = random.Random(1)
    recoveries_s = []
    for _ in range(num_kills):
        load.wait_for(1)
        time.sleep(chance.uniform(0.0, 0.3))
        service.kill()
        killed_at_s, num_before = time.monotonic(), len(load.outcomes)
        service.start()
        load.wait_for(1)
        # The first acknowledgement may have been in flight when the service was killed.
        first = next(at for at in load.outcomes.times_s[num_before:] if at > killed_at_s + 0.02)
        recoveries_s.append(first - killed_at_s)
    load.end()
    status = load.learner.status().result(60)
    service.stop()
    kept = StoreContents.read(service.folder)
    kept.check(load.acknowledged)
    drawn = [record for records in load.drawn.values() for record in records]
    assert len(drawn) == len(set(drawn)), "a sample was used for training twice"
    assert status.ledger["gap"] == 0
    recoveries_s.sort()
    assert recoveries_s[-1] <= bound(2.0)
    show(
        f"durability '{durability}': {num_kills} kills, {len(load.acknowledged)} acknowledged, 0 lost, 0 stored twice, "
        f"ledger gap 0, recovery median {recoveries_s[num_kills // 2]:.2f} s, longest {recoveries_s[-1]:.2f} s"
    )


@pytest.mark.fault(1, "acknowledgement before the commit, 1 to 5 kills", control=True)
def test_a_service_that_acknowledges_before_the_commit_loses_samples_on_a_kill(start_service, load_on, show):
    service = start_service(entry=EARLY_ACKNOWLEDGEMENT, facts=MANY)
    load = load_on(service, facts=MANY, draws=False, groups=16)
    for _ in range(5):
        load.wait_for(3000)
        service.kill()
        settle()
        num_lost = lost(service.folder, load.acknowledged)
        if num_lost:
            break
        service.start()  # nothing was lost: the kill came just after a late commit
    assert num_lost > 0
    show(f"{num_lost} of {len(load.acknowledged)} acknowledged lost")


@pytest.mark.fault(2, "kill -9 at every system call of a commit", tools=("strace",), full=True)
@pytest.mark.parametrize(("call", "num_kills"), [("lseek", 10), ("writev", 10), ("fdatasync", 10), ("pwrite64", 30)])
def test_a_kill_at_any_system_call_of_a_commit_loses_and_tears_nothing(
    call, num_kills, start_service, load_on, tmp_path, show
):
    service = start_service()
    load = load_on(service, num_actors=1)
    for number in range(1, num_kills + 1):
        kill_at(service, call, number, tmp_path / f"strace-{number}")
        if number % 5 == 0:
            settle()
            StoreContents.read(service.folder).check(load.acknowledged)
        service.start()
        load.wait_for(1)
    load.end()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged)
    show(f"at the 1st to {num_kills}th {call}: {len(load.acknowledged)} acknowledged, 0 lost, 0 torn, 0 stored twice")


@pytest.mark.fault(2, "kill -9 at every system call that makes a new store", tools=("strace",), full=True)
def test_a_kill_during_store_creation_does_not_prevent_the_next_start(start_service, tmp_path, show):
    killed: Counter[str] = Counter()
    for call in ("openat", *COMMIT_CALLS.split(","), "write", "ftruncate"):
        for number in range(1, 13):
            folder = tmp_path / f"{call}-{number}" / "buffer"
            inject = f"{call}:signal=SIGKILL:when={number}"
            only = [] if call == "write" else paths(folder)
            strace = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}", *only, "-e", f"inject={inject}"]
            if not is_killed([*strace, *serving(folder, FACTS)], folder):
                break
            killed[call] += 1
            start_service(folder).stop()
    assert killed["pwrite64"] > 2, killed
    show(f"kills at {as_text(killed)}: the next start succeeds after each")


def paths(folder) -> list[str]:
    """Return strace's options that select the files of a store."""
    names = (folder, *(folder / name for name in ("data.mdb", "lock.mdb", "owner.lock", "port")))
    return [option for name in names for option in ("-P", str(name))]


def is_killed(command: list[str], folder) -> bool:
    """Start a service; return whether strace kills it at a system call. Kill a service that starts to serve."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process.stdout:
        was_killed = not process.stdout.readline()
        if not was_killed:
            try:
                os.kill(int((folder / "owner.lock").read_text()), signal.SIGKILL)
            except ProcessLookupError:
                was_killed = True
        process.wait(60)
    return was_killed


@pytest.mark.fault(2, "acknowledgement before the commit", control=True, tools=("strace",), full=True)
def test_early_acknowledgement_loses_samples_on_a_kill_at_a_system_call(start_service, load_on, tmp_path, show):
    service = start_service(entry=EARLY_ACKNOWLEDGEMENT, facts=MANY)
    load = load_on(service, facts=MANY, draws=False)
    load.wait_for(100)
    kill_at(service, "fdatasync", 1, tmp_path / "strace")
    settle()
    num_lost = lost(service.folder, load.acknowledged)
    assert num_lost > 0
    show(f"{num_lost} of {len(load.acknowledged)} acknowledged lost")


def kill_at(service, call: str, number: int, log) -> None:
    """Kill the service as it enters this system call for the `number`-th time."""
    strace = Strace(service.pid, log, trace=COMMIT_CALLS, inject=f"{call}:signal=SIGKILL:when={number}")
    try:
        assert service.wait(60) == -signal.SIGKILL
        strace.wait(60)
    finally:
        strace.close()
    assert strace.last_call == call


def cut_power(service, load, image, copy) -> set:
    """Copy a consistent snapshot of the disk; return the samples that were acknowledged before the copy."""
    service.signal(signal.SIGSTOP)
    try:
        # Wait until the client has received the acknowledgements already sent: these samples must not be lost.
        settle()
        acknowledged = load.acknowledged
        copy_snapshot(image, copy)
    finally:
        service.signal(signal.SIGCONT)
    return acknowledged


@pytest.mark.fault(3, "power cut", tools=("losetup", "mkfs.ext4"), root=True, full=True)
def test_a_power_cut_loses_nothing_acknowledged(mounts, start_service, load_on, tmp_path, show):
    disk, image = mounts.ext4("disk", 128)
    service = start_service(disk / "buffer", facts=MANY)
    # without pauses, the load would use up its leases before the last cut
    load = load_on(service, draws=False, num_actors=1, groups=2, pause_s=0.02)
    chance = random.Random(3)
    num_acknowledged = []
    for number in range(20):
        load.wait_for(20)
        time.sleep(chance.uniform(0.0, 0.2))
        copy = tmp_path / "copy.img"
        acknowledged = cut_power(service, load, image, copy)
        after = mounts.image(f"after-{number}", copy)
        StoreContents.read(after / "buffer").check(acknowledged)
        mounts.unmount(after)
        num_acknowledged.append(len(acknowledged))
    load.end()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged)
    show(
        f"{len(num_acknowledged)} points (ext4 copied under the stopped service, journal replayed) with "
        f"{num_acknowledged[0]} to {num_acknowledged[-1]} acknowledged: 0 lost, verify clean"
    )


@pytest.mark.fault(
    3, "durability 'os' and 'interval'", control=True, tools=("losetup", "mkfs.ext4"), root=True, full=True
)
@pytest.mark.parametrize("durability", ["os", "interval"])
def test_without_a_sync_per_commit_a_power_cut_loses_samples(
    durability, mounts, start_service, load_on, tmp_path, show
):
    disk, image = mounts.ext4("disk", 128)
    config = CONFIG.model_copy(update={"durability": durability})
    entry = ("-m", "tests.world.service", "leeway.buffer.upkeep.SYNC_EVERY_S=0.5")
    service = start_service(disk / "buffer", facts=MANY, config=config, entry=entry)
    load = load_on(service, draws=False, num_actors=1)
    worst = (0, 0)
    for number in range(5):
        load.wait_for(200)
        acknowledged = cut_power(service, load, image, tmp_path / "copy.img")
        after = mounts.image(f"after-{number}", tmp_path / "copy.img")
        worst = max(worst, (lost(after / "buffer", acknowledged), len(acknowledged)))
        mounts.unmount(after)
    assert worst[0] > 0
    show(f"'{durability}': {worst[0]} of {worst[1]} acknowledged lost at the worst of 5 points")
