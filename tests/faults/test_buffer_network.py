"""The network between actors and buffer is cut, slow, lossy, half open, or reorders and duplicates messages."""

import contextlib
import logging
import threading
import time
from concurrent.futures import wait

import numpy as np
import psutil
import pytest
import zmq
from tests.faults import netns
from tests.faults.actor_process import ActorProcess
from tests.faults.proxy import Proxy
from tests.faults.service_process import MANY, Load, Service, StoreContents, sample
from tests.full import pick
from tests.world.waiting import bound

from leeway.buffer import client as client_module
from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.client import BufferClient
from leeway.buffer.errors import BufferUnavailable

MIB = 2**20
CUT_S = 7.0
DETECTED_S, RESUMED_S, RECONNECTED_S = 2.5, 1.0, 3.0
LINK_MBIT_PER_S = 10.0
COUNTS_TWICE = ("-m", "tests.world.service", "without_deduplication")
SMALL_INBOX = ("-m", "tests.world.service", f"leeway.buffer.service.INBOX_BYTES={32 * MIB}")
needs_link = {"tools": netns.TOOLS, "root": True, "full": True}


@pytest.fixture
def link():
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Link() as made:
        yield made


@pytest.fixture
def far_service(link, tmp_path, monkeypatch):
    """Yield a service at the far end of the link, with the clients' default request timeout."""
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_S", 10.0)
    running = Service(tmp_path / "buffer", MANY, entry=SMALL_INBOX, host=link.far, prefix=link.prefix)
    yield running
    running.close()


class Notices(logging.Handler):
    """Times at which clients logged that the connection to the service is lost."""

    def __init__(self):
        super().__init__()
        self.times_s = []

    def emit(self, record):
        if "lost the connection to the buffer service at tcp://" in record.getMessage():
            self.times_s.append(time.monotonic())


@pytest.fixture
def notices():
    handler = Notices()
    logger = logging.getLogger("leeway.common.rpc.client")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def sockets_without_heartbeats(monkeypatch):
    """Disable the heartbeats of sockets that this process creates from now on."""

    class WithoutHeartbeats(zmq.Socket):
        def setsockopt(self, option, value):
            if option not in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT):
                super().setsockopt(option, value)

    monkeypatch.setattr(zmq.Context, "_socket_class", WithoutHeartbeats)


def end_and_check(load, service) -> StoreContents:
    """Stop the load and the service; assert that nothing acknowledged is lost and nothing was refused."""
    load.end(120)
    load.close()
    service.stop()
    assert {outcome for _, outcome in load.outcomes} <= {"committed", "duplicate"}
    kept = StoreContents.read(service.folder)
    kept.check(load.acknowledged)
    return kept


def seconds_to_answer(actors, timeout_s) -> float:
    """Return the seconds until each of these clients has a reply to a request sent now."""
    began = time.monotonic()
    answers = [actor.status() for actor in actors]
    assert not wait(answers, timeout_s).not_done, f"no answer within {timeout_s} s"
    return time.monotonic() - began


@pytest.mark.fault(18, f"actors are cut off for {CUT_S:g} s", **needs_link)
def test_a_cut_link_is_detected_soon_and_work_resumes_once_it_is_back(link, far_service, load_on, notices, show):
    load = load_on(far_service, draws=False)
    found_s, resumed_s = [], []
    for _ in range(pick(1, 5)):
        load.wait_for(200)
        notices.times_s.clear()
        link.cut()
        cut_at = time.monotonic()
        time.sleep(CUT_S)
        # the first notice of each of the two actors
        found_s += [at - cut_at for at in notices.times_s[:2]]
        num_dropped = link.num_dropped()
        link.heal()
        resumed_s.append(seconds_to_answer(load.actors, 30))
    end_and_check(load, far_service)
    assert num_dropped
    assert len(found_s) == 2 * len(resumed_s)
    assert max(found_s) <= bound(DETECTED_S)
    assert max(resumed_s) <= bound(RESUMED_S)
    show(f"{len(resumed_s)} cuts: detected after at most {max(found_s):.2f} s, resumed within {max(resumed_s):.2f} s")
    show(f"0 of {len(load.acknowledged)} acknowledged lost")


@pytest.mark.fault(18, "no heartbeats", control=True, **needs_link)
@pytest.mark.usefixtures("sockets_without_heartbeats")
def test_control_without_heartbeats_a_cut_link_is_not_detected(link, far_service, load_on, notices, show):
    load = load_on(far_service, draws=False)
    load.wait_for(200)
    link.cut()
    time.sleep(CUT_S)
    link.heal()
    assert notices.times_s == []
    show(f"nothing detected in {CUT_S:g} s")


@pytest.mark.fault(18, "no acknowledgements", control=True, **needs_link)
def test_control_a_sender_without_acknowledgements_loses_messages_in_flight(link, far_service, load_on, show):
    load = load_on(far_service, draws=False, num_actors=0)  # publishes a version, so that leases are granted
    client = BufferClient(far_service.address, run_id=MANY.run_id, role="actor", name="careless")
    client.connect()
    leases = client.lease(1000).result(60).leases
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    for option, value in ((zmq.LINGER, 0), (zmq.HEARTBEAT_IVL, 500), (zmq.HEARTBEAT_TIMEOUT, 2000)):
        socket.setsockopt(option, value)
    socket.connect(far_service.address)
    sent, link_is_cut = set(), threading.Timer(0.5, link.cut)
    link_is_cut.start()
    for seq, lease in enumerate(leases):
        body = schema.encode([sample(lease, 0)], MANY.run_id, schema.Sender(client.name, client.epoch, [seq]))
        message = p.Push(client.name, client.epoch)
        socket.send_multipart([p.encode(seq, message, body, run_id=MANY.run_id, client=client._identity), body])
        sent.add((lease.group_id, 0))
        time.sleep(0.004)
    link.heal()
    time.sleep(2.0)
    socket.close()
    context.term()
    client.close(0.1)
    load.close()
    far_service.stop()
    lost = sent - StoreContents.read(far_service.folder).keys
    assert lost
    show(f"{len(lost)} of {len(sent)} trajectories lost")


def growth_of_memory(service, seconds) -> list[int]:
    """Return the largest growth of the service and of this process with its clients, in bytes."""
    own = psutil.Process()
    first, most = np.array([service.memory_bytes(), own.memory_info().rss]), np.zeros(2, np.int64)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        most = np.maximum(most, np.array([service.memory_bytes(), own.memory_info().rss]) - first)
        time.sleep(0.1)
    return most.tolist()


@pytest.mark.fault(19, "10 % of all packets are lost", **needs_link)
def test_packet_loss_of_10_percent_loses_nothing_and_does_not_grow_memory(link, far_service, load_on, show):
    load = load_on(far_service, draws=False, num_completion_tokens=500)
    load.wait_for(1000)
    link.lose(0.1)
    before = len(load.outcomes)
    grown = growth_of_memory(far_service, 20.0)
    answered, dropped = len(load.outcomes) - before, link.num_dropped()
    link.heal()
    end_and_check(load, far_service)
    assert dropped > 100
    assert answered > 100, "the actors pushed almost nothing"
    assert max(grown) <= 32 * MIB
    show(f"{dropped} packets lost, {answered / 20:.0f} trajectories/s acknowledged, 0 lost")
    show(f"memory of the service grew by {grown[0] // MIB} MiB")
    show("no control: TCP retransmits lost packets, which cannot be disabled")


@pytest.mark.fault(19, f"a link of {LINK_MBIT_PER_S:g} Mbit/s", **needs_link)
def test_a_slow_link_makes_senders_wait_and_does_not_grow_memory(link, far_service, load_on, notices, show):
    load = load_on(far_service, draws=False, num_completion_tokens=8000, groups=64)
    load.wait_for(1000)
    link.slow_down(LINK_MBIT_PER_S)
    # Messages in the sockets at the far end are acknowledged at full speed; after that the link limits the rate.
    time.sleep(10.0)
    before, seconds = len(load.outcomes), 40.0
    grown = growth_of_memory(far_service, seconds)
    megabits_per_s = (len(load.outcomes) - before) * 64_000 * 8 / 1e6 / seconds
    link.heal()
    kept = end_and_check(load, far_service)
    assert 0.5 * LINK_MBIT_PER_S <= megabits_per_s <= 1.1 * LINK_MBIT_PER_S
    assert max(grown) <= 64 * MIB
    twice = kept.report["ledger"]["duplicates"] / kept.report["ledger"]["committed"]
    assert twice <= 0.02, "messages in flight were sent again"
    assert notices.times_s == [], "a slow link was reported as a lost connection"
    show(f"{megabits_per_s:.1f} Mbit/s of trajectories acknowledged, 0 lost, {twice:.1%} sent twice")
    show(f"memory of the service grew by {grown[0] // MIB} MiB, of two actors by {grown[1] // MIB} MiB")


@pytest.mark.fault(19, "no credit, on the slow link", control=True, **needs_link)
def test_control_without_credit_an_actor_on_a_slow_link_grows(link, far_service, load_on, tmp_path, show):
    load_on(far_service, num_actors=0, draws=False)
    link.slow_down(LINK_MBIT_PER_S)
    actor = ActorProcess(tmp_path, far_service, "boundless", groups=500, num_completion_tokens=8000, bounded=False)
    try:
        actor.wait_for("push")
        before = actor.memory_bytes()
        time.sleep(10.0)
        grown = actor.memory_bytes() - before
    finally:
        actor.kill()
    assert grown > 64 * MIB
    show(f"the actor grew by {grown // MIB} MiB in 10 s")


@pytest.fixture
def load_through_proxy():
    """Return `load_through_proxy(service, **arguments of Load)`, which starts a load and its proxy."""
    with contextlib.ExitStack() as running:

        def start(service, **arguments):
            proxy = running.enter_context(Proxy(service.address, seed=20))
            load = Load(proxy.address, **{"facts": service.facts, **arguments})
            running.callback(load.close)
            return load.start(), proxy

        yield start


@pytest.mark.fault(20, "messages are delayed, reordered and duplicated")
def test_delayed_reordered_and_duplicated_messages_are_each_stored_once(start_service, load_through_proxy, show):
    service = start_service()
    load, proxy = load_through_proxy(service, num_actors=6, groups=1)
    load.wait_for(pick(1000, 8_000), 240)
    load.end()
    load.close()
    service.stop()
    kept = StoreContents.read(service.folder)
    kept.check(load.acknowledged)
    assert kept.keys == load.acknowledged == {key for key, _ in load.outcomes}
    assert min(proxy.num_duplicated, proxy.num_overtaken) > 20
    ledger = kept.report["ledger"]
    assert ledger["failed"] == 0, "samples had to be issued again"
    assert ledger["duplicates"] + ledger["late"] > 0
    show(f"{proxy.num_messages} messages, {proxy.num_overtaken} overtaken, {proxy.num_duplicated} twice")
    show(f"{len(kept.keys)} trajectories pushed, acknowledged and stored: the same set, none twice")


@pytest.mark.fault(20, "no de-duplication", control=True, full=True)
def test_control_without_deduplication_the_ledger_breaks_or_the_service_dies(
    start_service, load_through_proxy, show, monkeypatch
):
    monkeypatch.setattr("leeway.buffer.client.GIVE_UP_S", 3.0)
    service = start_service(facts=MANY, entry=COUNTS_TWICE)
    load, _ = load_through_proxy(service, draws=False)
    with contextlib.suppress(BufferUnavailable):
        load.wait_for(400)
        load.end()
    if not service.is_alive:
        show(f"the service died: {service.log.splitlines()[-1]}")
        return
    load.close()
    service.stop()
    faults = StoreContents.read(service.folder).report["faults"]
    assert faults
    show(f"verify finds {len(faults)} faults, such as '{faults[0][:80]}'")


def half_open(link, service, actors, direction) -> None:
    """Drop one direction of every connection of this process to the service."""
    port = int(service.address.rsplit(":", 1)[1])
    open_ones = psutil.Process().net_connections("tcp")
    near_ports = [each.laddr.port for each in open_ones if each.raddr and each.raddr.port == port]
    assert len(near_ports) >= len(actors)
    for near_port in near_ports:
        link.cut_one_way(direction, near_port)


@pytest.mark.parametrize("direction", ["to_near", "to_far"])
@pytest.mark.fault(21, "a half-open connection", **needs_link)
def test_a_half_open_connection_is_replaced(link, far_service, load_on, direction, show):
    load = load_on(far_service, draws=False)
    waits_s = []
    for _ in range(pick(1, 5)):
        load.wait_for(200)
        half_open(link, far_service, load.actors, direction)
        waits_s.append(seconds_to_answer(load.actors, 30))
        dropped = link.num_dropped()
        link.heal()
        assert dropped
    end_and_check(load, far_service)
    assert max(waits_s) <= bound(RECONNECTED_S)
    show(f"{direction.replace('_', ' ')}: answered again after at most {max(waits_s):.2f} s, 0 lost")


@pytest.mark.fault(21, "no heartbeats", control=True, **needs_link)
@pytest.mark.usefixtures("sockets_without_heartbeats")
def test_control_without_heartbeats_a_half_open_connection_is_kept(link, far_service, load_on, show):
    load = load_on(far_service, draws=False)
    load.wait_for(200)
    half_open(link, far_service, load.actors, "to_near")
    answers = [actor.status() for actor in load.actors]
    assert len(wait(answers, RECONNECTED_S).not_done) == len(load.actors)
    link.heal()
    show(f"no answer for {RECONNECTED_S:g} s")
