"""The arguments of an engine, as vLLM takes them; no engine is started.

vLLM takes seconds to import: the tests do it, and not each process that lists them.
"""

import dataclasses
from pathlib import Path

import pytest

from actors import engine_setup
from actors.config import ActorsConfig
from actors.engine_setup import check_engine_args, engine_args, known_engine_args, set_environment

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
GIB = 2**30


@pytest.fixture
def args_on(monkeypatch):
    """`args_on(is_cpu, **actors)`: for a vLLM that computes there, on GPUs of 24 GiB."""
    from vllm.platforms import current_platform

    def make(is_cpu: bool, **actors: object):
        monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu)
        monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: 24 * GIB)
        return engine_args(DEMO_MODEL, ActorsConfig(**actors), seed=0)

    return make


@pytest.mark.parametrize("is_cpu", [True, False])
def test_workers_of_a_split_model_are_processes_of_the_engine_and_not_rays(args_on, is_cpu):
    split = args_on(is_cpu, tensor_parallel_size=2, gpus=0 if is_cpu else 2)
    assert split.distributed_executor_backend == "mp"
    assert args_on(is_cpu, gpus=0 if is_cpu else 1).distributed_executor_backend != "mp"


def test_an_engine_takes_the_share_of_its_own_gpus_memory_that_the_configuration_says(args_on):
    made = args_on(False, gpus=1, gpu_memory_share=0.4)
    assert (made.gpu_memory_utilization, made.kv_cache_memory_bytes) == (0.4, None)


def test_an_engine_that_shares_a_gpu_is_told_bytes_so_that_it_measures_nobody_else(args_on, monkeypatch):
    made = args_on(False, gpus=0.5, gpu_memory_share=0.4, dtype="bfloat16")
    share = 0.4 * 24 * GIB
    assert share - 2.2 * GIB < made.kv_cache_memory_bytes < share - 2 * GIB
    assert made.gpu_memory_utilization * 24 * GIB < share - 1.9 * GIB, "what must be free: keys and weights alone"
    said = args_on(False, gpus=0.5, kv_cache_gib=3)
    assert said.kv_cache_memory_bytes == 3 * GIB
    assert said.gpu_memory_utilization == pytest.approx(3 / 24, abs=1e-3)
    assert args_on(False, gpus=1, kv_cache_gib=3).kv_cache_memory_bytes == 3 * GIB
    with pytest.raises(ValueError, match=r"gpu_memory_share = 0.05 of a GPU of 24 GiB does not leave memory for att"):
        args_on(False, gpus=0.5, gpu_memory_share=0.05)
    with pytest.raises(
        ValueError, match=r"0.2 of a GPU of 24 GiB does not leave actors.kv_cache_gib = 3 for attention"
    ):
        args_on(False, gpus=0.5, gpu_memory_share=0.2, kv_cache_gib=3)
    assert args_on(False, gpus=1, gpu_memory_share=0.2, kv_cache_gib=20).kv_cache_memory_bytes == 20 * GIB


def test_an_engine_on_the_cpu_takes_what_it_took(args_on):
    assert args_on(True).kv_cache_memory_bytes == GIB // 4
    assert args_on(True, kv_cache_gib=1).kv_cache_memory_bytes == GIB


def test_an_actor_without_a_gpu_is_refused_where_vllm_knows_gpus_alone(args_on):
    assert args_on(True, gpus=0.0).enforce_eager
    with pytest.raises(ValueError, match=r"actors\.gpus = 0, and the vLLM installed here computes on GPUs"):
        args_on(False, gpus=0.0)


def test_an_actor_that_has_reserved_a_gpu_never_computes_on_the_cpu_instead(args_on):
    with pytest.raises(
        ValueError, match=r"has reserved 1 GPUs, and the vLLM installed on this host computes on the CPU"
    ):
        args_on(True, gpus=1)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_logits_of_16_bit_engines_are_made_in_float32_unless_the_user_says_otherwise(args_on, is_cpu):
    from vllm.config import ModelConfig

    gpus = 0 if is_cpu else 1
    assert args_on(is_cpu, gpus=gpus).hf_overrides == {}
    assert args_on(is_cpu, gpus=gpus, dtype="bfloat16").hf_overrides == {"head_dtype": "float32"}
    assert isinstance(ModelConfig.head_dtype, property), "vLLM asks for it under another name"
    told = {"hf_overrides": {"head_dtype": "model", "rope_theta": 1e6}}
    assert args_on(is_cpu, gpus=gpus, dtype="float16", engine_args=told).hf_overrides == told["hf_overrides"]


def test_what_the_user_tells_an_engine_reaches_it_and_takes_the_place_of_a_default(args_on):
    told = {"enforce_eager": True, "enable_prefix_caching": True, "disable_log_stats": False, "quantization": "fp8"}
    made = args_on(False, gpus=1, engine_args=told)
    assert {name: getattr(made, name) for name in told} == told
    assert args_on(True, engine_args={"enable_prefix_caching": True}).enable_prefix_caching
    assert not args_on(True).enable_prefix_caching


def test_the_arguments_that_vllm_knows_are_read_from_its_source_and_are_those_of_its_class():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert known_engine_args() == {
        field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")
    }


def test_what_leeway_sets_is_for_nobody_else(args_on):
    refused = engine_setup._SET_ALREADY.keys() | engine_setup._SET_ON_CPU.keys()
    assert refused <= known_engine_args(), "vLLM has no such argument any more"
    for name in refused:
        with pytest.raises(ValueError, match=rf"engine_args\.{name} is set by Leeway: "):
            check_engine_args({name: 1}, on_cpu=True)
    check_engine_args(dict.fromkeys(engine_setup._SET_ON_CPU, True), on_cpu=False)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"enforce_eagr": True}, "vLLM knows no such argument; did you mean 'enforce_eager'?"),
        ({"hf_overrides": "x"}, "hf_overrides = 'x' must be a table"),
    ],
)
def test_an_argument_that_vllm_does_not_know_is_refused(told, said):
    with pytest.raises(ValueError) as refused:
        check_engine_args(told, on_cpu=False)
    assert said in str(refused.value)


def test_without_vllm_names_are_not_checked(monkeypatch):
    monkeypatch.setattr(engine_setup, "find_spec", lambda _: None)
    assert known_engine_args.__wrapped__() == frozenset()


def test_the_environment_of_an_engine_leaves_what_is_said_already(monkeypatch):
    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "900")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as inner:
        before = dict(engine_setup.os.environ)
        inner.setattr(engine_setup.os, "environ", before)
        set_environment(ActorsConfig())
    assert before["VLLM_ENGINE_READY_TIMEOUT_S"] == "900"
    assert before["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
