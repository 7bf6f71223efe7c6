"""The device of a rank: its selection, its memory limit, and the estimated memory need of training."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from leeway.learner import device as device_module
from leeway.learner.attention import AttentionLayout
from leeway.learner.config import LearnerConfig
from leeway.learner.decoders import StageShare, split_layers, widths
from leeway.learner.device import configure, device_of, kept_bytes, memory_need, micro_batches_in_flight
from leeway.learner.model import StageModule
from leeway.learner.products import LogitRule

TOKENS = 480
SHAPES = {
    "qwen2": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
    "llama": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192},
}
QWEN_7B = {
    **{"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944},
    **{"num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False},
}


class Kept:
    """Counts the bytes that autograd saves: each storage once, casts of parameters separately, and no parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        self._shapes = {shape for each in shapes for shape in (each, each[::-1])}
        self._seen: list[torch.Tensor] = []
        self.activations = self.casts = 0

    def __enter__(self) -> "Kept":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._own.add(storage._cdata)
            self._seen.append(tensor)  # keeps the storage alive so that its address is not reused
            if tuple(tensor.shape) in self._shapes:
                self.casts += storage.nbytes()
            else:
                self.activations += storage.nbytes()
        return tensor


def kept_by_layers(family: str, precision: str, num_layers: int) -> Kept:
    """Return the bytes kept by the middle stage of a model, measured on tensors without data."""
    config = transformers.CONFIG_MAPPING[family](**SHAPES[family], num_hidden_layers=num_layers + 2, vocab_size=64)
    with FakeTensorMode():
        whole = AutoModelForCausalLM.from_config(config)
        stage = StageModule(whole, StageShare(1, 3, 1, 1 + num_layers), LogitRule(1.0))
        if precision == "bfloat16":
            stage.compute_in_bfloat16()
        stage._batch = SimpleNamespace(
            num_tokens=[TOKENS],
            positions_ML=torch.arange(TOKENS)[None],
            layouts=[AttentionLayout.build(np.array([0, 120, 240, TOKENS]), torch.device("cpu"))],
        )
        states = torch.empty(1, TOKENS, config.hidden_size, dtype=stage.states_dtype, requires_grad=True)
        with Kept(stage) as kept:
            stage(states, 0)
    return kept


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHAPES)
def test_the_estimated_bytes_of_a_layer_equal_those_saved_by_autograd(family, precision):
    one, three = (kept_by_layers(family, precision, num) for num in (1, 3))
    model = transformers.CONFIG_MAPPING[family](**SHAPES[family])
    counted = (three.activations - one.activations) / 2 / TOKENS
    assert kept_bytes(model, LearnerConfig(precision=precision)) == pytest.approx(counted, rel=0.03)
    assert three.casts == one.casts == 0


def need(**changes):
    """Estimate the memory need of Qwen2.5-7B on four stages with steps of 640 samples of 1,280 tokens."""
    config = LearnerConfig(**{"num_stages": 4, "token_budget": 8192, "precision": "bfloat16", **changes})
    model = transformers.Qwen2Config(**QWEN_7B)
    return memory_need(model, config, update_tokens=640 * 1280, references=[model])


def test_a_7b_model_fits_four_80_gb_stages_only_with_activation_checkpointing():
    plain, checkpointed = need(), need(activation_checkpointing=True)
    assert plain.stage == 0, "stage 0 needs most: it holds one micro-batch per stage"
    assert plain.size_bytes > 100 * 2**30
    assert checkpointed.size_bytes < 80 * 10**9 < plain.size_bytes
    assert checkpointed.parts["activations"] < plain.parts["activations"] / 10
    assert plain.parts["weights"] == plain.parts["gradients"] == plain.parts["moments"] / 2


SIZES = {
    "0.5B": {
        **{"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
        **{"num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "1.5B": {
        **{"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960},
        **{"num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True},
    },
    "7B": QWEN_7B,
}


def test_the_memory_table_of_the_docs_matches_the_estimate():
    def gib(size: str, num_stages: int, checkpointing: bool) -> float:
        options = {"token_budget": 8192, "precision": "bfloat16", "activation_checkpointing": checkpointing}
        config, model = LearnerConfig(num_stages=num_stages, **options), transformers.Qwen2Config(**SIZES[size])
        return memory_need(model, config, update_tokens=640 * 640, references=[model]).size_bytes / 2**30

    rows = [
        f"| {size} | "
        + " | ".join(f"{gib(size, num, False):.0f}, {gib(size, num, True):.0f}" for num in (1, 2, 4))
        + " |"
        for size in SIZES
    ]
    page = (Path(__file__).parents[2] / "docs" / "learner.md").read_text()
    assert "\n".join(rows) in page, "\n".join(rows)
    for size, kept in zip(SIZES, ("63", "113", "247"), strict=True):
        config = LearnerConfig(precision="bfloat16")
        assert f"{kept_bytes(transformers.Qwen2Config(**SIZES[size]), config) / 1000:.0f}" == kept


def test_an_off_loaded_reference_does_not_add_to_the_peak_memory():
    kept, offloaded = need(), need(reference_offload="cpu")
    assert kept.size_bytes - offloaded.size_bytes == kept.parts["reference"]
    assert "reference" not in offloaded.parts
    assert "stage 0 needs up to" in offloaded.describe()


def test_a_forward_only_pass_holds_states_between_stages_but_no_activations():
    model = transformers.Qwen2Config(**QWEN_7B)

    def need(*, num_minibatches: int, **changes):
        options = {"num_stages": 4, "token_budget": 8192, "precision": "bfloat16", "activation_checkpointing": True}
        draw, config = 640 * 1280, LearnerConfig(**{**options, **changes})
        return memory_need(model, config, update_tokens=draw // num_minibatches, scored_tokens=draw)

    whole, divided = need(num_minibatches=1), need(num_minibatches=8)
    assert divided.parts["between stages"] == whole.parts["between stages"] > 20 * 2**30
    assert "activations" in whole.parts
    assert "activations" not in divided.parts
    # if the activations are larger than the states, the activations determine the peak
    kept = need(num_minibatches=8, activation_checkpointing=False)
    assert kept.parts["activations"] > divided.parts["between stages"] > 7 * kept.parts["between stages"]


def test_every_teacher_counts_with_its_size_but_only_the_largest_if_off_loaded():
    student, teachers = (
        transformers.Qwen2Config(**SIZES["0.5B"]),
        [transformers.Qwen2Config(**SIZES[size]) for size in ("1.5B", "7B")],
    )

    def reference(references, offload="none", num_models=1):
        options = {"num_stages": 1, "precision": "bfloat16", "token_budget": 64, "reference_offload": offload}
        need = memory_need(student, LearnerConfig(**options), update_tokens=64, references=references)
        return need.parts["reference"]

    alone = [reference([teacher]) for teacher in teachers]
    assert alone[1] > 3 * alone[0] > 0
    assert reference(teachers) == sum(alone)
    assert reference(teachers, "cpu") == alone[1]


def test_the_stages_together_hold_every_weight_once():
    model = transformers.Qwen2Config(**QWEN_7B)
    config = LearnerConfig(num_stages=4)
    parts = [device_module._need_of(stage, model, config, (4096, 0), (), 1).parts for stage in range(4)]
    num = 28 * widths(model).num_weights + 2 * model.vocab_size * model.hidden_size
    assert sum(each["weights"] for each in parts) == 4 * num
    tied = transformers.Qwen2Config(**{**QWEN_7B, "tie_word_embeddings": True})
    alone = device_module._need_of(0, tied, LearnerConfig(num_stages=1), (4096, 0), (), 1)
    assert alone.parts["weights"] == 4 * (num - model.vocab_size * model.hidden_size)
    assert alone.parts["between stages"] == 0


@pytest.mark.parametrize("schedule", ["1f1b", "fused"])
def test_a_critic_model_is_counted_by_its_own_split_of_layers(schedule):
    model, config = transformers.Qwen2Config(**SIZES["1.5B"]), LearnerConfig(num_stages=2, schedule=schedule)
    parts = [
        [device_module._need_of(stage, model, config, (64, 0), (), num).parts for num in (1, 2)] for stage in (0, 1)
    ]
    of_critic = [(both["weights"] - policy["weights"]) // 4 for policy, both in parts]
    split = split_layers(model, 2, has_lm_head=False)
    assert split != split_layers(model, 2), "an LM head costs as much as several layers"
    sizes = [(end - first) * widths(model).num_weights for first, end in split]
    sizes[0] += model.vocab_size * model.hidden_size
    assert of_critic == (sizes[::-1] if schedule == "fused" else sizes)


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("1f1b", 4), ("interleaved_1f1b", 6), ("zero_bubble", 4), ("fused", 5)]
)
def test_each_schedule_has_its_number_of_micro_batches_in_flight(schedule, in_flight):
    config = LearnerConfig(num_stages=4, num_chunks=2 if schedule == "interleaved_1f1b" else 1, schedule=schedule)
    assert micro_batches_in_flight(config, 0, 32) == in_flight
    assert micro_batches_in_flight(config, 0, 2) == (4 if schedule == "fused" else 2)  # a fused pass has two networks
    assert micro_batches_in_flight(config, 3, 32) == (1 if schedule == "1f1b" else in_flight)


# --- which device ---------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """Return `card(is_found, capability)`, which fakes a GPU for torch and returns the memory shares set on it."""
    shares: list[float] = []

    def make(is_found: bool, capability: tuple[int, int] = (9, 0)) -> list[float]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_found)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(is_found))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
        return shares

    return make


def test_a_stage_that_reserves_a_gpu_never_falls_back_to_the_cpu(card):
    card(False)
    assert device_of(LearnerConfig(), 0).type == "cpu"
    with pytest.raises(ValueError, match=r"finds no GPU on this host: run leeway doctor"):
        device_of(LearnerConfig(gpus=1), 0)
    card(True)
    assert device_of(LearnerConfig(gpus=1), 1) == torch.device("cuda", 0)


def test_bfloat16_is_rejected_on_a_gpu_without_it(card):
    card(True, (7, 5))
    assert device_of(LearnerConfig(gpus=1), 0).type == "cuda"
    with pytest.raises(ValueError, match=r"needs compute capability 8.0, .*\(T4\) has 7.5: use"):
        device_of(LearnerConfig(gpus=1, precision="bfloat16"), 0)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"gpus": 1}, []),
        ({"gpus": 0.5}, [0.5]),
        ({"gpus": 0.5, "gpu_memory_share": 0.45}, [0.45]),
        ({"gpus": 1, "gpu_memory_share": 0.9}, [0.9]),
    ],
)
def test_a_stage_limits_its_memory_on_a_shared_gpu(card, options, limit):
    shares = card(True)
    configure(LearnerConfig(**options), torch.device("cuda", 0))
    assert shares == limit


def test_a_stage_on_a_cpu_sets_its_threads_and_keeps_freed_memory(card, monkeypatch):
    shares, found = card(True), []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(device_module, "keep_freed_memory", lambda: found.append("kept"))
    configure(LearnerConfig(cpus=3.5), torch.device("cpu"))
    assert (found, shares) == ([3, "kept"], [])
