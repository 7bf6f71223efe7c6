"""Weights on their way between machines: killed services, pullers and stages, stopped ones, and changed bytes."""

import contextlib
import signal
import threading
import time
from pathlib import Path

import pytest

from common.rpc import client as rpc_client
from common.rpc import messages
from common.rpc import server as rpc_server
from tests.faults.weight_processes import CHUNK_BYTES, SIZE, UPDATE_TIMEOUT_S, WINDOW, Process, Wire, config
from tests.full import pick
from tests.weights_by_hand import RUN, Machine, assert_holds, publish, v
from tests.world.waiting import bound, wait_until
from weight_sync.client import StoreAccess, WeightClient
from weight_sync.manifest import Manifest, TransferFailed, file_name
from weight_sync.puller import Puller, open_puller
from weight_sync.staging import HostStaging
from weight_sync.store import StagedVersion, WeightStore

WHOLE = file_name(0, "float32")
WINDOW_BYTES = WINDOW * CHUNK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def service(folder: Path):
    with Process("serve", folder) as running:
        yield running


def connect(address: str, staging_dir: Path, name: str = "actor-0") -> Puller:
    access = StoreAccess(config(staging_dir), Path("/does/not/exist"), address, RUN)
    return open_puller(access, name, "float32")


def document_bytes(folder: Path) -> int:
    return (folder / "0.0" / "manifest.json").stat().st_size


@pytest.mark.fault(26, "weight service killed again and again while a version is fetched")
def test_a_fetch_ends_though_the_service_is_killed_and_nothing_is_fetched_twice(folder, service, tmp_path, show):
    total = publish(folder, 0, **SIZE).whole_bytes("float32")
    kills = pick(3, 10)
    fetched: list[StagedVersion] = []
    with Wire(service.said) as wire:
        puller = connect(wire.address, tmp_path / "staging")
        thread = threading.Thread(target=lambda: fetched.append(puller.fetch(v(0))))
        thread.start()
        for number in range(1, kills + 1):
            wait_until(lambda n=number: wire.sent_bytes > total * n / (kills + 1), f"part {number} of the transfer")
            address = service.said
            service.kill()
            service.start()
            assert service.said == address
        thread.join(60)
        assert fetched, "the fetch did not end"
        assert_holds(fetched[0], 0, **SIZE)
        fetched[0].close()
        puller.close()
        again = wire.sent_bytes - total - document_bytes(folder)
    assert again <= kills * WINDOW_BYTES
    show(f"{kills} kills, {again / CHUNK_BYTES:.1f} of {total / CHUNK_BYTES:.0f} chunks fetched twice")


@pytest.mark.fault(26, "actor killed while it fetches for its machine, another one waits")
def test_the_next_actor_of_a_machine_goes_on_where_a_killed_one_was(folder, service, tmp_path, show):
    total = publish(folder, 0, **SIZE).whole_bytes("float32")
    staging = tmp_path / "staging"
    with Wire(service.said) as wire, Process("pull", wire.address, staging, v(0).key, "actor-0") as first:
        wait_until(lambda: wire.sent_bytes > total / 4, "a quarter of the transfer")
        with Process("pull", wire.address, staging, v(0).key, "actor-1") as waiting:
            wait_until(lambda: wire.sent_bytes > total / 2, "half of the transfer")
            first.kill()
            began = time.monotonic()
            assert waiting.wait(60) == 0
            took_s = time.monotonic() - began
        again = wire.sent_bytes - total - 2 * document_bytes(folder)
        first.start()  # for the context manager; alone on its machine, it fetches all of it again
    assert again <= 2 * WINDOW_BYTES
    show(f"{again / CHUNK_BYTES:.1f} of {total / CHUNK_BYTES:.0f} chunks fetched twice, {took_s:.1f} s to the end")


@pytest.mark.fault(26, "actor stopped while it fetches for its machine, and continued")
def test_a_stopped_actor_holds_up_the_others_of_its_machine_for_a_bounded_time(folder, service, tmp_path, show):
    total = publish(folder, 0, **SIZE).whole_bytes("float32")
    staging = tmp_path / "staging"
    with Wire(service.said) as wire, Process("pull", wire.address, staging, v(0).key, "actor-0") as stopped:
        wait_until(lambda: wire.sent_bytes > total / 2, "half of the transfer")
        stopped.send(signal.SIGSTOP)
        began = time.monotonic()
        with Process("pull", wire.address, staging, v(0).key, "actor-1") as waiting:
            assert waiting.wait(60) == 0
        took_s = time.monotonic() - began
        stopped.send(signal.SIGCONT)
        assert stopped.wait(60) == 0, "it must end with what the other one staged, or its own"
    assert took_s < bound(2 * UPDATE_TIMEOUT_S)
    show(f"{took_s:.1f} s held up of {UPDATE_TIMEOUT_S / 4:g} s and the rest of the transfer")


def fetch_through(wire: Wire, staging_dir: Path) -> tuple[HostStaging, Manifest]:
    client = WeightClient(wire.address, RUN, "actor-0", role="actor", chunk_bytes=CHUNK_BYTES, silence_s=0.2)
    staging = HostStaging(staging_dir / "host", who="actor-0")
    try:
        manifest, document = client.manifest(v(0))
        staging.stage(client, manifest, document, "float32").close()
    finally:
        client.close()
    return staging, manifest


@pytest.mark.fault(26, "flipped bits in chunks and requests on their way", full=True)
def test_flipped_bits_are_asked_for_again_and_never_staged(folder, service, tmp_path, show):
    publish(folder, 0, **SIZE)
    num_flipped = 0
    for seed in range(pick(3, 20)):
        with Wire(service.said, seed=seed, max_delay_s=0.0, flips=0.03) as wire:
            staging, manifest = fetch_through(wire, tmp_path / str(seed))
            num_flipped += wire.num_flipped
        with StagedVersion(staging.store.folder, manifest, "float32", (tmp_path / str(seed) / "x").open("wb")) as held:
            assert_holds(held, 0, **SIZE)
        staging.close()
    assert num_flipped > 10
    show(f"{num_flipped} flips, none staged")


@pytest.mark.fault(26, "checksums of chunks and tensors", control=True)
def test_without_checksums_flipped_bits_are_staged(folder, tmp_path, monkeypatch, show):
    """The service runs here, so that it is without them too."""
    publish(folder, 0, **SIZE)
    for module in (messages, rpc_client, rpc_server):
        monkeypatch.setattr(module, "checksum", lambda _: 0)
    monkeypatch.setattr("weight_sync.store.checked", lambda file, entry: file.view(entry.name))
    machine = Machine(tmp_path)
    try:
        with Wire(machine.address, seed=1, max_delay_s=0.0) as wire:
            flip_bodies_alone(wire)
            staging, _ = fetch_through(wire, tmp_path / "staging")
        sent, staged = ((where / "0.0" / WHOLE).read_bytes() for where in (folder, staging.store.folder))
        wrong = sum(a != b for a, b in zip(sent, staged, strict=True))
        staging.close()
    finally:
        machine.close()
    assert wrong > 0
    show(f"{wrong} bytes staged wrong")


def flip_bodies_alone(wire: Wire) -> None:
    """One bit in every fifth chunk."""
    delay, count = wire._delay, iter(range(10**9))

    def flipping(target, frames) -> None:
        if len(frames) == 3 and len(frames[-1]) == CHUNK_BYTES and next(count) % 5 == 0:
            frames = [*frames[:-1], frames[-1][:9999] + bytes([frames[-1][9999] ^ 1]) + frames[-1][10000:]]
        delay(target, frames)

    wire._delay = flipping


@pytest.mark.fault(26, "an older version's chunks and manifests replayed")
def test_answers_to_earlier_questions_are_never_taken_for_later_ones(folder, service, tmp_path, show):
    publish(folder, 0, **SIZE)
    with Wire(service.said, max_delay_s=0.0) as wire:
        replays = replay_all(wire)
        puller = connect(wire.address, tmp_path / "staging")
        puller.newest()
        puller.fetch(v(0)).close()
        publish(folder, 1, **SIZE)
        replays.append(None)  # from here on, every answer comes after all those before it
        wait_until(lambda: puller.newest() == v(1), "the newer version")
        with puller.fetch(v(1)) as staged:
            assert_holds(staged, 1, **SIZE)
        puller.close()
    show(f"{len(replays) - 1} answers replayed, none taken")


def replay_all(wire: Wire) -> list:
    """Keeps all answers; once the list holds None, sends old ones before each new one."""
    kept: list = []
    delay = wire._delay

    def replaying(target, frames) -> None:
        if target is wire._front:
            if None in kept:
                for old in [old for old in kept if old is not None][:20]:
                    delay(target, [frames[0], *old[1:]])
            elif len(kept) < 300:
                kept.append(frames)
        delay(target, frames)

    wire._delay = replaying
    return kept


@pytest.mark.fault(26, "weight service stopped")
def test_a_stopped_service_is_an_error_in_time_and_serves_on_when_it_is_continued(folder, service, show):
    total, received = publish(folder, 0, **SIZE).size_of(WHOLE), bytearray()
    client = WeightClient(
        service.said, RUN, "actor-0", role="actor", timeout_s=2.0, silence_s=0.3, chunk_bytes=CHUNK_BYTES
    )

    def is_read() -> bool:
        with contextlib.suppress(TransferFailed):  # on a crowded machine, 2 s may be too short
            client.read(v(0), WHOLE, total, len(received), received.extend)
        return len(received) == total

    try:
        wait_until(is_read, "all of it before the stop")
        received.clear()
        service.send(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TransferFailed, match=rf"weight service at {service.said} did not answer ReadRequest"):
            client.read(v(0), WHOLE, total, 0, lambda _: None)
        took_s = time.monotonic() - began
        service.send(signal.SIGCONT)
        wait_until(is_read, "all of it after the stop")
    finally:
        client.close()
    assert bytes(received) == (folder / "0.0" / WHOLE).read_bytes()
    assert took_s < bound(4.0)
    show(f"error after {took_s:.1f} s of 2.0")


@pytest.mark.fault(26, "publishing stage killed while it uploads")
def test_a_stage_killed_in_its_upload_leaves_no_version_and_the_next_learner_goes_on(folder, service, show):
    with Wire(service.said) as wire:
        received = count_uploads(wire)
        with Process("publish", wire.address, 0) as stage:
            wait_until(lambda: sum(received) > 10 * CHUNK_BYTES, "a part of the upload")
            stage.kill()
            stage.start()  # the same learner again, as a supervisor would: it goes on behind what is there
            wait_until(lambda: sum(received) > 40 * CHUNK_BYTES, "more of the upload")
            stage.kill()
            assert WeightStore(folder).newest() is None
            stage.start()
            assert stage.wait(60) == 0
        total = WeightStore(folder).manifest(v(0)).whole_bytes("float32")
        again = sum(received) - total
    with Puller.of_folder(folder, "float32").fetch(v(0)) as staged:
        assert_holds(staged, 0, **SIZE)
    sink = WeightClient(service.said, RUN, "stage-0", role="learner", chunk_bytes=CHUNK_BYTES)
    publish(sink, 1, incarnation=1, deltas=True, **SIZE)
    sink.close()
    with Puller.of_folder(folder, "float32").fetch(v(1, 1)) as staged:
        assert_holds(staged, 1, **SIZE)
    document = (folder / "0.0" / "part-0.json").stat().st_size + document_bytes(folder)
    # what was on its way at each of two kills; and in each of three processes, what followed a piece that was overtaken
    assert again <= document + (2 + 3) * WINDOW_BYTES
    show(f"2 kills, {max(0, again - document) / CHUNK_BYTES:.0f} of {total / CHUNK_BYTES:.0f} chunks uploaded twice")


def count_uploads(wire: Wire) -> list[int]:
    """Grows by the size of every body that a stage sends."""
    sizes: list[int] = []
    delay = wire._delay

    def counting(target, frames) -> None:
        if target is not wire._front:
            sizes.append(sum(map(len, frames[1:])))
        delay(target, frames)

    wire._delay = counting
    return sizes
