"""Compare the throughput of the replay buffer with other systems and hardware limits. Prints one JSON line last.

    python benchmarks/buffer.py [--quick] [--only NAME ...] [--rounds 3] [--num-trajectories 20000]

Every system receives the same long-tailed trajectories (`buffer_peers/workload.py`), with the producer and the service
or consumer in separate processes. Rounds are interleaved, ratios are taken within a round, and medians over rounds are
reported. The buffer runs at its default durability. Among the peers, acknowledged data survives a power cut only in
Redis with `appendfsync always` and in plain LMDB; the other peers lose acknowledged data on kill -9. The settings of
each peer are in the docstring of its file. Peers that are not dependencies of Leeway are installed into a separate
environment (`buffer_peers/measuring.py`).

`--quick` is for development: it measures fewer trajectories and sets `quick` in the result. `--only` selects
measurements.
A full run writes its section of docs/results/buffer.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.buffer_peers.measuring import peers_python, run_measurement
from benchmarks.lib.machine import RESULTS
from benchmarks.lib.page import MET, judged, table
from benchmarks.lib.peers import PeersUnavailable
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm

from leeway.buffer.outbox import COALESCE_S
from leeway.buffer.protocol import STAGES

Figures = dict[str, Any]

IN_ROUNDS = {
    "leeway": "leeway:measure",
    "raw_zmq_arrow": "limits:measure_raw_zmq",
    "lmdb_alone": "limits:measure_lmdb",
    "mp_queue": "mp_queue:measure",
    "ray_actor": "ray_peers:measure_actor",
    "ray_queue": "ray_peers:measure_queue",
    "torchrl": "torchrl_peer:measure",
    "redis_aof_always": "redis_peer:measure",
    "transferqueue": "transferqueue_peer:measure",
}
"""Measurements taken once per round: name -> module of `buffer_peers` and function."""
NEED_PEERS = {"torchrl", "redis_aof_always", "transferqueue"}
"""Measurements that run in the environment of the peers."""
SIZED_ALONE = {
    "clients": "scale:measure_clients",
    "draw_cost": "scale:measure_draws",
    "memory": "scale:measure_memory",
    "restart": "scale:measure_restart",
    "hostile": "hostile:measure",
}
"""Measurements taken once, each with sizes of its own."""
ONCE = {"syncs": "leeway:count_syncs", **SIZED_ALONE}
MEASUREMENTS = {**IN_ROUNDS, **ONCE}
BARS = {
    "durable_over_ray_actor": 2.7,
    "durable_over_ray_queue": 5.0,
    "durable_over_torchrl": 1.3,
    "durable_over_redis_aof_always": 2.0,
    "durable_over_transferqueue": 7.0,
    "durable_over_mp_queue": 0.7,
    "durable_over_raw_zmq_arrow": 0.75,
    "sample_over_ray_actor": 3.0,
    "sample_over_torchrl": 2.0,
}
"""Ratio of two figures -> minimum target."""
ALONE_BARS = {"hostile_over_quiet": 0.9}
"""Figure of a measurement that is taken once -> minimum target."""
CEILINGS = {"draw_cost_1e6_over_1e4": 3.0, "rss_anon_growth": 1.1, "restart_s": 2.0}
"""Figure of a measurement that is taken once -> maximum target."""


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller counts, for development")
    parser.add_argument("--only", nargs="+", choices=[*MEASUREMENTS], metavar="NAME", help=" ".join(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, help="number of rounds; default: 3, or 1 with --quick")
    parser.add_argument("--num-trajectories", type=int, help="default: 20000 trajectories, or 4000 with --quick")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="parent folder of the stores")
    args = parser.parse_args()
    end_at_sigterm()
    num_trajectories = args.num_trajectories or (4000 if args.quick else 20_000)
    chosen = args.only or [*IN_ROUNDS, *ONCE]
    measure = Measurer(args.folder, num_trajectories, quick=args.quick)
    rounds = measure.rounds([name for name in IN_ROUNDS if name in chosen], args.rounds or (1 if args.quick else 3))
    once = {name: measure.one(name) for name in ONCE if name in chosen}
    result = {
        **ratios(rounds),
        **{key: value for key in (*ALONE_BARS, *CEILINGS) for value in [_find(once, key)] if value is not None},
        "quick": args.quick,
        "num_rounds": len(rounds),
        "num_trajectories": num_trajectories,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "file_system": _file_system(args.folder),
        },
        "beside": beside(rounds),
        "rounds": medians(rounds),
        **once,
        "failed": measure.failed,
    }
    result["wanted"] = judgements(result)
    if not (args.quick or args.only):
        write_section(RESULTS / "buffer.md", result)
    print(json.dumps(result))


class Measurer:
    """Sequential runner of measurements, which records failed measurements."""

    def __init__(self, folder: Path, num_trajectories: int, *, quick: bool) -> None:
        self._folder = folder
        self._num_trajectories = num_trajectories
        self._quick = quick
        self.failed: dict[str, str] = {}
        """Measurement -> reason for the failure."""

    def rounds(self, names: list[str], num_rounds: int) -> list[dict[str, Figures]]:
        """Run every measurement once per round; each round starts with a different one."""
        return [
            {name: self.one(name) for name in names[i % len(names) :] + names[: i % len(names)]}
            for i in range(num_rounds if names else 0)
        ]

    def one(self, name: str) -> Figures:
        """Return the figures of one measurement, or an empty dict if the measurement failed."""
        if name in self.failed:
            return {}
        try:
            python = peers_python() if name in NEED_PEERS else None
            figures = run_measurement(
                name,
                MEASUREMENTS[name],
                folder=self._folder,
                num_trajectories=None if name in SIZED_ALONE else self._num_trajectories,
                quick=self._quick,
                python=python,
            )
        except (MeasurementFailed, PeersUnavailable, OSError, subprocess.TimeoutExpired) as error:
            self.failed[name] = str(error)
            print(f"{name}: {error}", flush=True)
            return {}
        shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
        print(f"{name}: {shown}", flush=True)
        return figures


def ratios(rounds: list[dict[str, Figures]]) -> dict[str, float | None]:
    """Return the ratios that have targets, as medians over rounds. A ratio is None if one of its figures is missing."""
    found = {}
    for key in BARS:
        verb, name = key.split("_over_")
        figure = "push_per_s" if verb == "durable" else "sample_per_s"
        found[key] = ratio(rounds, figure, name, figure)
    return found


def beside(rounds: list[dict[str, Figures]]) -> dict[str, float | None]:
    """Return further ratios, which have no target."""
    found = {
        "durable_over_lmdb_alone": ratio(rounds, "push_per_s", "lmdb_alone", "push_per_s"),
        "durable_over_torchrl_lazy_stack": ratio(rounds, "push_per_s", "torchrl", "push_lazy_stack_per_s"),
        "with_leasing_over_raw_zmq_arrow": ratio(rounds, "push_with_leasing_per_s", "raw_zmq_arrow", "push_per_s"),
    }
    for name in ("ray_actor", "ray_queue", "transferqueue"):
        found[f"durable_over_{name}_plain"] = ratio(rounds, "push_per_s", name, "push_plain_per_s")
    found["plain_over_raw_zmq_arrow"] = ratio(rounds, "push_plain_per_s", "raw_zmq_arrow", "push_per_s")
    for name in ("ray_queue", "redis_aof_always", "transferqueue"):
        found[f"sample_over_{name}"] = ratio(rounds, "sample_per_s", name, "sample_per_s")
    return found


def ratio(rounds: list[dict[str, Figures]], ours: str, name: str, theirs: str) -> float | None:
    """Return the median over rounds of Leeway's figure divided by the peer's figure; None if one of them is missing."""
    pairs = [(each.get("leeway", {}).get(ours), each.get(name, {}).get(theirs)) for each in rounds]
    quotients = [mine / other for mine, other in pairs if mine and other]
    return statistics.median(quotients) if quotients else None


def medians(rounds: list[dict[str, Figures]]) -> dict[str, Figures]:
    """Return the median over rounds of each figure of each measurement. A text has the value of the last round."""

    def middle(values: list[Any]) -> Any:  # noqa: ANN401 -- a number or a word
        return statistics.median(values) if all(isinstance(value, (int, float)) for value in values) else values[-1]

    names = dict.fromkeys(name for each in rounds for name in each)
    return {
        name: {key: middle([each[name][key] for each in rounds if key in each[name]]) for key in rounds[0][name]}
        for name in names
        if any(each[name] for each in rounds)
    }


def judgements(result: Figures) -> Figures:
    """Compare figures with their targets. Figures of measurements that are taken once are judged only at full size."""
    return {
        **judged(result, BARS, "at least", at_full_size=True),
        **judged(result, ALONE_BARS, "at least", at_full_size=not result["quick"]),
        **judged(result, CEILINGS, "at most", at_full_size=not result["quick"]),
    }


def _find(once: dict[str, Figures], key: str) -> float | None:
    return next((figures[key] for figures in once.values() if key in figures), None)


def _file_system(folder: Path) -> str:
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


# --- the section of the page ---------------------------------------------------------------------


TITLE = "# The replay buffer, measured"
HEADING = "## Speed compared with alternatives"
NAMES = {
    "leeway": "**Leeway**, durable before acknowledgement",
    "lmdb_alone": "limit: plain LMDB in the producer's process, 256 trajectories per commit",
    "raw_zmq_arrow": "limit: ZeroMQ with Arrow; trajectories are validated, not stored",
    "mp_queue": "`multiprocessing.Queue` into a list",
    "torchrl": "TorchRL `ReplayBuffer`, memory-mapped, behind a queue",
    "redis_aof_always": "Redis stream, `appendfsync always`",
    "ray_actor": "Ray actor with a list",
    "ray_queue": "`ray.util.queue`",
    "transferqueue": "TransferQueue",
}
SURVIVES = {"leeway": "power cut", "lmdb_alone": "power cut", "redis_aof_always": "power cut"}
"""System -> failure that an acknowledged trajectory survives. Other systems keep trajectories in memory or unsynced."""


def write_section(path: Path, result: dict[str, Any]) -> None:
    """Replace or append the section of this benchmark on the page; create a missing page."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"{TITLE}\n"
    before, _, old = text.partition(HEADING)
    _, next_heading, after = old.partition("\n## ")
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = next_heading + after if next_heading else ""
    path.write_text(f"{before.rstrip()}\n\n{section(result)}{rest}", encoding="utf-8")


def section(result: dict[str, Any]) -> str:
    """Return the section as Markdown."""
    machine = result["machine"]
    parts = [
        HEADING,
        f"Written by `benchmarks/buffer.py` on {machine['cores']} cores, no GPU, Python {machine['python']}, file "
        f"system {machine['file_system']}. The systems take turns in {result['num_rounds']} rounds of "
        f"{result['num_trajectories']:,} trajectories each. Lengths are log-normal with a median of 512 tokens and a "
        "maximum of 8,192. Every system receives 32 trajectories per call, and producer and service are separate "
        "processes. The docstring of each peer's file in `benchmarks/buffer_peers` has the fastest settings that we "
        "found. Ratios are medians of the rounds' ratios. Absolute figures depend on the machine and its load, so "
        "compare only figures of this table.",
        _bars(result),
        _beside(result),
        _rates(result["rounds"]),
        *_stages(result),
        *_latencies(result),
        *_scale(result),
    ]
    if result["failed"]:
        parts.append("Not measured: " + "; ".join(f"{name} ({why})" for name, why in result["failed"].items()))
    return "\n\n".join(parts) + "\n"


def _bars(result: dict[str, Any]) -> str:
    rows = []
    for key, each in result["wanted"].items():
        word = "at least" if "at least" in each else "at most"
        measured = "not measured" if each["measured"] is None else f"{each['measured']:.2f}"
        rows.append([f"`{key}`", f"{word} {each[word]:g}", measured, MET[each["met"]]])
    return table(["figure", "target", "measured", "met"], rows)


def _beside(result: dict[str, Any]) -> str:
    known = [f"`{key}` {value:.2f}" for key, value in result["beside"].items() if value is not None]
    return (
        "Further ratios have no target ('plain' is the straightforward use of the peer, not the fastest): "
        f"{', '.join(known)}."
    )


def _rates(rounds: dict[str, dict[str, Any]]) -> str:
    rows = []
    for key, name in NAMES.items():
        figures = rounds.get(key, {})
        columns = ("push_per_s", "push_mb_per_s", "sample_per_s", "batches_per_s")
        cells = [f"{figures[column]:,.0f}" if column in figures else "-" for column in columns]
        rows.append([name, *cells, SURVIVES.get(key, "nothing")])
    head = ["", "pushed/s", "MB/s", "sampled/s", "batches/s", "acknowledged data survives"]
    return table(head, rows)


def _latencies(result: dict[str, Any]) -> list[str]:
    ours = result["rounds"].get("leeway")
    if not ours:
        return []
    text = (
        f"Leeway stores {ours['push_with_leasing_per_s']:,.0f} trajectories/s if the timed part includes the requests "
        f"for leases, and {ours['push_plain_per_s']:,.0f}/s with one call per trajectory. The median acknowledgement "
        f"latency includes {1000 * COALESCE_S:g} ms of coalescing. The latency is {ours['ack_ms_lone']:.1f} ms for a "
        f"single push in flight, {ours['ack_ms_half_load']:.1f} ms at half of the maximum rate, and "
        f"{ours['ack_ms_saturated']:.0f} ms with as many pushes in flight as the credit of the client allows."
    )
    if syncs := result.get("syncs"):
        calls = syncs["fsync_calls_per_1000"]
        text += f" Per 1,000 trajectories: {syncs['commits_per_1000']:.2f} commits"
        text += "." if calls is None else f" and {calls:.2f} `fdatasync` calls, each with a synced meta page write."
    return [text]


def _stages(result: dict[str, Any]) -> list[str]:
    """Return the table of the service's time by stage."""
    ours = result["rounds"].get("leeway")
    if not ours:
        return []
    rows = [[stage, what, f"{ours[f'push_us_{stage}']:.1f}"] for stage, what in STAGES.items()]
    return [
        "Microseconds that the service takes per pushed trajectory, by stage (`spent_s` of its status):\n\n"
        + table(["stage", "work", "us"], rows)
    ]


def _scale(result: dict[str, Any]) -> list[str]:
    lines = []
    if clients := result.get("clients"):
        lines.append(
            f"- {clients['num_clients']} client processes: {clients['push_per_s']:,.0f} trajectories/s, Jain's index "
            f"of fairness {clients['jain']:.3f}, slowest client at {clients['slowest_over_mean']:.2f} of the mean "
            f"rate; the service's anonymous memory grew from {clients['service_rss_anon_mib_before']:.0f} to "
            f"{clients['service_rss_anon_mib_after']:.0f} MiB."
        )
    if draws := result.get("draw_cost"):
        costs = ", ".join(
            f"{name} sampler {draws[f'draw_ms_{name}_small']:.2f} ms and {draws[f'draw_ms_{name}_large']:.2f} ms"
            for name in ("reward", "age")
        )
        small, large = draws["sizes"]
        lines.append(f"- Drawing 256 trajectories of 32 tokens from {small:,} and from {large:,}: {costs}.")
    if memory := result.get("memory"):
        lines.append(
            f"- {memory['num_tokens']:,} tokens pushed, trained and evicted: the service's anonymous memory was "
            f"{memory['rss_anon_mib_early']:.0f} MiB early, {memory['rss_anon_mib_late']:.0f} MiB late and at most "
            f"{memory['rss_anon_mib_max']:.0f} MiB; the final file size was {memory['file_mib']:.0f} MiB."
        )
    if restart := result.get("restart"):
        lines.append(
            f"- Restart after SIGKILL with {restart['store_gib']:.1f} GiB ({restart['num_records']:,} trajectories): "
            f"the first request is answered {restart['restart_s']:.2f} s after the new process starts, or "
            f"{restart['restart_cold_s']:.2f} s if the file was dropped from the page cache."
        )
    if hostile := result.get("hostile"):
        lines.append(
            f"- Under {hostile['refused_per_s']:,.0f} hostile messages/s (malformed, unauthenticated, or not allowed "
            f"for the sender's role), honest pushes and draws run at {hostile['hostile_over_quiet']:.2f}x of the rate."
        )
    return ["\n".join(lines)] if lines else []


if __name__ == "__main__":
    main()
