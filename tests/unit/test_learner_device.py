"""The device of a rank: which one, its share of the memory, and what training is said to take of it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from learner import device as device_module
from learner.attention import AttentionLayout
from learner.config import LearnerConfig
from learner.decoders import StageShare, split_layers, widths
from learner.device import device_of, kept_bytes, memory_need, micro_batches_in_flight, settle
from learner.model import StageModule
from learner.products import LogitRule

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
    """Bytes that autograd saves in a block, each storage once: of parameters none, of their casts apart."""

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
            self._seen.append(tensor)  # else another would take its place, and its address
            if tuple(tensor.shape) in self._shapes:
                self.casts += storage.nbytes()
            else:
                self.activations += storage.nbytes()
        return tensor


def kept_by_layers(family: str, precision: str, num_layers: int) -> Kept:
    """Of the middle of a model, that runs on tensors without data."""
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
def test_what_a_layer_is_said_to_keep_is_what_autograd_saves_and_no_cast_of_a_weight_is_among_it(family, precision):
    one, three = (kept_by_layers(family, precision, num) for num in (1, 3))
    model = transformers.CONFIG_MAPPING[family](**SHAPES[family])
    counted = (three.activations - one.activations) / 2 / TOKENS
    assert kept_bytes(model, LearnerConfig(precision=precision)) == pytest.approx(counted, rel=0.03)
    assert three.casts == one.casts == 0


def need(**changes):
    """Of Qwen2.5-7B on four stages, steps of 640 samples of 1,280 tokens."""
    config = LearnerConfig(**{"num_stages": 4, "token_budget": 8192, "precision": "bfloat16", **changes})
    model = transformers.Qwen2Config(**QWEN_7B)
    return memory_need(model, config, update_tokens=640 * 1280, references=[model])


def test_seven_billion_on_four_stages_need_more_than_80_gb_each_unless_activations_are_computed_again():
    plain, again = need(), need(activation_checkpointing=True)
    assert plain.stage == 0, "it holds as many micro-batches as there are stages"
    assert plain.size_bytes > 100 * 2**30
    assert again.size_bytes < 80 * 10**9 < plain.size_bytes
    assert again.parts["activations"] < plain.parts["activations"] / 10
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


def test_the_table_of_the_learners_page_is_what_is_computed():
    def gib(size: str, num_stages: int, checkpointing: bool) -> float:
        told = {"token_budget": 8192, "precision": "bfloat16", "activation_checkpointing": checkpointing}
        config, model = LearnerConfig(num_stages=num_stages, **told), transformers.Qwen2Config(**SIZES[size])
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


def test_a_reference_that_leaves_takes_the_place_of_activations_and_no_more():
    kept, gone = need(), need(reference_offload="cpu")
    assert kept.size_bytes - gone.size_bytes == kept.parts["reference"]
    assert "reference" not in gone.parts
    assert "stage 0 takes up to" in gone.describe()


def test_a_pass_over_the_draw_holds_all_its_states_and_no_activations():
    model = transformers.Qwen2Config(**QWEN_7B)

    def need(*, num_minibatches: int, **changes):
        told = {"num_stages": 4, "token_budget": 8192, "precision": "bfloat16", "activation_checkpointing": True}
        draw, config = 640 * 1280, LearnerConfig(**{**told, **changes})
        return memory_need(model, config, update_tokens=draw // num_minibatches, scored_tokens=draw)

    whole, divided = need(num_minibatches=1), need(num_minibatches=8)
    assert divided.parts["between stages"] == whole.parts["between stages"] > 20 * 2**30
    assert "activations" in whole.parts
    assert "activations" not in divided.parts
    # where activations are larger than that, they are what a stage has to hold
    kept = need(num_minibatches=8, activation_checkpointing=False)
    assert kept.parts["activations"] > divided.parts["between stages"] > 7 * kept.parts["between stages"]


def test_every_teacher_is_counted_by_its_own_size_and_the_largest_alone_where_they_leave():
    student, teachers = (
        transformers.Qwen2Config(**SIZES["0.5B"]),
        [transformers.Qwen2Config(**SIZES[size]) for size in ("1.5B", "7B")],
    )

    def reference(references, offload="none", num_models=1):
        told = {"num_stages": 1, "precision": "bfloat16", "token_budget": 64, "reference_offload": offload}
        need = memory_need(student, LearnerConfig(**told), update_tokens=64, references=references)
        return need.parts["reference"]

    alone = [reference([teacher]) for teacher in teachers]
    assert alone[1] > 3 * alone[0] > 0
    assert reference(teachers) == sum(alone)
    assert reference(teachers, "cpu") == alone[1]


def test_all_stages_together_hold_every_weight_once():
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
def test_a_critic_model_is_counted_on_the_layers_that_its_own_split_gives_a_stage(schedule):
    model, config = transformers.Qwen2Config(**SIZES["1.5B"]), LearnerConfig(num_stages=2, schedule=schedule)
    parts = [
        [device_module._need_of(stage, model, config, (64, 0), (), num).parts for num in (1, 2)] for stage in (0, 1)
    ]
    of_critic = [(both["weights"] - policy["weights"]) // 4 for policy, both in parts]
    split = split_layers(model, 2, has_lm_head=False)
    assert split != split_layers(model, 2), "a head weighs as much as some layers"
    sizes = [(end - first) * widths(model).num_weights for first, end in split]
    sizes[0] += model.vocab_size * model.hidden_size
    assert of_critic == (sizes[::-1] if schedule == "fused" else sizes)


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("1f1b", 4), ("interleaved_1f1b", 6), ("zero_bubble", 4), ("fused", 5)]
)
def test_a_schedule_holds_as_many_micro_batches_as_it_says(schedule, in_flight):
    config = LearnerConfig(num_stages=4, num_chunks=2 if schedule == "interleaved_1f1b" else 1, schedule=schedule)
    assert micro_batches_in_flight(config, 0, 32) == in_flight
    assert micro_batches_in_flight(config, 0, 2) == (4 if schedule == "fused" else 2)  # of two networks
    assert micro_batches_in_flight(config, 3, 32) == (1 if schedule == "1f1b" else in_flight)


# --- which device ---------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """`card(seen, capability)`: what torch would see; the shares that were set are returned."""
    shares: list[float] = []

    def make(seen: bool, capability: tuple[int, int] = (9, 0)) -> list[float]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(seen))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
        return shares

    return make


def test_a_stage_that_has_reserved_a_gpu_never_trains_on_the_cpu_instead(card):
    card(False)
    assert device_of(LearnerConfig(), 0).type == "cpu"
    with pytest.raises(ValueError, match=r"sees none on this host: see leeway doctor"):
        device_of(LearnerConfig(gpus=1), 0)
    card(True)
    assert device_of(LearnerConfig(gpus=1), 1) == torch.device("cuda", 0)


def test_bfloat16_is_refused_where_the_card_has_none(card):
    card(True, (7, 5))
    assert device_of(LearnerConfig(gpus=1), 0).type == "cuda"
    with pytest.raises(ValueError, match=r"\(T4, compute capability 7.5\) has none, which begins at 8.0"):
        device_of(LearnerConfig(gpus=1, precision="bfloat16"), 0)


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        ({"gpus": 1}, []),
        ({"gpus": 0.5}, [0.5]),
        ({"gpus": 0.5, "gpu_memory_share": 0.45}, [0.45]),
        ({"gpus": 1, "gpu_memory_share": 0.9}, [0.9]),
    ],
)
def test_a_stage_keeps_to_its_share_of_a_gpu_that_it_shares(card, told, limit):
    shares = card(True)
    settle(LearnerConfig(**told), torch.device("cuda", 0))
    assert shares == limit


def test_on_a_cpu_a_stage_keeps_its_threads_and_what_it_freed(card, monkeypatch):
    shares, found = card(True), []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(device_module, "keep_freed_memory", lambda: found.append("kept"))
    settle(LearnerConfig(cpus=3.5), torch.device("cpu"))
    assert (found, shares) == ([3, "kept"], [])
