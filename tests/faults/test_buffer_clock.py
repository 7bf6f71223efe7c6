"""The wall clock of the service or of an actor jumps by a day, or stops.

libfaketime changes only the wall clock (DONT_FAKE_MONOTONIC), as a clock step by hand or by NTP does. CLOCK_MONOTONIC
never jumps on a running kernel, so a jump of this clock would be an impossible case.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.constants import environment
from tests.faults.actor_process import ActorProcess
from tests.faults.service_process import FACTS, Load, StoreContents, sample
from tests.full import pick
from tests.world.waiting import bound, wait_until

LEASE_TIMEOUT_S = 2.0
SLACK_S = 0.7
SHORT_LEASES = environment({"leeway.buffer.leases.LEASE_TIMEOUT_S": LEASE_TIMEOUT_S})
STEPS = {"a day ahead": "+1d", "a day back": "-1d", "standing still": "2030-01-01 00:00:00"}
"""Settings of libfaketime: an offset, or a time at which the clock stops."""
needs_faketime = {"tools": ("faketime",), "full": True}


class FakeClock:
    """The wall clock of processes started with `environment`."""

    def __init__(self, folder: Path) -> None:
        (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        self._file = folder / "faketime"
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        self.set("+0")

    def set(self, to: str) -> None:
        """Make the clock jump; `to` is a value of `STEPS`."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(to + "\n")
        fresh.rename(self._file)

    def offset_s(self) -> float:
        """Return the difference to the true clock as a process measures it, in seconds."""
        code = "import time; print(time.time())"
        shown = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=True
        )
        return float(shown.stdout) - time.time()


@pytest.fixture
def clock(tmp_path):
    return FakeClock(tmp_path)


def lease_and_wait(load: Load, wait_s: float) -> tuple[str, float]:
    """Lease one group, push its first sample after `wait_s`, and wait until the lease of the other samples expires.

    Returns:
        The outcome of the pushed sample, and the seconds from the lease request to the expiry.
    """
    (client,) = load.actors
    failed = load.learner.status().result(60).failed_by_reason.get("lease expired", 0)
    requested_at = time.monotonic()
    (lease,) = client.lease(1).result(60).leases
    time.sleep(wait_s)
    outcome = client.push(sample(lease, lease.sample_indices[0])).result(60).outcome
    wait_until(lambda: load.learner.status().result(60).failed_by_reason.get("lease expired", 0) > failed, "expiry")
    return outcome, time.monotonic() - requested_at


@pytest.fixture
def join(request):
    """Return `join(service)`, which connects a learner and an actor without starting their threads."""

    def make(service) -> Load:
        load = Load(service.address, facts=service.facts, num_actors=1)
        request.addfinalizer(load.close)
        return load

    return make


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.fault(22, "the wall clock of the service jumps by a day or stands still", **needs_faketime)
def test_lease_timeouts_do_not_depend_on_the_wall_clock(start_service, clock, join, step, show):
    service = start_service(environment={**SHORT_LEASES, **clock.environment})
    load = join(service)
    assert abs(clock.offset_s()) < 60
    clock.set(STEPS[step])
    assert abs(clock.offset_s()) > 80_000, "the clock did not move: the test proves nothing"
    outcome, expired_after_s = lease_and_wait(load, 0.5 * LEASE_TIMEOUT_S)
    load.close()
    service.stop()
    assert outcome == "committed"
    assert LEASE_TIMEOUT_S <= expired_after_s <= bound(LEASE_TIMEOUT_S + SLACK_S)
    show(f"{step}: a lease of {LEASE_TIMEOUT_S:g} s expired after {expired_after_s:.2f} s")


@pytest.mark.fault(22, "deadlines on the wall clock", control=True, **needs_faketime)
def test_control_a_jump_ends_every_lease_if_deadlines_use_the_wall_clock(start_service, clock, join, show):
    entry = ("-m", "tests.world.service", "without_monotonic_time")
    service = start_service(environment={**SHORT_LEASES, **clock.environment}, entry=entry)
    load = join(service)
    (client,) = load.actors
    (lease,) = client.lease(1).result(60).leases
    clock.set(STEPS["a day ahead"])
    wait_until(lambda: client.status().result(60).failed_by_reason.get("lease expired", 0) > 0, "expiry")
    outcome = client.push(sample(lease, 0)).result(60).outcome
    load.close()
    assert outcome == "late"
    show("a lease expired at once, and its trajectory was late")


@pytest.mark.fault(22, "the wall clocks of all processes jump under load", **needs_faketime)
def test_work_continues_without_loss_while_all_wall_clocks_jump(start_service, clock, load_on, tmp_path, show):
    service = start_service(environment={**SHORT_LEASES, **clock.environment})
    load = load_on(service)
    actor = ActorProcess(tmp_path, service, "jumping", environment=clock.environment)
    pauses_s, num_jumps = [], pick(1, 5)
    try:
        for to in [*STEPS.values()] * num_jumps:
            actor.wait_for("committed", len(actor.events("committed")) + 20)
            clock.set(to)
            began, before = time.monotonic(), len(load.drawn)
            actor.wait_for("committed", len(actor.events("committed")) + 20)
            wait_until(lambda: len(load.drawn) > before + 2, "further steps", 30, load.errors)  # noqa: B023
            pauses_s.append(time.monotonic() - began)
    finally:
        actor.kill()
    load.end()
    ledger = load.learner.status().result(60).ledger
    load.close()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged | actor.acknowledged)
    assert ledger["dropped_stale"] == 0
    assert max(pauses_s) <= bound(LEASE_TIMEOUT_S)
    assert all(len(records) == FACTS.groups_per_step * FACTS.group_size for records in load.drawn.values())
    show(f"{3 * num_jumps} jumps: 0 lost, 0 leases expired early, {len(load.drawn)} steps drawn, none stale")
