"""benchmarks/gpu: what it counts without a GPU, how its steps are bounded, and the page made of their lines."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

from benchmarks.gpu import counting, page, paper, pretended, shapes, steps
from benchmarks.gpu.__main__ import main
from learner.packing import PackingRule, pack


def test_model_flops_are_six_per_weight_and_token_plus_attention():
    shape = shapes.SHAPES["tiny"]
    model = Qwen2ForCausalLM(shapes.config_of("tiny"))
    weights = sum(module.weight.numel() for module in model.model.modules() if isinstance(module, nn.Linear))
    rows = shapes.fresh_rows(2, 512, seed=0, median=20, longest=40)
    lengths = [len(row.token_ids) for row in rows]
    head = 6 * model.lm_head.weight.numel() * sum(row.num_completion_tokens for row in rows)
    attention = 6 * shape["num_hidden_layers"] * shape["hidden_size"] * sum(length**2 for length in lengths)
    assert shapes.model_flops(shape, rows) == 6 * weights * sum(lengths) + head + attention


def test_another_seed_makes_a_batch_of_other_lengths_and_tokens():
    one, two = (shapes.fresh_rows(8, 512, seed=seed) for seed in (1, 2))
    assert [len(row.token_ids) for row in one] != [len(row.token_ids) for row in two]
    assert all(row.num_completion_tokens / len(row.token_ids) == pytest.approx(0.8, abs=0.01) for row in one)


# --- counting -------------------------------------------------------------------------------------


def test_a_product_under_autocast_is_counted_with_the_casts_of_what_it_reads():
    with pretended.pretended_gpu():
        layer = nn.Linear(64, 32, bias=False, device="cuda")
        states = torch.empty(100, 64, device="cuda")
        counter = counting.Counting()
        counter.know(layer.parameters())
        with counter, torch.autocast("cuda", torch.bfloat16):
            for _ in range(2):
                out = layer(states)
        assert (out.device.type, out.dtype) == ("cuda", torch.bfloat16)
        figures = counter.figures
    assert figures["forward.gemm.kernels"] == 2
    assert figures["forward.gemm.flops"] == 2 * 2 * 100 * 64 * 32
    assert figures["forward.gemm.bytes"] == 2 * 2 * (100 * 64 + 64 * 32 + 100 * 32)
    # the states twice; the weight once, for autocast keeps what it has made of it
    assert figures["casts"] == 1
    assert figures["forward.other.bytes"] == 6 * (2 * 100 * 64 + 64 * 32)


def test_views_move_nothing_and_a_backward_pass_is_counted_apart():
    with pretended.pretended_gpu(), counting.Counting() as counter:
        states = torch.empty(10, 4, device="cuda", requires_grad=True)
        out = F.silu(states.view(4, 10).transpose(0, 1))
        counter.phase = "backward"
        out.backward(torch.empty_like(out))
    assert counter.figures["forward.other.kernels"] == 1
    assert counter.figures["forward.other.bytes"] == 2 * 40 * 4
    assert counter.by_operation["backward.silu_backward"] == 3 * 40 * 4


def test_who_sets_or_picks_a_few_numbers_of_many_moves_those_alone():
    with pretended.pretended_gpu(), counting.Counting() as counter:
        table, one_each = torch.empty(10, 1000, device="cuda"), torch.zeros(10, 1, dtype=torch.int64, device="cuda")
        table.scatter_(1, one_each, 0)
        table.gather(1, one_each)
    assert counter.by_operation["forward.scatter_"] == 10 * (8 + 4)
    assert counter.by_operation["forward.gather"] == 10 * (8 + 2 * 4)


def test_gradients_are_added_to_those_of_the_micro_batch_before():
    packed = pack([np.arange(30)], [6], PackingRule(64))
    with pretended.pretended_gpu():
        stage = pretended.fake_stage("tiny", (1, 1), last=False)
        added = counting.count_micro_batch(stage, packed, 0).by_operation["backward.add_"]
    of_matrices = {module.weight for module in stage.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    assert added == 12 * sum(parameter.numel() for parameter in {*stage.parameters()} - of_matrices)


def test_what_a_forward_pass_keeps_is_told_from_copies_of_weights():
    with pretended.pretended_gpu():
        layer = nn.Linear(64, 32, bias=False, device="cuda")
        states = torch.empty(100, 64, device="cuda", requires_grad=True)
        counter = counting.Counting()
        counter.know(layer.parameters())
        with counter, torch.autocast("cuda", torch.bfloat16):
            out = layer(states)
            copies, kept = counter.kept()
        assert copies == 64 * 32 * 2
        assert kept == 100 * (64 + 32) * 2
        assert out.requires_grad


def test_a_stage_on_a_gpu_that_is_not_there_packs_attention_into_one_call_and_casts_no_weight():
    packed = pack([np.arange(30), np.arange(9)], [6, 2], PackingRule(64))
    with pretended.pretended_gpu():
        one, two = (
            counting.count_micro_batch(pretended.fake_stage("tiny", (1, layers), last=True), packed, 0).figures
            for layers in (1, 2)
        )
    layer = Counter(two)
    layer.subtract(one)
    assert (layer["forward.attention.kernels"], layer["backward.attention.kernels"]) == (1, 1)
    assert layer["forward.gemm.kernels"] == 7, "q, k, v, o, gate, up, down"
    assert layer["backward.gemm.kernels"] == 14
    assert two["casts"] == 0


def test_what_fused_kernels_compute_is_one_operation_each():
    packed = pack([np.arange(30)], [6], PackingRule(64))
    with pretended.pretended_kernels(), pretended.pretended_gpu():
        moved, of_last = (
            counting.count_micro_batch(pretended.fake_stage("tiny", (1, 1), last=last), packed, 0).by_operation
            for last in (False, True)
        )
    tokens, hidden, keys, wide = 30, 64, 32, 128
    normed = tokens * hidden * 2 + hidden * 2 + tokens * 4
    assert moved["forward.fused_pass_norm"] == tokens * hidden * 4 + normed
    assert moved["forward.fused_add_norm"] == tokens * hidden * (4 + 2 + 4) + normed
    assert of_last["forward.fused_norm"] == 24 * hidden * 4 * 2 + hidden * 2 + 24 * 4
    assert moved["forward.fused_gate"] == 3 * tokens * wide * 2
    assert moved["forward.fused_rotation"] == 2 * tokens * (hidden + keys) * 2 + 2 * tokens * 16 * 4
    assert moved["backward.fused_gate_backward"] == 5 * tokens * wide * 2
    assert of_last["forward.fused_softmax"] == 24 * 512 * 4 + 24 * 4
    assert of_last["forward.fused_softmax_again"] == 24 * 512 * (4 + 2)
    assert not {"forward.silu", "forward.rsqrt", "forward.exp_"} & of_last.keys()


def test_the_page_on_paper_has_the_kernels_of_a_layer_and_what_each_stage_holds():
    counted = counting.count_shape("small")
    layer = counted["training"]["layer"]
    text = "\n\n".join(paper.page_of({"1.5B": {"now": counted}}, "", "abc"))
    assert f"| kernels, forward | {sum(layer[f'forward.{kind}.kernels'] for kind in paper.KINDS):.0f} |" in text
    assert "*before*" not in text
    (alone,) = paper.memory_gib(counted, 1)
    trained = 18 * (8 * shapes.layer_weights(shapes.SHAPES["small"]) + 512 * 32_000)
    kept = 8 * layer["kept.activations"] + sum(
        counted["training"][of]["kept.activations"] for of in ("embedding", "head")
    )
    assert alone * 2**30 == pytest.approx(trained + kept)
    first, last = paper.memory_gib(counted, 2)
    assert first + last > alone, "the table twice, and two micro-batches in flight on the first"


# --- steps and page -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", steps.PARTS)
def test_a_part_takes_nine_minutes_at_most(part):
    assert sum(step.limit_s for step in steps.STEPS if step.part == part) <= steps.PART_LIMIT_S


def test_steps_are_chosen_by_part_and_by_name():
    assert {step.part for step in steps.chosen(["right"], [])} == {"right"}
    assert [step.name for step in steps.chosen([], ["head", "facts"])] == ["facts", "head"]
    with pytest.raises(ValueError, match="no step hed; there are facts"):
        steps.chosen([], ["hed"])


@pytest.mark.process
def test_a_step_that_hangs_or_dies_is_told_and_ends(tmp_path):
    told = []
    rest = {"on_cpu": True, "beside": tmp_path, "write": told.append}
    (facts,) = steps.chosen([], ["facts"])
    assert not steps.run_step(facts, tmp_path, limit_s=0.2, **rest)
    assert not steps.run_step(replace(facts, name="unheard of"), tmp_path, limit_s=30.0, **rest)
    hung, died = told
    assert (hung["step"], hung["failed"]) == ("facts", "took longer than 0.2 s")
    assert died["failed"].startswith("its process ended with status 1: ValueError")


LINES = [
    {"step": "facts", "case": "card", "name": "NVIDIA H100", "total_gib": 79.2, "nvidia_smi": "580"},
    {"step": "facts", "case": "software", "python": "3.12", "torch": "2.11", "transformers": "5.17", "triton": None,
     "cuda": "13.0", "commit": "abc"},
    {"step": "exact", "case": "llama float64", "gradient": 3e-12, "wanted": 1e-10, "met": True},
    {"step": "baseline", "case": "steps", "shape": "1.5B", "mfu": 0.5, "tokens_per_s": 40_000.0},
    {"step": "baseline", "case": "took", "seconds": 50.0},
    {"step": "baseline", "case": "steps", "shape": "1.5B", "mfu": 0.3, "tokens_per_s": 25_000.0},
    {"step": "sweep", "case": "took", "seconds": 160.0, "failed": "took longer than 160 s"},
]  # fmt: skip


def test_the_page_has_the_newest_figures_their_bars_and_what_failed():
    text = "\n\n".join(page.page_of([{**line, "cpu": False} for line in LINES]))
    assert "commit abc, on one NVIDIA H100 (79 GiB" in text
    assert "| gradients against the CPU, float64 | at most 1e-10 | 3e-12 | yes |" in text
    assert "| MFU of 1.5B | at least 0.45 | 0.300 | **no** |" in text
    assert "**Failed**: `sweep`: took longer than 160 s." in text


def test_lines_from_a_cpu_make_no_page(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.jsonl"
    out.write_text(json.dumps({**LINES[0], "cpu": True}) + "\n")
    monkeypatch.setattr("sys.argv", ["gpu", "--write", "--out", str(out)])
    with pytest.raises(SystemExit):
        main()
    assert "has no line from a GPU" in capsys.readouterr().err
