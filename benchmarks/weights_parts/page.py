"""Figures computed from raw measurements, and the results page. Ratios are medians of the rounds' ratios."""

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
"""Name of a figure -> maximum target."""


def pause_figures(engines: Sequence[Rounds]) -> Figures:
    """Return the figures on the cost of an update for an engine.

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
    """Return the figures on the cost of publishing for the learner.

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
    """Return figures that compare the time from publish to staged with torch.save plus torch.load.

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
    """Return the figures that combine several measurements, if all of these measurements are present."""
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
    """Return how often a version was sent to one machine, and verified on this machine.

    Args:
        num_bytes: bytes of the version's tensors.
        sent_share: bytes sent by the service to all network pullers, over the bytes of the version's files.
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
        "The model is SmolLM2-135M. Its head is tied, but is published in addition to the embedding, so a version in "
        f"bfloat16 has {r['delta_full_mb']:.0f} MB. The compared sides take turns within one run; ratios are medians "
        "of the rounds' ratios. Absolute figures depend on the machine and its load, so compare only figures of this "
        "page."
    )


def _update(r: Figures) -> str:
    text = (
        f"{r['update_num_actors']} engines and a learner share the {r['machine']['cores']} cores, with one thread "
        f"each. Each engine has {r['update_num_running']} running requests in bfloat16. The learner publishes every "
        'step, and the engines read the weights from the folder like actors, with `kv_cache = "keep"`. '
        "`pause_over_step` is the pause of an update over one engine step plus the *bare reload*. The pause lasts from "
        "the request to pause until generation resumes. The bare reload is vLLM's reload of tensors that are already "
        "in the engine's memory (`initialize_layerwise_reload`, `load_weights`, `finalize_layerwise_reload`). The bare "
        "reload is measured a second after each update, and the engine step until the next version arrives, while the "
        "learner and the second engine continue. The pause includes the rest of the engine step that is running at the "
        "request (half of a step on average), loading from the mapped files, vLLM's repacking of the weights, and the "
        "messages between the processes of actor and engine. The pause does not include fetching and verification, "
        "which run during generation."
    )
    rows = [
        ["engine step (median time between tokens)", ms(r["engine_step_s"])],
        ["bare reload", ms(r["bare_reload_s"])],
        ["pause of an update", ms(r["pause_s"])],
        ["loading, which is part of the pause", ms(r["load_s"])],
        ["pause around a bare reload", ms(r["bare_pause_s"])],
        ["longest time between two tokens during an update", ms(r["gap_s"])],
        ["longest time between two tokens during a bare reload", ms(r["bare_gap_s"])],
        ["from detecting a version to serving it", ms(r["update_s"])],
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
        "on samples of the model itself. The learner publishes after each step. A step takes "
        f"{r['learner_step_s']:.1f} s. The call of `Publisher.publish` takes {ms(r['publish_call_s'])} ms, in which "
        "the weights are copied to host memory and rounded to "
        "bfloat16. "
        f"`publish_stall_frac`, the time of the call over the time of the step, is {r['publish_stall_frac']:.4f} "
        f"(worst step {r['publish_stall_frac_worst']:.4f}). A thread of the learner writes the version, which is "
        f"available {ms(r['publish_committed_s'])} ms after the start of the call. All cores are busy in this run, so "
        "the thread takes time from learner and engines, and the step times above include this time."
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
        "The learner takes real optimizer steps without engines. The table has the bytes of the delta over the bytes "
        "of the full version in bfloat16, and the fraction of values that a step does not change. Every delta was "
        "decoded and compared. The first step of AdamW moves every weight by the learning rate and therefore changes "
        f"most values. This checkpoint was made from four-bit weights: {r['boundary_share']:.1%} of its weights are "
        "exactly halfway between two values of bfloat16, so even a tiny step may round them differently. *Spread* "
        "starts from weights that are moved to random values with the same bfloat16 rounding, like weights after "
        "training."
    )
    rest = (
        f"On one core, encoding takes {r['delta_full_mb'] / r['delta_encode_mb_per_s']:.2f} s for the full version "
        f"({r['delta_encode_mb_per_s']:.0f} MB/s of weights), and decoding takes "
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
        "A sync lasts from the call of `Publisher.publish` to the return of `Puller.fetch` in another process, when "
        "the version is verified and staged. The first table measures the folder transport. A sync is compared with "
        "`torch.save` in the first process and `torch.load` in the second process, for the same tensors and the same "
        "folder. Files are new each time and are in the page cache afterwards. Neither side calls fsync, and the sides "
        "take turns. The first five rounds do not count. In these rounds, writes on both sides use memory that the "
        "machine has never touched, at ten times the cost, until pages of removed files are reused. "
        "`sync_over_torch_save_load` is the ratio of the first row. Leeway writes checksums, verifies them and maps "
        "the files; `torch.load` copies the files to the heap."
    )
    head = ["tensors, folder", "MB", "until seen, ms", "fetch, ms", "sync, ms", "save, ms", "load, ms", "ratio"]
    whole, delta = r["sync_network"]["whole"], r["sync_network"]["delta"]
    rest = (
        f"With the bare reload of {ms(r['bare_reload_s'])} ms added to both sides, the ratio of the first row is "
        f"{r['sync_over_torch_save_load_with_reload']:.2f}. The network transport on loopback transfers bfloat16 from "
        f"a store on disk to a staging folder in /dev/shm. A full version takes {ms(whole['sync_s'])} ms (fetch "
        f"{ms(whole['fetch_s'])} ms). The delta of an optimizer step takes {ms(delta['sync_s'])} ms (fetch "
        f"{ms(delta['fetch_s'])} ms, {delta['sent_share']:.2%} of the bytes). Deltas save bytes but may take longer: "
        "deltas are meant for links that are slower than the encoder."
    )
    return f"{text}\n\n{table(head, rows)}\n\n{rest}"


def _bandwidth(r: Figures) -> str:
    disk, memory = r["sync"]["bfloat16_disk"], r["sync"]["bfloat16_memory"]
    return (
        f"One core copies {r['memcpy_gb_per_s']:.1f} GB/s in memory and checksums {r['checksum_gb_per_s']:.1f} GB/s "
        f"(xxh3-64). A sync in bfloat16 through the folder moves {disk['gb_per_s']:.2f} GB/s on disk and "
        f"{memory['gb_per_s']:.2f} GB/s in /dev/shm, which are {r['sync_over_memcpy']:.3f} and "
        f"{memory['gb_per_s'] / r['memcpy_gb_per_s']:.3f} of the copy rate. A sync copies the bytes twice (to host "
        "memory, and into the page cache) and reads them twice (checksum before writing, verification after writing). "
        f"This takes {2 / r['memcpy_gb_per_s'] + 2 / r['checksum_gb_per_s']:.2f} s per GB. The remaining time is the "
        "work of the kernel for new pages of a file, which `torch.save` needs too. Loading copies the bytes once more."
    )


def _many(r: Figures) -> str:
    verified, last = r["host_verified"], r["host_last_s"]
    return (
        f"{r['host_num_pullers']} pullers on one machine, one process each, wait for a version of {r['host_mb']:.0f} "
        "MB and fetch it at the same time. Over the network, the service sent "
        f"{r['host_reads']:.2f} times the bytes of the version (`host_reads`), and the pullers verified the version "
        f"{verified['network']:.2f} times. The last puller finished {last['network']:.2f} s after the call of "
        "`publish`. "
        "Through the folder, each puller verified the version separately, like its engine "
        f"({verified['folder']:.2f} times in total), and the last puller finished after {last['folder']:.2f} s.\n\n"
        f"{r['fairness_num_clients']} clients without engines fetch a version of {r['fairness_mb']:.1f} MB from one "
        "service at the same time, with eight clients per process. The slowest time over the median is "
        f"{r['fairness']:.2f} (worst round {r['fairness_worst']:.2f}), the median time {r['fairness_median_s']:.2f} s, "
        f"and the total rate {r['fairness_gb_per_s']:.2f} GB/s."
    )
