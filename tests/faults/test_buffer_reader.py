"""Row 8 of the fault matrix: a reader keeps a read transaction open, so freed pages cannot be reused."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.faults.disks import MIB
from tests.faults.service_process import CONFIG, StoreContents
from tests.full import FULL, pick
from tests.world.waiting import bound, wait_until

from leeway.buffer.store import Store

UNWATCHED = ("-m", "tests.world.service", "without_reader_watch")
LIVE_TRAJECTORIES = pick(400, 2000)
TOKENS = 4000
SMALL_STORE = CONFIG.model_copy(update={"capacity_trajectories": LIVE_TRAJECTORIES})
SLACK_BYTES = 32 * MIB
"""Maximum size in bytes by which the file of the short run may exceed its live data."""


@pytest.fixture
def start_reader():
    """Return `start_reader(folder)`, which starts a process that keeps a read transaction open."""
    started = []

    def start(folder) -> subprocess.Popen:
        script = Path(__file__).with_name("pinned_reader.py")
        reader = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True)
        started.append(reader)
        assert reader.stdout.readline() == "reading\n"
        return reader

    yield start
    for reader in started:
        reader.kill()
        reader.wait(60)
        reader.stdout.close()


def file_bytes(service) -> int:
    return (service.folder / "data.mdb").stat().st_size


def fill_up(load) -> None:
    """Push until old samples are evicted for new ones."""
    load.wait_for(LIVE_TRAJECTORIES + 200, timeout_s=60)


def live_bytes(folder) -> int:
    """Return the bytes of pages in use."""
    store = Store(folder, None)
    try:
        return store.read(lambda tx: tx.live_bytes)
    finally:
        store.close()


@pytest.mark.fault(8, "pinned reader")
def test_a_pinned_reader_is_reported_and_the_file_stays_small(start_service, load_on, start_reader, show):
    service = start_service(config=SMALL_STORE)
    load = load_on(service, num_completion_tokens=TOKENS, groups=8)
    fill_up(load)
    before = file_bytes(service)
    reader = start_reader(service.folder)
    began = time.monotonic()
    detected_s = wait_until(lambda: f"process {reader.pid} has been reading" in service.log, "a warning")
    wait_until(lambda: "pushes wait" in service.log, "back-pressure", 60.0, load.errors)
    time.sleep(pick(1, 5))
    largest, held_s = file_bytes(service), time.monotonic() - began
    reader.kill()
    reader.wait(60)
    freed_at_s, num_then = time.monotonic(), len(load.outcomes)
    load.wait_for(10)
    resumed_s = load.outcomes.times_s[num_then] - freed_at_s
    fill_up(load)
    after = file_bytes(service)
    load.end()
    status = load.learner.status().result(60)
    service.stop()
    live = live_bytes(service.folder)
    assert detected_s <= bound(10.0)
    assert largest <= (2 * live if FULL else live + SLACK_BYTES)
    assert after <= largest + SLACK_BYTES, "freed pages are not reused"
    assert status.ledger["gap"] == 0
    report = StoreContents.read(service.folder).report
    assert report["faults"] == []
    assert all(outcome in ("committed", "duplicate") for _, outcome in load.outcomes)
    show(
        f"detected after {detected_s:.1f} s; {live / MIB:.0f} MiB of live data, file {before / MIB:.0f} MiB before and "
        f"at most {largest / MIB:.0f} MiB in {held_s:.0f} s of reading (pushes wait), resumed {resumed_s:.2f} s later"
    )


@pytest.mark.fault(8, "readers are not watched", control=True)
def test_without_a_reader_watch_the_file_grows_during_a_read_transaction(start_service, load_on, start_reader, show):
    service = start_service(config=SMALL_STORE, entry=UNWATCHED)
    load = load_on(service, num_completion_tokens=TOKENS, groups=8)
    fill_up(load)
    live = file_bytes(service)
    start_reader(service.folder)
    took_s = wait_until(lambda: file_bytes(service) > 2 * live + 2 * SLACK_BYTES, "growth", 90.0, load.errors)
    load.end()
    show(f"file from {live / MIB:.0f} to {file_bytes(service) / MIB:.0f} MiB in {took_s:.0f} s, still growing")
