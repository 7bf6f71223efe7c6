"""Run a seed and print its events: `python -m tests.simulation --seed 17 --trace`; or run many: `--seeds 10000`."""

from __future__ import annotations

import argparse
import time

from tests.simulation.core import Environment
from tests.simulation.seeds import simulate
from tests.simulation.world import NUM_EVENTS


def main() -> None:
    """Run the seeds of the command line; stop at the first failure, whose message has the trace."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument(
        "--depth",
        choices=("policy", "system"),
        default="policy",
        help="'policy': buffer as a dictionary; 'system': real buffer",
    )
    parser.add_argument("--events", type=int, default=NUM_EVENTS, help="random events per seed")
    parser.add_argument("--trace", action="store_true", help="print every event")
    args = parser.parse_args()
    env = Environment() if args.depth == "system" else None
    started_s = time.monotonic()
    for seed in range(args.seed, args.seed + args.seeds):
        outcome = simulate(seed, env, num_events=args.events, trace=args.trace)
        for line in outcome.trace:
            print(line)
        if args.trace:
            print(f"{outcome.knobs}\n{outcome.faults}\ntrace {outcome.trace_hash}")
    print(f"{args.seeds} seeds from {args.seed} in {time.monotonic() - started_s:.1f} s: no invariant broken")
    if env is not None:
        env.close()


if __name__ == "__main__":
    main()
