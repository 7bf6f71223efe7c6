"""benchmarks/gpu: operations counted without a GPU, time limits of steps, and the page made from the step results."""

import importlib
import inspect
import json
import struct
import tarfile
import tomllib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.gpu import (
    card,
    counting,
    engine,
    gaps,
    page,
    paper,
    pretended,
    prune,
    shapes,
    site_folder,
    steps,
    whole,
)
from benchmarks.gpu.__main__ import main
from torch import nn
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

from leeway.buffer.schema import VersionSpan
from leeway.common.staleness import PolicyVersion
from leeway.launch.config import load_config
from leeway.launch.resources import Gpu, check_gpus
from leeway.learner.packing import PackingRule, pack


def test_model_flops_are_six_per_weight_and_token_plus_attention():
    shape = shapes.SHAPES["tiny"]
    model = Qwen2ForCausalLM(shapes.config_of("tiny"))
    weights = sum(module.weight.numel() for module in model.model.modules() if isinstance(module, nn.Linear))
    rows = shapes.fresh_rows(2, 512, seed=0, median=20, longest=40)
    lengths = [len(row.token_ids) for row in rows]
    head = 6 * model.lm_head.weight.numel() * sum(row.num_completion_tokens for row in rows)
    attention = 6 * shape["num_hidden_layers"] * shape["hidden_size"] * sum(length**2 for length in lengths)
    assert shapes.model_flops(shape, rows) == 6 * weights * sum(lengths) + head + attention


def test_another_seed_gives_other_lengths_and_tokens():
    one, two = (shapes.fresh_rows(8, 512, seed=seed) for seed in (1, 2))
    assert [len(row.token_ids) for row in one] != [len(row.token_ids) for row in two]
    assert all(row.num_completion_tokens / len(row.token_ids) == pytest.approx(0.8, abs=0.01) for row in one)


# --- counting -------------------------------------------------------------------------------------


def test_a_matrix_product_under_autocast_is_counted_with_the_casts_of_its_inputs():
    with pretended.pretended_gpu():
        layer = nn.Linear(64, 32, bias=False, device="cuda")
        states = torch.empty(100, 64, device="cuda")
        counter = counting.Counting()
        counter.register_weights(layer.parameters())
        with counter, torch.autocast("cuda", torch.bfloat16):
            for _ in range(2):
                out = layer(states)
        assert (out.device.type, out.dtype) == ("cuda", torch.bfloat16)
        figures = counter.figures
    assert figures["forward.gemm.kernels"] == 2
    assert figures["forward.gemm.flops"] == 2 * 2 * 100 * 64 * 32
    assert figures["forward.gemm.bytes"] == 2 * 2 * (100 * 64 + 64 * 32 + 100 * 32)
    # the states are cast in both passes; the weight is cast once, because autocast caches the result
    assert figures["casts"] == 1
    assert figures["forward.other.bytes"] == 6 * (2 * 100 * 64 + 64 * 32)


def test_views_move_no_bytes_and_the_backward_pass_is_counted_separately():
    with pretended.pretended_gpu(), counting.Counting() as counter:
        states = torch.empty(10, 4, device="cuda", requires_grad=True)
        out = F.silu(states.view(4, 10).transpose(0, 1))
        counter.phase = "backward"
        out.backward(torch.empty_like(out))
    assert counter.figures["forward.other.kernels"] == 1
    assert counter.figures["forward.other.bytes"] == 2 * 40 * 4
    assert counter.by_operation["backward.silu_backward"] == 3 * 40 * 4


def test_scatter_and_gather_move_only_the_selected_elements():
    with pretended.pretended_gpu(), counting.Counting() as counter:
        table, one_each = torch.empty(10, 1000, device="cuda"), torch.zeros(10, 1, dtype=torch.int64, device="cuda")
        table.scatter_(1, one_each, 0)
        table.gather(1, one_each)
    assert counter.by_operation["forward.scatter_"] == 10 * (8 + 4)
    assert counter.by_operation["forward.gather"] == 10 * (8 + 2 * 4)


def test_gradients_accumulate_over_micro_batches():
    packed = pack([np.arange(30)], [6], PackingRule(64))
    with pretended.pretended_gpu():
        stage = pretended.fake_stage("tiny", (1, 1), last=False)
        added = counting.count_micro_batch(stage, packed, 0).by_operation["backward.add_"]
    of_matrices = {module.weight for module in stage.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    assert added == 12 * sum(parameter.numel() for parameter in {*stage.parameters()} - of_matrices)


def test_kept_activations_are_counted_separately_from_weight_copies():
    with pretended.pretended_gpu():
        layer = nn.Linear(64, 32, bias=False, device="cuda")
        states = torch.empty(100, 64, device="cuda", requires_grad=True)
        counter = counting.Counting()
        counter.register_weights(layer.parameters())
        with counter, torch.autocast("cuda", torch.bfloat16):
            out = layer(states)
            copies, kept = counter.kept()
        assert copies == 64 * 32 * 2
        assert kept == 100 * (64 + 32) * 2
        assert out.requires_grad


def test_a_stage_on_a_simulated_gpu_makes_one_attention_call_and_casts_no_weight():
    packed = pack([np.arange(30), np.arange(9)], [6, 2], PackingRule(64))
    with pretended.pretended_gpu():
        one, two = (
            counting.count_micro_batch(pretended.fake_stage("tiny", (1, layers), last=True), packed, 0).figures
            for layers in (1, 2)
        )
    layer = Counter(two)
    layer.subtract(one)
    assert (layer["forward.attention.kernels"], layer["backward.attention.kernels"]) == (1, 1)
    assert layer["forward.gemm.kernels"] == 7, "a layer has seven matrices: q, k, v, o, gate, up, down"
    assert layer["backward.gemm.kernels"] == 14
    assert two["casts"] == 0


def test_each_fused_kernel_is_counted_as_one_operation():
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


def test_the_paper_page_has_the_kernels_of_a_layer_and_the_memory_of_each_stage():
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
    assert first + last > alone, "two stages have two embedding tables, and the first has two micro-batches in flight"


# --- steps and page -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", steps.PARTS)
def test_the_limits_of_steps_fit_into_the_limit_of_their_part(part):
    assert 0 < sum(step.limit_s for step in steps.STEPS if step.part == part) <= steps.PARTS[part]


@pytest.mark.parametrize("step", steps.STEPS, ids=lambda step: step.name)
def test_every_step_names_a_function_that_accepts_its_options(step):
    module, _, name = step.function.partition(":")
    function = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    inspect.signature(function).bind(None, **step.options)
    assert step.shape is None or step.shape in shapes.SHAPES


def test_steps_are_chosen_by_part_and_by_name():
    assert {step.part for step in steps.chosen(["right"], [])} == {"right"}
    assert [step.name for step in steps.chosen([], ["head", "facts"])] == ["facts", "head"]
    with pytest.raises(ValueError, match="no step hed: choose from facts"):
        steps.chosen([], ["hed"])


@pytest.mark.process
def test_a_step_that_hangs_or_dies_is_reported_and_ended(tmp_path):
    lines = []
    rest = {"on_cpu": True, "output_folder": tmp_path, "write": lines.append}
    (facts,) = steps.chosen([], ["facts"])
    assert not steps.run_step(facts, tmp_path, limit_s=0.2, **rest)
    assert not steps.run_step(replace(facts, name="unknown"), tmp_path, limit_s=30.0, **rest)
    hung, died = lines
    assert (hung["step"], hung["failed"]) == ("facts", "timed out after 0.2 s")
    assert died["failed"].startswith("the process exited with status 1: ValueError")


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


def test_the_page_has_the_newest_metrics_their_bars_and_the_failures():
    text = "\n\n".join(page.page_of([{**line, "cpu": False} for line in LINES]))
    assert "commit abc, on one NVIDIA H100 (79 GiB" in text
    assert "| gradients against the CPU, float64 | at most 1e-10 | 3e-12 | yes |" in text
    assert "| MFU of 1.5B | at least 0.45 | 0.300 | **no** |" in text
    assert "**Failed**: `sweep`: took longer than 160 s." in text


def test_the_page_refuses_lines_from_a_cpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.jsonl"
    out.write_text(json.dumps({**LINES[0], "cpu": True}) + "\n")
    monkeypatch.setattr("sys.argv", ["gpu", "--write", "--out", str(out)])
    with pytest.raises(SystemExit):
        main()
    assert "has no line from a GPU" in capsys.readouterr().err


COMPARED = [
    {"step": "engine", "case": "round 1 of 3", "tokens_per_s": 1.0},
    {"step": "engine", "case": "round 2 of 3", "tokens_per_s": 30_000.0},
    {"step": "engine", "case": "round 3 of 3", "tokens_per_s": 30_000.0},
    {"step": "engine", "case": "lag 0, head in float32", "mean_nats": 0.002},
    {"step": "engine", "case": "update 1, recompute", "pause_s": 0.25},
    {"step": "engine of vLLM", "case": "round 1 of 3", "tokens_per_s": 1.0},
    {"step": "engine of vLLM", "case": "round 2 of 3", "tokens_per_s": 40_000.0},
    {"step": "engine of vLLM", "case": "lag 0, head in bfloat16", "mean_nats": 0.004},
    {"step": "pair asynchronous", "case": "steps", "samples_per_s": 90.0},
    {"step": "pair synchronous", "case": "steps", "samples_per_s": 60.0},
    {"step": "demo", "case": "end", "accuracy_after": 0.97},
    {"step": "gaps", "case": "one step by its kernels", "idle_ms": {"0 to 5 us": 1.5}},
]


def test_the_page_compares_the_two_engines_and_the_two_runs():
    origin = {"cpu": False, "commit": "abc", "card": "NVIDIA H200", "versions": "torch 2.11.0, vllm 0.32.0"}
    text = "\n\n".join(page.page_of([{**line, **origin} for line in COMPARED]))
    assert "commit abc, on one NVIDIA H200, torch 2.11.0, vllm 0.32.0" in text
    assert "| tokens/s, the engine relative to vLLM's defaults | - | 0.75 | - |" in text
    assert "| mismatch at lag 0, head in bfloat16, mean nats | - | 0.004 | - |" in text
    assert "| pause of a weight update, median of 1, ms | - | 250 | - |" in text
    assert "| samples/s, asynchronous relative to synchronous | - | 1.50 | - |" in text
    for part in ("engine", "demo", "pair", "gaps"):
        assert f"## {page.HEADS[part]}" in text
    assert page.HEADS["right"] not in text


# --- before anything starts -----------------------------------------------------------------------


H100 = Gpu(0, "GPU-1", "NVIDIA H100", "580.159", 80 * 2**30, 2**30, 9.0)


@pytest.fixture
def machine(monkeypatch):
    """Return `machine(...)`, which simulates a machine that can run every step and sets the arguments of `main`."""

    def prepare(*arguments, gpus=(H100,), cuda=True, packages=("vllm", "ray"), packed=False):
        monkeypatch.setattr(card, "list_gpus", lambda: list(gpus))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(card.importlib.util, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.delenv("LEEWAY_SITE", raising=False)
        if packed:
            monkeypatch.setenv("LEEWAY_SITE", "/tmp/site")
        monkeypatch.setattr("sys.argv", ["gpu", *arguments])
        monkeypatch.setattr("benchmarks.gpu.__main__.run_step", lambda *_, **__: pytest.fail("a step started"))

    return prepare


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": ()}, "nvidia-smi lists no GPU: run on a machine with an NVIDIA card, or pass --cpu"),
        ({"cuda": False}, f"torch {torch.__version__} finds no CUDA device, but nvidia-smi lists GPU 0"),
        (
            {"gpus": [H100._replace(driver="535.104")]},
            "the NVIDIA driver 535.104 of GPU 0 (NVIDIA H100, 80 GiB) is too old for CUDA 13",
        ),
        (
            {"gpus": [H100._replace(total_bytes=24 * 2**30)]},
            "has 23 GiB free, but the step baseline with the shape 1.5B needs 46 GiB: stop other processes",
        ),
        ({"packages": ("ray",)}, "the part engine needs vllm, which cannot be imported: source benchmarks/gpu/unpack"),
        (
            {"gpus": [H100._replace(capability=8.0)], "packed": True},
            "has compute capability 8, but the vLLM packed by pack",
        ),
    ],
)
def test_an_unsuitable_machine_is_refused_in_one_line_before_a_step_starts(machine, options, message):
    machine(**options)
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code.startswith("benchmarks.gpu: ")
    assert message in refused.value.code
    assert "\n" not in refused.value.code


@pytest.mark.parametrize("text", ["enforce_eager", "[1]"])
def test_engine_arguments_that_are_not_an_object_are_refused(machine, capsys, text):
    machine("--engine-args", text)
    with pytest.raises(SystemExit):
        main()
    assert (
        f"--engine-args: expected a JSON object such as {{\"enforce_eager\": true}}, got '{text}'"
        in capsys.readouterr().err
    )


def test_steps_without_a_large_shape_or_an_engine_need_neither(machine):
    machine(gpus=[H100._replace(total_bytes=8 * 2**30)], packages=())
    card.check(steps.chosen(["right"], []), on_cpu=False)
    machine(gpus=(), cuda=False)
    card.check(steps.chosen([], []), on_cpu=True)


def test_every_line_has_commit_card_and_versions(machine, monkeypatch, tmp_path):
    out = tmp_path / "gpu.jsonl"
    machine("--steps", "facts", "--out", str(out))

    def run_step(step, *_, write, **__):
        write({"step": step.name, "case": "card", "cpu": False})
        return True

    monkeypatch.setattr("benchmarks.gpu.__main__.run_step", run_step)
    with pytest.raises(SystemExit):
        main()
    line = json.loads(out.read_text())
    assert line["card"] == "NVIDIA H100"
    assert line["commit"]
    assert f"torch {torch.__version__}".partition("+")[0] in line["versions"]


# --- engines and whole runs -----------------------------------------------------------------------


def _generation(*spans):
    """Return a fake request whose spans are given as (version, start, end)."""
    version_spans = tuple(VersionSpan(PolicyVersion(0, version), start, end) for version, start, end in spans)
    return SimpleNamespace(token_ids=[0] * 8, spans=version_spans)


def test_an_update_counts_requests_with_tokens_before_and_after_it():
    found = [_generation((0, 0, 3), (1, 3, 8)), _generation((0, 0, 2), (1, 2, 4), (2, 4, 8)), _generation((2, 0, 8))]
    assert engine.check_spans(found, [1, 2]) == 1
    with pytest.raises(RuntimeError, match="no request has tokens from before and after update 3"):
        engine.check_spans(found, [1, 2, 3])


@pytest.mark.parametrize("spans", [[(0, 0, 3), (1, 4, 8)], [(0, 0, 7)], [(1, 0, 3), (0, 3, 8)], [(1, 0, 3), (1, 3, 8)]])
def test_spans_with_a_gap_or_out_of_order_fail_the_step(spans):
    with pytest.raises(RuntimeError, match="spans"):
        engine.check_spans([_generation(*spans)], [])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_configs_of_demo_and_pair_are_valid(tmp_path, on_gpu):
    (tmp_path / "pair.toml").write_text(whole.pair_config(tmp_path, tmp_path))
    demo, pair = whole.ROOT / "examples" / "demo.toml", tmp_path / "pair.toml"
    for path, keys in ((demo, whole.DEMO_ON_GPU), (pair, whole.PAIR_ON_GPU)):
        config = load_config(path, whole.overrides_of(keys) if on_gpu else [])
        assert (config.learner.gpus > 0) == on_gpu
        check_gpus(config)


def test_engine_arguments_reach_the_config_of_a_run_including_tables():
    arguments = {"enforce_eager": True, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    overrides = whole.overrides_of({"actors.engine_args": arguments})
    assert load_config(whole.ROOT / "examples" / "demo.toml", overrides).actors.engine_args == arguments


def test_the_tokenizer_of_the_pair_has_a_word_for_every_token(tmp_path):
    whole.write_tokenizer(tmp_path, 100)
    tokenizer = whole.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer("3 10 99").input_ids == [3, 10, 99]
    assert tokenizer.decode([3, 10, shapes.EOS], skip_special_tokens=True) == "310"


def test_an_interrupted_run_has_the_metrics_of_its_steps(tmp_path):
    keys = ("batch/trajectories", "batch/completion_tokens", "lag/token_max")
    rows = [
        {"step": number, "loss": 0.0, "skipped": False, "started_s": 9.0 + number, "finished_s": 10.0 + number}
        | dict.fromkeys(keys, 8)
        for number in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = whole.figures(whole.FinishedRun(tmp_path), began_s=4.0)
    assert (found["steps"], found["counted"], found["samples_per_s"], found["first_batch_s"]) == (8, 4, 8.0, 6.0)


def test_overlapping_kernels_count_once_and_gaps_are_grouped_by_length():
    found = gaps.idle([(0.0, 10.0), (5.0, 8.0), (13.0, 20.0), (220.0, 230.0)])
    assert found["busy_s"] == pytest.approx(27e-6)
    assert found["idle_s"] == pytest.approx(203e-6)
    assert (found["idle_ms"]["0 to 5 us"], found["idle_ms"]["100 to 1000 us"]) == (0.0, 0.2)


# --- packages for a machine without network -------------------------------------------------------


def _image(kind, arch, content):
    head = struct.pack("<HHIQ", kind, 0, 64, len(content)).ljust(28, b"\0") + struct.pack("<I", arch)
    return head.ljust(64, b"\0") + content


def _library(*containers):
    """Return an ELF file with a section of containers and a section of names."""
    body = b"".join(
        struct.pack("<IHHQ", prune.MAGIC, 1, 16, sum(map(len, images))) + b"".join(images) for images in containers
    )
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start, table = 64, 64 + len(body) + len(names)
    heads = struct.pack("<IIQQQQ", 0, 0, 0, 0, 0, 0).ljust(64, b"\0")
    heads += struct.pack("<IIQQQQ", 1, 1, 0, 0, start, len(body)).ljust(64, b"\0")
    heads += struct.pack("<IIQQQQ", 12, 3, 0, 0, start + len(body), len(names)).ljust(64, b"\0")
    elf = bytearray(64)
    struct.pack_into("<Q", elf, 40, table)
    struct.pack_into("<HHH", elf, 58, 64, 3, 2)
    return bytearray(bytes(elf) + body + names + heads)


def test_pruning_keeps_hopper_device_code_and_all_offsets():
    hopper, ampere = _image(2, 90, b".text.attention\0".ljust(64, b"h")), _image(2, 80, b"a" * 32)
    ptx, dropped = _image(1, 90, b"p" * 32), _image(2, 90, b".text.attention_fp8\0".ljust(64, b"d"))
    data = _library([ampere, hopper], [ampere, ptx], [dropped])
    size = len(data)
    found = prune.prune(data, prune.re.compile(rb"fp8"))
    kept = [[image.content for image in each.images] for each in prune.containers(data)]
    assert (len(data), found.num_containers) == (size, 3)
    assert kept == [[hopper], [ampere], [ampere]], "a container keeps its smallest image if no image matches"
    assert found.kept_bytes == len(hopper) + 2 * len(ampere)


def test_a_site_folder_is_unpacked_and_registers_leeway(tmp_path):
    (tmp_path / "site" / "package").mkdir(parents=True)
    (tmp_path / "site" / "package" / "__init__.py").write_text("here = True")
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "site", "site")
    site_folder.unpack(tmp_path / "a.tar.xz", tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "package" / "__init__.py").read_text() == "here = True"
    project = tomllib.loads(site_folder.PROJECT.read_text())["project"]
    folder = site_folder.register(project, tmp_path / "unpacked")
    (leeway,) = importlib.metadata.distributions(path=[str(folder.parent)])
    assert leeway.version == project["version"]
    assert "lmdb>=3.0" in leeway.requires
    (point,) = leeway.entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "leeway.weight_sync.vllm_engine:register")


def test_the_stub_of_an_omitted_package_has_every_name():
    absent = importlib.import_module("benchmarks.gpu.absent")
    assert absent.Anything.solve(1) == []
    with pytest.raises(AttributeError):
        absent.__getattr__("__path__")
