"""What shows only after a while: the service's memory, and how fast it is back.

Memory: 10 million tokens are pushed, trained and evicted, in the cycle of a run (lease, push, draw,
finish, publish, checkpoint); the service's RssAnon is read all the while. It is anonymous memory:
pages of the store belong to the page cache and do not count. Flat means that the median of the last
quarter (of the tokens) is near the median of the second; the first one reaches the capacity.

Restart: a store of 2 GiB, the service killed with SIGKILL, and the time from starting its process to
the line with its address and to the first request answered; with the file in the page cache, and
after it was dropped from there.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

from benchmarks.buffer_peers.leeway import draw_steps, fill
from benchmarks.buffer_peers.service import Service, config_for, facts_for, lease_all
from benchmarks.buffer_peers.workload import GROUP_SIZE, PATIENCE_S, Figures, Workload
from buffer.client import BufferClient

GROUPS_PER_STEP = 32
STEPS_PER_CYCLE = 4
"""So many steps' groups may be outstanding; a cycle pushes and trains all of them."""
CAPACITY_TRAJECTORIES = 2048
NUM_TOKENS = {False: 10_000_000, True: 5_000_000}
"""Pushed in all; by `quick`."""
STORE_BYTES = {False: 2 * 2**30, True: 200 * 2**20}
SAMPLE_EVERY_S = 0.05
WORKLOAD_TRAJECTORIES = 4096
OPEN_GROUPS = 100
"""Leases that are open when the service is killed."""


class RssSampler:
    """Reads a service's RssAnon in a thread, each time with the progress so far."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        self.progress = 0.0
        """Share of the work that is done; whoever does it keeps this up to date."""
        self._samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, name="rss", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._samples.append((self.progress, self._service.rss_anon_bytes()))

    def stop(self) -> None:
        """Take no more samples."""
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def mib(self, first: float = 0.0, last: float = 1.0) -> list[float]:
        """What was read while the progress was in [first, last], in MiB."""
        return [size / 2**20 for progress, size in self._samples if first <= progress <= last]


def measure_memory(quick: bool, folder: Path) -> Figures:
    """RssAnon while tokens are pushed, trained and evicted."""
    work = Workload.make(WORKLOAD_TRAJECTORIES)
    config = config_for(capacity_trajectories=CAPACITY_TRAJECTORIES)
    with Service(folder / "store", facts_for(GROUPS_PER_STEP), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        sampler = RssSampler(service)
        num_tokens, num_pushed, num_steps = 0, 0, 0
        while num_tokens < NUM_TOKENS[quick]:
            num_in_cycle = STEPS_PER_CYCLE * GROUPS_PER_STEP * GROUP_SIZE
            fill(actor, work, num_in_cycle, first=num_pushed)
            num_tokens += sum(_tokens(work, num_pushed + i) for i in range(num_in_cycle))
            num_pushed += num_in_cycle
            num_steps = _train(learner, num_steps)
            sampler.progress = min(1.0, num_tokens / NUM_TOKENS[quick])
        sampler.stop()
        status = learner.status().result(PATIENCE_S)
        file_bytes = (folder / "store" / "data.mdb").stat().st_size
        actor.close()
        learner.close()
    if status.num_records > CAPACITY_TRAJECTORIES or status.ledger["trained"] != num_pushed:
        raise RuntimeError(f"not all of {num_pushed} trajectories were trained and evicted: {status}")
    early, late = statistics.median(sampler.mib(0.25, 0.5)), statistics.median(sampler.mib(0.75))
    return {
        "rss_anon_growth": late / early,
        "rss_anon_mib_early": early,
        "rss_anon_mib_late": late,
        "rss_anon_mib_max": max(sampler.mib()),
        "rss_anon_mib_over_tokens": [round(statistics.median(part), 1) for part in _tenths(sampler)],
        "num_tokens": num_tokens,
        "num_trajectories": num_pushed,
        "file_mib": file_bytes / 2**20,
    }


def _tenths(sampler: RssSampler) -> list[list[float]]:
    parts = [sampler.mib(i / 10, (i + 1) / 10) for i in range(10)]
    return [part for part in parts if part]


def _tokens(work: Workload, i: int) -> int:
    i %= len(work)
    return int(work.bounds[i + 1] - work.bounds[i])


def _train(learner: BufferClient, done: int) -> int:
    """Train what was pushed; the steps done now."""
    draw_steps(learner, done, STEPS_PER_CYCLE, GROUPS_PER_STEP)
    done += STEPS_PER_CYCLE
    learner.published(0, done).result(PATIENCE_S)
    learner.checkpoint_durable(done).result(PATIENCE_S)
    return done


def measure_restart(quick: bool, folder: Path) -> Figures:
    """Seconds until a killed service is back on a large store."""
    work = Workload.make(WORKLOAD_TRAJECTORIES)
    config = config_for(law="uniform", max_uses="unlimited")
    with Service(folder / "store", facts_for(GROUPS_PER_STEP), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        num_pushed = 0
        while (status := actor.status().result(PATIENCE_S)).size_bytes < STORE_BYTES[quick]:
            fill(actor, work, len(work), first=num_pushed)
            num_pushed += len(work)
        lease_all(actor, OPEN_GROUPS)
        figures: Figures = {"store_gib": status.size_bytes / 2**30, "num_records": status.num_records}
        for client in (actor, learner):
            client.close()
        for name, drop in (("", False), ("_cold", True)):
            service.kill()
            if drop:
                _drop_from_page_cache(folder / "store" / "data.mdb")
            answered_s = _restart(service, status.num_records)
            figures |= {f"restart{name}_s": answered_s, f"address_line{name}_s": service.address_after_s}
    return figures


def _restart(service: Service, num_records: int) -> float:
    """Seconds from starting the process to the first answer.

    Raises:
        RuntimeError: records are missing.
    """
    started = time.monotonic()
    service.start()
    client = service.client("observer", "observer")
    answered_s = time.monotonic() - started
    found = client.status().result(PATIENCE_S).num_records
    client.close()
    if found != num_records:
        raise RuntimeError(f"{num_records} trajectories were acknowledged, {found} are there after the restart")
    return answered_s


def _drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
