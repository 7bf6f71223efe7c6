"""The service is a real process that is killed with SIGKILL under load."""

import subprocess
import threading
import time
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
from tests.faults.service_process import FACTS, StoreContents, generate
from tests.world.buffer_process import serving

from leeway.buffer import client as client_module
from leeway.buffer.errors import BufferRefused, BufferUnavailable


def test_a_service_killed_under_load_loses_and_doubles_nothing_acknowledged(service, connect):
    learner = connect("learner", "learner")
    begun = learner.begin_incarnation(0, 0).result(60)
    learner.published(begun.incarnation, 0).result(60)
    stop = threading.Event()
    outcomes = []
    actors = [
        threading.Thread(target=generate, args=(connect(f"actor-{number}"), stop, outcomes)) for number in range(2)
    ]
    for actor in actors:
        actor.start()
    drawn = {}
    for step in range(1, 61):
        if step % 12 == 0:
            service.kill()
            service.start()
        draw = learner.draw(step, step - 1, 0, FACTS.groups_per_step, 20.0)
        if step % 20 == 0:
            # The kill comes between the draw and its reply, or just after the reply: the client sees no difference.
            time.sleep(0.002)
            service.kill()
            service.start()
        batch = draw.result(60)
        assert batch.ready, batch.waiting_for
        drawn[step] = batch.record_ids
        again = learner.draw(step, step - 1, 0, FACTS.groups_per_step, 1.0).result(60)
        assert (again.record_ids, again.body) == (batch.record_ids, batch.body)
        learner.step_finished(step, step).result(60)
        learner.published(0, step).result(60)
    stop.set()
    for actor in actors:
        actor.join(60)
        assert not actor.is_alive()
    status = learner.status().result(60)
    service.stop()

    records = [record for step in drawn.values() for record in step]
    assert len(records) == len(set(records)) == 60 * 32
    acknowledged = {key for key, outcome in outcomes if outcome in ("committed", "duplicate")}
    assert len(acknowledged) == len(outcomes)
    assert status.ledger["gap"] == 0
    kept = StoreContents.read(service.folder)
    kept.check(acknowledged)
    assert kept.report["recount"]["committed"] == kept.report["num_records"] == len(outcomes)


def test_a_client_times_out_and_names_the_service_if_it_stays_down(service, connect, monkeypatch):
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_S", 0.3)
    transport = (client := connect("actor-0"))._transport
    transport._timeouts = replace(transport._timeouts, request_s=1.0)
    service.kill()
    pending = [client.status(), client.lease(1)]
    wait(pending, 60)
    for future in pending:
        with pytest.raises(BufferUnavailable, match=service.address):
            future.result(0)


def test_a_restarted_service_keeps_its_address_and_a_second_one_is_refused(service):
    address = service.address
    second = subprocess.run(serving(service.folder, FACTS), capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert f"in use by process {service.process.pid}" in second.stderr
    service.kill()
    service.start()
    assert service.address == address


def test_invalid_bytes_are_counted_and_the_service_keeps_answering(service, connect):
    import zmq

    from leeway.buffer import protocol as p

    context = zmq.Context()
    raw_socket = context.socket(zmq.DEALER)
    raw_socket.linger = 0
    raw_socket.connect(service.address)
    random = np.random.default_rng(0)
    good = p.encode(1, p.LeaseRequest("x" * 600, -5, 0, 1), run_id=service.facts.run_id)
    requests = [
        p.StepFinished(-1, 0, 0), p.CheckpointDurable(-1, 0), p.Renew("a", 1, [-1]), p.GiveUp("a", 1, -1, 1, [0], "x"),
        p.DrawRequest(-2, -2, 0, 8, 0.0), p.Hello("actor", "n" * 999, "s"), p.Push("a\0", 1), p.WriteScores(),
        p.BeginIncarnation("s", -1, -1), p.Published(9, -1), p.Done(),
    ]  # fmt: skip
    for message in requests:
        raw_socket.send_multipart([p.encode(2, message, b"body", run_id=service.facts.run_id), b"body"])
    for _ in range(200):
        mutant = bytearray(good)
        mutant[random.integers(0, len(good))] ^= 1 << int(random.integers(0, 8))
        raw_socket.send_multipart([bytes(mutant)])
        raw_socket.send_multipart([random.bytes(int(random.integers(0, 50))) for _ in range(random.integers(1, 5))])
    raw_socket.send_multipart([p.encode(3, p.Push("a", 1), b"another body"), b"body"])
    raw_socket.send_multipart([good])
    client = connect("actor-0")
    deadline = time.monotonic() + 60
    while (status := client.status().result(60)).quarantined_by_reason.get("header", 0) < 409:
        assert time.monotonic() < deadline, status
    assert status.quarantined_by_reason["checksum"] == 1
    assert status.ledger["gap"] == 0
    with pytest.raises(BufferRefused, match="no learner has begun"):
        connect("learner", "learner").draw(1, 0, 0, 8, 0.0).result(60)
    raw_socket.close()
    context.term()
