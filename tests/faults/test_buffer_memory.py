"""Memory limits: senders wait before the limit is reached, and an OOM-killed service loses nothing acknowledged."""

import contextlib
import signal
import time

import pytest
from tests.constants import environment
from tests.faults import cgroups
from tests.faults.actor_process import ActorProcess
from tests.faults.service_process import CONFIG, MANY, StoreContents
from tests.full import pick

MIB = 2**20
ROOM = 128 * MIB
"""Memory limit in bytes above the memory use of the idle service."""
STUCK_S = 30.0
SMALL_INBOX = f"leeway.buffer.service.INBOX_BYTES={16 * MIB}"
LARGE_INBOX = f"leeway.buffer.service.INBOX_BYTES={4096 * MIB}"
LEASE_TIMEOUT_S = 2.0
SHORT_LEASES = environment(
    {"leeway.buffer.leases.LEASE_TIMEOUT_S": LEASE_TIMEOUT_S, "leeway.buffer.groups.MAX_ATTEMPTS": 100}
)

needs_cgroups = pytest.mark.skipif(bool(cgroups.missing()), reason=cgroups.missing() or "-")


@pytest.fixture
def limit():
    with contextlib.closing(cgroups.MemoryLimit()) as made:
        yield made


@pytest.fixture
def start_limited(start_service, limit):
    """Return `start_limited(*constants)`, which starts a service whose memory is counted; no limit is set yet."""

    def start(*constants):
        entry = ("-m", "tests.world.service", *constants)
        return start_service(facts=MANY, config=CONFIG, entry=entry, prefix=limit.prefix)

    return start


def flood(service, start_actor, load_on, limit, stopped_s=None, **options) -> list[ActorProcess]:
    """Limit memory to slightly more than the service uses, stop the service, and let actors send large trajectories."""
    actors = [
        start_actor(service, f"actor-{number}", groups=300, num_completion_tokens=8000, **options)
        for number in range(4)
    ]
    for actor in actors:
        actor.wait_for("epoch")
    limit.allow(ROOM)
    load_on(service, num_actors=0, draws=False)  # publishes a version, so that the service grants leases
    for actor in actors:
        actor.wait_for("lease")
    service.signal(signal.SIGSTOP)
    time.sleep(stopped_s or pick(2, 10))
    service.signal(signal.SIGCONT)
    return actors


@needs_cgroups
@pytest.mark.fault(
    28, "a memory limit 128 MiB above the idle service, four actors that send as fast as they can", root=True
)
def test_senders_wait_before_the_memory_of_the_service_is_used_up(start_limited, start_actor, load_on, limit, show):
    service = start_limited(SMALL_INBOX)
    idle = limit.used_bytes
    actors = flood(service, start_actor, load_on, limit)
    most, num_expected = 0, pick(1_000, 10_000)
    num_before, until = 0, time.monotonic() + STUCK_S
    while (num := sum(len(actor.events("committed")) for actor in actors)) < num_expected:
        assert service.is_alive, f"the service was killed after {num} trajectories"
        if num > num_before:  # the rate depends on the disk
            num_before, until = num, time.monotonic() + STUCK_S
        assert time.monotonic() < until, f"stuck at {num} trajectories for {STUCK_S:.0f} s"
        most = max(most, limit.used_bytes)
        time.sleep(0.1)
    for actor in actors:
        actor.kill()
    service.stop()
    StoreContents.read(service.folder).check(set().union(*(actor.acknowledged for actor in actors)))
    show(f"{num} trajectories of 64 KB acknowledged, at most {(most - idle) / MIB:.0f} of {ROOM / MIB:.0f} MiB used")


@needs_cgroups
@pytest.mark.fault(28, "no credit", control=True, root=True)
def test_control_without_credit_the_service_is_oom_killed(start_limited, start_actor, load_on, limit, show):
    service = start_limited(LARGE_INBOX)
    # The stop is short: after a long stop, clients reconnect, and libzmq 4.3.5 may abort the service
    # (zeromq/libzmq#4841).
    flood(service, start_actor, load_on, limit, stopped_s=2.0, bounded=False)
    assert service.wait(60) == -signal.SIGKILL
    show("the service was killed")


@needs_cgroups
@pytest.mark.fault(28, "the service is OOM-killed", root=True, full=True)
def test_an_oom_killed_service_loses_nothing_acknowledged(start_limited, load_on, limit, show):
    service = start_limited()
    load = load_on(service, draws=False, num_completion_tokens=4000)
    num_kills = pick(2, 10)
    for _ in range(num_kills):
        load.wait_for(50, 60)
        limit.allow(0)
        with limit.exhaust():
            assert service.wait(60) == -signal.SIGKILL
        limit.allow(None)
        service.start()
    load.wait_for(50, 60)
    load.end()
    load.close()
    service.stop()
    StoreContents.read(service.folder).check(load.acknowledged)
    show(f"{num_kills} kills, {len(load.acknowledged)} acknowledged, 0 lost")


@needs_cgroups
@pytest.mark.fault(28, "an actor is OOM-killed", root=True, full=True)
def test_leases_of_an_oom_killed_actor_are_issued_again(start_service, start_actor, load_on, limit, show):
    service = start_service(facts=MANY, environment=SHORT_LEASES)
    load = load_on(service, draws=False)
    victim = start_actor(service, "victim", groups=16, num_completion_tokens=8000)
    victim.wait_for("committed")
    limit.add(victim.process.pid)
    limit.allow(1 * MIB)
    assert victim.process.wait(60) == -signal.SIGKILL
    outstanding = victim.leased - victim.acknowledged
    assert outstanding, "the actor had no samples left: the test proves nothing"
    time.sleep(LEASE_TIMEOUT_S + 2.0)
    load.end()
    assert load.learner.status().result(60).ledger["in_flight"] == 0
    load.close()
    service.stop()
    kept = StoreContents.read(service.folder)
    kept.check(load.acknowledged | victim.acknowledged)
    assert outstanding <= kept.keys, "samples of the killed actor were not issued again"
    show(f"{len(outstanding)} samples issued again within {LEASE_TIMEOUT_S + 2:g} s, 0 lost")
