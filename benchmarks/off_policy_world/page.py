"""Results page and plot of `benchmarks/off_policy.py`."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.figure import drawn
from benchmarks.lib.page import table, write_page
from benchmarks.off_policy_world.training import (
    GROUP_SIZE,
    LAGS,
    LEARNING_RATES,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    ROWS,
    SAMPLES_PER_DRAW,
    UPDATES_PER_DRAW,
    Outcome,
)
from benchmarks.off_policy_world.world import (
    BETA,
    LENGTH,
    NUM_PROMPTS,
    NUM_SEQUENCES,
    NUM_TOKENS,
    World,
    sequence_logprobs,
)
from matplotlib.axes import Axes

Outcomes = dict[str, dict[str, list[Outcome]]]
"""Row of the matrix -> lag -> one outcome per seed."""
Means = dict[str, dict[str, float | None]]
"""Row of the matrix -> lag -> mean KL, or None if a seed became non-finite."""

WANTED_KL = 1e-3
"""Target KL of trajectory balance at lags 0 to 16; with default weights, the target includes uniform data."""
TB = "trajectory_balance"
PPO = "off_policy_ppo"
NAIVE = f"{PPO}+naive"

ALGORITHMS_SHOWN = {
    "trajectory_balance": ("#0b6e4f", "-"),
    "trajectory_balance+unweighted": ("#0b6e4f", ":"),
    "oapl": ("#555555", "-"),
    "online_dpo": ("#7b4fa3", "-"),
    "online_dpo+ipo": ("#7b4fa3", ":"),
    PPO: ("#1f5fa8", "-"),
    f"{PPO}+critic": ("#1f5fa8", ":"),
    f"{PPO}+proximal_rloo": ("#e08a1e", "-"),
    f"{PPO}+naive": ("#c0392b", "-"),
    "distillation": ("#8c564b", "-"),
}
"""Row of the matrix -> colour and line style in the left plot."""
CORRECTIONS_SHOWN = {
    PPO: ("#1f5fa8", "-"),
    f"{PPO}+naive": ("#c0392b", "-"),
    f"{PPO}+unbounded": ("#0b6e4f", "-"),
    f"{PPO}+sequence_tis": ("#0b6e4f", ":"),
    f"{PPO}+icepop": ("#7b4fa3", "-"),
    f"{PPO}+geometric_mask": ("#7b4fa3", ":"),
    f"{PPO}+gspo": ("#e08a1e", "-"),
    f"{PPO}+cispo": ("#e08a1e", ":"),
    f"{PPO}+interpolated": ("#8c564b", ":"),
}
"""Row of the matrix -> colour and line style in the right plot."""

SHOWS = """\
- **The optimum of trajectory balance is independent of data age.** Up to lag 16, the KL of trajectory balance changes \
by no more than between seeds, with and without weights. On data of one old policy or of the uniform policy, this KL \
is larger but still small. On such data, the KL with weights is about twice the KL without weights, because \
completions that the policy rarely generates count less. An anchor at the sampler has no effect while the sampler \
follows the policy, and limits the progress of the policy if the sampler never follows. This world of 1,024 \
completions with a decaying learning rate does not test whether a run reaches the optimum. \
[stability.md](stability.md) tests this.
- **The optimum of OAPL depends on the draw.** While the sampler follows the policy, successive optima end near the \
best completion, far from pi*. On data of the first policy, the optimum of OAPL is pi*, and OAPL ends close to pi*.
- **Naive PPO degrades from the first update of lag.** Naive PPO centres its trust region on the behaviour policy, and \
computes the KL in its reward from the behaviour policy too. On old or uniform data, naive PPO therefore stays near \
the behaviour policy. Proximal RLOO treats the completion as one action, has the same centre, and degrades equally.
- **Decoupled PPO hardly degrades up to lag 16**, with either baseline, and comes near pi* even on uniform data. \
Decoupled PPO does not reach pi*: the weight of a token corrects the choice of that token, but not the prefix and the \
continuation, which mu generated.
- **Corrections gain little up to lag 16**: token_tis (the default), none (`+unbounded`), icepop and geometric_mask \
differ by no more than seeds do. sequence_tis is worse at lag 16. On uniform data, the KL of token_tis is less than \
half of the KL of raw weights, and the KL of some other corrections is much higher. sequence_tis collapses to a \
completion that is not the best one: the expectation of a truncated weight is not 1, so the baseline no longer \
cancels. icepop drops every token that the policy generates less than half as often as mu, so nothing raises the \
probability of such tokens. gspo varies between seeds: its ratio is that of a sequence, so the weight of one token \
affects all tokens. Up to lag 1, gspo has the lowest KL of all PPO rows. Its narrow clip limits updates, so the coarse \
grid of learning rates may explain the low KL as well as the surrogate does.
- **An interpolated proximal policy is as good as a computed one.** An interpolated policy needs no pass over the \
draw. Its KL is as low as that of a computed policy at lag 0 and 1, and the lowest of all PPO rows at lag 4 and 16 and \
on uniform data. The trust region is centred on a policy between the behaviour policy and the current policy, and \
moves with the current policy. The more these two policies differ, the less the trust region limits updates. In this \
world weights cannot explode, so the weak limit does no harm.
- **Averaging and bounding of gradients have little effect**: `dr_grpo`, `batch` and a critic differ from \
default PPO by about as much as seeds do. `entropy` has a different optimum and reaches this optimum at every age, so \
its reward is lower by the value of the bonus.
- **Distillation uses no reward**, so the source of the tokens does not matter: at every age, the row of distillation \
is nearer to its teacher than all other rows are to pi*.
- **The rule on the effective sample size** never acts at lag 0 and 1, and changes little at other lags. The rule \
slows a run whose weights are uneven, but corrects no bias.
- **Online DPO has a different optimum.** The best completion of a group is always preferred to the worst. On its own \
data, the sigmoid loss therefore converges to one completion per prompt, mostly the best one. The result has the \
highest reward, and is farther from pi* than the reference. IPO stops at its margin. Neither loss depends on the \
source of a pair, and neither result changes up to lag 16. Uniform pairs contain completions that the policy rarely \
generates, and change the policy less.

The tables are measurements. The explanations are our interpretation of the run with three seeds.

Limits: with 4 tokens, a uniform policy bounds the weight of a token by 4 and the weight of a completion by 1,024. \
Weights therefore cannot explode, unlike with a vocabulary of 100,000 and a thousand tokens, for which corrections are \
designed. The learning rate decays to 0, so lag matters less towards the end: the tables show the cost of data age for \
a run whose learning rate decays. All samples of a draw have the same age. The policy sees every completion many \
times, so the results do not cover generalization. Learning rates were chosen at lag 0 on one seed, and no parameter \
of a correction was tuned. Rows that differ only in a weight are identical at lag 0, where the weight is 1."""


def means(seen: list[Outcome]) -> dict[str, float | None]:
    """Return the mean over seeds of each figure; None if a seed became non-finite."""
    if any(outcome.kl is None or outcome.reward is None for outcome in seen):
        return {"kl": None, "reward": None}
    return {
        "kl": statistics.fmean(outcome.kl for outcome in seen if outcome.kl is not None),
        "reward": statistics.fmean(outcome.reward for outcome in seen if outcome.reward is not None),
    }


def write_results(folder: Path, outcomes: Outcomes, seeds: Sequence[int], num_draws: int, wall_s: float) -> None:
    """Write off_policy.md and off_policy.svg into a folder.

    Args:
        folder: folder of the results.
        outcomes: outcomes of the whole matrix.
        seeds: seeds in the order of the outcomes.
        num_draws: draws of every cell.
        wall_s: wall time of the matrix in seconds.
    """
    kl: Means = {name: {lag: means(by_lag[lag])["kl"] for lag in LAGS} for name, by_lag in outcomes.items()}
    worlds = [World.made_from(seed) for seed in seeds]
    reference_kl = statistics.fmean(world.kl(sequence_logprobs(world.reference)) for world in worlds)
    draw(folder / "off_policy.svg", kl, reference_kl)
    parts = [
        "# Algorithms and data age",
        _setting(len(seeds), num_draws, wall_s),
        "![KL to the optimum over the lag of the data](off_policy.svg)",
        _kl_table(outcomes),
        _growth_table(kl),
        _reward_table(outcomes, worlds),
        "## Targets",
        _targets(outcomes, kl, reference_kl),
        "## Interpretation and limits",
        SHOWS,
    ]
    write_page(folder / "off_policy.md", parts)


def _setting(num_seeds: int, num_draws: int, wall_s: float) -> str:
    num_samples = num_draws * SAMPLES_PER_DRAW
    return f"""\
Written by `python benchmarks/off_policy.py` on {os.cpu_count()} cores ({platform.machine()}), no GPU, Python \
{platform.python_version()}, in {wall_s / 60:.0f} minutes.

**The world.** There are {NUM_PROMPTS} prompts, a vocabulary of {NUM_TOKENS}, and completions of exactly {LENGTH} \
tokens. Each prompt has {NUM_SEQUENCES} completions, so all reported figures are exact. A reward is a sum of random \
scores: of tokens by position, of adjacent tokens, and of the first token with the last. Rewards have mean 0 and \
standard deviation 1. The policy is a transformer of 2 layers and width 32 that starts as the reference. The optimum \
is pi* ~ pi_ref exp(r / beta) with beta = {BETA}. KL(pi || pi*) times beta is exactly the difference between the \
optimum and pi in E[r] - beta KL(pi || pi_ref). Every seed is a different world. Figures are means over {num_seeds} \
seeds, which all cells share.

**A cell.** A cell has {num_draws} draws of {SAMPLES_PER_DRAW // GROUP_SIZE} groups of {GROUP_SIZE} samples \
({num_samples:,} samples in total). A draw has {NUM_MINIBATCHES} minibatches x {NUM_EPOCHS} epochs = \
{UPDATES_PER_DRAW} updates. pi_prox is fixed at the start of the draw, as in the learner. The losses are those of \
`algorithms`, called through its registry. Corrections and other parameters have their defaults (token_tis for all \
losses), with these exceptions. PPO has kl_beta = {BETA} in its reward; sigmoid DPO and OAPL have this beta too. IPO \
has a beta of 0.1, which sets a pair's margin to 1 / (2 beta) = 5. `distillation` has pi* as its teacher, and \
`+entropy` has a bonus of 0.01. The rule on the effective sample size has a budget of 0.5 and `scale_lr`. The \
optimizer has the learner's defaults; the learning rate decays to 0 on a cosine. The peak of the rate is chosen for \
each row from {", ".join(f"{rate:g}" for rate in LEARNING_RATES)} by the KL at lag 0 on another seed, and holds for \
every lag.

**Lag** L: the samples of a draw come from the policy L updates before the first update of the draw. The last update \
of the draw therefore trains on data that are L + {UPDATES_PER_DRAW - 1} versions old. **first**: all samples come \
from the first policy, which is the reference. The last update of the run therefore trains on data that are \
{num_draws * UPDATES_PER_DRAW - 1} versions old. On such data, the optimum of `oapl` is pi*. **uniform**: every token \
of every draw is sampled uniformly, never from a policy."""


def _kl_table(outcomes: Outcomes) -> str:
    text = "Final KL(pi || pi*) in nats: mean over seeds, with the worst seed in brackets."
    rates = {row.name: f"{row.learning_rate:g}" for row in ROWS}
    rows = [[f"`{name}`", rates[name], *map(_kl_cell, by_lag.values())] for name, by_lag in outcomes.items()]
    return f"{text}\n\n{table(['', 'learning rate', *_headings()], rows)}"


def _reward_table(outcomes: Outcomes, worlds: list[World]) -> str:
    before = statistics.fmean(world.expected_reward(sequence_logprobs(world.reference)) for world in worlds)
    best = statistics.fmean(world.expected_reward(world.optimum_logprobs_PS) for world in worlds)
    most = statistics.fmean(float(world.rewards_PS.amax(1).mean()) for world in worlds)
    distance = statistics.fmean(world.kl(sequence_logprobs(world.reference)) for world in worlds)
    text = (
        f"Final expected reward, mean over seeds. The reference has {before:.3f}, and a KL to pi* of "
        f"{distance:.2f}; pi* has {best:.3f}; the best completion has {most:.2f}. A reward above that of pi* is not "
        "better, because its KL to the reference is too high."
    )
    rows = [[f"`{name}`", *map(_reward_cell, by_lag.values())] for name, by_lag in outcomes.items()]
    return f"{text}\n\n{table(['', *_headings()], rows)}"


def _headings() -> list[str]:
    return [_heading(lag) for lag in LAGS]


def _heading(lag: str) -> str:
    return f"lag {lag}" if lag.isdecimal() else lag


def _kl_cell(seen: list[Outcome]) -> str:
    mean = means(seen)["kl"]
    return "not finite" if mean is None else f"{mean:.1e} ({max(each.kl for each in seen if each.kl is not None):.1e})"


def _reward_cell(seen: list[Outcome]) -> str:
    mean = means(seen)["reward"]
    return "not finite" if mean is None else f"{mean:.3f}"


def _growth_table(kl: Means) -> str:
    rows = [[f"`{name}`", *(_growth(by_lag, lag) for lag in LAGS[1:])] for name, by_lag in kl.items()]
    return f"Cost of data age: the KL of a row over its KL at lag 0.\n\n{table(['', *_headings()[1:]], rows)}"


def _growth(by_lag: dict[str, float | None], lag: str) -> str:
    aged, fresh = by_lag[lag], by_lag["0"]
    return "not finite" if aged is None or not fresh else f"{aged / fresh:.2g}"


def _targets(outcomes: Outcomes, kl: Means, reference_kl: float) -> str:
    bounded = [lag for lag in LAGS if lag.isdecimal()]
    shipped = "; ".join(_against(kl[TB], lag) for lag in [*bounded, "uniform"])
    first = _figure(kl["oapl"]["first"])
    costs = "; ".join(f"{_heading(lag)}: {_growth(kl[NAIVE], lag)} and {_growth(kl[PPO], lag)}" for lag in LAGS[1:])
    pairs = [pair for lag in LAGS[1:] for pair in zip(outcomes[NAIVE][lag], outcomes[PPO][lag], strict=True)]
    num_worse = sum(
        naive.kl is None or (decoupled.kl is not None and naive.kl > decoupled.kl) for naive, decoupled in pairs
    )
    return f"""\
- Trajectory balance with default weights reaches KL(pi || pi*) below {WANTED_KL:g}: {shipped}.
- OAPL on data of the first policy only, for which its optimum is pi*, ends at a KL of {first}; the reference has \
{reference_kl:.2f}.
- Naive PPO degrades more with lag than decoupled PPO. Final KL over the KL at lag 0, naive and decoupled: {costs}. \
Naive PPO ends farther from pi* in {num_worse} of {len(pairs)} cells with lag, compared seed by seed."""


def _against(by_lag: dict[str, float | None], lag: str) -> str:
    met = by_lag[lag] is not None and (by_lag[lag] or 0.0) < WANTED_KL
    return f"{_heading(lag)}: {_figure(by_lag[lag])}, {'met' if met else '**not met**'}"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def draw(path: Path, kl: Means, reference_kl: float) -> None:
    """Plot KL over lag, with the algorithms on the left and the corrections of PPO on the right.

    Args:
        path: SVG file to write.
        kl: row -> lag -> mean KL.
        reference_kl: KL(pi_ref || pi*), at which every run starts.
    """
    with drawn(path, 11, 5, font_size=9) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw(left, kl, ALGORITHMS_SHOWN, reference_kl)
        _draw(right, kl, CORRECTIONS_SHOWN, reference_kl)
        left.set_title("algorithms")
        right.set_title("off_policy_ppo: corrections")
        left.set_ylabel("final KL(pi || pi*), nats")


def _draw(axes: Axes, kl: Means, shown: dict[str, tuple[str, str]], reference_kl: float) -> None:
    for name, (colour, line) in shown.items():
        values = [math.nan if value is None else value for value in kl[name].values()]  # NaN leaves a gap in the line
        places = range(len(values))
        axes.plot(places[:-1], values[:-1], line, color=colour, marker="o", markersize=4, label=_short(name))
        # "uniform" is not a lag: draw the point of uniform data separately
        axes.plot(places[-2:], values[-2:], line, color=colour, linewidth=0.7, alpha=0.35)
        axes.plot(places[-1:], values[-1:], "o", color=colour, markersize=5)
    axes.axhline(reference_kl, color="#999999", linewidth=1, linestyle="--", label="reference, before training")
    axes.set_yscale("log")
    axes.set_xticks(places, list(kl[name]))
    axes.set_xlabel("lag of the behaviour policy, in updates before the draw")
    axes.grid(visible=True, axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _short(name: str) -> str:
    if name == PPO:
        return "off_policy_ppo (decoupled)"
    return name.removeprefix(PPO)
