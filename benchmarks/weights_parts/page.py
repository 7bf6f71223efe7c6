"""Figures computed from raw measurements, and the results page. Ratios are medians of the ratios of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.page import bars_table, ms, origin, table
from benchmarks.lib.rounds import median_ratio

Figures = dict[str, Any]
Rounds = Sequence[Mapping[str, Any]]

BARS = {
    "pause_over_step": 1.3,
    "publish_stall_frac": 0.05,
    "sync_over_torch_save_load": 0.6,
    "host_reads": 1.0,
    "fairness": 2.0,
}
"""Figure -> maximum target."""


def pause_figures(engines: Sequence[Rounds]) -> Figures:
    """Return the cost of an update for an engine.

    Args:
        engines: rounds of each engine, as `FollowingEngine.follow` returns them.
    """
    rounds = [each for engine in engines for each in engine]
    pause, bare_pause, gap = (
        [each[key] / (each["step"] + each["bare"]) for each in rounds] for key in ("pause", "bare_pause", "gap")
    )
    staging = [step_s for each in rounds for step_s in each["staging_steps"]]
    step_s = _median(rounds, "step")
    return {
        "pause_over_step": statistics.median(pause),
        "pause_over_step_worst": max(pause),
        "bare_pause_over_step": statistics.median(bare_pause),
        "gap_over_step": statistics.median(gap),
        "num_updates": len(rounds),
        **{f"{key}_s": _median(rounds, key) for key in ("pause", "load")},
        "bare_reload_s": _median(rounds, "bare"),
        "bare_pause_s": _median(rounds, "bare_pause"),
        "engine_step_s": step_s,
        **{f"{key}_s": _median(rounds, key) for key in ("gap", "bare_gap", "update")},
        "staging_step_over_step": statistics.median(staging) / step_s if staging else None,
    }


def learner_figures(steps: Rounds) -> Figures:
    """Return the cost of publishing for the learner.

    Args:
        steps: steps as `PublishingLearner.finish` returns them.
    """
    return {
        "publish_stall_frac": statistics.median(each["publish"] / each["step"] for each in steps),
        "publish_stall_frac_worst": max(each["publish"] / each["step"] for each in steps),
        "num_learner_steps": len(steps),
        "learner_step_s": _median(steps, "step"),
        "publish_call_s": _median(steps, "publish"),
        "publish_committed_s": _median(steps, "committed"),
    }


def delta_figures(rates: Mapping[str, Rounds]) -> Figures:
    """Return the figures of deltas by learning rate.

    Args:
        rates: name of the learning rate -> its steps, as `DeltaLearner.steps` returns them.
    """
    everything = [each for steps in rates.values() for each in steps]
    return {
        "delta_over_full": {name: _median_ratio(steps, "delta_bytes", "full_bytes") for name, steps in rates.items()},
        "delta_over_full_by_step": {
            name: [each["delta_bytes"] / each["full_bytes"] for each in steps] for name, steps in rates.items()
        },
        "unchanged_share": {name: _median(steps, "unchanged") for name, steps in rates.items()},
        "unchanged_share_by_step": {name: [each["unchanged"] for each in steps] for name, steps in rates.items()},
        "delta_full_mb": everything[0]["full_bytes"] / 1e6,
        "delta_encode_mb_per_s": _median_ratio(everything, "full_bytes", "encode_s") / 1e6,
        "delta_decode_mb_per_s": _median_ratio(everything, "full_bytes", "decode_s") / 1e6,
    }


def copying_figures(rates: Mapping[str, Sequence[float]]) -> Figures:
    """Return GB/s of one core from the result of `Copying.rates`."""
    return {
        "memcpy_gb_per_s": statistics.median(rates["copy"]),
        "checksum_gb_per_s": statistics.median(rates["checksum"]),
    }


def sync_figures(places: Mapping[str, Figures], network: Mapping[str, Figures]) -> Figures:
    """Return the time from publish to staged, compared with torch.save plus torch.load.

    Args:
        places: 'DTYPE_PLACE' -> `num_bytes` and `rounds` with sync, save and load.
        network: 'whole' and 'delta' -> `num_bytes` and `rounds` with sync and sent_bytes.
    """
    found: Figures = {"sync": {}, "sync_network": {}}
    for name, each in places.items():
        rounds, num_bytes = each["rounds"], each["num_bytes"]
        found["sync"][name] = {
            "over_torch": statistics.median(one["sync"] / (one["save"] + one["load"]) for one in rounds),
            "mb": num_bytes / 1e6,
            **{f"{key}_s": _median(rounds, key) for key in ("sync", "call", "until_seen", "fetch", "save", "load")},
            "gb_per_s": num_bytes / _median(rounds, "sync") / 1e9,
        }
    for name, each in network.items():
        rounds, num_bytes = each["rounds"], each["num_bytes"]
        found["sync_network"][name] = {
            **{f"{key}_s": _median(rounds, key) for key in ("sync", "fetch")},
            "sent_share": _median(rounds, "sent_bytes") / num_bytes,
            "gb_per_s": num_bytes / _median(rounds, "sync") / 1e9,
        }
    return found


def summed_up(result: Figures) -> Figures:
    """Return the figures that need several measurements, if these are present."""
    found: Figures = {}
    sync = result.get("sync", {}).get("bfloat16_disk")
    if sync is not None:
        found["sync_over_torch_save_load"] = sync["over_torch"]
        found["sync_over_memcpy"] = sync["gb_per_s"] / result["memcpy_gb_per_s"]
        if "bare_reload_s" in result:
            reload_s = result["bare_reload_s"]
            found["sync_over_torch_save_load_with_reload"] = (sync["sync_s"] + reload_s) / (
                sync["save_s"] + sync["load_s"] + reload_s
            )
    return found


def hosts_figures(num_bytes: int, sent_share: float, pullers: Mapping[str, Rounds]) -> Figures:
    """Return how often a version was sent to one machine and verified on it.

    Args:
        num_bytes: bytes of the version's tensors.
        sent_share: bytes sent by the service to all pullers of the network, over those of the version's files.
        pullers: transport -> `sync` and `verified_bytes` of each puller.
    """
    return {
        "host_reads": sent_share,
        "host_verified": {
            name: sum(each["verified_bytes"] for each in rounds) / num_bytes for name, rounds in pullers.items()
        },
        "host_last_s": {name: max(each["sync"] for each in rounds) for name, rounds in pullers.items()},
        "host_num_pullers": len(pullers["network"]),
        "host_mb": num_bytes / 1e6,
    }


def fairness_figures(num_bytes: int, rounds: Sequence[Sequence[float]]) -> Figures:
    """Return the figures of simultaneous clients.

    Args:
        num_bytes: bytes of the fetched version.
        rounds: seconds of every client from the common start, for each round.
    """
    medians = [statistics.median(each) for each in rounds]
    return {
        "fairness": statistics.median(max(each) / middle for each, middle in zip(rounds, medians, strict=True)),
        "fairness_worst": max(max(each) / middle for each, middle in zip(rounds, medians, strict=True)),
        "fairness_num_clients": len(rounds[0]),
        "fairness_mb": num_bytes / 1e6,
        "fairness_median_s": statistics.median(medians),
        "fairness_gb_per_s": num_bytes * len(rounds[0]) / statistics.median(max(each) for each in rounds) / 1e9,
    }


def _median(rounds: Rounds, key: str) -> float:
    return float(statistics.median(each[key] for each in rounds if key in each))


def _median_ratio(rounds: Rounds, above: str, below: str) -> float:
    return median_ratio((each[above] for each in rounds), (each[below] for each in rounds))


# --- the page ------------------------------------------------------------------------------------


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    return [
        "# Weight transfer",
        _head(result),
        bars_table(result["wanted"], "at most"),
        "## Pause of an update",
        _update(result),
        "## Cost for the learner",
        _learner(result),
        "## Deltas",
        _deltas(result),
        "## Comparison with torch.save and torch.load",
        _sync(result),
        "## Comparison with memory bandwidth",
        _bandwidth(result),
        "## Many pullers and clients",
        _many(result),
    ]


def _head(r: Figures) -> str:
    return (
        f"{origin('python benchmarks/weights.py', r['machine'])} "
        "The model is SmolLM2-135M; its head is tied and is published in addition to the embedding, so a version in "
        f"bfloat16 is {r['delta_full_mb']:.0f} MB. The compared sides take turns within one run; ratios are medians "
        "of the rounds' ratios. Absolute figures depend on the machine and its load; compare within this page only."
    )


def _update(r: Figures) -> str:
    text = (
        f"{r['update_num_actors']} engines ({r['update_num_running']} running requests each, bfloat16, one thread "
        f"each) and a learner (one thread) share the {r['machine']['cores']} cores. The learner publishes every step, "
        'and the engines read the weights from the folder like actors, with `kv_cache = "keep"`. '
        "`pause_over_step` is the pause of an update, from the request to pause until generation resumes, over one "
        "engine step plus the *bare reload*: vLLM's reload of tensors that are already in the engine's memory "
        "(`initialize_layerwise_reload`, `load_weights`, `finalize_layerwise_reload`). Both are measured in the same "
        "engine while the learner and the other engine continue: the bare reload a second after each update, and the "
        "engine step until the next version arrives. The pause includes the rest of the engine step that is running at "
        "the request (half of one on average), loading from the mapped files, vLLM's repacking of the weights, and the "
        "messages between the actor's process and that of its engine. It does not include fetching and verification, "
        "which run during generation."
    )
    rows = [
        ["engine step (median time between tokens)", ms(r["engine_step_s"])],
        ["bare reload", ms(r["bare_reload_s"])],
        ["pause of an update", ms(r["pause_s"])],
        ["loading, part of the pause", ms(r["load_s"])],
        ["pause around a bare reload", ms(r["bare_pause_s"])],
        ["longest time between two tokens during an update", ms(r["gap_s"])],
        ["longest time between two tokens during a bare reload", ms(r["bare_gap_s"])],
        ["from a version seen to served", ms(r["update_s"])],
    ]
    slower = r["staging_step_over_step"]
    rest = (
        f"Relative to one engine step plus the bare reload: the pause {r['pause_over_step']:.2f} (worst of "
        f"{r['num_updates']} updates {r['pause_over_step_worst']:.2f}), the pause around a bare reload "
        f"{r['bare_pause_over_step']:.2f}, the longest time between two tokens {r['gap_over_step']:.2f}."
    )
    if slower is not None:
        rest += f" While a version is staged and verified, an engine step takes {slower:.2f} times as long."
    return f"{text}\n\n{table(['median of the updates', 'ms'], rows)}\n\n{rest}"


def _learner(r: Figures) -> str:
    return (
        f"The same run has {r['num_learner_steps']} optimizer steps (float32 weights, bf16 autocast, AdamW, one stage) "
        f"on samples of the model itself, each followed by publishing. A step takes {r['learner_step_s']:.1f} s, the "
        f"call of `Publisher.publish` {ms(r['publish_call_s'])} ms for the copy to host memory with rounding to "
        "bfloat16. "
        f"`publish_stall_frac` is the second over the first, {r['publish_stall_frac']:.4f} (worst step "
        f"{r['publish_stall_frac_worst']:.4f}). A thread of the learner does the rest: the version was available "
        f"{ms(r['publish_committed_s'])} ms after the start of the call. If all cores are busy, as here, the thread "
        "takes time from learner and engines, which is part of the steps above."
    )


def _deltas(r: Figures) -> str:
    rows = [
        [
            name,
            f"{r['unchanged_share'][name]:.2%}",
            f"{r['delta_over_full'][name]:.4f}",
            f"{1 / r['delta_over_full'][name]:.0f}",
            ", ".join(f"{share:.4f}" for share in r["delta_over_full_by_step"][name]),
        ]
        for name in r["delta_over_full"]
    ]
    text = (
        "Real optimizer steps as above, with the learner alone: bytes of the delta over bytes of the full version in "
        "bfloat16, and the fraction of values that a step does not change. Every delta was decoded and compared. The "
        "first step of AdamW moves every weight by the learning rate and therefore changes most values. This "
        f"checkpoint was made from four-bit weights: {r['boundary_share']:.1%} of its weights are exactly halfway "
        "between two values of bfloat16, so even a tiny step may round them differently. *Spread* starts from the same "
        "weights moved to random values that round to the same bfloat16, as they are after training."
    )
    rest = (
        f"Encoding takes one core {r['delta_full_mb'] / r['delta_encode_mb_per_s']:.2f} s for the full version "
        f"({r['delta_encode_mb_per_s']:.0f} MB/s of weights), decoding "
        f"{r['delta_full_mb'] / r['delta_decode_mb_per_s']:.2f} s ({r['delta_decode_mb_per_s']:.0f} MB/s)."
    )
    head = ["learning rate", "unchanged, median", "`delta_over_full`, median", "times smaller", "each step"]
    return f"{text}\n\n{table(head, rows)}\n\n{rest}"


def _sync(r: Figures) -> str:
    names = {
        "bfloat16_disk": "bfloat16, disk",
        "bfloat16_memory": "bfloat16, /dev/shm",
        "float32_disk": "float32, disk",
        "float32_memory": "float32, /dev/shm",
    }
    rows = [
        [
            names[name],
            f"{each['mb']:.0f}",
            *(ms(each[f"{key}_s"]) for key in ("until_seen", "fetch", "sync", "save", "load")),
            f"{each['over_torch']:.2f}",
        ]
        for name, each in r["sync"].items()
    ]
    text = (
        "Time from the call of `Publisher.publish` to the return of `Puller.fetch` in another process, with the "
        "version verified and staged, through the folder transport; compared with `torch.save` in the first process "
        "and `torch.load` in the second, for the same tensors and the same folder. Files are new each time and are in "
        "the page cache afterwards, neither side calls fsync, and the two take turns. The first five rounds do not "
        "count: until pages of removed files are reused, writes use memory that the machine has never touched, at ten "
        "times the cost, on both sides. `sync_over_torch_save_load` is the ratio of the first row. Leeway writes "
        "checksums, verifies them and maps the files; `torch.load` copies the files to the heap."
    )
    head = ["tensors, folder", "MB", "until seen, ms", "fetch, ms", "sync, ms", "save, ms", "load, ms", "ratio"]
    whole, delta = r["sync_network"]["whole"], r["sync_network"]["delta"]
    rest = (
        f"With the bare reload of {ms(r['bare_reload_s'])} ms added to both sides, the ratio of the first row is "
        f"{r['sync_over_torch_save_load_with_reload']:.2f}. With the network transport on loopback, for bfloat16 from "
        f"a store on disk to a staging folder in /dev/shm, a full version takes {ms(whole['sync_s'])} ms (fetch "
        f"{ms(whole['fetch_s'])} ms), and the delta of an optimizer step {ms(delta['sync_s'])} ms (fetch "
        f"{ms(delta['fetch_s'])} ms, {delta['sent_share']:.2%} of the bytes). Deltas save bytes even if they take "
        "longer: they are meant for links that are slower than the encoder."
    )
    return f"{text}\n\n{table(head, rows)}\n\n{rest}"


def _bandwidth(r: Figures) -> str:
    disk, memory = r["sync"]["bfloat16_disk"], r["sync"]["bfloat16_memory"]
    return (
        f"One core copies {r['memcpy_gb_per_s']:.1f} GB/s in memory and checksums {r['checksum_gb_per_s']:.1f} GB/s "
        f"(xxh3-64). A sync in bfloat16 through the folder moves {disk['gb_per_s']:.2f} GB/s on disk and "
        f"{memory['gb_per_s']:.2f} GB/s in /dev/shm: {r['sync_over_memcpy']:.3f} and "
        f"{memory['gb_per_s'] / r['memcpy_gb_per_s']:.3f} of the copy rate. The bytes are copied twice (to host "
        "memory, and into the page cache) and read twice (checksum before writing, verification after), which takes "
        f"{2 / r['memcpy_gb_per_s'] + 2 / r['checksum_gb_per_s']:.2f} s per GB; the rest is the kernel's work for new "
        "pages of a file, which `torch.save` needs too. Loading copies the bytes once more."
    )


def _many(r: Figures) -> str:
    verified, last = r["host_verified"], r["host_last_s"]
    return (
        f"{r['host_num_pullers']} pullers on one machine, one process each, wait for a version of {r['host_mb']:.0f} "
        "MB and fetch it at once. Over the network, the service sent "
        f"{r['host_reads']:.2f} times the bytes of the version (`host_reads`), the pullers verified it "
        f"{verified['network']:.2f} times, and the last finished {last['network']:.2f} s after the call of `publish`. "
        "Through the folder, each puller verified it separately, like its engine "
        f"({verified['folder']:.2f} times in total), and the last finished after {last['folder']:.2f} s.\n\n"
        f"{r['fairness_num_clients']} clients without engines fetch a version of {r['fairness_mb']:.1f} MB from one "
        f"service at once, eight clients per process: slowest over median {r['fairness']:.2f} (worst round "
        f"{r['fairness_worst']:.2f}), median {r['fairness_median_s']:.2f} s, total {r['fairness_gb_per_s']:.2f} GB/s."
    )
