"""Rows 4 to 7 of the fault matrix: a disk that fails, is slow, or is full, and an LMDB map that is full."""

import statistics
import time

import pytest
from tests.faults.disks import MIB, fill
from tests.faults.service_process import FACTS, MANY, StoreContents, sample, settle
from tests.faults.strace import COMMIT_CALLS, Strace
from tests.full import pick
from tests.world.waiting import bound, wait_until, wait_until_stable

from leeway.buffer import outbox
from leeway.buffer.client import BufferClient

IGNORES_ERRORS = ("-m", "tests.world.service", "without_commit_errors")
SMALL_MAP = ("-m", "tests.world.service", "with_small_map")
FIXED_SMALL_MAP = ("-m", "tests.world.service", "with_fixed_small_map")
MANY_MORE = FACTS.model_copy(update={"groups_per_step": 32_768})
"""Facts that lease half a million samples."""


@pytest.mark.fault(4, "fsync or write fails with EIO", tools=("strace",), full=True)
@pytest.mark.parametrize("call", ["fdatasync", "writev", "pwrite64"])
def test_a_failed_write_stops_acknowledgements_and_ends_the_service(call, start_service, load_on, tmp_path, show):
    service = start_service()
    load = load_on(service)
    load.wait_for(100)
    strace = Strace(service.pid, tmp_path / "strace", trace=COMMIT_CALLS, inject=f"{call}:error=EIO:when=20+")
    try:
        assert service.wait(60) == 1
    finally:
        strace.close()
    failed_at_s = strace.injected_at_s[0] - time.time() + time.monotonic()
    settle(0.3)
    late = [at for at in load.outcomes.times_s if at > failed_at_s + 0.1]
    assert late == []
    assert f"writing to the buffer in {service.folder} failed" in service.log
    acknowledged = load.acknowledged
    StoreContents.read(service.folder).check(acknowledged)
    service.start()
    load.wait_for(100)
    load.end()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged)
    show(
        f"{call}: exit code 1 with the reason in its log, no acknowledgement after it, 0 of {len(acknowledged)} lost, "
        "work continues after a restart"
    )


@pytest.mark.fault(4, "commit errors are ignored", control=True, tools=("strace",), full=True)
def test_a_service_that_ignores_a_failed_fsync_loses_samples(start_service, load_on, tmp_path, show):
    service = start_service(entry=IGNORES_ERRORS, facts=MANY)
    load = load_on(service, facts=MANY, draws=False)
    load.wait_for(100)
    strace = Strace(service.pid, tmp_path / "strace", trace="fdatasync", inject="fdatasync:error=EIO")
    try:
        wait_until(lambda: "the error is ignored" in service.log, "the error", errors=load.errors)
        load.wait_for(40)
    finally:
        strace.close()
    service.kill()
    settle()
    num_lost = len(load.acknowledged - StoreContents.read(service.folder).keys)
    assert num_lost > 0
    show(f"{num_lost} of {len(load.acknowledged)} acknowledged lost")


def rate_with_delay(service, count, delay_ms: int, log) -> float:
    """Return acknowledgements per second while fdatasync takes `delay_ms` longer; strace is attached for any delay."""
    inject = f"fdatasync:delay_enter={delay_ms * 1000}" if delay_ms else ""
    strace = Strace(service.pid, log, trace="fdatasync", inject=inject)
    try:
        settle(0.3)
        before, began = count(), time.monotonic()
        time.sleep(2.0)
        return (count() - before) / (time.monotonic() - began)
    finally:
        strace.close()


@pytest.mark.fault(5, "slow fsync, 5 and 50 ms", tools=("strace",), full=True)
def test_a_slow_fsync_costs_little_throughput_and_no_memory(start_service, load_on, tmp_path, show):
    service = start_service(facts=MANY_MORE)
    load = load_on(service, facts=MANY_MORE, draws=False, groups=128, num_actors=4)
    load.wait_for(5000)
    rates: dict[int, list[float]] = {0: [], 5: [], 50: []}
    memory: dict[int, list[int]] = {0: [], 5: [], 50: []}
    for number in range(3):
        for delay_ms in rates:
            log = tmp_path / f"strace-{number}-{delay_ms}"
            rates[delay_ms].append(rate_with_delay(service, lambda: len(load.outcomes), delay_ms, log))
            memory[delay_ms].append(service.memory_bytes())
    load.end()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged)
    middle = {delay_ms: statistics.median(found) for delay_ms, found in rates.items()}
    assert middle[5] >= 0.3 * middle[0], rates
    peaks = {delay_ms: max(found) / MIB for delay_ms, found in memory.items()}
    assert max(peaks[5], peaks[50]) <= 1.1 * peaks[0] + 4, memory
    show(
        f"acknowledged per s (medians of 3): {middle[0]:.0f} without delay, {middle[5]:.0f} at 5 ms "
        f"({middle[5] / middle[0]:.2f}x), {middle[50]:.0f} at 50 ms ({middle[50] / middle[0]:.2f}x), "
        f"anonymous memory at most {peaks[0]:.0f}, {peaks[5]:.0f} and {peaks[50]:.0f} MiB"
    )


@pytest.mark.fault(5, "one push at a time", control=True, tools=("strace",), full=True)
def test_without_a_window_of_unacknowledged_pushes_a_slow_fsync_cuts_throughput(
    start_service, load_on, tmp_path, show, monkeypatch
):
    service = start_service(facts=MANY)
    load_on(service, facts=MANY, draws=False, num_actors=0)
    monkeypatch.setattr(outbox, "COALESCE_S", 0.0)
    client = BufferClient(service.address, run_id=MANY.run_id, role="actor", name="one-by-one")
    client.connect()
    leases = iter(client.lease(512).result(60).leases)

    def rate() -> float:
        num_done, until_s = 0, time.monotonic() + 1.0
        while time.monotonic() < until_s:
            lease = next(leases)
            for index in lease.sample_indices:
                assert client.push(sample(lease, index)).result(60).outcome == "committed"
                num_done += 1
        return num_done

    rates = {0: rate()}
    try:
        for delay_ms in (5, 50):
            inject = f"fdatasync:delay_enter={delay_ms * 1000}"
            strace = Strace(service.pid, tmp_path / f"strace-{delay_ms}", trace="fdatasync", inject=inject)
            try:
                rates[delay_ms] = rate()
            finally:
                strace.close()
    finally:
        client.close(1.0)
    assert rates[50] < 0.3 * rates[0]
    show(
        f"acknowledged per s: {rates[0]:.0f} without delay, {rates[5]:.0f} at 5 ms ({rates[5] / rates[0]:.2f}x), "
        f"{rates[50]:.0f} at 50 ms ({rates[50] / rates[0]:.2f}x)"
    )


@pytest.mark.fault(6, "disk full, then freed", root=True)
def test_producers_wait_while_the_disk_is_full_and_nothing_is_dropped(mounts, start_service, load_on, tmp_path, show):
    disk = mounts.tmpfs("disk", 48)
    service = start_service(disk / "buffer", facts=MANY, log=tmp_path / "log")
    load = load_on(service, facts=MANY, draws=False, num_completion_tokens=256)
    load.wait_for(50)
    ballast = fill(disk, leave_bytes=2 * MIB)
    wait_until(lambda: "no space is left" in service.log, "the report of the full disk", errors=load.errors)
    # the space left is enough for one or two small commits
    wait_until_stable(lambda: len(load.outcomes), "the number of acknowledgements on a full disk", for_s=pick(2, 10))
    assert service.is_alive
    ballast.unlink()
    freed_at_s = time.monotonic()
    load.wait_for(50)
    resumed_s = next(at for at in load.outcomes.times_s if at > freed_at_s) - freed_at_s
    load.end()
    status = load.learner.status().result(60)
    service.stop()
    assert resumed_s <= bound(2.0)
    assert all(outcome in ("committed", "duplicate") for _, outcome in load.outcomes)
    assert status.ledger["gap"] == 0
    StoreContents.read(service.folder).check(load.acknowledged)
    show(
        f"full for {pick(2, 10)} s: the service keeps running and reports it, 0 acknowledged meanwhile; resumed "
        f"{resumed_s:.2f} s after space was freed, 0 of {len(load.acknowledged)} lost, 0 dropped"
    )


@pytest.mark.fault(6, "commit errors are ignored", control=True, root=True, full=True)
def test_a_service_that_ignores_a_full_disk_loses_samples(mounts, start_service, load_on, tmp_path, show):
    disk = mounts.tmpfs("disk", 48)
    service = start_service(disk / "buffer", facts=MANY, entry=IGNORES_ERRORS, log=tmp_path / "log")
    load = load_on(service, facts=MANY, draws=False, num_completion_tokens=256)
    load.wait_for(50)
    fill(disk, leave_bytes=2 * MIB)
    wait_until(lambda: "the error is ignored" in service.log, "the error", errors=load.errors)
    settle(0.3)
    service.kill()
    settle()
    num_lost = len(load.acknowledged - StoreContents.read(service.folder).keys)
    assert num_lost > 0
    show(f"{num_lost} of {len(load.acknowledged)} acknowledged lost")


@pytest.mark.fault(7, "LMDB map of 4 MiB full")
def test_a_full_map_grows_and_nothing_is_lost(start_service, load_on, show):
    service = start_service(facts=MANY, entry=SMALL_MAP)
    load = load_on(service, facts=MANY, draws=False, num_completion_tokens=1024)
    goal_bytes = pick(20, 100) * MIB
    wait_until(lambda: (service.folder / "data.mdb").stat().st_size > goal_bytes, "growth", errors=load.errors)
    load.end()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged)
    num_grown = service.log.count("is full; growing it")
    assert num_grown >= 2
    show(f"grew {num_grown} times to hold {goal_bytes // MIB} MiB: 0 of {len(load.acknowledged)} lost, verify clean")


@pytest.mark.fault(7, "a map that cannot grow", control=True)
def test_a_service_exits_if_its_map_cannot_grow(start_service, load_on, show):
    service = start_service(facts=MANY, entry=FIXED_SMALL_MAP)
    load = load_on(service, facts=MANY, draws=False, num_completion_tokens=1024)
    code = service.wait(60)
    settle()
    num_then = len(load.outcomes)
    settle(1.0)
    assert (code, len(load.outcomes)) == (1, num_then)
    StoreContents.read(service.folder).check(load.acknowledged)
    show(f"the service exits with 1 after {num_then} acknowledgements; none follows")
