"""What a draw costs as the store grows: 10,000 against 1,000,000 trajectories of 32 tokens.

For the reward and the age law, with reuse. The same service is filled, measured, filled on, and
measured again. Trajectories are of 50 versions and have random rewards. One batch is 256 trajectories;
the time is from asking to the answer, its records included. Finishing the step is outside of the clock.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.buffer_peers.leeway import LEASES_AHEAD, push_all
from benchmarks.buffer_peers.service import Service, config_for, facts_for, lease_all
from benchmarks.buffer_peers.workload import BATCH_TRAJECTORIES, GROUP_SIZE, PATIENCE_S, Figures, Workload
from buffer.client import BufferClient
from buffer.trajectory import Trajectory, VersionSpan
from common.staleness import PolicyVersion

LAWS = {"reward": "reward_softmax", "age": "prioritised"}
SIZES = {False: (10_000, 1_000_000), True: (10_000, 50_000)}
"""Trajectories stored when the draws are timed; by `quick`."""
TOKENS = 32
NUM_VERSIONS = 50
WARM_UP_DRAWS = 10
TIMED_DRAWS = 100
GROUPS_PER_STEP = BATCH_TRAJECTORIES // GROUP_SIZE


def measure(quick: bool, folder: Path) -> Figures:
    """Median milliseconds of a draw at both sizes, for both laws."""
    figures: Figures = {}
    for name, law in LAWS.items():
        small, large = _measure_law(law, SIZES[quick], folder / name)
        figures |= {f"draw_ms_{name}_small": small, f"draw_ms_{name}_large": large, f"draw_cost_{name}": large / small}
    worst = max(figures[f"draw_cost_{name}"] for name in LAWS)
    figures["sizes"] = list(SIZES[quick])
    figures["draw_cost_quick" if quick else "draw_cost_1e6_over_1e4"] = worst
    return figures


def _measure_law(law: str, sizes: tuple[int, int], folder: Path) -> tuple[float, float]:
    work = Workload.make(sizes[0], fixed_tokens=TOKENS)
    config = config_for(law=law, max_uses="unlimited", capacity_trajectories=2 * sizes[1])
    found = []
    with Service(folder, facts_for(GROUPS_PER_STEP), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        learner.published(0, NUM_VERSIONS).result(PATIENCE_S)
        num_stored = 0
        for i, size in enumerate(sizes):
            while num_stored < size:
                num_stored += _push(actor, work, num_stored, size)
            found.append(_draw_ms(learner, i * (WARM_UP_DRAWS + TIMED_DRAWS)))
        actor.close()
        learner.close()
    return found[0], found[1]


def _push(actor: BufferClient, work: Workload, num_stored: int, goal: int) -> int:
    """Push some groups of the version that is due; returns the number of trajectories."""
    leases = lease_all(actor, min(LEASES_AHEAD, (goal - num_stored) // GROUP_SIZE))
    version = PolicyVersion(0, num_stored * NUM_VERSIONS // goal)
    samples = [(lease, index) for lease in leases for index in lease.sample_indices]
    rows = [
        _of_version(work.trajectory((num_stored + i) % len(work), *sample), version) for i, sample in enumerate(samples)
    ]
    push_all(actor, rows)
    return len(rows)


def _of_version(row: Trajectory, version: PolicyVersion) -> Trajectory:
    return replace(row, spans=(VersionSpan(version, 0, row.num_completion_tokens),))


def _draw_ms(learner: BufferClient, done: int) -> float:
    times_s = []
    for step in range(done + 1, done + WARM_UP_DRAWS + TIMED_DRAWS + 1):
        started = time.perf_counter()
        draw = learner.draw(step, step - 1, 0, GROUPS_PER_STEP, PATIENCE_S).result(PATIENCE_S)
        times_s.append(time.perf_counter() - started)
        if not draw.ready or len(draw.record_ids) != BATCH_TRAJECTORIES:
            raise RuntimeError(f"step {step} cannot be drawn: {draw.waiting_for or len(draw.record_ids)}")
        learner.step_finished(step, step).result(PATIENCE_S)
    return 1000 * statistics.median(times_s[WARM_UP_DRAWS:])
