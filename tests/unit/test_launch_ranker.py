"""The ranker of a run: which runs start a ranker, and how a dead ranker is restarted."""

from types import SimpleNamespace

import pytest
import ray

from leeway.launch.processes import role_process, supervisor
from leeway.planning import ranking
from tests.unit.made_up_run import context, plan

TWO_POOLS = ("--pools.slow.role", "actors", "--pools.slow.count", "1", "--pools.fast.role", "actors")
BY_DEADLINE = (*TWO_POOLS, "--buffer.dispatch", "by_deadline")


@pytest.fixture
def world(monkeypatch):
    """Fake rankers without processes; ranker n, counted from 0, is alive until n is in `dead`."""
    seen = SimpleNamespace(started=0, dead=set(), events=[])

    def spawn(*_, **__):
        seen.started += 1
        return SimpleNamespace(run=SimpleNamespace(remote=lambda _, number=seen.started - 1: number))

    monkeypatch.setattr(ranking, "spawn", spawn)
    monkeypatch.setattr(ranking, "here", lambda: None)
    for module in (ranking, role_process):
        monkeypatch.setattr(module, "done", lambda call: call in seen.dead)
    monkeypatch.setattr(ranking, "outcome", lambda _: "it was killed")
    monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
    return seen


def start(world, folder, *overrides):
    made = plan(folder, *overrides)
    found = supervisor.ranker(made, lambda *event: world.events.append(event))
    if found is not None:
        found.start(context(made))
    return found


@pytest.mark.parametrize(
    ("overrides", "num"),
    [
        (("--buffer.dispatch", "by_deadline"), 0),
        (BY_DEADLINE, 1),
        (TWO_POOLS, 0),
        (("--buffer.dispatch", "longest_first"), 1),
    ],
    ids=["one pool", "two pools", "in order", "longest first"],
)
def test_a_run_has_a_ranker_if_lengths_may_affect_dispatch(world, tmp_path, overrides, num):
    found = start(world, tmp_path / "run", *overrides)
    assert (0 if found is None else len(found.processes), world.started) == (num, num)


def test_a_dead_ranker_is_restarted_and_given_up_after_too_many_deaths(world, tmp_path, monkeypatch):
    monkeypatch.setattr("leeway.planning.ranking.MAX_RESTARTS", 1)
    found = start(world, tmp_path / "run", *BY_DEADLINE)
    (process,) = found.processes
    world.dead = {0}
    found.watch()
    found.watch()
    assert (world.started, process.state, process.restarts.total) == (2, "working", 1)
    world.dead = {0, 1}
    found.watch()
    found.watch()
    assert process.state == f"lost: given up: it was killed; see {process.log}"
    assert [kind for kind, _ in world.events] == ["restart", "given_up"]
    assert str(process.log) in world.events[1][1]
