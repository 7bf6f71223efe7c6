"""Generate docs/results/gpu.md from the results of the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.fast import MFU_TARGET
from benchmarks.gpu.steps import PARTS, STEPS, Result
from benchmarks.lib.machine import RESULTS
from benchmarks.lib.page import MET, table

PAGE = RESULTS / "gpu.md"
HEADS = {
    "right": "Correctness",
    "fast": "Speed of the learner",
    "mends": "Optimizations against their alternatives",
    "engine": "Engine: rate and weight updates",
    "demo": "Demo",
    "pair": "Asynchronous against synchronous training",
    "gaps": "Time of a step outside its micro-batches",
}
_NOT_FIGURES = frozenset({"step", "case", "cpu", "commit", "card", "versions"})
_LONGEST_CELL = 120
NAMED = ("torch", "transformers", "triton", "vllm", "ray")
"""Packages whose versions are in the first paragraph of the page."""


def page_of(results: Sequence[Result]) -> list[str]:
    """Return the paragraphs of the page, which show only the last run of each step."""
    runs = _last_runs(results)
    failed = [f"`{step}`: {each['failed']}" for step, run in runs.items() for each in run if "failed" in each]
    parts = ["# Measured on one GPU", _head(runs), _bars(runs), *_by_commit(results)]
    if failed:
        parts.append(f"**Failed**: {'; '.join(failed)}.")
    for part in PARTS:
        if any(step.name in runs for step in STEPS if step.part == part):
            parts.append(f"## {HEADS[part]}")
        for step in (step for step in STEPS if step.part == part):
            shown = [each for each in runs.get(step.name, []) if each["case"] not in ("took", "failed")]
            if shown:
                parts += [f"### `{step.name}`: {step.answers}", *_tables(shown)]
    return parts


def _runs(results: Sequence[Result]) -> Iterator[list[Result]]:
    """Yield the results of each run of a step. A run that was not interrupted ends with the result "took"."""
    run: list[Result] = []
    for result in results:
        if run and (run[-1]["case"] == "took" or run[-1]["step"] != result["step"]):
            yield run
            run = []
        run.append(result)
    if run:
        yield run


def _last_runs(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the last run of each step."""
    return {run[0]["step"]: run for run in _runs(results)}


def _by_commit(results: Sequence[Result]) -> Iterator[str]:
    """Yield a table of steps and micro-batches by commit, if the results have several runs."""
    rows: list[list[str]] = []
    for run in _runs(results):
        cases = {result["case"]: result for result in run}
        commit = f"`{run[0]['step']}`, {cases.get('took', {}).get('commit', 'unknown')}"
        if run[0]["step"] == "baseline" and "steps" in cases:
            rows.append([commit, _cell(cases["steps"]["tokens_per_s"]), _cell(cases["steps"]["mfu"]), *["-"] * 4])
        if run[0]["step"] == "profile" and "micro-batch" in cases:
            one = cases["micro-batch"]
            unprofiled = one["ms"] if "watched_ms" in one else None
            figures = one["tokens"], unprofiled, one["busy_ms"], one["launches"]
            rows.append([commit, "-", "-", *map(_cell, figures)])
    if len(rows) > 2:
        yield "Results by commit. The milliseconds of a micro-batch are measured without the profiler:"
        head = ["", "tokens/s", "MFU", "tokens of a micro-batch", "ms of a micro-batch", "ms in kernels", "launches"]
        yield table(head, rows)


def _case(runs: Mapping[str, Sequence[Result]], step: str, case: str) -> Result | None:
    return next((each for each in runs.get(step, []) if each["case"] == case), None)


def _head(runs: Mapping[str, Sequence[Result]]) -> str:
    card, software = _case(runs, "facts", "card"), _case(runs, "facts", "software")
    if card is None or software is None:
        last = next((each for run in runs.values() for each in run if "versions" in each), None)
        where = f", commit {last['commit']}, on one {last['card']}, {last['versions']}" if last else ""
        return f"Written by `python -m benchmarks.gpu --write`{where}. The step `facts` was not run."
    versions = ", ".join(f"{name} {software[name]}" for name in NAMED if software.get(name))
    return (
        f"Written by `python -m benchmarks.gpu --write`, commit {software['commit']}, on one {card['name']} "
        f"({card['total_gib']:.0f} GiB; driver, clocks, power, memory used: {card['nvidia_smi']}), Python "
        f"{software['python']}, {versions}, CUDA {software['cuda']}. Models have shapes of Qwen2.5 and random "
        "weights. Lengths are log-normal with a median of 512 tokens, clipped at 4,096; completions are four fifths of "
        "a sample. Each timed step trains new samples. MFU counts only model FLOPs, relative to the dense bf16 peak of "
        "the card. A step consists of loss, backward pass, gradient norm, clipping and AdamW. A step computes loss and "
        "gradient in one pass, except in the case `two passes`."
    )


def _bars(runs: Mapping[str, Sequence[Result]]) -> str:
    rows = []
    for precision in ("float64", "float32", "bfloat16"):
        found = [each for each in runs.get("exact", []) if each["case"].endswith(precision)]
        if found:
            worst = max(found, key=lambda each: each["gradient"])
            met = all(each["met"] for each in found)
            target = f"at most {worst['wanted']:g}"
            rows.append([f"gradients against the CPU, {precision}", target, _cell(worst["gradient"]), MET[met]])
    steps = _case(runs, "baseline", "steps")
    if steps is not None and steps["mfu"] is not None:
        met = steps["mfu"] >= MFU_TARGET
        rows.append([f"MFU of {steps['shape']}", f"at least {MFU_TARGET:g}", f"{steps['mfu']:.3f}", MET[met]])
        rows.append([f"tokens/s of {steps['shape']}", "-", f"{steps['tokens_per_s']:,.0f}", "-"])
    rows += [[name, "-", value, "-"] for name, value in _of_engines_and_runs(runs)]
    return table(["figure", "target", "measured", "met"], rows)


def _of_engines_and_runs(runs: Mapping[str, Sequence[Result]]) -> Iterator[tuple[str, str]]:
    """Yield names and values of figures that compare two steps, or that summarize engines and runs."""
    ours, theirs = _rate(runs, "engine"), _rate(runs, "engine of vLLM")
    if ours and theirs:
        yield "tokens/s, the engine relative to vLLM's defaults", f"{ours / theirs:.2f}"
    for step, case in (("engine", "lag 0, head in float32"), ("engine of vLLM", "lag 0, head in bfloat16")):
        found = _case(runs, step, case)
        if found is not None:
            yield f"mismatch at {case}, mean nats", _cell(found["mean_nats"])
    pauses = [each["pause_s"] for each in runs.get("engine", []) if "pause_s" in each]
    if pauses:
        yield f"pause of a weight update, median of {len(pauses)}, ms", _cell(1000 * median(pauses))
    fast, slow = (_case(runs, f"pair {name}", "steps") for name in ("asynchronous", "synchronous"))
    if fast is not None and slow is not None and "samples_per_s" in fast and "samples_per_s" in slow:
        yield "samples/s, asynchronous relative to synchronous", f"{fast['samples_per_s'] / slow['samples_per_s']:.2f}"


def _rate(runs: Mapping[str, Sequence[Result]], step: str) -> float | None:
    """Return the median tokens/s of an engine over the rounds after the first."""
    rates = [each["tokens_per_s"] for each in runs.get(step, []) if each["case"].startswith("round ")]
    return median(rates[1:]) if rates[1:] else None


def _tables(results: Sequence[Result]) -> Iterator[str]:
    """Yield one table per set of figures; a figure that is too long for a cell is a paragraph above the tables."""
    groups: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
    for result in results:
        figures = dict(_flat(result))
        short = {name: value for name, value in figures.items() if len(_cell(value)) <= _LONGEST_CELL}
        groups.setdefault(tuple(short), []).append((result["case"], short))
        for name in figures.keys() - short.keys():
            yield f"{result['case']}, {name.replace('_', ' ')}: {_cell(figures[name])}."
    for names, rows in groups.items():
        if names:
            head = ["", *(name.replace("_", " ") for name in names)]
            yield table(head, [[case, *(_cell(figures[name]) for name in names)] for case, figures in rows])


def _flat(result: Result) -> Iterator[tuple[str, Any]]:
    for name, value in result.items():
        if name in _NOT_FIGURES or value is None:
            continue
        if isinstance(value, dict):
            yield from ((f"{name}: {key}", each) for key, each in value.items())
        else:
            yield name, value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    return str(value).replace("|", "\\|")
