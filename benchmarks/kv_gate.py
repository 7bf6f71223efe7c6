"""Compare `actors.admission = "cache"` with "slots" on an engine with a small KV cache. Prints one JSON line last.

    python benchmarks/kv_gate.py [--quick] [--rounds 5] [--page [FILE]]

A real vLLM engine runs the long-tailed model of `benchmarks/overlap.py` with a KV cache that cannot hold the samples of
all slots. Parts of a real actor keep the engine busy. Groups of 8 samples are leased according to `ActorsConfig.room`,
samples start when the admission permits, and lengths are predicted by `leeway.planning.lengths`. With "slots", vLLM
starts every sample that fits at the moment, and preempts samples when the cache is full. In each round, each admission
uses the engine once. There are two cases: prompts of 8 tokens, which are cheap to recompute, and prompts of 2,000
tokens, each used by one group only. Names of figures end in the case, `_short` or `_long`:

    cache_over_slots         tokens per second with "cache", over those of "slots" with the default number of slots
    cache_over_best          tokens per second with "cache", over those of "slots" with the best number of slots
    preempted_by_cache       preemptions per sample with "cache"

`--quick` is for development: it runs one short round, whose figures are meaningless. `--page` writes
docs/results/kv_gate.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, table, write_page
from benchmarks.lib.processes import end_at_sigterm
from benchmarks.overlap_parts import long_tail

from leeway.actors.config import ActorsConfig, KvSample
from leeway.actors.engine import Engine
from leeway.actors.report import BusyClock
from leeway.common.serving_model import prepare_serving_model
from leeway.common.staleness import PolicyVersion
from leeway.planning.kv_gate import CacheAdmission, KvGate
from leeway.planning.lengths import LengthModel

PAGE = RESULTS / "kv_gate.md"
FIXED = (20, 28, 36, 44, 64)
SLOTS = 64
BLOCK_TOKENS = 32
"""Number of tokens per cache block; a token takes 4 KiB."""
NUM_PROMPTS, GROUP_SIZE = 128, 8
LEARNED_S = 20.0
"""Seconds before the first turn, during which the actor learns lengths."""
AT_LEAST = {"cache_over_slots_short": 1.0, "cache_over_slots_long": 1.0}
AT_MOST = {"preempted_by_cache_short": 0.01, "preempted_by_cache_long": 0.01}
CACHE, DEFAULT_SLOTS = "cache", f"slots {SLOTS}"
FORMS = {"tokens_per_s": "{:.0f}", "running": "{:.1f}", "preempted": "{:.3f}"}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Prompt length in tokens, cache size, and seconds per turn of a measurement."""

    prompt_tokens: int
    cache_gib: float
    turn_s: float

    @property
    def max_tokens(self) -> int:
        return self.prompt_tokens + long_tail.MAX_NEW_TOKENS + 8

    def config(self, num_slots: int) -> ActorsConfig:
        return ActorsConfig(
            group_size=GROUP_SIZE,
            max_running_samples=num_slots,
            max_new_tokens=long_tail.MAX_NEW_TOKENS,
            max_prompt_tokens=self.prompt_tokens,
            kv_cache_gib=self.cache_gib,
            engine_args={"block_size": BLOCK_TOKENS},
        )

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of a group's prompt: digits unique to the group, and a letter that sets the lengths."""
        letter = long_tail.VOCABULARY.index(long_tail.questions(NUM_PROMPTS)[number % NUM_PROMPTS][-1])
        chance = random.Random(number)
        return [
            *(long_tail.VOCABULARY.index(chance.choice(long_tail.DIGITS)) for _ in range(self.prompt_tokens - 1)),
            letter,
        ]


CASES = {"short": Case(long_tail.PROMPT_TOKENS, 0.0125, 12.0), "long": Case(2000, 0.05, 24.0)}
"""Cases by name. The longest sample takes 8 of 102 blocks in `short`, and 70 of 409 in `long`, where 62 are shared."""


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds, each with one turn per admission")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    machine = describe_machine()
    num_rounds = 1 if args.quick else args.rounds
    result: Figures = {"quick": args.quick, "rounds": num_rounds, "machine": machine, "cases": {}}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory(prefix="benchmark-kv-gate-") as folder:
            turns, cache = asyncio.run(measured(Path(folder), case, num_rounds, 3.0 if args.quick else case.turn_s))
        result["cases"][name] = {"cache": cache, "turns": turns}
        result |= {f"{key}_{name}": value for key, value in figures_of(turns).items()}
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=not args.quick)
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=not args.quick)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


async def measured(
    folder: Path, case: Case, num_rounds: int, seconds: float
) -> tuple[dict[str, list[Figures]], Figures]:
    """Return the figures of each turn by the name of the admission, and the size of the cache."""
    long_tail.write_checkpoint(folder / "model", case.max_tokens)
    served = prepare_serving_model(folder / "model", folder / "served")
    engine = await Engine.start(served, case.config(SLOTS), version=PolicyVersion(0, 0), seed=0)
    try:
        assert engine.stats.cache is not None, "vLLM reports the size of its cache"
        gates = {f"slots {number}": (case.config(number), KvGate[int](case.config(number), None)) for number in FIXED}
        gates[CACHE] = (case.config(SLOTS), KvGate[int](case.config(SLOTS), engine.stats.cache))
        actor = BusyActor(engine, case)
        await actor.keep_busy(*gates[CACHE], LEARNED_S if num_rounds > 1 else seconds)
        turns: dict[str, list[Figures]] = {name: [] for name in gates}
        for number, name in itertools.product(range(num_rounds), gates):
            found = await actor.keep_busy(*gates[name], seconds)
            turns[name].append(found)
            print(json.dumps({"round": number + 1, "admission": name, **found}), file=sys.stderr, flush=True)
        return turns, engine.stats.cache._asdict()
    finally:
        await engine.stop()


class BusyActor:
    """Actor that generates groups of successive prompts, and learns the lengths of their samples like the buffer."""

    def __init__(self, engine: Engine, case: Case) -> None:
        """Initialize the actor; no other actor may use the engine."""
        self._engine = engine
        self._case = case
        self._lengths = LengthModel(NUM_PROMPTS)
        self._groups = itertools.count()
        self._seeds = itertools.count()

    async def keep_busy(self, config: ActorsConfig, gate: KvGate[int], seconds: float) -> Figures:
        """Keep the engine busy for `seconds`; samples that end later are finished and not counted.

        Returns:
            `tokens_per_s` is the number of tokens of ended completions per second. `running` is the mean number of
            running samples. `preempted` is the number of preemptions per sample. `kv_usage` is the used fraction of the
            cache, as reported by vLLM.
        """
        slots, engine = CacheAdmission(gate, lambda: float(self._engine.stats.num_steps)), self._engine
        open_: dict[int, int] = {}
        ended: list[int] = []
        room_changed = asyncio.Event()
        busy, began_s, before = BusyClock(time.perf_counter), time.perf_counter(), engine.stats.report()
        tasks: set[asyncio.Task[None]] = set()

        async def group(number: int) -> None:
            prompt, tokens = number % NUM_PROMPTS, self._case.prompt(number)
            predicted = self._lengths.predicted_length(prompt, 0)
            made = await asyncio.gather(*[sample(number, tokens, predicted) for _ in range(GROUP_SIZE)])
            cut = [length >= config.max_new_tokens for length in made]
            self._lengths.update(prompt, made, cut, 0)

        async def sample(number: int, tokens: list[int], predicted: float) -> int:
            key = next(self._seeds)
            open_[key] = number
            await slots.admit(key, KvSample(number, len(tokens), config.max_new_tokens, 0, predicted))
            busy.enter()
            made = len((await engine.generate(tokens, seed=key)).token_ids)
            busy.leave()
            slots.end(key, made, is_cut=made >= config.max_new_tokens)
            del open_[key]
            ended.append(made)
            room_changed.set()
            return made

        while time.perf_counter() - began_s < seconds:
            room_changed.clear()
            for _ in range(config.room(len(open_), len(open_), 0.0, slots.at_once())):
                tasks.add(task := asyncio.create_task(group(next(self._groups))))
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(0)
            await room_changed.wait()
        after, took_s, tokens, running_s = (
            engine.stats.report(),
            time.perf_counter() - began_s,
            sum(ended),
            busy.running_s(),
        )
        await asyncio.gather(*tasks)
        return {
            "tokens_per_s": tokens / took_s,
            "running": running_s / took_s,
            "preempted": (after.num_preempted - before.num_preempted) / max(1, after.num_ended - before.num_ended),
            "kv_usage": after.kv_usage,
        }


def figures_of(turns: dict[str, list[Figures]]) -> Figures:
    """Return the ratios of a case; the best number of slots is the one with the highest median of tokens per second."""
    rates = {name: median(each["tokens_per_s"] for each in found) for name, found in turns.items()}
    best = max((name for name in turns if name != CACHE), key=lambda name: rates[name])

    def over(other: str) -> float:
        pairs = zip(turns[CACHE], turns[other], strict=True)
        return float(median(cache["tokens_per_s"] / fixed["tokens_per_s"] for cache, fixed in pairs))

    return {
        "cache_over_slots": over(DEFAULT_SLOTS),
        "cache_over_best": over(best),
        "preempted_by_cache": fmean(each["preempted"] for each in turns[CACHE]),
        "best": best,
    }


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    command = f"python benchmarks/kv_gate.py --rounds {result['rounds']} --page"
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} A real vLLM engine runs the model of "
        f"[overlap.md](overlap.md) on {NUM_PROMPTS} prompts in turn, with {GROUP_SIZE} samples each. With "
        '`actors.admission = "slots"`, vLLM starts every sample that fits at the moment, and preempts a sample if the '
        f'cache is full. With "cache" there are {SLOTS} slots, and a sample starts if the cache is likely to hold the '
        f"sample to its end. Figures are means of {result['rounds']} rounds; ratios are medians over rounds."
    )
    parts = ["# Admission by slots and by cache space", head]
    parts += [bars_table(result["wanted_at_least"], "at least"), bars_table(result["wanted_at_most"], "at most")]
    for name, case in CASES.items():
        found = result["cases"][name]
        longest = -(-case.max_tokens // found["cache"]["block_tokens"])
        parts.append(
            f"## Prompts of {case.prompt_tokens:,} tokens\n\nA cache of {found['cache']['num_blocks']} blocks of "
            f"{found['cache']['block_tokens']} tokens; a sample takes up to {longest} blocks. A turn takes "
            f'{case.turn_s:g} s. In tokens per second, admission by "cache" generates '
            f"{result[f'cache_over_slots_{name}']:.3f} of the rate of {SLOTS} slots, and "
            f"{result[f'cache_over_best_{name}']:.3f} of the rate of the best setting in this sweep, "
            f"{result[f'best_{name}']}."
        )
        cells = [
            [each, *(form.format(fmean(turn[key] for turn in turns)) for key, form in FORMS.items()),
             f"{max(turn['kv_usage'] for turn in turns):.0%}"]
            for each, turns in found["turns"].items()
        ]  # fmt: skip
        parts.append(table(["admission", "tokens/s", "running", "preempted per sample", "maximum cache use"], cells))
    return parts


if __name__ == "__main__":
    main()
