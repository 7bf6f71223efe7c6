"""Measure the cost of bad samples in reward functions. Prints one JSON line last.

    python benchmarks/rewards.py [--slots 5] [--seconds 6]

The figure is the rate of settled samples if one sample in a hundred is bad, over the rate without bad samples. 64
samples are generated at a time without an engine, each in five seconds. A reward function scores the samples in five
real processes, with a timeout of two seconds per call. The score of a bad sample sleeps endlessly, backtracks in a
regular expression, exits the process, allocates 30 GB, or starts a thread that sets an alarm. As in an actor, samples
that are being scored do not occupy any of the 64 slots, and 128 samples may be open. Rates are medians over time slots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from leeway.actors.rewards import RewardFailed, Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction
from leeway.actors.tasks.config import FileTask

REWARD = """
import os, re, signal, threading, time

def alarm():
    threading.Thread(target=lambda: signal.setitimer(signal.ITIMER_REAL, 0.01)).start()
    time.sleep(60)

BAD = {
    "sleep": lambda: time.sleep(1e6),
    "regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "exit": lambda: os._exit(3),
    "memory": lambda: bytearray(30 * 2**30),
    "alarm": alarm,
}

def reward(completions, **_):
    return [float(BAD.get(each, lambda: 1)()) for each in completions]
"""
KINDS = ("sleep", "regex", "exit", "memory", "alarm")
NUM_SLOTS = 64
GENERATE_S = 5.0
BAD_SHARE = 0.01
NUM_PROCESSES = 5
TIMEOUT_S = 2.0


class Actor:
    """Actor that generates samples without an engine and scores them."""

    def __init__(self, scorer: Scorer, kind: str) -> None:
        """Make one in a hundred samples bad, at random and in the way `kind`; the kind '' makes no sample bad."""
        self._scorer = scorer
        self._kind = kind
        self._chance = random.Random(0)
        self._slots = asyncio.Semaphore(NUM_SLOTS)
        self.settled: Counter[str] = Counter()
        """Outcome -> number of samples. The outcome is 'scored' or the reason of the failure."""

    async def run(self) -> None:
        """Generate and score samples until cancelled, with at most 2 * NUM_SLOTS open samples."""
        await asyncio.gather(*(self._samples() for _ in range(2 * NUM_SLOTS)))

    async def _samples(self) -> None:
        while True:
            async with self._slots:
                await asyncio.sleep(GENERATE_S * self._chance.uniform(0.5, 1.5))
            is_bad = self._kind and self._chance.random() < BAD_SHARE
            try:
                await self._scorer.score(Problem("q", "q", {}), self._kind if is_bad else "good")
                self.settled["scored"] += 1
            except RewardFailed as failure:
                self.settled[str(failure)] += 1


async def measure(folder: Path, kind: str, slots: int, seconds: float) -> tuple[list[float], Counter[str]]:
    """Return the samples settled per second in each time slot, and the number of samples by outcome."""
    reference = f"{folder / 'bad.py'}:reward"
    task = FileTask(type="file", path="rows.jsonl", rewards=(reference,))
    limits = ScorerLimits(NUM_PROCESSES, TIMEOUT_S, start_timeout_s=60.0)
    scorer = Scorer([RewardFunction("reward", task, (), reference)], limits)
    await scorer.start()
    actor = Actor(scorer, kind)
    running = asyncio.create_task(actor.run())
    rates = []
    try:
        await asyncio.sleep(2 * GENERATE_S)
        for _ in range(slots):
            began_s, before = time.monotonic(), actor.settled.total()
            await asyncio.sleep(seconds)
            rates.append((actor.settled.total() - before) / (time.monotonic() - began_s))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await scorer.close()
    return rates, actor.settled


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each kind of bad sample and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=5, help="number of time slots per kind of bad sample")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a time slot")
    args = parser.parse_args(arguments)
    logging.getLogger("leeway.actors.rewards").setLevel(logging.CRITICAL)  # failures are counted, not logged
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "bad.py").write_text(REWARD)
        for kind in ("", *KINDS):
            rates[kind], settled = asyncio.run(measure(Path(name), kind, args.slots, args.seconds))
            shown = ", ".join(f"{rate:.1f}" for rate in rates[kind])
            print(f"{kind or 'healthy'}: {shown} samples/s; {dict(settled)}", flush=True)
    healthy = median(rates[""])
    over_healthy = {kind: round(median(rates[kind]) / healthy, 3) for kind in KINDS}
    result = {
        "benchmark": "rewards",
        "rate_over_healthy": min(over_healthy.values()),
        "by_kind": over_healthy,
        "healthy_per_s": round(healthy, 2),
        "bad_share": BAD_SHARE,
        "slots": args.slots,
        "seconds": args.seconds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
