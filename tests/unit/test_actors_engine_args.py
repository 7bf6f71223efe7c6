"""Engine arguments passed to vLLM; no engine starts.

The tests import vLLM when they run, because the import takes seconds and would slow down test collection.
"""

import dataclasses
from pathlib import Path

import pytest

from leeway.actors import engine_setup
from leeway.actors.config import ADDED_ENV, ActorsConfig
from leeway.actors.engine_setup import check_engine_args, engine_args, known_engine_args, set_environment

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
GIB = 2**30


@pytest.fixture
def args_on(monkeypatch):
    """Return `args_on(is_cpu, **actors)`, which makes engine arguments for vLLM on a CPU or on GPUs of 24 GiB."""
    from vllm.platforms import current_platform

    def make(is_cpu: bool, **actors: object):
        monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu)
        monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: 24 * GIB)
        return engine_args(DEMO_MODEL, ActorsConfig(**actors), seed=0)

    return make


@pytest.mark.parametrize("is_cpu", [True, False])
def test_tensor_parallel_workers_are_engine_processes_and_not_ray_workers(args_on, is_cpu):
    split = args_on(is_cpu, tensor_parallel_size=2, gpus=0 if is_cpu else 2)
    assert split.distributed_executor_backend == "mp"
    assert args_on(is_cpu, gpus=0 if is_cpu else 1).distributed_executor_backend != "mp"


@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_step_holds_a_token_of_each_running_sample(args_on, is_cpu):
    few, many = (args_on(is_cpu, gpus=0 if is_cpu else 1, max_running_samples=each) for each in (2048, 5000))
    assert few.max_num_batched_tokens is None
    assert many.max_num_batched_tokens == many.max_num_seqs == 5000


def test_gpu_memory_share_sets_the_memory_of_an_engine_on_its_own_gpu(args_on):
    made = args_on(False, gpus=1, gpu_memory_share=0.4)
    assert (made.gpu_memory_utilization, made.kv_cache_memory_bytes) == (0.4, None)


def test_an_engine_on_a_shared_gpu_gets_its_cache_size_in_bytes(args_on, monkeypatch):
    made = args_on(False, gpus=0.5, gpu_memory_share=0.4, dtype="bfloat16")
    share = 0.4 * 24 * GIB
    assert share - 2.2 * GIB < made.kv_cache_memory_bytes < share - 2 * GIB
    assert made.gpu_memory_utilization * 24 * GIB < share - 1.9 * GIB, "vLLM needs free memory for cache and weights"
    explicit = args_on(False, gpus=0.5, kv_cache_gib=3)
    assert explicit.kv_cache_memory_bytes == 3 * GIB
    assert explicit.gpu_memory_utilization == pytest.approx(3 / 24, abs=1e-3)
    assert args_on(False, gpus=1, kv_cache_gib=3).kv_cache_memory_bytes == 3 * GIB
    with pytest.raises(ValueError, match=r"gpu_memory_share = 0.05 of a GPU of 24 GiB does not leave memory for att"):
        args_on(False, gpus=0.5, gpu_memory_share=0.05)
    with pytest.raises(
        ValueError, match=r"0.2 of a GPU of 24 GiB does not leave actors.kv_cache_gib = 3 for attention"
    ):
        args_on(False, gpus=0.5, gpu_memory_share=0.2, kv_cache_gib=3)
    assert args_on(False, gpus=1, gpu_memory_share=0.2, kv_cache_gib=20).kv_cache_memory_bytes == 20 * GIB


def test_an_engine_on_the_cpu_has_a_default_cache_size(args_on):
    assert args_on(True).kv_cache_memory_bytes == GIB // 4
    assert args_on(True, kv_cache_gib=1).kv_cache_memory_bytes == GIB


def test_an_actor_without_gpus_is_rejected_if_vllm_supports_only_gpus(args_on):
    assert args_on(True, gpus=0.0).enforce_eager
    with pytest.raises(ValueError, match=r"actors\.gpus = 0, but the vLLM installed here needs a GPU"):
        args_on(False, gpus=0.0)


def test_an_actor_with_a_reserved_gpu_never_falls_back_to_the_cpu(args_on):
    with pytest.raises(ValueError, match=r"reserved 1 GPUs, but the vLLM installed on this host runs on the CPU"):
        args_on(True, gpus=1)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_16_bit_engines_compute_logits_in_float32_by_default(args_on, is_cpu):
    from vllm.config import ModelConfig

    gpus = 0 if is_cpu else 1
    assert args_on(is_cpu, gpus=gpus).hf_overrides == {}
    assert args_on(is_cpu, gpus=gpus, dtype="bfloat16").hf_overrides == {"head_dtype": "float32"}
    assert isinstance(ModelConfig.head_dtype, property), "vLLM renamed head_dtype"
    custom = {"hf_overrides": {"head_dtype": "model", "rope_theta": 1e6}}
    assert args_on(is_cpu, gpus=gpus, dtype="float16", engine_args=custom).hf_overrides == custom["hf_overrides"]


def test_user_engine_args_override_the_defaults(args_on):
    custom = {"enforce_eager": True, "enable_prefix_caching": True, "disable_log_stats": False, "quantization": "fp8"}
    made = args_on(False, gpus=1, engine_args=custom)
    assert {name: getattr(made, name) for name in custom} == custom
    assert args_on(True, engine_args={"enable_prefix_caching": True}).enable_prefix_caching
    assert not args_on(True).enable_prefix_caching


def test_known_engine_args_match_the_fields_of_the_vllm_class():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert known_engine_args() == {
        field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")
    }


def test_arguments_set_by_leeway_are_rejected(args_on):
    reserved = engine_setup._SET_ALREADY.keys() | engine_setup._SET_ON_CPU.keys()
    assert reserved <= known_engine_args(), "vLLM no longer has one of the reserved arguments"
    for name in reserved:
        with pytest.raises(ValueError, match=rf"engine_args\.{name} is set by Leeway: "):
            check_engine_args({name: 1}, on_cpu=True)
    check_engine_args(dict.fromkeys(engine_setup._SET_ON_CPU, True), on_cpu=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"enforce_eagr": True}, "vLLM has no such argument; did you mean 'enforce_eager'?"),
        ({"hf_overrides": "x"}, "hf_overrides = 'x' must be a table"),
    ],
)
def test_an_argument_unknown_to_vllm_is_rejected(args, message):
    with pytest.raises(ValueError) as error:
        check_engine_args(args, on_cpu=False)
    assert message in str(error.value)


def test_argument_names_are_not_checked_without_vllm(monkeypatch):
    monkeypatch.setattr(engine_setup, "find_spec", lambda _: None)
    assert known_engine_args.__wrapped__() == frozenset()


def test_set_environment_keeps_variables_that_are_already_set_and_names_those_that_it_adds(monkeypatch):
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ADDED_ENV, "HF_HUB_OFFLINE")
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "900")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as inner:
        before = dict(engine_setup.os.environ)
        inner.setattr(engine_setup.os, "environ", before)
        set_environment(ActorsConfig())
    assert before["VLLM_ENGINE_READY_TIMEOUT_S"] == "900"
    assert before["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    added = before[ADDED_ENV].split(",")
    assert {"HF_HUB_OFFLINE", "VLLM_USE_FLASHINFER_SAMPLER", "TORCHDYNAMO_DISABLE"} <= set(added)
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in added
