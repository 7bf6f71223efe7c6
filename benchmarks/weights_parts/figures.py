"""From raw numbers to figures. Ratios are medians of the ratios of rounds, in which the sides took turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Figures = dict[str, Any]
Rounds = Sequence[Mapping[str, Any]]


def pause_figures(engines: Sequence[Rounds]) -> Figures:
    """What an update costs an engine.

    Args:
        engines: of each its rounds, as `engine_role.Role.follow` returns them.
    """
    rounds = [each for engine in engines for each in engine]
    floors = [each["step"] + each["bare"] for each in rounds]
    staging = [gap for each in rounds for gap in each["staging_steps"]]
    step_s = _median(rounds, "step")
    return {
        "pause_over_step": statistics.median(each["pause"] / floor for each, floor in zip(rounds, floors, strict=True)),
        "pause_over_step_worst": max(each["pause"] / floor for each, floor in zip(rounds, floors, strict=True)),
        "bare_pause_over_step": statistics.median(
            each["bare_pause"] / floor for each, floor in zip(rounds, floors, strict=True)
        ),
        "gap_over_step": statistics.median(each["gap"] / floor for each, floor in zip(rounds, floors, strict=True)),
        "num_updates": len(rounds),
        "pause_s": _median(rounds, "pause"),
        "load_s": _median(rounds, "load"),
        "bare_reload_s": _median(rounds, "bare"),
        "bare_pause_s": _median(rounds, "bare_pause"),
        "engine_step_s": step_s,
        "gap_s": _median(rounds, "gap"),
        "bare_gap_s": _median(rounds, "bare_gap"),
        "update_s": _median(rounds, "update"),
        "staging_step_over_step": statistics.median(staging) / step_s if staging else None,
    }


def learner_figures(steps: Rounds) -> Figures:
    """What publishing costs the learner.

    Args:
        steps: as `learner_role.Role.finish` returns them.
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
        rates: name of the learning rate -> its steps, as `delta_role.Role.steps` returns them.
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
    """GB/s of one core: as `copying_role.Role.rates` returns them."""
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
        rounds = each["rounds"]
        found["sync"][name] = {
            "over_torch": statistics.median(one["sync"] / (one["save"] + one["load"]) for one in rounds),
            "mb": each["num_bytes"] / 1e6,
            "sync_s": _median(rounds, "sync"),
            "call_s": _median(rounds, "call"),
            "until_seen_s": _median(rounds, "until_seen"),
            "fetch_s": _median(rounds, "fetch"),
            "save_s": _median(rounds, "save"),
            "load_s": _median(rounds, "load"),
            "gb_per_s": each["num_bytes"] / _median(rounds, "sync") / 1e9,
        }
    for name, each in network.items():
        rounds = each["rounds"]
        found["sync_network"][name] = {
            "sync_s": _median(rounds, "sync"),
            "fetch_s": _median(rounds, "fetch"),
            "sent_share": _median(rounds, "sent_bytes") / each["num_bytes"],
            "gb_per_s": each["num_bytes"] / _median(rounds, "sync") / 1e9,
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
    return float(statistics.median(each[above] / each[below] for each in rounds))
