"""GPUs of a run: sharing, detection through the driver, and estimated memory."""

from pathlib import Path

import pytest
import torch
import transformers

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.launch import resources as gpus_module
from leeway.launch.checks import check
from leeway.launch.config import ModelConfig, load_config
from leeway.launch.errors import ConfigError
from leeway.launch.pools import actor_pools, stage_pools
from leeway.launch.resources import (
    Gpu,
    check_gpus,
    colocated_share,
    describe_gpus,
    gpu_notes,
    list_gpus,
    stage_need,
    too_small,
    unfit,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo.toml"
GIB = 2**30
H100 = "0, GPU-aa, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 9.0"
T4 = "1, GPU-bb, Tesla T4, 580.65.06, 15360, 3, 7.5"
ONE_GPU = (
    *("--launch.colocate", "true", "--actors.num_actors", "1", "--actors.gpus", "1"),
    *("--learner.num_stages", "1", "--learner.gpus", "1"),
)
SHARES = ("--actors.gpu_memory_share", "0.4", "--learner.gpu_memory_share", "0.5")


def demo(*overrides: str):
    return load_config(DEMO, overrides)


def card(gib: float = 80.0, capability: float = 9.0, **fields: object) -> Gpu:
    return Gpu(0, "GPU-aa", "H100", "580.65", int(gib * GIB), 0, capability)._replace(**fields)


@pytest.fixture
def driver(monkeypatch):
    """`driver(*lines)` sets the output of nvidia-smi and returns the list of its queries."""
    queries: list[str] = []

    def set_output(*lines: str) -> list[str]:
        def answer(query: str) -> list[list[str]]:
            queries.append(query)
            return [[cell.strip() for cell in line.split(",")] for line in lines]

        monkeypatch.setattr(gpus_module, "_query_smi", answer)
        return queries

    return set_output


# --- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [(None, [0, 1]), ("1", [1]), ("0,1", [0, 1]), ("GPU-b", [1]), ("", []), ("7", [])],
)
def test_cuda_visible_devices_limits_the_gpus(driver, visible, numbers):
    driver(H100, T4)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.number for gpu in list_gpus(environment)] == numbers


def test_fields_of_a_gpu_are_parsed_and_gpus_without_memory_are_skipped(driver):
    driver(H100, "2, MIG-cc, H100 MIG 1g.10gb, 580.65.06, [N/A], [N/A], 9.0", "3, GPU-dd, K80, 390.1, 1024, 0, [N/A]")
    first, old = list_gpus({})
    assert first == Gpu(0, "GPU-aa", "NVIDIA H100 80GB HBM3", "580.65.06", 81559 * 2**20, 4 * 2**20, 9.0)
    assert (old.capability, str(first)) == (0.0, "GPU 0 (NVIDIA H100 80GB HBM3, 80 GiB)")


def test_an_old_driver_is_queried_without_unknown_fields(monkeypatch):
    row = ["0", "GPU-aa", "V100", "470.82", "16384", "4"]
    monkeypatch.setattr(gpus_module, "_query_smi", lambda query: [] if "compute_cap" in query else [row])
    assert list_gpus({}) == [Gpu(0, "GPU-aa", "V100", "470.82", 16384 * 2**20, 4 * 2**20, 0.0)]


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert list_gpus({}) == []


# --- sharing --------------------------------------------------------------------------------------


def test_an_actor_and_the_learner_share_one_gpu():
    config = demo(*ONE_GPU, *SHARES)
    check_gpus(config)
    assert colocated_share(config) == pytest.approx(0.9)
    assert colocated_share(demo(*ONE_GPU, "--actors.gpu_memory_share", "0.4")) == pytest.approx(0.9), (
        "the learner has a share of 0.5"
    )
    assert colocated_share(demo("--learner.gpus", "1", "--actors.gpus", "1")) == 0.0
    (actors,), (stages,) = actor_pools(config), stage_pools(config)
    assert (actors.bundle["GPU"], actors.config.gpus, stages.bundle["GPU"]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("--actors.gpus", "0.5"),
            "pool 'actors' reserves 0.5 GPUs per worker: use whole GPUs, or launch.",
        ),
        (("--learner.gpus", "0.75"), "pool 'learner' reserves 0.75 GPUs per worker"),
        (("--pools.st.role", "learner", "--pools.st.gpus", "0.5"), "pool 'st' reserves 0.5 GPUs"),
        ((*ONE_GPU, "--learner.num_stages", "2"), "the config has learner.num_stages = 2: set actors.num_actors, "),
        ((*ONE_GPU, "--actors.gpus", "0"), "but the config has actors.gpus = 0: set"),
        ((*ONE_GPU, "--pools.st.role", "learner"), "but the config has [pools]"),
        (ONE_GPU, "(unset: 0.5) add up to 1.35 of a GPU, but launch.colocate allows at most 0.95: lower one of them"),
    ],
)
def test_fractions_of_a_gpu_are_refused_except_for_one_actor_and_one_stage(overrides, expected):
    with pytest.raises(ConfigError) as error:
        check_gpus(demo(*overrides))
    assert expected in str(error.value)


def test_a_shared_gpu_with_too_little_free_memory_is_refused():
    small = demo(*ONE_GPU, *SHARES)
    assert unfit(small, [card(24)]) == ""
    assert "learner on GPU 0 (H100, 12 GiB) leave 1.2 GiB free" in unfit(small, [card(80), card(12)])
    assert unfit(demo("--learner.gpus", "1"), [card(12)]) == "", "the only worker of a GPU may use all memory"


# --- capability -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("--learner.precision", "bfloat16"), ""),
        (("--learner.precision", "bfloat16", "--learner.gpus", "1"), "learner.precision = 'bfloat16'"),
        (("--actors.dtype", "bfloat16", "--actors.gpus", "1"), "actors.dtype = 'bfloat16'"),
        (("--actors.dtype", "float16", "--actors.gpus", "1"), ""),
    ],
)
def test_bfloat16_is_refused_on_a_card_without_it(overrides, key):
    config = demo(*overrides)
    assert unfit(config, [card()]) == unfit(config, [card(capability=0.0)]) == ""
    why = unfit(config, [card(), card(capability=7.5, number=1, name="Tesla T4")])
    assert (key in why, bool(why)) == (True, bool(key))
    assert not key or "GPU 1 (Tesla T4, 80 GiB) has compute capability 7.5, and bfloat16 needs 8" in why


def test_a_dry_run_reports_gpus_that_torch_cannot_use(monkeypatch, tmp_path, driver):
    driver(H100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lacking = check(demo("--learner.gpus", "1"), tmp_path / "run").lacking
    assert "cannot use the driver's GPUs: the CUDA 13 wheels need driver 580" in lacking
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check(demo("--learner.gpus", "1"), tmp_path / "run").lacking == ""


# --- memory of training ---------------------------------------------------------------------------


def test_a_stage_that_does_not_fit_is_reported_with_remedies(monkeypatch):
    config = demo("--learner.gpus", "1", "--learner.token_budget", "8192")
    need = stage_need(config)
    assert need is not None
    assert stage_need(demo()) is None, "no stage has a GPU"
    assert too_small(config, need, [card()]) == too_small(config, need, []) == ""
    note = too_small(config, need, [card(0.9 * need.size_bytes / GIB), card()])
    assert "is too small: set learner.activation_checkpointing = true, or" in note
    assert "learner.reference_offload = 'cpu'" in note
    half = config.model_copy(update={"learner": config.learner.model_copy(update={"gpu_memory_share": 0.01})})
    assert "0.01 of GPU 0" in too_small(half, need, [card()])


@pytest.mark.parametrize(
    ("loss", "passes_over_the_batch"),
    [
        ({"kl_beta": 0.1, "kl_in": "loss", "proximal": "behaviour"}, True),
        ({}, True),
        ({"baseline": "value_head", "proximal": "behaviour"}, True),
        ({"proximal": "behaviour"}, False),
    ],
)
def test_a_pass_over_the_batch_needs_the_same_memory_with_more_minibatches(loss, passes_over_the_batch):
    overrides = ["--learner.gpus", "1", "--learner.num_stages", "2", "--learner.token_budget", "64"]
    config = demo(*overrides, "--learner.activation_checkpointing", "true")
    config = config.model_copy(update={"algorithm": OffPolicyPPOConfig(**loss)})

    def between(num_minibatches: int) -> int:
        learner = config.learner.model_copy(update={"num_minibatches": num_minibatches})
        return stage_need(config.model_copy(update={"learner": learner})).parts["between stages"]

    assert (between(8) == between(1)) == passes_over_the_batch


@pytest.mark.parametrize(
    ("example", "gib", "shape"),
    [
        ("one-gpu", 24, {"hidden_size": 896, "num_attention_heads": 14, "intermediate_size": 4864, "layers": 24}),
        ("qwen-gpu", 79, {"hidden_size": 1536, "num_attention_heads": 12, "intermediate_size": 8960, "layers": 28}),
    ],
)
def test_the_gpu_examples_fit_their_gpus(example, gib, shape, tmp_path):
    layers = shape.pop("layers")
    qwen = transformers.Qwen2Config(**shape, num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=True)
    qwen.save_pretrained(tmp_path)
    config = load_config(EXAMPLES / f"{example}.toml")
    config = config.model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    need = stage_need(config)
    assert need is not None
    assert too_small(config, need, [card(gib)]) == ""
    assert need.size_bytes > gib * GIB / 4, "a GPU with a quarter of the memory would suffice"
    check_gpus(config)
    assert unfit(config, [card(gib)]) == ""


def test_a_dry_run_shows_the_memory_of_a_stage_and_warns_of_slow_settings(driver, tmp_path):
    driver()
    assert describe_gpus(demo("--learner.precision", "float32")) == []
    small = demo("--learner.gpus", "1", "--learner.token_budget", "1024")
    lines = describe_gpus(small)
    assert [line.split()[0] for line in lines] == ["GPU", "warning", "warning"]
    assert "\n".join(lines) in check(small, tmp_path / "run").describe()
    assert "learner.precision = 'float32'" in lines[1]
    assert "learner.token_budget = 1024" in lines[2]
    good = describe_gpus(
        demo("--learner.gpus", "1", "--learner.precision", "bfloat16", "--learner.token_budget", "4096")
    )
    assert [line.split()[0] for line in good] == ["GPU"]
    driver("0, GPU-aa, H100, 580, 1100, 4, 9.0")
    (both, *_) = describe_gpus(demo(*ONE_GPU, *SHARES))
    assert both == "GPU        the actor and the learner share a GPU and use 0.9 of its memory"
    _, small = describe_gpus(
        demo("--learner.gpus", "1", "--learner.precision", "bfloat16", "--learner.token_budget", "16384")
    )
    assert small.startswith("warning    stage ")


CARD = Gpu(0, "GPU-aa", "H100", "580.65.06", 80 * GIB, 0, 9.0)


@pytest.mark.parametrize(
    ("overrides", "card", "expected"),
    [
        (["--learner.gpus", "1"], CARD._replace(total_bytes=GIB), "is too small: set learner.activation_"),
        (["--actors.gpus", "1"], CARD._replace(total_bytes=2 * GIB), "an engine of pool 'actors' needs 2.0"),
        (["--actors.gpus", "1", "--actors.kv_cache_gib", "75"], CARD, ""),
        (
            ["--actors.gpus", "0.9", "--actors.kv_cache_gib", "75"],
            CARD,
            "needs 77.0 GiB, but its share is 0.85 of GPU 0",
        ),
        (["--launch.ray_address", "h:1", "--actors.gpus", "1"], CARD._replace(total_bytes=GIB), ""),
    ],
)
def test_engines_and_stages_that_exceed_a_gpu_are_noted(monkeypatch, overrides, card, expected):
    monkeypatch.setattr(gpus_module, "list_gpus", lambda: [card])
    notes = list(gpu_notes(demo(*overrides)))
    assert expected in notes[0] if expected else notes == []
