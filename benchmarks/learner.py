"""Measure costs and savings of the learner's packing, pipeline and log-probabilities. Prints one JSON line last.

    python benchmarks/learner.py [--quick] [--only NAME ...]

    packing      real tokens over the tokens of the micro-batches, on long-tailed lengths
    padded       the learner's packed step compared with a plain padded Transformers loop
    weighed      a step of trajectory balance with its weights pi / mu, compared with a step without weights
    logprobs     peak memory of log-probabilities, computed in chunks and through the full logits
    sleeping2/4  gain and idle time of every schedule, on 2 and on 4 stages that sleep instead of computing
    real         two stages with real compute, one core each
    smollm2      SmolLM2-135M on two stages in bf16, compared with a plain loop on both cores
    balance      trajectory balance on SmolLM2-135M, in one pass and in two, compared with a plain loop
    shared       a prompt computed once for its eight samples, compared with once per sample

Each measurement runs in separate processes (`learner_parts/spot.py`). The compared sides take turns, and ratios are
medians over rounds. The docstring of each part describes the comparison. `--quick` is for development: its sizes are
smaller, and its figures are meaningless. A full run writes docs/results/learner.md. `python -m benchmarks.gpu` measures
the learner on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import SubprocessError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.learner_parts.spot import Figures, run_measurement
from benchmarks.lib.machine import RESULTS, Machine, describe_machine, smollm2
from benchmarks.lib.page import bars_table, judged, origin, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm

PAGE = RESULTS / "learner.md"
SUMS_AGREE_WITHIN = 1e-4
BARS = {
    "pack_efficiency": 0.97,
    "packed_over_padded": 1.5,
    "plain_over_weighed": 0.98,
    "pp2_over_pp1": 1.5,
    "logprob_peak_ratio": 4.0,
    "smollm2_one_pass_over_plain": 0.8,
    "smollm2_tb_over_plain": 1.3,
    "tb_one_pass_over_two": 1.25,
    "shared_prefix_over_plain_even": 1.6,
    "shared_prefix_over_plain_long_prompts": 2.8,
}
"""Figure -> minimum target."""
TITLE = "# Results of the learner"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run with smaller sizes, for development")
    parser.add_argument("--only", nargs="+", choices=[*MEASUREMENTS], metavar="NAME", help=" ".join(MEASUREMENTS))
    args = parser.parse_args()
    end_at_sigterm()
    chosen = args.only or [*MEASUREMENTS]
    machine = describe_machine()
    result: Figures = {"quick": args.quick}
    failed: dict[str, str] = {}
    for name in chosen:
        try:
            found = MEASUREMENTS[name](args.quick)
            bubbles = {**result.get("bubble_fraction", {}), **found.get("bubble_fraction", {})}
            result |= {**found, **({"bubble_fraction": bubbles} if bubbles else {})}
        except (MeasurementFailed, OSError, SubprocessError) as error:
            failed[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    targets = judged(result, BARS, "at least", at_full_size=not args.quick)
    result |= {"machine": machine, "failed": failed, "wanted": targets}
    if not (args.quick or args.only or failed):
        write_results(PAGE, result)
    print(json.dumps(result))
    sys.exit(1 if failed else 0)


def logprobs(quick: bool) -> Figures:
    """Measure log-probabilities in chunks and through full logits, each in a new process; return figures and ratio."""
    ours, full = (
        run_measurement("measurements:logprob_memory", {"side": side, "quick": quick}) for side in ("chunked", "full")
    )
    if any(abs(a / b - 1) > SUMS_AGREE_WITHIN for a, b in zip(ours["sums"], full["sums"], strict=True)):
        raise MeasurementFailed(f"the two sides of `logprobs` compute different log-probabilities: {ours}, {full}")
    return {
        "logprob_peak_mib": ours["peak_mib"],
        "logprob_full_peak_mib": full["peak_mib"],
        "logprob_peak_ratio": full["peak_mib"] / ours["peak_mib"],
        "logprob_s": ours["seconds"],
        "logprob_full_s": full["seconds"],
        "logprob_num_tokens": ours["num_tokens"],
        "logprob_chunk_mib": ours["chunk_mib"],
    }


def on_smollm2(name: str) -> Callable[[bool], Figures]:
    """Return a measurement of SmolLM2 with two stages in one world and a plain loop in a second world."""
    return lambda quick: run_measurement(name, {"path": str(smollm2()), "quick": quick}, worlds=(2, 1), limit_s=1200.0)


def measurement(name: str, *worlds: int) -> Callable[[bool], Figures]:
    """Return a measurement that runs in worlds (process groups) of these sizes."""
    return lambda quick: run_measurement(name, {"quick": quick}, worlds=worlds)


MEASUREMENTS: dict[str, Callable[[bool], Figures]] = {
    "packing": measurement("measurements:packing", 1),
    "padded": measurement("measurements:packed_against_padded", 1),
    "weighed": measurement("measurements:weighed_gradients", 1),
    "logprobs": logprobs,
    "sleeping2": measurement("sleeping:measure", 2, 1),
    "sleeping4": measurement("sleeping:measure", 4),
    "real": measurement("measurements:real_compute", 2, 1, 1),
    "smollm2": on_smollm2("measurements:smollm2"),
    "balance": on_smollm2("computed:balance"),
    "shared": measurement("computed:shared_prompts", 1),
}


# --- the page ------------------------------------------------------------------------------------


def write_results(path: Path, result: Figures) -> None:
    """Write the page."""
    parts = [
        TITLE,
        _head(result["machine"]),
        bars_table(result["wanted"], "at least"),
        "## Packing",
        _packing(result),
        "## Packed and padded steps",
        _padded(result),
        "## Cost of gradient weights",
        _weighed(result),
        "## Log-probabilities without the full logits",
        _logprobs(result),
        "## Two stages and one",
        _stages(result),
        "## Bubbles",
        _bubbles(result),
        "## SmolLM2-135M on two stages",
        _smollm2(result),
        "## Trajectory balance on SmolLM2-135M",
        _balance(result),
        "## Shared prompts",
        _shared(result),
    ]
    write_page(path, parts)


def _head(machine: Machine) -> str:
    return (
        f"{origin('python benchmarks/learner.py', machine)} "
        "The compared sides take turns within one run, and ratios are medians of the rounds' ratios. Absolute figures "
        "depend on the machine and its load, so compare only figures of this page. A *step* is a step of the learner: "
        "scores, loss, backward pass, gradient norm over all stages, clipping and AdamW. The loss is PPO with a group "
        "baseline."
    )


def _packing(r: Figures) -> str:
    rows = [
        [
            str(size),
            f"{r[f'pack_efficiency_{size}']:.4f}",
            f"{r[f'pack_efficiency_{size}_worst']:.4f}",
            f"{r[f'pack_extra_{size}']:.2f}",
            f"{r[f'pack_ms_{size}']:.1f}",
        ]
        for size in (64, 256, 1024)
    ]
    text = (
        "The efficiency of `leeway.learner.packing.pack` is the number of real tokens of a step over the tokens of its "
        "micro-batches (M x 4,096). Lengths are log-normal with median 200 and sigma 1.0, clipped at 2,048. Figures "
        "are means of 32 draws. `pack_efficiency` is the value for a step of 256 sequences. The wasted tokens are the "
        "free space in the last micro-batch. The fourth column counts the micro-batches beyond the minimum that could "
        "hold the tokens."
    )
    head = ["sequences per step", "efficiency, mean", "worst draw", "excess micro-batches, mean", "ms to pack"]
    return f"{text}\n\n{table(head, rows)}"


def _padded(r: Figures) -> str:
    return (
        f"Both sides take a step over {r['padded_num_sequences']} sequences with the lengths above "
        f"({r['padded_num_tokens']:,} real tokens), on a Llama of 4 layers, width 128 and vocabulary 1,024 in float32, "
        "with one thread. The learner has one stage and micro-batches of 4,096 tokens, computes attention per "
        "sequence, and takes one pass. The plain loop runs `LlamaForCausalLM` with SDPA attention on batches of 16 in "
        f"order of arrival, padded to the longest sequence, so that {r['padded_real_share']:.1%} of its tokens are "
        "real. The plain loop accumulates gradients to the same loss and takes one fused AdamW step. The two gradient "
        f"norms agree ({r['packed_grad_norm']:.6g} and {r['padded_grad_norm']:.6g}). The learner trains "
        f"{r['packed_tokens_per_s']:,.0f} real tokens per second, the plain loop {r['padded_tokens_per_s']:,.0f}, so "
        f"`packed_over_padded` is {r['packed_over_padded']:.2f}."
    )


def _weighed(r: Figures) -> str:
    return (
        f"A step of trajectory balance over {r['weighed_num_sequences']} sequences of 64 tokens on the same Llama "
        f"takes {r['weighed_ms']:.0f} ms with the default weights pi / mu "
        '(`corrections = ["token_tis"]`). A step without weights takes '
        f"{r['plain_over_weighed']:.3f} of this time (`plain_over_weighed`)."
    )


def _logprobs(r: Figures) -> str:
    return (
        f"Both sides compute log-probabilities of {r['logprob_num_tokens']:,} tokens from states of width 576 and a "
        "head of 49,152 x 576, forward and backward in float32. Each side runs in a separate process. Memory is the "
        "peak resident set size minus the size before the computation, and includes the gradients of head and states "
        f"(117 MiB). The computation in chunks of {r['logprob_chunk_mib']:g} MiB takes {r['logprob_peak_mib']:.0f} MiB "
        f"and {r['logprob_s']:.1f} s. The computation through the full logits with `log_softmax` takes "
        f"{r['logprob_full_peak_mib']:.0f} MiB and {r['logprob_full_s']:.1f} s. `logprob_peak_ratio` is "
        f"{r['logprob_peak_ratio']:.1f}. This ratio grows with the number of tokens, on which the peak in chunks "
        "hardly depends."
    )


def _stages(r: Figures) -> str:
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in r["pp2_over_pp1_by_schedule"].items())
    return (
        "Two stages are compared with one stage, first on stages that sleep instead of computing. A step has 8 "
        "micro-batches, and each of the two stages sleeps half as long as the single stage. With 1F1B, the gain "
        f"`pp2_over_pp1` is {r['pp2_over_pp1']:.2f}; the bubble allows 1.78. Gains by schedule (x chunks per stage): "
        f"{gains}.\n\n"
        "With real compute, the gain `pp2_over_pp1_real` is "
        f"{r['pp2_over_pp1_real']:.2f} ({r['pp1_tokens_per_s']:,.0f} and {r['pp2_tokens_per_s']:,.0f} tokens/s). The "
        "model is a Llama of 8 layers, width 256 and vocabulary 2,048 in float32. A step has 8 micro-batches of 1,024 "
        "tokens, and each process is pinned to one core. Two independent processes that take this step on one core "
        f"each gain {r['two_process_scaling']:.2f} over a single process (`two_process_scaling`). Shared resources of "
        "the cores cause the difference to 2, and limit any pipeline."
    )


def _bubbles(r: Figures) -> str:
    rows = [[name, f"{each['measured']:.3f}", f"{each['theory']:.3f}"] for name, each in r["bubble_fraction"].items()]
    text = (
        "The bubble is the idle fraction of a stage's time. P processes have stages that sleep 50 ms each for forward "
        "(F), backward for inputs (B) and backward for weights (W). A step has 8 micro-batches. Each of two chunks per "
        "stage sleeps half as long. The learner's `Pipeline` runs the stages, so the difference between measurement "
        "and theory is the time of its communication. In theory, the bubble is (P - 1) / (v M + P - 1) with v chunks "
        "per stage and M micro-batches. For zero bubble, the fraction is (P - 1) / (3 v M + P - 1), because each stage "
        "after the first adds an idle time of F + B - W of a chunk."
    )
    return f"{text}\n\n{table(['P, schedule x chunks per stage', 'measured', 'theory'], rows)}"


def _smollm2(r: Figures) -> str:
    rows = [
        ["plain loop, 1 process, 2 threads", f"{r['smollm2_plain_tokens_per_s']:,.0f}", "1"],
        [
            "learner, 2 stages, 1 thread each, one pass",
            f"{r['smollm2_one_pass_tokens_per_s']:,.0f}",
            f"{r['smollm2_one_pass_over_plain']:.2f}",
        ],
        [
            "learner, 2 stages, 1 thread each, two passes",
            f"{r['smollm2_two_pass_tokens_per_s']:,.0f}",
            f"{r['smollm2_two_pass_over_plain']:.2f}",
        ],
    ]
    norms = ", ".join(f"{norm:.4g}" for norm in r["smollm2_grad_norms"])
    text = (
        f"A step has {r['smollm2_num_tokens']:,} tokens in 16 micro-batches of 512, which are filled to "
        f"{r['smollm2_pack_efficiency']:.1%}. Prompts have at most 64 tokens, and {r['smollm2_completion_share']:.0%} "
        "of the tokens are completion tokens. The learner has float32 master weights, products in bf16, AdamW and "
        "1F1B. The plain loop runs the Transformers model under autocast, with weights rounded to bf16 at the start. "
        "The plain loop has the learner's micro-batches and attention per sequence. Both sides compute logits only at "
        f"completion tokens. The gradient norms of the plain loop, one pass and two passes are {norms}."
    )
    return f"{text}\n\n{table(['', 'tokens/s', 'over plain'], rows)}"


def _balance(r: Figures) -> str:
    sides = {
        "plain loop, 1 process, 2 threads: scores, forward for log Z, forward and backward": "plain",
        "plain loop with whole groups per micro-batch, without a pass for log Z": "plain_one_pass",
        "learner, 2 stages, 1 thread each: scores, one pass": "ours",
        "learner, scores precomputed, two passes": "two_pass",
        "learner, scores precomputed, one pass": "one_pass",
    }
    rows = [[text, f"{r[f'tb_{side}_s']:.2f}"] for text, side in sides.items()]
    norms = ", ".join(f"{norm:.4g}" for norm in r["tb_grad_norms"])
    text = (
        f"A step of trajectory balance has {r['tb_num_tokens']:,} tokens in {r['tb_num_micro_batches']} micro-batches "
        "of whole groups of 8, whose samples do not share a prompt. Precision, attention and plain loop are as in the "
        "previous section. There are no gradient weights. The plain loop takes five units of work: one for each "
        "forward pass, and three for forward and backward. The learner takes four units, because one pass computes "
        f"log Z and the gradient. The gain `smollm2_tb_over_plain` is {r['smollm2_tb_over_plain']:.2f}. Over a plain "
        "loop that also uses whole groups per micro-batch, the gain is "
        f"{r['smollm2_tb_over_plain_one_pass']:.2f}. With precomputed scores, the gain of one pass over two is "
        f"{r['tb_one_pass_over_two']:.2f} (`tb_one_pass_over_two`, at most 1.33). The gradient norms of both plain "
        f"loops and the learner are {norms}."
    )
    return f"{text}\n\n{table(['', 'step, s'], rows)}"


def _shared(r: Figures) -> str:
    rows = [
        [shape, f"{r[f'shared_{name}_plain_s']:.2f}", f"{r[f'shared_{name}_s']:.2f}", f"{bound:.2f}",
         f"{r[f'shared_prefix_over_plain_{name}']:.2f}"]
        for name, shape, bound in (("even", "128 and 128", 16 / 9), ("long_prompts", "512 and 128", 40 / 12))
    ]  # fmt: skip
    text = (
        "A step of trajectory balance over four groups of 8 computes the prompt of a group once in its micro-batch, "
        "and is compared with a step that computes the prompt once per sample (`shared_prefix_over_plain_...`). The "
        "model is a Llama of 8 layers, width 256 and vocabulary 2,048 in float32, on one stage with one thread. The "
        "bound counts tokens only, although the completion of every sample also attends to the prompt."
    )
    head = ["tokens of prompt and completion", "s, prompt per sample", "s, shared prompt", "bound", "gain"]
    return f"{text}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
