"""Pools of scorers: what a config may say of them, and what becomes of those that die."""

from types import SimpleNamespace

import pytest
import ray

from launch.checks import check
from launch.config import load_config
from launch.errors import ConfigError
from launch.pools import scorer_pools
from launch.processes import helpers, role_process
from launch.processes.helpers import Scorers
from tests.unit.fake_actor_process import Room
from tests.unit.made_up_run import DEMO, context, plan

POOL = ("--pools.score.role", "scorer")


@pytest.fixture
def world(monkeypatch):
    """Scorers without processes: the n-th that is started, from 0, lives until n is among the dead."""
    seen = SimpleNamespace(contexts=[], dead=set(), told=[], room=True)

    class Handle:
        def __init__(self, number):
            self.run = SimpleNamespace(remote=lambda context, _: seen.contexts.append(context) or number)

    class Place(Room):
        missing_s = 99.0

        @property
        def is_placed(self):
            return seen.room

    monkeypatch.setattr(helpers, "spawn", lambda *_, **__: Handle(len(seen.contexts)))
    for module in (helpers, role_process):
        monkeypatch.setattr(module, "done", lambda call: call in seen.dead)
    monkeypatch.setattr(helpers, "outcome", lambda _: "it was killed")
    monkeypatch.setattr(helpers, "place_of", lambda *_: Place())
    monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
    return seen


def start(world, folder, *overrides) -> Scorers:
    made = plan(folder, *POOL, *overrides)
    found = Scorers(made, lambda *event: world.told.append(event))
    found.start(context(made))
    return found


def test_a_pool_reserves_for_each_what_a_stage_does_unless_it_says_otherwise(tmp_path):
    (pool,) = scorer_pools(plan(tmp_path / "a", *POOL, "--pools.score.resource", "").config)
    assert (pool.name, pool.count, pool.bundle) == ("score", 1, {"CPU": 0.5})
    (pool,) = scorer_pools(plan(tmp_path / "b", *POOL, "--pools.score.count", "3", "--pools.score.gpus", "1").config)
    assert (pool.count, pool.bundle["GPU"], sorted(pool.bundle)) == (3, 1.0, ["CPU", "GPU", "pool_score"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("--pools.score.dtype", "float32"), "dtype is of an actor's engine, and this pool's role is 'scorer'"),
        (("--pools.score.gpus", "1.5"), "pool 'score' reserves 1.5 GPUs for each worker"),
    ],
)
def test_a_pool_that_could_not_work_is_refused_with_a_sentence(tmp_path, overrides, why):
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path / "run", *POOL, *overrides)
    assert why in str(refused.value)


def test_a_pool_without_a_reference_to_score_is_refused(tmp_path):
    text = DEMO.read_text().replace('"demo_model"', f'"{DEMO.parent}/demo_model"').replace("beta = 0.2\n", "")
    path = tmp_path / "config.toml"
    path.write_text(text.replace('"trajectory_balance"', '"off_policy_ppo"'))
    why = "pools.score.role = 'scorer', but algorithm.type = 'off_policy_ppo' as it is set reads no reference model"
    with pytest.raises(ConfigError, match=why):
        check(load_config(path, POOL), tmp_path / "run")


def test_a_scorer_has_the_whole_model_whatever_the_learner_is_split_into(world, tmp_path):
    start(world, tmp_path / "run", "--learner.num_stages", "2", "--learner.layers_per_chunk", "[1, 1]")
    learner = world.contexts[0].config.learner
    assert (learner.num_stages, learner.num_replicas, learner.num_chunks, learner.layers_per_chunk) == (1, 1, 1, None)
    assert (learner.device, learner.gpus) == ("cpu", 0)


def test_a_scorer_that_dies_is_started_again_and_given_up_when_it_does_so_too_often_and_the_run_goes_on(
    world, tmp_path
):
    found = start(world, tmp_path / "run", "--pools.score.count", "2", "--launch.max_restarts", "1")
    assert [each.state for each in found.processes] == ["working", "working"]
    world.dead = {0}
    found.watch()
    assert world.told == [
        ("restart", "scorer.0 died (it was killed) and is started again; the learner scores itself meanwhile")
    ]
    world.dead = {0, 2}
    for _ in range(3):
        found.watch()
    log = found.processes[0].log
    why = f"scorer.0 is given up, and the learner scores itself from now on: it was killed; see {log}"
    assert world.told[1:] == [("given_up", why)]
    assert [each.state for each in found.processes] == [f"lost: given up: it was killed; see {log}", "working"]
    found.stop()
    assert found.processes == []


def test_a_scorer_for_which_no_host_has_room_is_given_up_with_the_reason(world, tmp_path):
    world.room = False
    found = start(world, tmp_path / "run")
    assert world.contexts == []
    assert world.told == [
        ("given_up", "scorer.0 is given up, and the learner scores itself from now on: no host has room")
    ]
    assert found.processes[0].facts().state == "lost: given up: no host has room"
