"""The replay buffer beside what a user would pick instead, and beside the limits. Prints one JSON line last.

    python benchmarks/buffer.py [--quick] [--only NAME ...] [--rounds 3] [--num-trajectories 20000]

All in one run: the same long-tailed trajectories for everybody (`buffer_peers/workload.py`), a producer
and a service or consumer in separate processes, rounds interleaved, ratios taken within a round, medians
of rounds. The buffer runs at its default durability; of the peers, Redis with its file synced always and
LMDB alone keep what they acknowledged through a power cut, the others keep nothing through a kill -9.
Each peer's settings stand in the docstring of its file. Peers that are no dependency of Leeway are
installed into an environment of their own (`buffer_peers/environment.py`).

`--quick` is for development: smaller counts, flagged in the result. `--only` names measurements.
A whole run writes its section of docs/results/buffer.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.buffer_peers.environment import PeersUnavailable, peers_python
from benchmarks.buffer_peers.processes import MeasurementFailed, run_measurement
from benchmarks.buffer_peers.report import write_section
from benchmarks.lib.machine import ROOT

Figures = dict[str, Any]

BARS = {
    "durable_over_ray_actor": 3.0,
    "durable_over_ray_queue": 8.0,
    "durable_over_torchrl": 1.2,
    "durable_over_redis_aof_always": 1.2,
    "durable_over_transferqueue": 15.0,
    "durable_over_mp_queue": 0.5,
    "durable_over_raw_zmq_arrow": 0.4,
    "sample_over_ray_actor": 10.0,
}
"""Ratio -> at least this is wanted."""
CEILINGS = {"draw_cost_1e6_over_1e4": 3.0, "rss_anon_growth": 1.1, "restart_s": 2.0}
"""Figure -> at most this is wanted."""
IN_ROUNDS = ["leeway", "raw_zmq_arrow", "lmdb_alone", "mp_queue", "ray_actor", "ray_queue", "torchrl"]
IN_ROUNDS += ["redis_aof_always", "transferqueue"]
NEED_PEERS = {"torchrl", "redis_aof_always", "transferqueue"}
"""These run in the environment of the peers."""
ONCE = ["syncs", "clients", "draw_cost", "memory", "restart"]


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller counts, for development")
    parser.add_argument(
        "--only", nargs="+", choices=[*IN_ROUNDS, *ONCE], metavar="NAME", help=" ".join(IN_ROUNDS + ONCE)
    )
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--num-trajectories", type=int, help="default: 20000, or 4000 with --quick")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the stores are made")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does, it ends what is being measured
    num_trajectories = args.num_trajectories or (4000 if args.quick else 20_000)
    chosen = args.only or [*IN_ROUNDS, *ONCE]
    measure = Measurer(args.folder, num_trajectories, quick=args.quick)
    rounds = measure.rounds([name for name in IN_ROUNDS if name in chosen], args.rounds or (1 if args.quick else 3))
    once = {name: measure.one(name) for name in ONCE if name in chosen}
    result = {
        **ratios(rounds),
        **{key: value for key in CEILINGS for value in [_find(once, key)] if value is not None},
        "quick": args.quick,
        "num_rounds": len(rounds),
        "num_trajectories": num_trajectories,
        "machine": {
            "cores": _num_cores(),
            "python": platform.python_version(),
            "file_system": _file_system(args.folder),
        },
        "beside": beside(rounds),
        "rounds": medians(rounds),
        **once,
        "failed": measure.failed,
    }
    result["wanted"] = judged(result)
    if not (args.quick or args.only):
        write_section(ROOT / "docs" / "results" / "buffer.md", result)
    print(json.dumps(result))


class Measurer:
    """Runs measurements one after the other, and remembers which could not be run."""

    def __init__(self, folder: Path, num_trajectories: int, *, quick: bool) -> None:
        self._folder = folder
        self._num_trajectories = num_trajectories
        self._quick = quick
        self.failed: dict[str, str] = {}
        """Measurement -> why it has no figures."""

    def rounds(self, names: list[str], num_rounds: int) -> list[dict[str, Figures]]:
        """Every measurement once a round; each round begins with another one."""
        return [
            {name: self.one(name) for name in names[i % len(names) :] + names[: i % len(names)]}
            for i in range(num_rounds if names else 0)
        ]

    def one(self, name: str) -> Figures:
        """The figures of one measurement; none where it could not be run."""
        if name in self.failed:
            return {}
        try:
            python = peers_python() if name in NEED_PEERS else None
            arguments = [self._num_trajectories] if name in (*IN_ROUNDS, "syncs") else [int(self._quick)]
            figures = run_measurement(name, *arguments, folder=self._folder, python=python)
        except (MeasurementFailed, PeersUnavailable, OSError, subprocess.TimeoutExpired) as error:
            self.failed[name] = str(error)
            print(f"{name}: {error}", flush=True)
            return {}
        shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
        print(f"{name}: {shown}", flush=True)
        return figures


def ratios(rounds: list[dict[str, Figures]]) -> dict[str, float | None]:
    """The wanted ratios, each the median over rounds; None where one side is missing."""
    found = {}
    for key in BARS:
        verb, name = key.split("_over_")
        figure = "push_per_s" if verb == "durable" else "sample_per_s"
        found[key] = ratio(rounds, figure, name, figure)
    return found


def beside(rounds: list[dict[str, Figures]]) -> dict[str, float | None]:
    """Further ratios, for which nothing is wanted."""
    found = {
        "durable_over_lmdb_alone": ratio(rounds, "push_per_s", "lmdb_alone", "push_per_s"),
        "durable_over_torchrl_lazy_stack": ratio(rounds, "push_per_s", "torchrl", "push_lazy_stack_per_s"),
        "with_leasing_over_raw_zmq_arrow": ratio(rounds, "push_with_leasing_per_s", "raw_zmq_arrow", "push_per_s"),
    }
    for name in ("ray_actor", "ray_queue", "transferqueue"):
        found[f"durable_over_{name}_plain"] = ratio(rounds, "push_per_s", name, "push_plain_per_s")
    for name in ("ray_queue", "torchrl", "redis_aof_always", "transferqueue"):
        found[f"sample_over_{name}"] = ratio(rounds, "sample_per_s", name, "sample_per_s")
    return found


def ratio(rounds: list[dict[str, Figures]], ours: str, name: str, theirs: str) -> float | None:
    """The median over rounds of Leeway's figure over a peer's; None where one side is missing."""
    pairs = [(each.get("leeway", {}).get(ours), each.get(name, {}).get(theirs)) for each in rounds]
    quotients = [mine / other for mine, other in pairs if mine and other]
    return statistics.median(quotients) if quotients else None


def medians(rounds: list[dict[str, Figures]]) -> dict[str, Figures]:
    """Per measurement and figure, the median over rounds; what is no number is taken from the last."""

    def middle(values: list[Any]) -> Any:  # noqa: ANN401 -- a number or a word
        return statistics.median(values) if all(isinstance(value, (int, float)) for value in values) else values[-1]

    names = dict.fromkeys(name for each in rounds for name in each)
    return {
        name: {key: middle([each[name][key] for each in rounds if key in each[name]]) for key in rounds[0][name]}
        for name in names
        if any(each[name] for each in rounds)
    }


def judged(result: Figures) -> dict[str, Figures]:
    """Every wanted bar, what was measured, and whether it is met; None where that was not measured at full size."""
    too_small = set(CEILINGS) if result["quick"] else set()
    at_least: Callable[[float, float], bool] = float.__ge__
    at_most: Callable[[float, float], bool] = float.__le__
    bars = [(key, bar, at_least, "at least") for key, bar in BARS.items()]
    bars += [(key, bar, at_most, "at most") for key, bar in CEILINGS.items()]
    return {
        key: {
            word: bar,
            "measured": result.get(key),
            "met": None if result.get(key) is None or key in too_small else holds(float(result[key]), bar),
        }
        for key, bar, holds, word in bars
    }


def _find(once: dict[str, Figures], key: str) -> float | None:
    return next((figures[key] for figures in once.values() if key in figures), None)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _file_system(folder: Path) -> str:
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


if __name__ == "__main__":
    main()
