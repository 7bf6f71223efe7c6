"""Show seeds: `python -m tests.simulation --seed 17 --trace`, or run many: `--seeds 10000`."""

from __future__ import annotations

import argparse
import time

from tests.simulation.core import Environment
from tests.simulation.seeds import simulate
from tests.simulation.world import NUM_EVENTS


def main() -> None:
    """Run the seeds that the command line asks for; a failing one ends it with its trace."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from that one on")
    parser.add_argument("--depth", choices=("policy", "system"), default="policy", help="a plain book, or BufferCore")
    parser.add_argument("--events", type=int, default=NUM_EVENTS, help="random events of a seed")
    parser.add_argument("--trace", action="store_true", help="print every event")
    chosen = parser.parse_args()
    env = Environment() if chosen.depth == "system" else None
    started_s = time.monotonic()
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        outcome = simulate(seed, env, num_events=chosen.events, trace=chosen.trace)
        for line in outcome.trace:
            print(line)
        if chosen.trace:
            print(f"{outcome.knobs}\n{outcome.faults}\ntrace {outcome.trace_hash}")
    print(f"{chosen.seeds} seeds from {chosen.seed} in {time.monotonic() - started_s:.1f} s: no invariant broken")
    if env is not None:
        env.close()


if __name__ == "__main__":
    main()
