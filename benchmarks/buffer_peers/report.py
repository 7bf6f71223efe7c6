"""Writes the benchmark's section of docs/results/buffer.md; other sections of the page stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lib.page import table

TITLE = "# The replay buffer, measured"
HEADING = "## Speed, beside what a user would pick instead"
NAMES = {
    "leeway": "**Leeway**, durable before it is acknowledged",
    "lmdb_alone": "limit: LMDB alone, in the producer's process, 256 per commit",
    "raw_zmq_arrow": "limit: ZeroMQ with Arrow, validated, kept nowhere",
    "mp_queue": "`multiprocessing.Queue`, into a list",
    "torchrl": "TorchRL `ReplayBuffer`, memory-mapped, behind a queue",
    "redis_aof_always": "Redis stream, synced always",
    "ray_actor": "Ray actor that holds a list",
    "ray_queue": "`ray.util.queue`",
    "transferqueue": "TransferQueue",
}
SURVIVES = {"leeway": "power cut", "lmdb_alone": "power cut", "redis_aof_always": "power cut"}
"""What an acknowledged trajectory survives; the others keep it in memory or unsynced."""


def write_section(page: Path, result: dict[str, Any]) -> None:
    """Replace the section of this benchmark, or add it to the page, or make the page."""
    text = page.read_text(encoding="utf-8") if page.exists() else f"{TITLE}\n"
    before, _, old = text.partition(HEADING)
    _, next_heading, after = old.partition("\n## ")
    page.parent.mkdir(parents=True, exist_ok=True)
    rest = next_heading + after if next_heading else ""
    page.write_text(f"{before.rstrip()}\n\n{section(result)}{rest}", encoding="utf-8")


def section(result: dict[str, Any]) -> str:
    """The section as Markdown."""
    machine = result["machine"]
    parts = [
        HEADING,
        f"Written by `benchmarks/buffer.py` on {machine['cores']} cores, no GPU, Python {machine['python']}, file "
        f"system {machine['file_system']}: {result['num_rounds']} interleaved rounds of {result['num_trajectories']:,} "
        "log-normal trajectories (median 512 tokens, at most 8,192), 32 per call for everybody, producer and service "
        "in separate processes. Each peer runs as well as we could make it: its settings are in the docstring of its "
        "file in `benchmarks/buffer_peers`. Ratios are medians of the rounds' ratios. Absolute figures depend on the "
        "machine and its load; compare within the table only.",
        _bars(result),
        _beside(result),
        _rates(result["rounds"]),
        *_latencies(result),
        *_scale(result),
    ]
    if result["failed"]:
        parts.append("Could not be measured: " + "; ".join(f"{name} ({why})" for name, why in result["failed"].items()))
    return "\n\n".join(parts) + "\n"


def _bars(result: dict[str, Any]) -> str:
    rows = []
    for key, judged in result["wanted"].items():
        word = "at least" if "at least" in judged else "at most"
        measured = "not measured" if judged["measured"] is None else f"{judged['measured']:.2f}"
        met = {True: "yes", False: "**no**", None: "-"}[judged["met"]]
        rows.append([f"`{key}`", f"{word} {judged[word]:g}", measured, met])
    return table(["figure", "wanted", "measured", "met"], rows)


def _beside(result: dict[str, Any]) -> str:
    known = [f"`{key}` {value:.2f}" for key, value in result["beside"].items() if value is not None]
    return (
        "Further ratios, for which nothing was wanted ('plain' is the peer as most would write it down first, and not "
        f"as it is fastest): {', '.join(known)}."
    )


def _rates(rounds: dict[str, dict[str, Any]]) -> str:
    rows = []
    for key, name in NAMES.items():
        figures = rounds.get(key, {})
        columns = ("push_per_s", "push_mb_per_s", "sample_per_s", "batches_per_s")
        cells = [f"{figures[column]:,.0f}" if column in figures else "-" for column in columns]
        rows.append([name, *cells, SURVIVES.get(key, "nothing")])
    head = ["", "pushed/s", "MB/s", "sampled/s", "batches/s", "what is acknowledged survives"]
    return table(head, rows)


def _latencies(result: dict[str, Any]) -> list[str]:
    ours = result["rounds"].get("leeway")
    if not ours:
        return []
    text = (
        f"With the leases taken inside the clock Leeway takes in {ours['push_with_leasing_per_s']:,.0f}/s. Median time "
        f"to an acknowledgement, 10 ms of coalescing included: {ours['ack_ms_lone']:.1f} ms alone, "
        f"{ours['ack_ms_half_load']:.1f} ms at half of the greatest rate, {ours['ack_ms_saturated']:.0f} ms with 4,096 "
        "trajectories always outstanding."
    )
    if syncs := result.get("syncs"):
        calls = syncs["fsync_calls_per_1000"]
        text += f" Per 1,000 trajectories: {syncs['commits_per_1000']:.2f} commits"
        text += "." if calls is None else f", {calls:.2f} `fdatasync` calls, as many synced writes of LMDB's meta page."
    return [text]


def _scale(result: dict[str, Any]) -> list[str]:
    lines = []
    if clients := result.get("clients"):
        lines.append(
            f"- {clients['num_clients']} client processes: {clients['push_per_s']:,.0f} trajectories/s, Jain's index "
            f"of fairness {clients['jain']:.3f}, the slowest at {clients['slowest_over_mean']:.2f} of the mean; the "
            f"service's anonymous memory went from {clients['service_rss_anon_mib_before']:.0f} to "
            f"{clients['service_rss_anon_mib_after']:.0f} MiB."
        )
    if draws := result.get("draw_cost"):
        costs = ", ".join(
            f"{name} law {draws[f'draw_ms_{name}_small']:.2f} ms and {draws[f'draw_ms_{name}_large']:.2f} ms"
            for name in ("reward", "age")
        )
        small, large = draws["sizes"]
        lines.append(f"- Drawing 256 trajectories of 32 tokens from {small:,} and from {large:,}: {costs}.")
    if memory := result.get("memory"):
        lines.append(
            f"- {memory['num_tokens']:,} tokens pushed, trained and evicted: anonymous memory of the service "
            f"{memory['rss_anon_mib_early']:.0f} MiB early, {memory['rss_anon_mib_late']:.0f} MiB late, at most "
            f"{memory['rss_anon_mib_max']:.0f} MiB; the file ended at {memory['file_mib']:.0f} MiB."
        )
    if restart := result.get("restart"):
        lines.append(
            f"- Killed with SIGKILL on {restart['store_gib']:.1f} GiB ({restart['num_records']:,} trajectories): the "
            f"first request is answered {restart['restart_s']:.2f} s after the new process starts, "
            f"{restart['restart_cold_s']:.2f} s with the file dropped from the page cache."
        )
    return ["\n".join(lines)] if lines else []
