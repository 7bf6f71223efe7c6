"""Weight transfers between hosts: killed and stopped services, pullers and stages, and changed bytes."""

import contextlib
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.faults.weight_processes import CHUNK_BYTES, SIZE, UPDATE_TIMEOUT_S, WINDOW, Process, Wire, config
from tests.full import pick
from tests.weights_by_hand import RUN, Machine, assert_holds, publish, v
from tests.world.waiting import bound, wait_until

from leeway.common.rpc import client as rpc_client
from leeway.common.rpc import messages
from leeway.common.rpc import server as rpc_server
from leeway.weight_sync.client import StoreAccess, WeightClient
from leeway.weight_sync.manifest import Manifest, TransferFailed, file_name
from leeway.weight_sync.puller import Puller, open_puller
from leeway.weight_sync.staging import HostStaging
from leeway.weight_sync.store import StagedVersion, WeightStore

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


@pytest.mark.fault(26, "weight service killed repeatedly while a version is fetched")
def test_a_fetch_continues_after_kills_of_the_service_without_refetching(folder, service, tmp_path, show):
    total = publish(folder, 0, **SIZE).whole_bytes("float32")
    kills = pick(3, 10)
    fetched: list[StagedVersion] = []
    with Wire(service.printed) as wire:
        puller = connect(wire.address, tmp_path / "staging")
        thread = threading.Thread(target=lambda: fetched.append(puller.fetch(v(0))))
        thread.start()
        for number in range(1, kills + 1):
            wait_until(lambda n=number: wire.sent_bytes > total * n / (kills + 1), f"part {number} of the transfer")
            address = service.printed
            service.kill()
            service.start()
            assert service.printed == address
        thread.join(60)
        assert fetched, "the fetch did not finish"
        assert_holds(fetched[0], 0, **SIZE)
        fetched[0].close()
        puller.close()
        again = wire.sent_bytes - total - document_bytes(folder)
    assert again <= kills * WINDOW_BYTES
    show(f"{kills} kills, {again / CHUNK_BYTES:.1f} of {total / CHUNK_BYTES:.0f} chunks fetched twice")


@pytest.mark.fault(26, "actor killed while it fetches for its machine, another one waits")
def test_the_next_actor_of_a_host_resumes_the_transfer_of_a_killed_one(folder, service, tmp_path, show):
    total = publish(folder, 0, **SIZE).whole_bytes("float32")
    staging = tmp_path / "staging"
    with Wire(service.printed) as wire, Process("pull", wire.address, staging, v(0).key, "actor-0") as first:
        wait_until(lambda: wire.sent_bytes > total / 4, "a quarter of the transfer")
        with Process("pull", wire.address, staging, v(0).key, "actor-1") as waiting:
            wait_until(lambda: wire.sent_bytes > total / 2, "half of the transfer")
            first.kill()
            began = time.monotonic()
            assert waiting.wait(60) == 0
            took_s = time.monotonic() - began
        again = wire.sent_bytes - total - 2 * document_bytes(folder)
        first.start()  # the context manager can end only a running process; this process fetches everything again
    assert again <= 2 * WINDOW_BYTES
    show(f"{again / CHUNK_BYTES:.1f} of {total / CHUNK_BYTES:.0f} chunks fetched twice, {took_s:.1f} s to the end")


@pytest.mark.fault(26, "actor stopped while it fetches for its machine, and continued")
def test_a_stopped_actor_delays_the_others_on_its_host_for_a_bounded_time(folder, service, tmp_path, show):
    total = publish(folder, 0, **SIZE).whole_bytes("float32")
    staging = tmp_path / "staging"
    with Wire(service.printed) as wire, Process("pull", wire.address, staging, v(0).key, "actor-0") as stopped:
        wait_until(lambda: wire.sent_bytes > total / 2, "half of the transfer")
        stopped.send(signal.SIGSTOP)
        began = time.monotonic()
        with Process("pull", wire.address, staging, v(0).key, "actor-1") as waiting:
            assert waiting.wait(60) == 0
        took_s = time.monotonic() - began
        stopped.send(signal.SIGCONT)
        assert stopped.wait(60) == 0, "the continued actor did not stage the version"
    assert took_s < bound(2 * UPDATE_TIMEOUT_S)
    show(f"delayed by {took_s:.1f} s: takeover after {UPDATE_TIMEOUT_S / 4:g} s, then the rest of the transfer")


def fetch_through(wire: Wire, staging_dir: Path) -> tuple[HostStaging, Manifest]:
    client = WeightClient(wire.address, RUN, "actor-0", role="actor", chunk_bytes=CHUNK_BYTES, resend_s=0.2)
    staging = HostStaging(staging_dir / "host", owner="actor-0")
    try:
        manifest, document = client.manifest(v(0))
        staging.stage(client, manifest, document, "float32").close()
    finally:
        client.close()
    return staging, manifest


@pytest.mark.fault(26, "bits flipped in transit, in chunks and requests", full=True)
def test_chunks_with_flipped_bits_are_requested_again_and_never_staged(folder, service, tmp_path, show):
    publish(folder, 0, **SIZE)
    num_flipped = 0
    for seed in range(pick(3, 20)):
        with Wire(service.printed, seed=seed, max_delay_s=0.0, flips=0.03) as wire:
            staging, manifest = fetch_through(wire, tmp_path / str(seed))
            num_flipped += wire.num_flipped
        with StagedVersion(staging.store.folder, manifest, "float32", (tmp_path / str(seed) / "x").open("wb")) as held:
            assert_holds(held, 0, **SIZE)
        staging.close()
    assert num_flipped > 10
    show(f"{num_flipped} flips, none staged")


@pytest.mark.fault(26, "checksums of chunks and tensors", control=True)
def test_without_checksums_flipped_bits_are_staged(folder, tmp_path, monkeypatch, show):
    """Run the service in this process, to disable its checksums as well."""
    publish(folder, 0, **SIZE)
    for module in (messages, rpc_client, rpc_server):
        monkeypatch.setattr(module, "checksum", lambda _: 0)
    monkeypatch.setattr("leeway.weight_sync.store.checked", lambda file, entry: file.view(entry.name))
    machine = Machine(tmp_path)
    try:
        with Wire(machine.address, seed=1, max_delay_s=0.0) as wire:
            flip_chunks(wire)
            staging, _ = fetch_through(wire, tmp_path / "staging")
        sent, staged = ((root / "0.0" / WHOLE).read_bytes() for root in (folder, staging.store.folder))
        wrong = sum(a != b for a, b in zip(sent, staged, strict=True))
        staging.close()
    finally:
        machine.close()
    assert wrong > 0
    show(f"{wrong} bytes staged wrong")


def flip_chunks(wire: Wire) -> None:
    """Flip one bit in every fifth chunk."""
    delay, count = wire._delay, iter(range(10**9))

    def flipping(target, frames) -> None:
        if len(frames) == 3 and len(frames[-1]) == CHUNK_BYTES and next(count) % 5 == 0:
            frames = [*frames[:-1], frames[-1][:9999] + bytes([frames[-1][9999] ^ 1]) + frames[-1][10000:]]
        delay(target, frames)

    wire._delay = flipping


@pytest.mark.fault(26, "an older version's chunks and manifests replayed")
def test_replayed_replies_are_never_accepted_for_later_requests(folder, service, tmp_path, show):
    publish(folder, 0, **SIZE)
    with Wire(service.printed, max_delay_s=0.0) as wire:
        replays = replay_all(wire)
        puller = connect(wire.address, tmp_path / "staging")
        puller.newest()
        puller.fetch(v(0)).close()
        publish(folder, 1, **SIZE)
        replays.append(None)  # after this line, stale replies arrive before each current reply
        wait_until(lambda: puller.newest() == v(1), "the newer version")
        with puller.fetch(v(1)) as staged:
            assert_holds(staged, 1, **SIZE)
        puller.close()
    show(f"{len(replays) - 1} replies replayed, none accepted")


def replay_all(wire: Wire) -> list:
    """Record all replies; once the returned list contains None, send recorded replies before each new reply."""
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
def test_a_stopped_service_raises_an_error_in_time_and_serves_again_when_continued(folder, service, show):
    total, received = publish(folder, 0, **SIZE).size_of(WHOLE), bytearray()
    client = WeightClient(
        service.printed, RUN, "actor-0", role="actor", timeout_s=2.0, resend_s=0.3, chunk_bytes=CHUNK_BYTES
    )

    def is_read() -> bool:
        with contextlib.suppress(TransferFailed):  # 2 s may be too short on a loaded machine
            client.read(v(0), WHOLE, total, len(received), received.extend)
        return len(received) == total

    try:
        wait_until(is_read, "the transfer before the stop")
        received.clear()
        service.send(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TransferFailed, match=rf"weight service at {service.printed} did not reply to ReadRequest"):
            client.read(v(0), WHOLE, total, 0, lambda _: None)
        took_s = time.monotonic() - began
        service.send(signal.SIGCONT)
        wait_until(is_read, "the transfer after the stop")
    finally:
        client.close()
    assert bytes(received) == (folder / "0.0" / WHOLE).read_bytes()
    assert took_s < bound(4.0)
    show(f"error after {took_s:.1f} s, timeout 2.0 s")


@pytest.mark.fault(26, "publishing stage killed while it uploads")
def test_a_stage_killed_in_its_upload_leaves_no_version_and_the_next_one_resumes(folder, service, show):
    with Wire(service.printed) as wire:
        received = count_uploads(wire)
        with Process("publish", wire.address, 0) as stage:
            wait_until(lambda: sum(received) > 10 * CHUNK_BYTES, "a part of the upload")
            stage.kill()
            stage.start()  # restarts the stage, as a supervisor does; the stage resumes its upload
            wait_until(lambda: sum(received) > 40 * CHUNK_BYTES, "more of the upload")
            stage.kill()
            assert WeightStore(folder).newest() is None
            stage.start()
            assert stage.wait(60) == 0
        total = WeightStore(folder).manifest(v(0)).whole_bytes("float32")
        again = sum(received) - total
    with Puller.of_folder(folder, "float32").fetch(v(0)) as staged:
        assert_holds(staged, 0, **SIZE)
    sink = WeightClient(service.printed, RUN, "stage-0", role="learner", chunk_bytes=CHUNK_BYTES)
    publish(sink, 1, incarnation=1, deltas=True, **SIZE)
    sink.close()
    with Puller.of_folder(folder, "float32").fetch(v(1, 1)) as staged:
        assert_holds(staged, 1, **SIZE)
    document = (folder / "0.0" / "part-0.json").stat().st_size + document_bytes(folder)
    # each of two kills loses a window in flight; each of three processes may resend a window after a reordering
    assert again <= document + (2 + 3) * WINDOW_BYTES
    show(f"2 kills, {max(0, again - document) / CHUNK_BYTES:.0f} of {total / CHUNK_BYTES:.0f} chunks uploaded twice")


def count_uploads(wire: Wire) -> list[int]:
    """Return a list that grows by the size of every body that a stage sends."""
    sizes: list[int] = []
    delay = wire._delay

    def counting(target, frames) -> None:
        if target is not wire._front:
            sizes.append(sum(map(len, frames[1:])))
        delay(target, frames)

    wire._delay = counting
    return sizes
