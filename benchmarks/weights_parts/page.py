"""From raw numbers to figures, and from figures to the page. Ratios are medians of the ratios of rounds."""

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
"""Figure -> at most this is wanted."""


def pause_figures(engines: Sequence[Rounds]) -> Figures:
    """What an update costs an engine.

    Args:
        engines: of each its rounds, as `FollowingEngine.follow` returns them.
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
    """What publishing costs the learner.

    Args:
        steps: as `PublishingLearner.finish` returns them.
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
    """Deltas by learning rate.

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
    """GB/s of one core: as `Copying.rates` returns them."""
    return {
        "memcpy_gb_per_s": statistics.median(rates["copy"]),
        "checksum_gb_per_s": statistics.median(rates["checksum"]),
    }


def sync_figures(places: Mapping[str, Figures], network: Mapping[str, Figures]) -> Figures:
    """Publish to staged, beside torch.save plus torch.load.

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
    """Figures that need more than one measurement; only those for which all is there."""
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
    """How often a version was sent to one machine, and verified there.

    Args:
        num_bytes: of the version's tensors.
        sent_share: bytes sent by the service to all pullers of the network, over those of the version's files.
        pullers: transport -> of each puller `sync` and `verified_bytes`.
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
    """Clients at once.

    Args:
        num_bytes: of the version that each fetched.
        rounds: of each the seconds that every client took from the common start.
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
    """The paragraphs of the page."""
    return [
        "# Weights on their way, measured",
        _head(result),
        bars_table(result["wanted"], "at most"),
        "## The pause of an update",
        _update(result),
        "## The learner's side",
        _learner(result),
        "## Deltas",
        _deltas(result),
        "## Beside torch.save and torch.load",
        _sync(result),
        "## Bytes and time against memory bandwidth",
        _bandwidth(result),
        "## Many at once",
        _many(result),
    ]


def _head(r: Figures) -> str:
    return (
        f"{origin('python benchmarks/weights.py', r['machine'])} "
        "The model is SmolLM2-135M; its head is tied and is published beside the embedding, so a version in bfloat16 "
        f"is {r['delta_full_mb']:.0f} MB. Sides that are compared take turns within one run, and ratios are medians of "
        "the rounds' ratios. Absolute figures depend on the machine and its load; compare within this page only."
    )


def _update(r: Figures) -> str:
    text = (
        f"{r['update_num_actors']} engines ({r['update_num_running']} running requests each, bfloat16, one thread "
        f"each) and a learner (one thread) share the {r['machine']['cores']} cores; the learner publishes every step, "
        'the engines follow it through the weights\' folder as actors do, with `kv_cache = "keep"`. '
        "`pause_over_step` is the pause of an update, from the request to pause until generation went on, over one "
        "engine step plus the *bare reload*: vLLM's own reload of tensors that lie ready in the engine's memory "
        "(`initialize_layerwise_reload`, `load_weights`, `finalize_layerwise_reload`). Both are measured in the same "
        "engine, the bare reload a second after each update and the engine step until the next version comes, while "
        "learner and other engine go on. The pause holds: the rest of the engine step that runs when it is asked for "
        "(half of one on average), loading from the mapped files, vLLM's repacking of the weights, and the "
        "messages between the actor's process and its engine's. It does not hold fetching and verifying, "
        "which are done while requests run."
    )
    rows = [
        ["engine step (median time between tokens)", ms(r["engine_step_s"])],
        ["bare reload", ms(r["bare_reload_s"])],
        ["pause of an update", ms(r["pause_s"])],
        ["of it, loading", ms(r["load_s"])],
        ["pause around a bare reload", ms(r["bare_pause_s"])],
        ["longest time between two tokens, at an update", ms(r["gap_s"])],
        ["the same, at a bare reload", ms(r["bare_gap_s"])],
        ["a version seen until it is served", ms(r["update_s"])],
    ]
    slower = r["staging_step_over_step"]
    rest = (
        f"Over one engine step plus the bare reload: the pause {r['pause_over_step']:.2f} (worst of "
        f"{r['num_updates']} updates {r['pause_over_step_worst']:.2f}), the pause around a bare reload "
        f"{r['bare_pause_over_step']:.2f}, the longest time between two tokens {r['gap_over_step']:.2f}."
    )
    if slower is not None:
        rest += f" While a version is staged and verified an engine step takes {slower:.2f} times as long."
    return f"{text}\n\n{table(['median of the updates', 'ms'], rows)}\n\n{rest}"


def _learner(r: Figures) -> str:
    return (
        f"In the same run: {r['num_learner_steps']} optimizer steps (float32 weights, bf16 autocast, AdamW, one stage) "
        f"on samples of the model's own, each published. A step takes {r['learner_step_s']:.1f} s, the call of "
        f"`Publisher.publish` {ms(r['publish_call_s'])} ms: the copy to host memory, which rounds to bfloat16. "
        f"`publish_stall_frac` is the second over the first, {r['publish_stall_frac']:.4f} (worst step "
        f"{r['publish_stall_frac_worst']:.4f}). A thread of the learner does the rest: the version could be pulled "
        f"{ms(r['publish_committed_s'])} ms after the call began. Where all cores are busy, as here, its time is "
        "taken from learner and engines alike, and is part of the steps above."
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
        "Real optimizer steps as above, learner alone: bytes of the delta over bytes of the whole version in "
        "bfloat16, and the share of values that a step leaves as they are. Every delta was decoded and compared. The "
        "first step of AdamW moves every weight by the learning rate and so changes most. This checkpoint was "
        f"made from four bits: {r['boundary_share']:.1%} of its weights lie exactly between two values of bfloat16 and "
        "may round anew however small a step is. *Spread* begins from the same weights at random places among those "
        "that round to the same value, as training leaves them."
    )
    rest = (
        f"Encoding takes a core {r['delta_full_mb'] / r['delta_encode_mb_per_s']:.2f} s for the whole version "
        f"({r['delta_encode_mb_per_s']:.0f} MB/s of weights), decoding "
        f"{r['delta_full_mb'] / r['delta_decode_mb_per_s']:.2f} s ({r['delta_decode_mb_per_s']:.0f} MB/s)."
    )
    head = ["learning rate", "unchanged, median", "`delta_over_full`, median", "times smaller", "step by step"]
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
        "From `Publisher.publish` called to `Puller.fetch` returned in another process, so verified and staged, "
        "through the folder; beside `torch.save` in the one and `torch.load` in the other, of the same tensors and in "
        "the same folder. Files are new each time and in the page cache afterwards, neither side calls fsync, and the "
        "two take turns. The first five rounds do not count: until removed files give their pages to new ones, a write "
        "meets memory that the machine has never touched, at ten times the cost, on either side. "
        "`sync_over_torch_save_load` is the first row's. Ours writes checksums, reads them back and maps the files; "
        "`torch.load` copies them to the heap."
    )
    head = ["tensors, folder", "MB", "until seen, ms", "fetch, ms", "sync, ms", "save, ms", "load, ms", "ratio"]
    whole, delta = r["sync_network"]["whole"], r["sync_network"]["delta"]
    rest = (
        f"With the bare reload of {ms(r['bare_reload_s'])} ms on both sides the first row's ratio is "
        f"{r['sync_over_torch_save_load_with_reload']:.2f}. Through the network transport on loopback, bfloat16 from a "
        f"store on disk into a staging folder in /dev/shm: {ms(whole['sync_s'])} ms whole (fetch "
        f"{ms(whole['fetch_s'])} ms), {ms(delta['sync_s'])} ms as deltas of an optimizer step (fetch "
        f"{ms(delta['fetch_s'])} ms, {delta['sent_share']:.2%} of the bytes). Where that "
        "takes longer than the whole, it still saves bytes: a delta is for links slower than its encoder."
    )
    return f"{text}\n\n{table(head, rows)}\n\n{rest}"


def _bandwidth(r: Figures) -> str:
    disk, memory = r["sync"]["bfloat16_disk"], r["sync"]["bfloat16_memory"]
    return (
        f"One core copies {r['memcpy_gb_per_s']:.1f} GB/s in memory and checksums {r['checksum_gb_per_s']:.1f} GB/s "
        f"(xxh3-64). A sync in bfloat16 through the folder moves {disk['gb_per_s']:.2f} GB/s on disk and "
        f"{memory['gb_per_s']:.2f} GB/s in /dev/shm: {r['sync_over_memcpy']:.3f} and "
        f"{memory['gb_per_s'] / r['memcpy_gb_per_s']:.3f} of the copy. The bytes are copied twice (to host memory, and "
        "into the page cache) and read twice (checksum before writing, verification after), so "
        f"{2 / r['memcpy_gb_per_s'] + 2 / r['checksum_gb_per_s']:.2f} s per GB would do; what is left is the kernel's "
        "work for new pages of a file, which `torch.save` has as well. Loading copies them once more."
    )


def _many(r: Figures) -> str:
    verified, last = r["host_verified"], r["host_last_s"]
    return (
        f"{r['host_num_pullers']} pullers of one machine, a process each, wait for a version of {r['host_mb']:.0f} MB "
        f"and fetch it at once. Over the network the service sent {r['host_reads']:.2f} times the bytes of the "
        f"version (`host_reads`), the pullers verified it {verified['network']:.2f} times, and the last had it "
        f"{last['network']:.2f} s after `publish` was called. Through the folder each verified it for itself, "
        f"as its engine does ({verified['folder']:.2f} times in all), and the last had done so after "
        f"{last['folder']:.2f} s.\n\n"
        f"{r['fairness_num_clients']} light clients fetch a version of {r['fairness_mb']:.1f} MB from one service at "
        f"once, in processes of eight clients: slowest over median {r['fairness']:.2f} (worst round "
        f"{r['fairness_worst']:.2f}), median {r['fairness_median_s']:.2f} s, {r['fairness_gb_per_s']:.2f} GB/s in all."
    )
