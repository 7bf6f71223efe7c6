"""The bars, and the page docs/results/learner.md; the section of the GPU is kept when the rest is written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lib.page import table

Figures = dict[str, Any]

BARS = {
    "pack_efficiency": 0.97,
    "packed_over_padded": 1.5,
    "pp2_over_pp1": 1.5,
    "logprob_peak_ratio": 4.0,
    "smollm2_one_pass_over_plain": 0.8,
}
"""Figure -> at least this is wanted."""
TITLE = "# The learner, measured"
GPU_HEADING = "## One stage on a GPU"


def judged(result: Figures) -> Figures:
    """Every wanted bar, what was measured, and whether it is met; None where it was not measured at full size."""

    def met(key: str, bar: float) -> bool | None:
        return None if result.get(key) is None or result["quick"] else bool(result[key] >= bar)

    return {key: {"at least": bar, "measured": result.get(key), "met": met(key, bar)} for key, bar in BARS.items()}


def write_page(page: Path, result: Figures) -> None:
    """Write the page, but for its GPU section, which stays as it is."""
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    _, heading, rest = old.partition(GPU_HEADING)
    parts = [TITLE, _head(result), _bars(result), *_sections(result)]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n" + (f"\n{heading}{rest}" if heading else ""), encoding="utf-8")


def write_gpu_section(page: Path, result: Figures) -> None:
    """Replace the GPU section, which is the last of the page."""
    text = page.read_text(encoding="utf-8") if page.exists() else TITLE
    before = text.partition(GPU_HEADING)[0].rstrip()
    page.write_text(f"{before}\n\n{GPU_HEADING}\n\n{_gpu(result)}\n", encoding="utf-8")


def _head(result: Figures) -> str:
    machine = result["machine"]
    return (
        f"Written by `python benchmarks/learner.py` on {machine['cores']} cores ({machine['processor']}), no GPU, "
        f"Python {machine['python']}; load average of the machine before it began: {machine['load_before']:.1f}. "
        "Sides that are compared take turns within one run, and ratios are medians of the rounds' ratios. Absolute "
        "figures depend on the machine and its load; compare within this page only. A *step* is the learner's "
        "own: scores, loss, backward pass, gradient norm over all stages, clipping and AdamW; "
        "the loss is PPO with a group baseline."
    )


def _bars(result: Figures) -> str:
    rows = []
    for key, each in result["wanted"].items():
        met = {True: "yes", False: "**no**", None: "-"}[each["met"]]
        rows.append([f"`{key}`", f"{each['at least']:g}", f"{each['measured']:.3f}", met])
    return table(["figure", "wanted, at least", "measured", "met"], rows)


def _sections(result: Figures) -> list[str]:
    return [
        "## Packing",
        _packing(result),
        "## Packed against padded",
        _padded(result),
        "## Log-probabilities without the full logits",
        _logprobs(result),
        "## Two stages against one",
        _stages(result),
        "## Bubbles",
        _bubbles(result),
        "## SmolLM2-135M on two stages",
        _smollm2(result),
    ]


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
        "Real tokens over the tokens of the micro-batches (M x 4,096), as `learner.packing.pack` makes them for a "
        "step: log-normal lengths, median 200, sigma 1.0, clipped at 2,048, mean of 32 draws. `pack_efficiency` "
        "is that of a step of 256 sequences. What is lost is the room left in the last micro-batch: the fourth column "
        "counts the micro-batches beyond the fewest that could hold the tokens."
    )
    head = ["sequences of a step", "efficiency, mean", "worst draw", "micro-batches too many, mean", "ms to pack"]
    return f"{text}\n\n{table(head, rows)}"


def _padded(r: Figures) -> str:
    return (
        f"A step over {r['padded_num_sequences']} sequences of the same lengths ({r['padded_num_tokens']:,} real "
        "tokens), on a Llama of 4 layers, width 128 and vocabulary 1,024 in float32, one thread. Ours: one stage, "
        "micro-batches of 4,096 tokens, attention per sequence, in one pass. The other side: `LlamaForCausalLM` with "
        "its SDPA attention on batches of 16 in order of arrival, padded to the longest (of what it computes "
        f"{r['padded_real_share']:.1%} is real), gradients accumulated to the same loss, one fused AdamW step. The two "
        f"gradient norms agree ({r['packed_grad_norm']:.6g} and {r['padded_grad_norm']:.6g}). Real tokens per second: "
        f"{r['packed_tokens_per_s']:,.0f} packed, {r['padded_tokens_per_s']:,.0f} padded: "
        f"`packed_over_padded` {r['packed_over_padded']:.2f}."
    )


def _logprobs(r: Figures) -> str:
    return (
        f"Log-probabilities of {r['logprob_num_tokens']:,} tokens from states of width 576 and a head of 49,152 x 576, "
        "forward and backward, float32, each side in a process of its own; greatest resident set less that before it, "
        "the gradients of head and states (117 MiB) included on both sides. In chunks of "
        f"{r['logprob_chunk_mib']:g} MiB: {r['logprob_peak_mib']:.0f} MiB in {r['logprob_s']:.1f} s; through the full "
        f"logits with `log_softmax`: {r['logprob_full_peak_mib']:.0f} MiB in {r['logprob_full_s']:.1f} s. "
        f"`logprob_peak_ratio` {r['logprob_peak_ratio']:.1f}; it grows with the number of tokens, for our peak hardly "
        "depends on it."
    )


def _stages(r: Figures) -> str:
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in r["pp2_over_pp1_by_schedule"].items())
    return (
        "On stages that sleep, 8 micro-batches, 1F1B, each of the two stages with half of the sleep of the one: "
        f"`pp2_over_pp1` {r['pp2_over_pp1']:.2f} of the 1.78 that the bubble allows. By schedule (x chunks per stage): "
        f"{gains}.\n\n"
        "With real compute, on a Llama of 8 layers, width 256 and vocabulary 2,048 in float32, 8 micro-batches of "
        "1,024 tokens, each process pinned to one core: "
        f"`pp2_over_pp1_real` {r['pp2_over_pp1_real']:.2f} ({r['pp1_tokens_per_s']:,.0f} and "
        f"{r['pp2_tokens_per_s']:,.0f} tokens/s). Two processes that take the same step and know nothing of each "
        f"other, on a core each, gain `two_process_scaling` {r['two_process_scaling']:.2f} over one alone: "
        "what the cores share is not the pipeline's to give."
    )


def _bubbles(r: Figures) -> str:
    rows = [[name, f"{each['measured']:.3f}", f"{each['theory']:.3f}"] for name, each in r["bubble_fraction"].items()]
    text = (
        "Idle share of a stage's time, P processes with stages that sleep 50 ms each for forward (F), backward for "
        "inputs (B) and backward for weights (W), 8 micro-batches; with two chunks per stage each sleeps half of it. "
        "The learner's own `Pipeline` runs them, so what is measured beyond theory is its communication. In theory "
        "(P - 1) / (v M + P - 1) with v chunks; zero bubble (P - 1) / (3 v M + P - 1), where each "
        "stage but one costs F + B - W of a chunk."
    )
    return f"{text}\n\n{table(['P, schedule x chunks per stage', 'measured', 'in theory'], rows)}"


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
        f"A step of {r['smollm2_num_tokens']:,} tokens in 16 micro-batches of 512 (filled to "
        f"{r['smollm2_pack_efficiency']:.1%}; prompts of at most 64 tokens, {r['smollm2_completion_share']:.0%} of the "
        "tokens are completion tokens), float32 weights, bf16 autocast, AdamW, 1F1B. The plain loop runs "
        "the Transformers model on the same micro-batches with the learner's attention per sequence, and computes "
        f"logits at completion tokens alone, as we do. Gradient norms of plain loop, one pass and two: {norms}."
    )
    return f"{text}\n\n{table(['', 'tokens/s', 'over plain'], rows)}"


def _gpu(r: Figures) -> str:
    return (
        f"Written by `python benchmarks/learner.py --gpu` on one {r['gpu_device']}: the shape of {r['gpu_shape']} "
        f"({r['gpu_num_parameters'] / 1e9:.2f} billion parameters, head tied), random weights, float32 masters, bf16 "
        f"autocast, one stage, one pass, {r['gpu_num_tokens']:,} tokens in {r['gpu_micro_batches']} micro-batches of "
        f"8,192: {r['gpu_tokens_per_s']:,.0f} tokens/s, {r['gpu_mfu']:.1%} of the tensor cores' dense bf16 peak in "
        f"model FLOPs (a recomputation not counted), {r['gpu_peak_gib']:.0f} GiB at most."
    )
