"""Simulate runs on 16 to 1,024 GPUs and on mixed kinds of GPUs from data sheets. Prints one JSON line last.

    python benchmarks/scale.py [--quick] [--page [FILE]]

Nothing is measured on a GPU: the costs of engines and learners are derived from data sheets and from the assumptions
that `scale_parts/sheets.py` states. For each number of GPUs and each maximum lag, the plans with the best bounds are
simulated. A plan sets the number of training GPUs, the shape of the learner, and the samples that each engine runs.

    one_kind_over_mixed_price   simulated price per training sample with the best plan of one kind of GPU, over the
                                price with the best plan of two kinds, which cost 2.85 to 1; minimum over two models

`--quick` is for development; its figures are meaningless. `--page` writes docs/results/scale.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.lengths import lognormal
from benchmarks.lib.machine import RESULTS, ROOT, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, share, table, write_page
from benchmarks.scale_parts.sheets import (
    COMPUTES,
    H20,
    H800,
    LARGE,
    READS,
    SMALL,
    TRAINS,
    Gpu,
    Model,
    engine_law,
    kv_tokens,
    learner_law,
    other_costs,
    shapes,
)

from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.launch.config import load_config
from leeway.launch.pools import actor_pools
from leeway.planning.costs import LearnerShape
from leeway.planning.plans import Prediction, predict
from leeway.planning.search import Plan, Space, bounds_of, search
from leeway.planning.world import EnginePool, World

PAGE = RESULTS / "scale.md"
GROUPS, K, PROMPT_TOKENS, LONGEST = 128, 16, 512, 16_384
LENGTHS = lognormal(2000, 0.9, LONGEST, 0.65)
SLOTS = (8, 16, 24, 32, 48, 64, 96)
SIZES, LAGS = (16, 32, 64, 128, 256, 512, 1024), (1, 4, 16)
OF_LARGE = 64
"""Minimum number of GPUs with which the learner and the engines of the large model are simulated."""
MOST_OF_A_KIND, PRICED_LAG = 128, 8
NUM_CLOSER, STEPS = 4, 50
"""Number of simulated plans, which have the best bounds, and number of steps with each of three seeds."""
AT_LEAST = {"one_kind_over_mixed_price": 1.23}
CONFIG = load_config(
    ROOT / "examples" / "demo.toml",
    [*("--actors.group_size", str(K), "--actors.max_new_tokens", str(LONGEST), "--learner.token_budget", "20480"),
     *("--actors.max_prompt_tokens", str(PROMPT_TOKENS))],
)  # fmt: skip

Figures = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """A plan for a cluster: engines of each kind of GPU, and a learner."""

    model: Model
    engines: tuple[tuple[Gpu, int], ...]
    slots: int
    trainer: Gpu
    shape: LearnerShape
    max_lag: int

    @property
    def num_ranks(self) -> int:
        """Number of GPUs used for training."""
        return self.shape.num_stages * self.shape.num_replicas

    @property
    def price(self) -> float:
        """Relative price of all GPUs per hour."""
        generate = sum(count * self.model.tensor_parallel * gpu.price for gpu, count in self.engines)
        return generate + self.num_ranks * self.trainer.price

    @property
    def world(self) -> World:
        """Description of the plan for bounds and simulation."""
        law, shape = learner_law(self.model, self.trainer), self.shape
        return World(
            tuple(_pool(self.model, gpu, count, self.slots) for gpu, count in self.engines if count),
            StalenessContract(StalenessConfig(max_lag=self.max_lag), GROUPS),
            CONFIG.buffer,
            LENGTHS,
            lambda tokens: law.seconds(tokens, PROMPT_TOKENS, K, shape),
            prompt_tokens=PROMPT_TOKENS,
            costs=other_costs(self.model),
            learner_price=self.num_ranks * self.trainer.price,
        )

    @property
    def rate(self) -> float:
        """Samples per second that the bounds allow."""
        return bounds_of(self.world, _step_s(self.model, self.trainer, self.shape)).rate


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="simulate only two sizes, for development")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    if args.page and args.quick:
        parser.error("--page needs all sizes: omit --quick or --page")
    machine = describe_machine()
    rows = []
    for model, sizes in ((SMALL, SIZES), (LARGE, [size for size in SIZES if size >= OF_LARGE])):
        for size in sizes[:2] if args.quick else sizes:
            for max_lag in LAGS[:2] if args.quick else LAGS:
                rows.append(at_size(model, size, max_lag))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    priced = []
    for model in (SMALL, LARGE):
        priced.append(by_price(model))
        print(json.dumps(priced[-1]), file=sys.stderr, flush=True)
    result: Figures = {
        "quick": args.quick,
        "one_kind_over_mixed_price": min(each["one_kind_over_mixed_price"] for each in priced),
        "sizes": rows,
        "priced": priced,
        "machine": machine,
    }
    result["wanted"] = judged(result, AT_LEAST, "at least", at_full_size=not args.quick)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def at_size(model: Model, size: int, max_lag: int) -> Figures:
    """Return the simulated figures of the best plan for `size` H800 GPUs."""
    plans = [
        Cluster(model, ((H800, (size - ranks) // model.tensor_parallel),), slots, H800, shape, max_lag)
        for shape in shapes(model, H800, size - model.tensor_parallel)
        for ranks in [shape.num_stages * shape.num_replicas]
        for slots in SLOTS
    ]
    closer = sorted(plans, key=lambda plan: plan.rate, reverse=True)[:NUM_CLOSER]
    found, best = max(((_simulated(plan), plan) for plan in closer), key=lambda each: each[0].samples_per_s)
    bounds = bounds_of(best.world, _step_s(model, H800, best.shape))
    return {
        "model": model.name,
        "gpus": size,
        "max_lag": max_lag,
        "plan": _text(best),
        **_figures(found),
        "generation": bounds.generation,
        "training": bounds.training,
        "staleness": bounds.staleness,
    }


def by_price(model: Model) -> Figures:
    """Return the cheapest plan per sample with both kinds of GPU, and with only one kind."""
    found = {}
    for name, kinds in (("H800 alone", [H800]), ("H20 alone", [H20]), ("both", [H800, H20])):
        candidates = [(_simulated(plan), plan) for plan in _cheapest(model, kinds)]
        found[name] = min(candidates, key=lambda each: each[0].price_per_1000 or float("inf"))
    row: Figures = {"model": model.name}
    for name, (prediction, plan) in found.items():
        row[name] = {"plan": _text(plan), "price_per_1000": prediction.price_per_1000, **_figures(prediction)}
    alone = min(row["H800 alone"]["price_per_1000"], row["H20 alone"]["price_per_1000"])
    return row | {"one_kind_over_mixed_price": alone / row["both"]["price_per_1000"]}


def _cheapest(model: Model, kinds: Sequence[Gpu]) -> list[Cluster]:
    """Return the plans with the lowest price per sample by bounds, with at most MOST_OF_A_KIND GPUs of each kind."""
    most = MOST_OF_A_KIND // model.tensor_parallel
    counts = sorted({count for count in (*range(0, 17, 2), *range(20, 65, 4), *range(72, 129, 8)) if count <= most})
    learners = [(gpu, shape) for gpu in kinds for shape in shapes(model, gpu, MOST_OF_A_KIND)]
    space = Space({**{gpu.name: counts for gpu in kinds}, "slots": SLOTS, "learner": learners})

    def cluster(plan: Plan) -> Cluster:
        *each, slots, learner = plan
        engines = tuple((gpu, counts[place]) for gpu, place in zip(kinds, each, strict=True))
        return Cluster(model, engines, SLOTS[slots], *learners[learner], PRICED_LAG)

    def score(plan: Plan) -> float:
        found = cluster(plan)
        taken = {gpu: count * model.tensor_parallel for gpu, count in found.engines}
        taken[found.trainer] = taken.get(found.trainer, 0) + found.num_ranks
        if max(taken.values()) > MOST_OF_A_KIND or not any(count for _, count in found.engines):
            return float("-inf")
        return found.rate / found.price

    return [cluster(plan) for plan, _ in search(space, score, (0,) * len(space.dimensions), NUM_CLOSER)]


def _simulated(plan: Cluster) -> Prediction:
    return predict(plan.world, samples=3 * STEPS * GROUPS * K)


@lru_cache(maxsize=4096)
def _pool(model: Model, gpu: Gpu, count: int, slots: int) -> EnginePool:
    config = actor_pools(CONFIG)[0].config.model_copy(update={"max_running_samples": slots})
    price = gpu.price * model.tensor_parallel
    return EnginePool(gpu.name, count, engine_law(model, gpu), config, kv_tokens(model, gpu), price)


@lru_cache(maxsize=4096)
def _step_s(model: Model, gpu: Gpu, shape: LearnerShape) -> float:
    """Return the seconds of a learner step on samples whose lengths are quantiles of the length distribution."""
    num = GROUPS * K
    scores = [NormalDist().inv_cdf((place + 0.5) / num) for place in range(num)]
    lengths = [PROMPT_TOKENS + int(each) for each in replace(LENGTHS, explained=0.0).lengths(0.0, scores)]
    return learner_law(model, gpu).seconds(lengths, PROMPT_TOKENS, K, shape)


def _text(plan: Cluster) -> str:
    engines = " + ".join(f"{count} x {gpu.name}" for gpu, count in plan.engines if count)
    shape = plan.shape
    return f"{engines}, {plan.slots} slots; {shape.num_stages} stages x {shape.num_replicas} on {plan.trainer.name}"


def _figures(found: Prediction) -> Figures:
    return {
        "samples_per_s": found.samples_per_s,
        "low": found.low,
        "high": found.high,
        "binds": found.binds,
        "learner_busy": found.learner_busy,
        "slots_used": found.slots_used,
        "lag_mean": found.lag_mean,
        "drop_share": found.drop_share,
    }


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    head = (
        f"{origin('python benchmarks/scale.py --page', result['machine'], result['machine']['commit'])} **Nothing on "
        "this page was measured on a GPU**. The inputs of the simulator are data sheets and assumptions, all in "
        "[benchmarks/scale_parts/sheets.py](../../benchmarks/scale_parts/sheets.py). Engines reach "
        f"{READS:.0%} of the sheet's bandwidth and {COMPUTES:.0%} of its FLOP/s; a learner reaches {TRAINS:.0%} of "
        "the FLOP/s. The accuracy of the simulator is measured in [fleet.md](fleet.md). A step has "
        f"{GROUPS} prompts with {K} samples each, at every size; completions have {LENGTHS.mean:,.0f} tokens on "
        f"average and {LONGEST:,} at most, and the prompt explains 65 % of the variance of their logarithm."
    )
    rows = [
        [row["model"], f"{row['gpus']:,}", f"{row['max_lag']}", row["plan"],
         f"{row['samples_per_s']:.1f} ({row['low']:.1f} to {row['high']:.1f})",
         f"{row['samples_per_s'] / row['gpus']:.3f}", row["binds"], share(row["learner_busy"]),
         share(row["slots_used"]), f"{row['lag_mean']:.1f}", f"{row['drop_share']:.1%}"]
        for row in result["sizes"]
    ]  # fmt: skip
    bounds = [
        [row["model"], f"{row['gpus']:,}", f"{row['max_lag']}",
         *(f"{row[name]:,.1f}" for name in ("generation", "training", "staleness"))]
        for row in result["sizes"]
    ]  # fmt: skip
    priced = [
        [row["model"], name, row[name]["plan"], f"{row[name]['samples_per_s']:.1f}", row[name]["binds"],
         f"{row[name]['price_per_1000']:.3f}"]
        for row in result["priced"]
        for name in ("H800 alone", "H20 alone", "both")
    ]  # fmt: skip
    return [
        "# Simulated scale from data sheets",
        head,
        "## Bottlenecks",
        f"For each number of H800 GPUs, the {NUM_CLOSER} plans with the best bounds were simulated for {STEPS} steps "
        "with each of three seeds. The table shows the best simulated plan.",
        table(["model", "GPUs", "max_lag", "plan", "samples/s", "per GPU", "bottleneck", "learner busy", "slots used",
               "lag", "dropped"], rows),
        "Samples per second that each part would allow if all other parts took no time:",
        table(["model", "GPUs", "max_lag", "generation", "training", "staleness"], bounds),
        "## Mixed GPUs by price",
        f"The table has the cheapest plans of up to {MOST_OF_A_KIND} GPUs of each kind at `max_lag = {PRICED_LAG}`, by "
        "the price of a thousand trained samples. An hour of an H20 costs 1.",
        bars_table(result["wanted"], "at least"),
        table(["model", "GPUs", "plan", "samples/s", "bottleneck", "per 1,000"], priced),
        "## Not modelled",
        "Networks are not shared or congested: every host pulls weights at the full rate of its link, and a constant "
        "covers hops between stages and sums over replicas. Samples are not preempted: the simulated engine starts "
        "only samples that its cache can hold, but a real engine may preempt samples. There are no failures, "
        "stragglers, throttling hosts, or bursts of slow rewards. The efficiency of the kernels of a given version is "
        "not known. The effect of the lag on learning is measured in [stability.md](stability.md) and "
        "[accuracy_over_lag.md](accuracy_over_lag.md).",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
