"""The bar, and the page docs/results/overlap.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.page import origin, share, table
from benchmarks.overlap_parts.figures import Figures
from benchmarks.overlap_parts.long_tail import MEDIAN_LENGTH, SIGMA
from benchmarks.overlap_parts.setting import GROUP_SIZE, MAX_NEW_TOKENS, Setting

BAR = 1.6
EQUAL = (0.8, 1.25)
"""Between these r counts as about 1."""

READING = (
    "U is the longest over the mean completion length of a step's batch, mean over steps; r the time to train a step "
    "over the time to generate it, both of the synchronous runs. The limit counts work that any machine may do: it "
    "compares a system whose machines all generate until the longest answer is there, and then all train, with one "
    "that is never idle. Here each core has its own work. A synchronous step takes 1 + r times its generation; an "
    "asynchronous one as long as the busier core needs, which is training where r is above 1 / U: hence "
    "(1 + r) / max(r, 1 / U), and 2 at r = 1.\n\n"
    "What can lift a ratio above that: a synchronous learner also waits for all that lies between, from publishing its "
    "weights to the first request under them and from the last sample to the batch (in the table: waiting less "
    "generation), and asynchrony hides it. What keeps it below: the learner shares its core with the buffer service "
    "and the command, which in a synchronous run work while it waits; an engine step takes longer with more in it, so "
    "a full engine gains less than U. `learner idle` is what admission and the way of a batch cost. An actor is idle "
    "while it has no request running; asynchronous, that is where admission is closed, as the bound allows no more "
    "to be generated."
)


def judged(result: Figures) -> Figures:
    """The wanted bar and whether it is met; None where it was not measured at full size, or r is not about 1."""
    is_equal = EQUAL[0] <= result["r"] <= EQUAL[1]
    met = None if result["quick"] or not is_equal else bool(result["async_over_sync"] >= BAR)
    return {"async_over_sync": {"at least": BAR, "where": "r is about 1", "met": met}}


def write_page(path: Path, result: Figures, setting: Setting) -> None:
    """Write it."""
    parts = [
        "# What asynchrony buys, measured",
        _head(result, setting),
        _ratio(result),
        _table(result),
        READING,
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _head(result: Figures, setting: Setting) -> str:
    num_rounds = len(result["async_over_sync_rounds"])
    command = (
        f"python benchmarks/overlap.py --rounds {num_rounds} --steps {setting.num_steps - setting.num_warmup} "
        f"--groups {setting.groups_per_step} --page"
    )
    return (
        f"{origin(command, result['machine'], result['machine']['commit'])} Real runs of "
        "`leeway train`, one after the other: `weight_sync.max_lag = 0`, which is synchronous training, then the "
        "default, asynchronous setting. One actor has a core of its own; the learner (one stage), the buffer service, "
        "Ray and the command share the other. "
        f"A step trains {setting.groups_per_step} prompts of {GROUP_SIZE} samples; the actor keeps as many in flight "
        "on both sides. The model is a Llama of 1.7 million parameters whose completions end at random: the mean "
        f"lengths of its 16 kinds of prompts are log-normal (median {MEDIAN_LENGTH:g} tokens, sigma {SIGMA:g}), the "
        f"length around each is geometric, and {MAX_NEW_TOKENS} tokens are the longest. Each run has "
        f"{setting.num_warmup} steps to warm up and {setting.num_steps - setting.num_warmup} that count; start-up and "
        f"evaluations are left out. Rounds: {num_rounds}."
    )


def _ratio(result: Figures) -> str:
    rounds = ", ".join(f"{ratio:.2f}" for ratio in result["async_over_sync_rounds"])
    met = {True: "met", False: "**missed**", None: "not judged, for r is not about 1"}
    return (
        f"`async_over_sync` **{result['async_over_sync']:.2f}** (rounds: {rounds}; greatest over smallest "
        f"{1 + result['spread']:.3f}), wanted: at least {BAR:g} where generation and training take equal time: "
        f"{met[result['wanted']['async_over_sync']['met']]}. U {result['U']:.2f}, r {result['r']:.2f}: the limit "
        f"(U + r) / (1 + r) is {result['limit']:.2f}, and what a core each for generation and training allow is "
        f"{result['ceiling']:.2f}."
    )


def _table(result: Figures) -> str:
    sides = (result["sync"], result["async"])
    lines = [
        ("samples trained per second", "samples_per_s", "{:.1f}"),
        ("completion tokens trained per second", "tokens_per_s", "{:.0f}"),
        ("seconds to train a step", "step_s", "{:.2f}"),
        ("seconds that it waits for its batch", "wait_s", "{:.2f}"),
        ("from the first to the last of its samples, seconds", "generation_s", "{:.2f}"),
        ("trained samples in flight, mean over time", "running", "{:.1f}"),
        ("longest over mean completion of a step (U)", "U", "{:.2f}"),
        ("lag, mean", "lag_mean", "{:.2f}"),
        ("lag, greatest", "lag_max", "{:.0f}"),
    ]
    rows = [[name, *(form.format(side[key]) for side in sides)] for name, key, form in lines]
    for name, key in (
        ("learner idle", "learner_idle_frac"),
        ("actor idle", "actor_idle_frac"),
        ("samples dropped as stale", "dropped_stale"),
    ):
        rows.append([name, *(share(side[key]) for side in sides)])
    return table(["mean of the rounds", "max_lag = 0", "asynchronous"], rows)
