"""Complete runs of `leeway train`: the demo, and two runs that differ only in `weight_sync.max_lag`."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import Place
from benchmarks.gpu.shapes import EOS
from benchmarks.lib.machine import ROOT
from benchmarks.lib.runs import FEW_PROCESSES, FinishedRun, Row, train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KEPT = ("report.html", "metrics.jsonl", "actors.jsonl", "events.jsonl", "eval.jsonl", "summary.json", "config.toml")
"""Files of a run that are copied to the results."""
KEEP_S = 20.0
"""Seconds of a step's limit for imports before the run, and for copying the files if the run times out."""
NUM_STEPS, NUM_WARM_UP = 20, 5
DEMO_STEPS_ON_CPU = 8
NUM_PROMPTS = 2048
REWARD = ROOT / "benchmarks" / "overlap_parts" / "reward.py"
DEMO_ON_GPU = {
    "launch.colocate": True, "actors.num_actors": 1, "actors.dtype": "bfloat16", "actors.gpus": 1,
    "actors.gpu_memory_share": 0.3, "learner.gpus": 1, "learner.gpu_memory_share": 0.3, "learner.num_stages": 1,
    "learner.precision": "bfloat16",
}  # fmt: skip
"""Overrides of the demo with which an engine and the learner share the card."""
PAIR_ON_GPU = {
    "launch.colocate": True, "actors.gpus": 1, "actors.gpu_memory_share": 0.35, "actors.dtype": "bfloat16",
    "actors.max_new_tokens": 256,
    "actors.max_running_samples": 128, "learner.gpus": 1, "learner.gpu_memory_share": 0.55,
    "learner.precision": "bfloat16", "learner.groups_per_step": 16,
    "learner.token_budget": 8192,
}  # fmt: skip


def demo(place: Place) -> None:
    """Run examples/demo.toml on the card; on a CPU, a few steps with one actor and one stage."""
    steps = ("--learner.num_steps", str(DEMO_STEPS_ON_CPU))
    overrides = overrides_of(DEMO_ON_GPU) if place.on_gpu else [*FEW_PROCESSES, *steps]
    run(place, "demo", ROOT / "examples" / "demo.toml", overrides)


def pair(place: Place, max_lag: int, shape: str = "0.6B") -> None:
    """Train a randomly initialized model of a shape with a staleness bound."""
    name, known = place.shape(shape)
    model = place.model(shape)
    write_tokenizer(model, known["vocab_size"])
    folder = place.folder / "pair"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"question": f"{number % 7} {number % 11} {number % 512}"}) for number in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "pair.toml").write_text(pair_config(folder, model), encoding="utf-8")
    on_gpu = overrides_of(PAIR_ON_GPU) if place.on_gpu else []
    overrides = ["--weight_sync.max_lag", str(max_lag), *on_gpu]
    run(place, f"pair-max-lag-{max_lag}", folder / "pair.toml", overrides, shape=name, max_lag=max_lag)


def run(place: Place, name: str, config: Path, overrides: Sequence[str], **facts: object) -> None:
    """Train, report figures of the completed steps, and copy report and metrics, also if the run fails."""
    folder, began_s = place.folder / "runs" / name, time.time()
    log = place.folder / f"{name}.log"
    engine_args = overrides_of({"actors.engine_args": place.engine_args}) if place.engine_args else []
    try:
        train(
            config,
            folder,
            ["--tracking.to", "[]", *overrides, *engine_args],
            log=log,
            limit_s=place.limit_s - KEEP_S,
        )
    finally:
        if (folder / "metrics.jsonl").exists():
            place.report("steps", **facts, **figures(FinishedRun(folder), began_s))
        for path in (log, *(folder / each for each in KEPT)):
            if path.exists() and place.output_folder is not None:
                copies = place.output_folder / name
                copies.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copies / path.name)
    place.report("end", seconds=time.time() - began_s, **_summary(folder))


def figures(run: FinishedRun, began_s: float) -> dict[str, Any]:
    """Return rates and medians over the steps after the warm-up, and seconds from the command to the first batch."""
    rows = run.updates
    if len(rows) < 2:
        return {"steps": len(rows)}
    counted = rows[min(NUM_WARM_UP, len(rows) // 2) :]
    before = rows[rows.index(counted[0]) - 1]
    seconds = counted[-1]["finished_s"] - before["finished_s"]
    return {
        "steps": len(rows),
        "counted": len(counted),
        "first_batch_s": rows[0]["started_s"] - began_s,
        "samples_per_s": sum(row["batch/trajectories"] for row in counted) / seconds,
        "tokens_per_s": sum(row["batch/completion_tokens"] for row in counted) / seconds,
        "step_s": _median(counted, "time/step"),
        "wait_s": _median(counted, "time/wait_for_batch"),
        "pause_s": _median(counted, "time/weight_pause"),
        "lag_mean": _median(counted, "lag/token_mean"),
        "lag_max": max(row["lag/token_max"] for row in counted),
        "lag0_nats": _median(counted, "mismatch/lag0_abs"),
    }


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(statistics.median(values)) if values else None


def _summary(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {key: found.get(key) for key in ("accuracy_before", "accuracy_after", "trained_tokens", "generated_tokens")}


def overrides_of(keys: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `leeway train` that set keys; each key of a table is set separately."""
    found: list[str] = []
    for key, value in keys.items():
        if isinstance(value, Mapping):
            found += overrides_of({f"{key}.{name}": each for name, each in value.items()})
        else:
            found += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return found


# --- the pair's model and config ----------------------------------------------------------------------


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer that has one word per token of the vocabulary; the words are numbers."""
    words = {"<eos>": EOS, **{str(number): number for number in range(1, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def pair_config(folder: Path, model: Path) -> str:
    """Return the config of a run of `pair` as TOML; the prompts are in `folder`."""
    return f"""\
[model]
path = "{model}"

[task]
type = "file"
path = "{folder / "prompts.jsonl"}"
rewards = ["{REWARD}:even"]
num_heldout = 8

[algorithm]
type = "trajectory_balance"

[actors]
num_actors = 1
group_size = 8
max_prompt_tokens = 8
max_new_tokens = 64
max_running_samples = 32

[learner]
num_stages = 1
num_steps = {NUM_STEPS}
groups_per_step = 4
token_budget = 1024
learning_rate = 1e-6
checkpoint_every = 1000
"""
