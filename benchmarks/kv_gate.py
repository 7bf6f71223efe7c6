"""Which samples an engine starts, where its cache is small: `KvGate` against fixed numbers. Prints one JSON line last.

    python benchmarks/kv_gate.py [--quick] [--rounds 5] [--page [FILE]]

A real vLLM engine with the long-tailed model of `benchmarks/overlap.py`, whose cache holds a fraction of what its slots
could come to need. It is kept busy as an actor keeps it, by the actor's own parts: groups of 8 are taken as
`ActorsConfig.room` says, samples start as `Slots` lets them, and what is foretold of a prompt comes from the buffer's
`LengthModel`. A fixed number of slots leaves the rest to vLLM, which starts whatever has room at once. In every round
all of them have the engine in turn:

    tokens_over_best_fixed   tokens per second by the gate, over those by the best of the fixed numbers
    preempted_by_gate        preemptions per sample
    preempted_by_best_fixed  the same by the best fixed number

`--quick` is for development: one short round, and its figures mean nothing. `--page` writes docs/results/kv_gate.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.admission import KvSample
from actors.config import ActorsConfig
from actors.engine import Engine
from actors.report import BusyClock
from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, table, write_page
from benchmarks.lib.processes import end_at_sigterm
from benchmarks.overlap_parts import long_tail
from common.serving_model import prepare_serving_model
from common.staleness import PolicyVersion
from planning.kv_gate import CacheAdmission, KvGate
from planning.length_model import LengthModel

PAGE = RESULTS / "kv_gate.md"
FIXED = (20, 28, 36, 44, 64)
SLOTS = 64
CACHE_GIB, BLOCK_TOKENS = 0.0125, 32
"""A token takes 4 KiB: 100 blocks, of which the longest sample takes 8."""
NUM_PROMPTS, GROUP_SIZE = 128, 8
MEASURED_S, LEARNED_S = 12.0, 20.0
"""Of each turn, and before the first, in which lengths are learned."""
AT_LEAST = {"tokens_over_best_fixed": 0.95}
AT_MOST = {"preempted_by_gate": 0.01}
GATE = "gate"
FORMS = {"tokens_per_s": "{:.0f}", "running": "{:.1f}", "preempted": "{:.3f}"}

Figures = dict[str, Any]


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=5, help="in which each has its turn")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    machine = describe_machine()
    num_rounds, seconds = (1, 3.0) if args.quick else (args.rounds, MEASURED_S)
    with tempfile.TemporaryDirectory(prefix="benchmark-kv-gate-") as folder:
        turns, cache = asyncio.run(measured(Path(folder), num_rounds, seconds))
    result = {"quick": args.quick, "rounds": num_rounds, **figures_of(turns), "cache": cache, "machine": machine}
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=not args.quick)
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=not args.quick)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


async def measured(folder: Path, num_rounds: int, seconds: float) -> tuple[dict[str, list[Figures]], Figures]:
    """What was measured in the turns of each, by its name, and what the cache is."""
    long_tail.write_checkpoint(folder / "model")
    config = config_of(SLOTS)
    served = prepare_serving_model(folder / "model", folder / "served")
    engine = await Engine.start(served, config, version=PolicyVersion(0, 0), seed=0)
    try:
        assert engine.cache is not None, "vLLM says how large it is"
        gates = {f"{number}": (config_of(number), KvGate[int](config_of(number), None)) for number in FIXED}
        gates[GATE] = (config, KvGate[int](config, engine.cache))
        actor = BusyActor(engine)
        await actor.keep_busy(*gates[GATE], LEARNED_S if num_rounds > 1 else seconds)
        turns: dict[str, list[Figures]] = {name: [] for name in gates}
        for number, name in itertools.product(range(num_rounds), gates):
            found = await actor.keep_busy(*gates[name], seconds)
            turns[name].append(found)
            print(json.dumps({"round": number + 1, "slots": name, **found}), file=sys.stderr, flush=True)
        return turns, engine.cache._asdict()
    finally:
        await engine.stop()


def config_of(num_slots: int) -> ActorsConfig:
    """Of an actor with so many slots; the engine has those of the gate."""
    return ActorsConfig(
        group_size=GROUP_SIZE,
        max_running_samples=num_slots,
        max_new_tokens=long_tail.MAX_NEW_TOKENS,
        max_prompt_tokens=long_tail.PROMPT_TOKENS,
        kv_cache_gib=CACHE_GIB,
        engine_args={"block_size": BLOCK_TOKENS},
    )


class BusyActor:
    """Has groups generated as an actor does, of prompts in turn, and learns their lengths as the buffer does."""

    def __init__(self, engine: Engine) -> None:
        """Of an engine that does nothing else."""
        self._engine = engine
        self._lengths = LengthModel(NUM_PROMPTS)
        self._prompts = [
            [long_tail.VOCABULARY.index(letter) for letter in question] for question in long_tail.questions(NUM_PROMPTS)
        ]
        self._groups = itertools.count()
        self._seeds = itertools.count()

    async def keep_busy(self, config: ActorsConfig, gate: KvGate[int], seconds: float) -> Figures:
        """For so long, from when all slots were taken; then what runs ends, and counts no more.

        Returns:
            `tokens_per_s`: of completions that ended; `running`: samples, mean; `preempted`: preemptions per sample.
        """
        slots, engine = CacheAdmission(gate, lambda: float(self._engine.num_steps)), self._engine
        open_: dict[int, int] = {}
        ended: list[int] = []
        room_changed = asyncio.Event()
        busy, began_s, before = BusyClock(time.perf_counter), time.perf_counter(), engine.report()
        tasks: set[asyncio.Task[None]] = set()

        async def group(number: int) -> None:
            prompt = number % NUM_PROMPTS
            usual = self._lengths.usual(prompt, 0)
            made = await asyncio.gather(*[sample(number, prompt, usual) for _ in range(GROUP_SIZE)])
            cut = [length >= config.max_new_tokens for length in made]
            self._lengths.see(prompt, made, cut, 0)

        async def sample(number: int, prompt: int, usual: float) -> int:
            key, tokens = next(self._seeds), self._prompts[prompt]
            open_[key] = number
            await slots.admit(key, KvSample(number, len(tokens), config.max_new_tokens, 0, usual))
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
        after, took_s, tokens, running_s = engine.report(), time.perf_counter() - began_s, sum(ended), busy.running_s()
        await asyncio.gather(*tasks)
        return {
            "tokens_per_s": tokens / took_s,
            "running": running_s / took_s,
            "preempted": (after.num_preempted - before.num_preempted) / max(1, after.num_ended - before.num_ended),
            "kv_usage": after.kv_usage,
        }


def figures_of(turns: dict[str, list[Figures]]) -> Figures:
    """Of the turns of all rounds; the best fixed number is that of most tokens over all of them."""
    rates = {name: median(each["tokens_per_s"] for each in found) for name, found in turns.items()}
    best = max((name for name in turns if name != GATE), key=lambda name: rates[name])
    ratios = [
        gate["tokens_per_s"] / fixed["tokens_per_s"] for gate, fixed in zip(turns[GATE], turns[best], strict=True)
    ]
    return {
        "tokens_over_best_fixed": median(ratios),
        "tokens_over_best_fixed_rounds": ratios,
        "preempted_by_gate": fmean(each["preempted"] for each in turns[GATE]),
        "preempted_by_best_fixed": fmean(each["preempted"] for each in turns[best]),
        "best_fixed": best,
        "turns": turns,
    }


def page(result: Figures) -> list[str]:
    """The paragraphs of the page."""
    command, cache = f"python benchmarks/kv_gate.py --rounds {result['rounds']} --page", result["cache"]
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} A real vLLM engine with the model of "
        f"[overlap.md](overlap.md) and a cache of {cache['num_blocks']} blocks of {cache['block_tokens']} tokens; a "
        f"sample takes up to {-(-(long_tail.MAX_NEW_TOKENS + long_tail.PROMPT_TOKENS + 1) // cache['block_tokens'])}. "
        f"{NUM_PROMPTS} prompts in turn, {GROUP_SIZE} samples each. With a fixed number of slots vLLM starts what has "
        f"room at once; with the gate there are {SLOTS} slots. Means of {result['rounds']} rounds of "
        f"{MEASURED_S:g} s each; ratios are medians. The best fixed number is {result['best_fixed']}, found by this "
        "sweep; the gate is not told it."
    )
    cells = [
        [name, *(form.format(fmean(each[key] for each in found)) for key, form in FORMS.items()),
         f"{max(each['kv_usage'] for each in found):.0%}"]
        for name, found in result["turns"].items()
    ]  # fmt: skip
    return [
        "# A cache that is nearly full, and nothing thrown away",
        head,
        bars_table(result["wanted_at_least"], "at least"),
        bars_table(result["wanted_at_most"], "at most"),
        table(["slots", "tokens/s", "running", "preempted per sample", "fullest"], cells),
    ]


if __name__ == "__main__":
    main()
