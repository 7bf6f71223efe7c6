"""The page of results of the matrix, and its plot."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

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

Outcomes = dict[str, dict[str, list[Outcome]]]
"""Row -> lag -> one outcome for each seed."""
Means = dict[str, dict[str, float | None]]
"""Row -> lag -> KL, None where a seed became non-finite."""

WANTED_KL = 1e-3
"""Of trajectory balance at lags 0 to 16, and as it ships on uniform data too."""
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
"""Row -> colour and line, on the left."""
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
"""The same on the right."""

SHOWS = """\
- **The optimum of trajectory balance does not mind age.** Up to lag 16 its KL changes by no more than it does between \
seeds, with weights and without. From data of one old policy or of the uniform one it is larger and still small, with \
weights about twice what it is without: what the policy hardly writes has less of a say. An anchor at the sampler \
changes nothing while the sampler follows, and holds the policy back where it never does. Whether a run gets to the \
optimum is another question, which a world of 1,024 answers with a cooled rate does not ask: \
[stability.md](stability.md) does.
- **OAPL has an optimum of each draw's own.** While the sampler follows, steps from one to the next end near the best \
completion, far from pi*. From data of the first policy its optimum is pi*, and it comes close.
- **Naive PPO pays for lag from the first update on.** It centres its trust region on the policy that sampled, and \
takes the KL of its reward from that policy too; from old or uniform data it therefore stays beside it. Proximal \
RLOO, which does the same with the completion as one action, degrades alike.
- **Decoupled PPO hardly degrades up to lag 16**, with either baseline, and from uniform data it still comes near. It \
does not arrive: the weight of a token repairs the choice of that token, not the prefix before it nor the \
continuation after it, which mu wrote.
- **Corrections gain little up to lag 16**: token_tis (the default), none (`+unbounded`), icepop and geometric_mask \
differ by no more than seeds do. sequence_tis is worse at 16. On uniform data token_tis leaves less than half of what \
raw weights do, and some of the others do great harm. sequence_tis collapses, and not to the best completion: the \
expectation of a truncated weight is not 1, so the baseline no longer cancels. icepop drops every token that the \
policy writes less than half as often as mu, and nothing holds those up. gspo is uneven between seeds: its ratio is \
that of a sequence, so the weight of one token reaches all of them. At the other end, up to lag 1, gspo has the least \
KL of all PPO rows: its narrow clip holds updates back, which says as much about a learning rate from a coarse grid as \
about the surrogate.
- **An interpolated proximal policy does as well as one that is scored.** It needs no pass over the draw, is as near \
to pi* at lag 0 and 1, and at lag 4 and 16 and from uniform data it is the nearest of all PPO rows. Its region lies \
about a policy between the one that sampled and the one that learns, and moves with the second: the farther apart \
they are, the less it holds back. Here, where no weight can explode, that does no harm.
- **How a gradient is averaged or bounded hardly shows**: `dr_grpo`, `batch` and a critic differ from \
PPO as it ships by about what seeds do. `entropy` has another optimum, and comes to it at every age: less \
reward by what the bonus is worth.
- **Distillation asks for no reward**, so it does not matter who wrote the tokens: at every age no row is nearer to \
its teacher.
- **The rule on the effective sample size** never acts at lag 0 and 1, and changes little where it does: it slows a \
run whose weights are uneven, and repairs no bias.
- **Online DPO has another optimum.** The best of a group is always preferred to the worst, so on data of its own the \
sigmoid loss ends at one completion for each prompt, mostly the best: the most reward, and farther from pi* than the \
reference was. IPO stops at its margin. Neither asks who wrote a pair, and up to lag 16 neither changes; \
uniform pairs are about completions that the policy hardly writes, and move it less.

What was measured are the tables; the reasons given here are our reading of them, written for the run of three seeds.

What it does not show: with 4 tokens a uniform policy bounds the weight of a token by 4 and that of a completion by \
1,024, so nothing here explodes as it can with a vocabulary of 100,000 and a thousand tokens; corrections are made \
for that. The learning rate falls to 0, so lag means less and less towards the end: this is what age costs a run that \
is cooled down, not one that is not. All samples of a draw have one age. The policy sees every completion many times, \
so nothing is said about generalisation. Learning rates were chosen at lag 0 on one seed, and no knob of a correction \
was tuned. Rows that differ in a weight alone are the same run at lag 0, where it is 1."""


def means(seen: list[Outcome]) -> dict[str, float | None]:
    """Means over seeds; None where one of them became non-finite."""
    if any(outcome.kl is None or outcome.reward is None for outcome in seen):
        return {"kl": None, "reward": None}
    return {
        "kl": statistics.fmean(outcome.kl for outcome in seen if outcome.kl is not None),
        "reward": statistics.fmean(outcome.reward for outcome in seen if outcome.reward is not None),
    }


def write_results(folder: Path, outcomes: Outcomes, seeds: Sequence[int], num_draws: int, wall_s: float) -> None:
    """Write off_policy.md and off_policy.svg into a folder.

    Args:
        folder: of the results.
        outcomes: of the whole matrix.
        seeds: in the order of the outcomes.
        num_draws: of every cell.
        wall_s: what the matrix took.
    """
    kl: Means = {name: {lag: means(by_lag[lag])["kl"] for lag in LAGS} for name, by_lag in outcomes.items()}
    worlds = [World.made_from(seed) for seed in seeds]
    reference_kl = statistics.fmean(world.kl(sequence_logprobs(world.reference)) for world in worlds)
    draw(folder / "off_policy.svg", kl, reference_kl)
    parts = [
        "# Every algorithm on data of every age",
        _setting(len(seeds), num_draws, wall_s),
        "![KL to the optimum over the lag of the data](off_policy.svg)",
        _kl_table(outcomes),
        _growth_table(kl),
        _reward_table(outcomes, worlds),
        "## What was wanted",
        _wanted(outcomes, kl, reference_kl),
        "## What it shows, and what it does not",
        SHOWS,
    ]
    write_page(folder / "off_policy.md", parts)


def _setting(num_seeds: int, num_draws: int, wall_s: float) -> str:
    num_samples = num_draws * SAMPLES_PER_DRAW
    return f"""\
Written by `python benchmarks/off_policy.py` on {os.cpu_count()} cores ({platform.machine()}), no GPU, Python \
{platform.python_version()}, in {wall_s / 60:.0f} minutes.

**The world.** {NUM_PROMPTS} prompts, a vocabulary of {NUM_TOKENS}, completions of exactly {LENGTH} tokens: \
{NUM_SEQUENCES} of them for each prompt, so everything that is reported is exact and nothing is estimated. A reward is \
a sum of random scores: of tokens by their place, of neighbours, and of the first token with the last; mean 0, \
standard deviation 1. The policy is a transformer of 2 layers and width 32 that starts as the reference. \
pi* ~ pi_ref exp(r / beta) with beta = {BETA}. KL(pi || pi*) times beta is exactly what pi falls short of the optimum \
in E[r] - beta KL(pi || pi_ref). Every seed is another world; figures are means over {num_seeds} seeds, the same for \
all cells.

**A cell.** {num_draws} draws of {SAMPLES_PER_DRAW // GROUP_SIZE} groups of {GROUP_SIZE} samples ({num_samples:,} \
samples in all), {NUM_MINIBATCHES} minibatches x {NUM_EPOCHS} epochs = {UPDATES_PER_DRAW} updates a draw, with pi_prox \
fixed at its start, as the learner does it. The losses are those of `algorithms`, called through its registry. \
Corrections and other knobs stand at their defaults (token_tis for all losses); PPO has kl_beta = {BETA} in its \
reward, sigmoid DPO and OAPL the same beta, IPO 0.1 (its beta sets a pair's margin, 1 / (2 beta) = 5), \
`distillation` has pi* for a teacher, `+entropy` a bonus of 0.01, and the rule on the effective sample size a budget \
of 0.5 and `scale_lr`. Optimizer as the learner's defaults; the learning rate falls to 0 on a cosine. Its peak is \
chosen for each row from \
{", ".join(f"{rate:g}" for rate in LEARNING_RATES)} by the KL at lag 0 on another seed, and is the same at every lag.

**Lag** L: the samples of a draw come from the policy of L updates before its first update, so the last of its updates \
trains on data that are L + {UPDATES_PER_DRAW - 1} versions old. **first**: all samples come from the first policy, \
which is the reference, so the last update trains on data that are {num_draws * UPDATES_PER_DRAW - 1} versions old; \
the optimum of `oapl` on these is pi* as well. **uniform**: every token of every draw is sampled \
uniformly, and no policy ever samples."""


def _kl_table(outcomes: Outcomes) -> str:
    text = "KL(pi || pi*) at the end, in nats: the mean over seeds, and the worst seed in brackets."
    rates = {row.name: f"{row.learning_rate:g}" for row in ROWS}
    rows = [[f"`{name}`", rates[name], *map(_kl_cell, by_lag.values())] for name, by_lag in outcomes.items()]
    return f"{text}\n\n{table(['', 'learning rate', *_headings()], rows)}"


def _reward_table(outcomes: Outcomes, worlds: list[World]) -> str:
    before = statistics.fmean(world.expected_reward(sequence_logprobs(world.reference)) for world in worlds)
    best = statistics.fmean(world.expected_reward(world.optimum_logprobs_PS) for world in worlds)
    most = statistics.fmean(float(world.rewards_PS.amax(1).mean()) for world in worlds)
    distance = statistics.fmean(world.kl(sequence_logprobs(world.reference)) for world in worlds)
    text = (
        f"Expected reward at the end, mean over seeds. The reference has {before:.3f}, and its KL to pi* is "
        f"{distance:.2f}; pi* has {best:.3f}; the best completion has {most:.2f}. More than pi* is no better: it was "
        "paid for with KL to the reference."
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
    return f"What age costs: KL over that of the same row at lag 0.\n\n{table(['', *_headings()[1:]], rows)}"


def _growth(by_lag: dict[str, float | None], lag: str) -> str:
    aged, fresh = by_lag[lag], by_lag["0"]
    return "not finite" if aged is None or not fresh else f"{aged / fresh:.2g}"


def _wanted(outcomes: Outcomes, kl: Means, reference_kl: float) -> str:
    bounded = [lag for lag in LAGS if lag.isdecimal()]
    shipped = "; ".join(_against(kl[TB], lag) for lag in [*bounded, "uniform"])
    first = _figure(kl["oapl"]["first"])
    costs = "; ".join(f"{_heading(lag)}: {_growth(kl[NAIVE], lag)} against {_growth(kl[PPO], lag)}" for lag in LAGS[1:])
    pairs = [pair for lag in LAGS[1:] for pair in zip(outcomes[NAIVE][lag], outcomes[PPO][lag], strict=True)]
    num_worse = sum(
        naive.kl is None or (decoupled.kl is not None and naive.kl > decoupled.kl) for naive, decoupled in pairs
    )
    return f"""\
- Trajectory balance as it ships reaches KL(pi || pi*) below {WANTED_KL:g}: {shipped}.
- OAPL comes to its own optimum from data of the first policy alone, where that is pi*; the reference is \
{reference_kl:.2f} away: {first}.
- Naive PPO degrades with lag, and the decoupled one less. KL over that at lag 0, naive against decoupled: \
{costs}. Naive ends farther from pi* in {num_worse} of {len(pairs)} cells with lag, seed by seed."""


def _against(by_lag: dict[str, float | None], lag: str) -> str:
    met = by_lag[lag] is not None and (by_lag[lag] or 0.0) < WANTED_KL
    return f"{_heading(lag)}: {_figure(by_lag[lag])}, {'met' if met else '**not met**'}"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def draw(path: Path, kl: Means, reference_kl: float) -> None:
    """The plot of the matrix: KL over lag, the algorithms on the left and the corrections of PPO on the right.

    Args:
        path: of the SVG file.
        kl: of every cell.
        reference_kl: KL(pi_ref || pi*), where every run starts.
    """
    with drawn(path, 11, 5, font_size=9) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw(left, kl, ALGORITHMS_SHOWN, reference_kl)
        _draw(right, kl, CORRECTIONS_SHOWN, reference_kl)
        left.set_title("algorithms")
        right.set_title("off_policy_ppo: corrections")
        left.set_ylabel("KL(pi || pi*) at the end, nats")


def _draw(axes: Axes, kl: Means, shown: dict[str, tuple[str, str]], reference_kl: float) -> None:
    for name, (colour, line) in shown.items():
        values = [math.nan if value is None else value for value in kl[name].values()]  # a gap where it is NaN
        places = range(len(values))
        axes.plot(places[:-1], values[:-1], line, color=colour, marker="o", markersize=4, label=_short(name))
        # uniform is no lag: its point stands apart
        axes.plot(places[-2:], values[-2:], line, color=colour, linewidth=0.7, alpha=0.35)
        axes.plot(places[-1:], values[-1:], "o", color=colour, markersize=5)
    axes.axhline(reference_kl, color="#999999", linewidth=1, linestyle="--", label="the reference, before training")
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
