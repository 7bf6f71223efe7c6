"""Pools: how the sections of a config define actors and stages, and what each reserves."""

from pathlib import Path

import pytest

from leeway.launch.checks import check
from leeway.launch.config import load_config, to_toml
from leeway.launch.errors import ConfigError
from leeway.launch.pools import HOST_UNIT, actor_pools, serving_dtypes, stage_pools

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"

TWO_POOLS = """
[pools.exact]
role = "actors"
count = 1

[pools.fast]
role = "actors"
count = 3
dtype = "bfloat16"
max_running_samples = 32
cpus = 2
gpus = 1
"""


@pytest.fixture
def load(tmp_path):
    """`load(sections, *overrides)` loads the demo's config with these sections in place of num_actors."""

    def loaded(sections: str = "", *overrides: str):
        path = tmp_path / "config.toml"
        text = DEMO.read_text().replace("num_actors = 2\n", "").replace('"demo_model"', f'"{DEMO.parent}/demo_model"')
        path.write_text(text + sections)
        return load_config(path, overrides)

    return loaded


def test_without_sections_there_are_two_pools_on_any_host(load):
    config = load()
    (actors,), (stages,) = actor_pools(config), stage_pools(config)
    assert (actors.name, actors.count, actors.config) == ("actors", 2, config.actors)
    assert (actors.bundle, stages.bundle) == ({"CPU": 0.5}, {"CPU": config.learner.cpus})
    assert (stages.name, stages.count) == ("learner", 2)


def test_a_pool_inherits_the_keys_of_the_actors_section_that_it_does_not_set(load):
    config = load(TWO_POOLS)
    exact, fast = actor_pools(config)
    assert (exact.count, exact.config.dtype, exact.bundle) == (1, "float32", {"CPU": 0.5, "pool_exact": HOST_UNIT})
    assert (fast.count, fast.config.dtype, fast.config.max_running_samples) == (3, "bfloat16", 32)
    assert fast.config.group_size == config.actors.group_size
    assert fast.bundle == {"CPU": 2.0, "GPU": 1.0, "pool_fast": HOST_UNIT}
    assert serving_dtypes(config) == ("bfloat16", "float32"), "the learner publishes both dtypes"


def test_the_resolved_config_of_a_run_with_pools_can_be_loaded(load, tmp_path):
    config = load(TWO_POOLS)
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(config))
    assert actor_pools(load_config(path)) == actor_pools(config)


def test_learner_ranks_follow_the_order_of_the_pools(load):
    front = '[pools.front]\nrole = "learner"\ncount = 1\n'
    back = '[pools.back]\nrole = "learner"\ncpus = 2\n'
    pools = stage_pools(load(front + back))
    assert [(pool.name, pool.count, pool.bundle["CPU"]) for pool in pools] == [("front", 1, 0.5), ("back", 1, 2.0)]


FRONT_ON_GPU = '[pools.front]\nrole = "learner"\ncount = 1\ngpus = 1\n[pools.back]\nrole = "learner"\n'


@pytest.mark.parametrize(
    ("sections", "overrides", "message"),
    [
        (TWO_POOLS, ["--actors.num_actors", "2"], "num_actors = 2, but the actor pools have 4"),
        ('[pools.a]\nrole = "learner"\ncount = 3\n', [], r"have 3 stages \(a 3\), but .* = 2"),
        ('[pools.a]\nrole = "learner"\ncount = 2\n[pools.b]\nrole = "learner"\n', [], r"\(a 2, b 0\)"),
        ('[pools."a b"]\nrole = "actors"\n', [], "use only letters"),
        ('[pools.a]\nrole = "actors"\ntensor_parallel_size = 2\n', [], "pools.a.tensor_parallel_size = 2 needs"),
        (FRONT_ON_GPU, [], r"cannot train together \(GPUs per stage, by pool: front 1, back 0\)"),
    ],
)
def test_invalid_pools_are_refused_before_anything_starts(load, tmp_path, sections, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(load(sections, *overrides), tmp_path / "run")


def test_a_mistyped_key_of_a_pool_is_refused_with_a_suggestion(load):
    with pytest.raises(ConfigError, match=r"unknown key pools.a.dtyp; did you mean pools.a.dtype\?"):
        load('[pools.a]\nrole = "actors"\ndtyp = "bfloat16"\n')
    with pytest.raises(ConfigError, match=r"\[pools.a\] dtype applies only to actors"):
        load('[pools.a]\nrole = "learner"\ndtype = "bfloat16"\n')


def test_an_override_changes_the_number_of_actors_of_a_pool(load, tmp_path):
    plan = check(load(TWO_POOLS, "--pools.exact.count", "5"), tmp_path / "run")
    assert "actors     8: 5 in exact (float32), 3 in fast (bfloat16), 8 samples per prompt" in plan.describe()
