"""Rows 9 and 10 of the fault matrix: bits flipped at rest, and a truncated or zeroed file."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.faults.results import as_text
from tests.faults.service_process import FACTS, Load, Service, StoreContents, sample_tokens
from tests.full import FULL, pick
from tests.trajectories import decode
from tests.world.buffer_process import command, serving
from tests.world.waiting import wait_until

from leeway.buffer.store import Store

UNCHECKED = ("-m", "tests.world.service", "without_checksums")
MANY_STEPS = FACTS.model_copy(update={"groups_per_step": 128})
"""Facts for 2,048 samples in 512 groups, enough for 4 steps."""
NUM_SAMPLES = 2048
PAGE = 4096


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return the folder of a store with samples that are ready to draw, and their keys; tests damage only copies."""
    folder = tmp_path_factory.mktemp("stored") / "buffer"
    service = Service(folder, MANY_STEPS)
    load = Load(service.address, facts=MANY_STEPS, num_completion_tokens=300, draws=False)
    try:
        load.start().wait_for(NUM_SAMPLES)
        load.end()
        service.stop()
    finally:
        load.close()
        service.close()
    assert len(load.acknowledged) == NUM_SAMPLES
    StoreContents.read(folder).check(load.acknowledged)
    return folder, load.acknowledged


@pytest.fixture
def copy(stored, tmp_path):
    """Return a copy of the store, and the acknowledged samples."""
    folder, acknowledged = stored
    return Path(shutil.copytree(folder, tmp_path / "buffer")), acknowledged


def flip_bits(folder, num_flips: int, *, within=lambda value: (0, len(value))) -> set[int]:
    """Flip one bit in each of `num_flips` records, in every copy of the record in the file; return the records."""
    store = Store(folder, None)
    try:
        values = store.read(lambda tx: {record: bytes(tx.records.view(record)) for (record,) in tx.records.all_keys()})
    finally:
        store.close()
    chance = random.Random(9)
    data = bytearray((folder / "data.mdb").read_bytes())
    damaged = chance.sample(sorted(values), num_flips)
    for record in damaged:
        first, end = within(values[record])
        at, bit = chance.randrange(first, end), 1 << chance.randrange(8)
        places = [found.start() for found in re.finditer(re.escape(values[record]), data)]
        assert places, f"record {record} is nowhere in the file"
        for place in places:
            data[place + at] ^= bit
    (folder / "data.mdb").write_bytes(data)
    return set(damaged)


def inspect(folder) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, "--verify"), capture_output=True, text=True, timeout=60, check=False)


def draw_all(service, connect_to) -> Counter:
    """Draw until no step can be filled; return how many samples were intact and how many damaged."""
    load = connect_to(service)
    served: Counter[str] = Counter()
    for step in range(1, 5):
        batch = load.learner.draw(step, step - 1, load.incarnation, MANY_STEPS.groups_per_step, 0.5).result(60)
        if not batch.ready:
            break
        for row in decode(batch.body):
            intact = np.array_equal(row.token_ids, sample_tokens((row.group_id, row.sample_index), len(row.token_ids)))
            served["intact" if intact else "damaged"] += 1
        load.learner.step_finished(step, step).result(60)
    return served


def groups_without(folder, records: set[int]) -> int:
    """Return how many groups contain none of these records."""
    store = Store(folder, None)
    try:
        return store.read(lambda tx: sum(records.isdisjoint(group.records) for _, group in tx.groups.all_items()))
    finally:
        store.close()


@pytest.fixture
def connect_to():
    """Return `connect_to(service)`, which makes a load without actors, whose learner begins a new incarnation."""
    loads = []

    def connect(service):
        loads.append(Load(service.address, facts=MANY_STEPS, num_actors=0, draws=False))
        return loads[-1]

    yield connect
    for load in loads:
        load.close()


@pytest.mark.fault(9, "bit flips at rest in live records")
def test_every_flipped_bit_is_found_and_no_damaged_sample_is_served(copy, start_service, connect_to, show):
    folder, _ = copy
    damaged = flip_bits(folder, pick(40, 200))
    checked = inspect(folder)
    assert checked.returncode == 2, checked.stderr[-2000:]
    faults = json.loads(checked.stdout.splitlines()[-1])["faults"]
    named = {record for record in damaged if any(f"{record:016x}" in fault for fault in faults)}
    assert named == damaged
    service = start_service(folder, facts=MANY_STEPS)
    scrubbed_s = wait_until(
        lambda: set(map(int, re.findall(r"scrubbing found the block of record (\d+) damaged", service.log))) >= damaged,
        "the scrub",
    )
    found = set(map(int, re.findall(r"scrubbing found the block of record (\d+) damaged", service.log)))
    assert found == damaged
    served = draw_all(service, connect_to)
    status = connect_to(service).learner.status().result(60)
    service.kill()
    num_intact_groups = groups_without(folder, damaged)
    steps = num_intact_groups // MANY_STEPS.groups_per_step
    assert 0 < steps < 4
    assert served == {"intact": steps * MANY_STEPS.groups_per_step * MANY_STEPS.group_size}
    assert status.ledger["gap"] == 0
    show(
        f"{len(damaged)} flips: verify finds {len(named)}, the scrub of a live service {len(found)} "
        f"in {scrubbed_s:.1f} s; drawing serves the {steps} steps that {num_intact_groups} intact groups of 512 fill, "
        "0 samples damaged"
    )


@pytest.mark.fault(9, "checksums are not verified", control=True)
def test_without_checksums_flipped_bits_are_served(copy, start_service, connect_to, show):
    folder, acknowledged = copy
    tokens = [sample_tokens(key, 300).tobytes() for key in acknowledged]
    starts = {text[:64] for text in tokens}

    def token_ids(value: bytes) -> tuple[int, int]:
        at = next(at for at in range(0, len(value), 4) if value[at : at + 64] in starts)
        return at, at + 1200

    damaged = flip_bits(folder, pick(40, 200), within=token_ids)
    service = start_service(folder, facts=MANY_STEPS, entry=UNCHECKED)
    served = draw_all(service, connect_to)
    service.kill()
    assert served["damaged"] > 0
    show(f"of {len(damaged)} flips {served['damaged']} samples are served damaged, none is detected")


def pages(folder) -> dict[str, list[int]]:
    """Return page numbers by the type in the page header; free pages keep their old header."""
    data = (folder / "data.mdb").read_bytes()
    kinds: dict[str, list[int]] = {"meta": [], "branch": [], "leaf": [], "record": []}
    for page in range(len(data) // PAGE):
        header = data[page * PAGE : page * PAGE + 16]
        name = {1: "branch", 2: "leaf", 4: "record", 8: "meta"}.get(int.from_bytes(header[10:12], "little"))
        if name and (int.from_bytes(header[:8], "little") == page or name == "meta"):
            kinds[name].append(page)
    return kinds


def zero(data: Path, page: int) -> None:
    """Punch a hole, so that the page reads as zeros."""
    subprocess.run(
        ["fallocate", "--punch-hole", "--offset", str(page * PAGE), "--length", str(PAGE), str(data)], check=True
    )


def outcome(folder, facts, acknowledged) -> str:
    """Open the store in a service; return 'refused', or the state of the served store: 'whole' or 'damaged'."""
    process = subprocess.Popen(serving(folder, facts), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline()
    finally:
        process.terminate()
        _, error = process.communicate(timeout=30)
    assert process.returncode in (0, 1), f"{signal.Signals(-process.returncode).name}: {error[-500:]}"
    if not address:
        assert process.returncode == 1
        assert str(folder) in error, error[-500:]
        assert "Traceback" not in error, error[-2000:]
        return "refused"
    checked = inspect(folder)
    assert checked.returncode in (0, 2), checked.stderr[-2000:]
    if checked.returncode == 2:
        return "damaged"
    StoreContents.read(folder).check(acknowledged)
    return "whole"


@pytest.mark.fault(10, "truncated file")
def test_a_truncated_file_is_refused(stored, tmp_path, show):
    folder, acknowledged = stored
    size = (folder / "data.mdb").stat().st_size
    chance = random.Random(10)
    lengths = [0, 1, PAGE, 2 * PAGE, size // 2, size - PAGE]
    lengths += [chance.randrange(size - PAGE) for _ in range(pick(0, 20))]
    outcomes: Counter[str] = Counter()
    for number, length in enumerate(lengths):
        copied = Path(shutil.copytree(folder, tmp_path / f"cut-{number}" / "buffer"))
        with (copied / "data.mdb").open("r+b") as file:
            file.truncate(length)
        outcomes[outcome(copied, MANY_STEPS, acknowledged)] += 1
    # If only free pages were cut off, nothing is missing.
    assert outcomes["damaged"] == 0, outcomes
    assert outcomes["refused"] >= len(lengths) - 1, outcomes
    show(f"cut to {len(lengths)} lengths: {as_text(outcomes)} ('whole': only free pages are missing); no signal")


@pytest.mark.fault(10, "zeroed pages (hole punched)", tools=("fallocate",))
def test_a_zeroed_page_is_refused_or_detected_and_never_crashes_the_service(stored, tmp_path, show):
    folder, acknowledged = stored
    chance = random.Random(10)
    outcomes: dict[str, Counter[str]] = {}
    for kind, numbers in pages(folder).items():
        outcomes[kind] = Counter()
        for page in chance.sample(numbers, min(pick(1, 15), len(numbers))):
            copied = Path(shutil.copytree(folder, tmp_path / f"zero-{page}" / "buffer"))
            zero(copied / "data.mdb", page)
            outcomes[kind][outcome(copied, MANY_STEPS, acknowledged)] += 1
            shutil.rmtree(copied.parent)
    for kind in ("meta", "branch", "leaf"):
        # A page of this type may be free, and zeros in a free page do no damage.
        assert set(outcomes[kind]) <= {"refused", "whole"}, outcomes
        assert outcomes[kind]["refused"] or not FULL, outcomes
    show("; ".join(f"{kind} pages: {as_text(counts)}" for kind, counts in outcomes.items()))


@pytest.mark.fault(10, "LMDB alone", control=True, tools=("fallocate",))
def test_lmdb_alone_crashes_on_truncated_and_zeroed_files(stored, tmp_path, show):
    folder, _ = stored
    size = (folder / "data.mdb").stat().st_size
    ends: Counter[str] = Counter()

    def read(copied) -> None:
        script = Path(__file__).with_name("read_by_lmdb_alone.py")
        code = subprocess.run([sys.executable, script, copied], capture_output=True, timeout=60, check=False).returncode
        ends[signal.Signals(-code).name if code < 0 else f"exit code {code}"] += 1

    for number in range(pick(2, 10)):
        copied = Path(shutil.copytree(folder, tmp_path / f"cut-{number}" / "buffer"))
        with (copied / "data.mdb").open("r+b") as file:
            file.truncate(size // 2)
        read(copied)
    for page in pages(folder)["leaf"][-pick(12, 60) :]:
        copied = Path(shutil.copytree(folder, tmp_path / f"zero-{page}" / "buffer"))
        zero(copied / "data.mdb", page)
        read(copied)
    assert ends["SIGBUS"] + ends["SIGSEGV"] > 0, ends
    show(f"LMDB's own reader ends with {as_text(ends)}")
