"""Actors as real processes that are killed during a send, stopped and replaced, or left without a buffer."""

import itertools
import random
import signal
import time
from contextlib import closing

import pytest
from tests.constants import environment
from tests.faults.actor_process import ZOMBIE_EXIT
from tests.faults.service_process import MANY, StoreContents
from tests.full import FULL, pick
from tests.world.waiting import bound, wait_until

from leeway.buffer.store import Store
from leeway.buffer.tables import NO_RECORD

MIB = 2**20
LEASE_TIMEOUT_S = 2.0
SHORT_LEASES = environment(
    {"leeway.buffer.leases.LEASE_TIMEOUT_S": LEASE_TIMEOUT_S, "leeway.buffer.groups.MAX_ATTEMPTS": 100}
)
SMALL_CREDIT = ("-m", "tests.world.service", f"leeway.buffer.service.INBOX_BYTES={8 * MIB}")
"""Arguments of a service that gives each of two actors a credit of 4 MiB."""
GROWTH_LIMIT = 64 * MIB
LONG_LEASES = environment({"leeway.buffer.leases.LEASE_TIMEOUT_S": 3600.0})
STOPPED_S = 5.0 if FULL else 2.0


@pytest.fixture
def start_run(start_service, load_on):
    """Return `start_run(**arguments of Service)`, which starts a service whose learner has published a version."""

    def start(**arguments):
        service = start_service(**{"facts": MANY, **arguments})
        load_on(service, num_actors=0, draws=False)
        return service

    return start


def kill_in_mid_send(start_actor, service, num_kills):
    """Kill actors while they send. Half of the actors share a name, so that each of them replaces the previous one.

    Returns:
        The actors, and for each leased sample the time at which the last actor with this lease was killed.
    """
    chance = random.Random(11)
    victims, killed_at = [], {}
    for number in range(num_kills):
        name = "again" if number % 2 else f"once-{number}"
        victim = start_actor(service, name, num_completion_tokens=4000, pause_s=0.002)
        victim.wait_for("committed")
        # samples in flight may still arrive; other actors must generate the unsent samples
        while not ((pushed := victim.keys("push")) - victim.acknowledged and victim.leased - pushed):
            victim.signal(signal.SIGCONT)
            time.sleep(chance.uniform(0.0, 0.05))
            victim.signal(signal.SIGSTOP)
        victim.kill()
        victims.append(victim)
        killed_at |= dict.fromkeys(victim.leased, time.monotonic())
    time.sleep(LEASE_TIMEOUT_S + 1.0)
    return victims, killed_at


def stored(folder):
    """Return the samples that have a record; the service may write at the same time."""
    with closing(Store(folder, None)) as store:
        groups = store.read(lambda tx: list(tx.groups.all_items()))
    return {(key, i) for (key,), group in groups for i, record in enumerate(group.records) if record != NO_RECORD}


@pytest.mark.fault(11, "kill -9 of both actors and of the service while samples are requeued")
def test_acknowledged_tokens_of_requeued_samples_survive_kills_of_actors_and_service(
    start_service, start_actor, load_on, show
):
    service = start_service(facts=MANY, environment=environment({"leeway.buffer.groups.MAX_ATTEMPTS": 10_000}))
    load_on(service, num_actors=0, draws=False)
    chance, num_points = random.Random(3), pick(3, 200)
    options = {"requeue_share": 0.7, "num_completion_tokens": 4000, "groups": 2}
    alive = {name: start_actor(service, name, **options) for name in ("one", "other")}
    actors, num_killed = [*alive.values()], dict.fromkeys(("actor", "service"), 0)
    for _ in range(num_points):
        for actor in alive.values():
            actor.wait_for("requeued")
        time.sleep(chance.uniform(0.0, 0.1))
        if chance.random() < 0.3:
            service.kill()
            service.start()
            num_killed["service"] += 1
            continue
        name = chance.choice([*alive])
        alive[name].kill()
        alive[name] = start_actor(service, name, **options)
        actors.append(alive[name])
        num_killed["actor"] += 1
    for actor in alive.values():
        actor.kill()
    service.stop()

    kept = StoreContents.read(service.folder)
    kept.check(set().union(*(actor.acknowledged for actor in actors)))
    ledger = kept.report["recount"]
    assert ledger["issued"] == ledger["in_flight"] + ledger["committed"] + ledger["failed"] + ledger["requeued"]
    assert [event for actor in actors for event in actor.events("wrong")] == []
    requeued = [(int(g), int(i), int(n), float(s)) for actor in actors for _, g, i, n, s in actor.events("requeued")]
    resumed = [(int(g), int(i), int(n), float(s)) for actor in actors for _, g, i, n, s in actor.events("prefix")]
    acknowledged_at: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for group, index, num_tokens, second in requeued:
        acknowledged_at.setdefault((group, index), []).append((second, num_tokens))
    short = [
        (group, index)
        for group, index, num_tokens, requested_s in resumed
        if num_tokens < max((n for at, n in acknowledged_at.get((group, index), ()) if at < requested_s), default=0)
    ]
    assert short == [], "the next lease lacked acknowledged tokens"
    assert len(resumed) > num_points
    show(f"{num_killed['actor']} kills of actors, {num_killed['service']} of the service")
    show(f"{ledger['requeued']} samples requeued, {len(resumed)} resumed, 0 of their tokens lost")


@pytest.mark.fault(11, "kill -9 of an actor in the middle of a send")
def test_leases_of_a_killed_actor_are_issued_again_without_delaying_other_actors(
    start_service, start_actor, load_on, show
):
    service = start_service(facts=MANY, environment=SHORT_LEASES)
    load = load_on(service, draws=False, pause_s=0.1)
    num_kills = pick(2, 50)
    victims, killed_at = kill_in_mid_send(start_actor, service, num_kills)
    wait_until(lambda: killed_at.keys() <= stored(service.folder), "the samples of killed actors", errors=load.errors)
    load.end()
    wait_until(lambda: load.learner.status().result(60).ledger["in_flight"] == 0, "the leases of killed actors to end")
    load.close()
    service.stop()

    kept = StoreContents.read(service.folder)
    kept.check(load.acknowledged.union(*(victim.acknowledged for victim in victims)))
    assert killed_at.keys() <= kept.keys, "samples of killed actors were not issued again"
    answered_at = dict(zip((key for key, _ in load.outcomes), load.outcomes.times_s, strict=True))
    waits_s = [answered_at[key] - at for key, at in killed_at.items() if key in answered_at]
    assert waits_s, "no actor was killed with samples outstanding: the test proves nothing"
    assert max(waits_s) <= bound(LEASE_TIMEOUT_S + 1.0)
    times_s = load.outcomes.times_s
    pause_s = max(later - sooner for sooner, later in itertools.pairwise(times_s))
    assert pause_s <= bound(1.0), "the other actors had to wait"
    show(f"{num_kills} kills, 0 acknowledged lost")
    show(f"{len(waits_s)} samples issued again, the last acknowledged {max(waits_s):.1f} s after the kill")
    show(f"the other actors never paused for more than {pause_s:.2f} s")


@pytest.mark.fault(11, "leases that do not expire", control=True, full=True)
def test_control_samples_of_a_killed_actor_are_lost_if_leases_do_not_expire(start_service, start_actor, load_on, show):
    service = start_service(facts=MANY, environment=LONG_LEASES)
    load = load_on(service, draws=False)
    # With a single actor, all samples might arrive before the kill.
    _, killed_at = kill_in_mid_send(start_actor, service, 4)
    load.end()
    load.close()
    service.stop()
    missing = killed_at.keys() - StoreContents.read(service.folder).keys
    assert missing
    show(f"{len(missing)} samples of 4 killed actors were never stored")


def replace_a_stopped_actor(start_actor, service, name):
    """Stop an actor with unsent samples, replace it, and continue it. Return both actors, and the pushed samples."""
    zombie = start_actor(service, name, groups=8, num_completion_tokens=64, pause_s=0.005)
    zombie.wait_for("committed", 40)  # a lease request has 32 samples, so the second one is in progress

    def has_stopped_with_more_to_push():
        zombie.signal(signal.SIGCONT)
        time.sleep(0.02)
        zombie.signal(signal.SIGSTOP)
        return zombie.leased - zombie.keys("push")

    wait_until(has_stopped_with_more_to_push)
    replacement = start_actor(service, name, num_completion_tokens=64)
    replacement.wait_for("committed", 8)
    before = zombie.keys("push")
    zombie.signal(signal.SIGCONT)
    return zombie, replacement, before


@pytest.mark.fault(12, "an actor is stopped, replaced and continued")
def test_every_message_of_an_actor_replaced_while_stopped_is_fenced(start_run, start_actor, show):
    service = start_run()
    acknowledged, num_fenced, num_rounds = set(), 0, pick(1, 20)
    for number in range(num_rounds):
        zombie, replacement, before = replace_a_stopped_actor(start_actor, service, f"actor-{number}")
        assert zombie.process.wait(60) == ZOMBIE_EXIT
        late_pushes = zombie.keys("push") - before
        assert late_pushes, "the zombie had nothing left to push: the test proves nothing"
        assert late_pushes <= zombie.keys("fenced")
        assert zombie.keys("push") == zombie.acknowledged | zombie.keys("fenced")
        assert "was replaced by a newer process (epoch 2)" in " ".join(zombie.events("refused")[0])
        assert zombie.events("lost") == [["lost", "8", "of", "8"]]
        replacement.wait_for("committed", 100)
        replacement.kill()
        assert replacement.keys("fenced", "late") == set()
        acknowledged |= zombie.acknowledged | replacement.acknowledged
        num_fenced += len(late_pushes)
    service.stop()
    kept = StoreContents.read(service.folder)
    kept.check(acknowledged)
    assert kept.report["ledger"]["fenced"] >= num_fenced
    show(f"{num_rounds} zombies: all {num_fenced} of their late trajectories, their leases and renewals fenced, 0 lost")


@pytest.mark.fault(12, "no epochs", control=True)
def test_control_without_epochs_acknowledged_trajectories_are_lost(start_run, start_actor, show):
    service = start_run(entry=("-m", "tests.world.service", "without_epochs"))
    zombie, replacement, _ = replace_a_stopped_actor(start_actor, service, "actor-0")
    zombie.wait_for("committed", 8)
    acknowledged = zombie.acknowledged | replacement.acknowledged
    for actor in (zombie, replacement):
        actor.kill()
    service.stop()
    lost = acknowledged - StoreContents.read(service.folder).keys
    assert lost
    show(f"{len(lost)} of {len(acknowledged)} acknowledged trajectories lost")


def stop_the_buffer(start_service, start_actor, load_on, num_actors, **options):
    """Stop a service while actors push large trajectories as fast as they can.

    Returns:
        The stopped service, the actors, and the largest growth of an actor since it was idle, in bytes.
    """
    service = start_service(facts=MANY, entry=SMALL_CREDIT)
    actors = [
        start_actor(service, f"actor-{number}", groups=300, num_completion_tokens=8000, **options)
        for number in range(num_actors)
    ]
    for actor in actors:
        actor.wait_for("epoch")
    idle = {actor: actor.memory_bytes() for actor in actors}
    load_on(service, num_actors=0, draws=False)  # publishes a version, so that the service grants leases
    for actor in actors:
        actor.wait_for("committed", 32)
    service.signal(signal.SIGSTOP)
    growth, until = 0, time.monotonic() + STOPPED_S
    while time.monotonic() < until:
        growth = max(growth, *(actor.memory_bytes() - idle[actor] for actor in actors))
        time.sleep(0.05)
    return service, actors, growth


@pytest.mark.fault(13, f"the buffer is stopped for {STOPPED_S:g} s")
def test_actors_hold_trajectories_in_bounded_memory_while_the_buffer_is_stopped(
    start_service, start_actor, load_on, show
):
    service, actors, growth = stop_the_buffer(start_service, start_actor, load_on, 2)
    held = {actor: actor.keys("push") - actor.acknowledged for actor in actors}
    service.signal(signal.SIGCONT)
    continued_at = time.monotonic()
    for actor in actors:
        wait_until(lambda a=actor: held[a] <= a.acknowledged, "all held trajectories to be acknowledged")
    caught_up_s = time.monotonic() - continued_at
    for actor in actors:
        actor.kill()
        assert actor.keys("failed", "late", "fenced", "quarantined") == set()
    service.stop()
    StoreContents.read(service.folder).check(actors[0].acknowledged | actors[1].acknowledged)
    assert min(map(len, held.values())) > 30, "the actors did not continue: the test proves nothing"
    assert growth <= GROWTH_LIMIT
    num_held = sum(map(len, held.values()))
    show(f"{num_held} trajectories held and 0 lost, all acknowledged {caught_up_s:.1f} s later")
    show(f"an actor grew by at most {growth // MIB} MiB")


@pytest.mark.fault(13, "no credit", control=True, full=True)
def test_control_without_credit_an_actor_grows_while_the_buffer_is_stopped(start_service, start_actor, load_on, show):
    service, _, growth = stop_the_buffer(start_service, start_actor, load_on, 1, bounded=False)
    service.signal(signal.SIGCONT)
    assert growth > GROWTH_LIMIT
    show(f"the actor grew by {growth // MIB} MiB")
