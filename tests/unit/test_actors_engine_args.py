"""The arguments of an engine, as vLLM takes them; no engine is started."""

import pytest
from vllm.platforms import current_platform

from actors.config import ActorsConfig
from actors.engine_setup import engine_args


@pytest.fixture
def args_on(monkeypatch, tmp_path):
    """`args_on(is_cpu, **actors)`: for a vLLM that computes there."""

    def make(is_cpu: bool, **actors: object):
        monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu)
        return engine_args(tmp_path, ActorsConfig(**actors), seed=0)

    return make


@pytest.mark.parametrize("is_cpu", [True, False])
def test_workers_of_a_split_model_are_processes_of_the_engine_and_not_rays(args_on, is_cpu):
    split = args_on(is_cpu, tensor_parallel_size=2, gpus=2.0)
    assert split.distributed_executor_backend == "mp"
    assert args_on(is_cpu, gpus=1.0).distributed_executor_backend != "mp"


def test_an_engine_takes_the_share_of_its_gpus_memory_that_the_configuration_says(args_on):
    assert args_on(False, gpus=0.5, gpu_memory_share=0.4).gpu_memory_utilization == 0.4


def test_an_actor_without_a_gpu_is_refused_where_vllm_knows_gpus_alone(args_on):
    assert args_on(True, gpus=0.0).enforce_eager
    with pytest.raises(ValueError, match=r"actors\.gpus = 0, and the vLLM installed here computes on GPUs"):
        args_on(False, gpus=0.0)
