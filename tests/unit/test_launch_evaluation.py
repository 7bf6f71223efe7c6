"""Evaluations during which actors shut down, die or restart."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from leeway.launch.processes import actor_pools as evaluation_module
from leeway.launch.processes.actor_pools import Evaluation
from leeway.launch.processes.actor_role import Terminated
from leeway.launch.processes.role_process import RunFailed
from tests.unit.fake_actor_process import Handle, worker


@pytest.fixture
def two_actors(tmp_path):
    return [worker(number, tmp_path, starting="done", running="a call") for number in range(2)]


@pytest.mark.parametrize(("is_leaving", "succeeds"), [(True, True), (False, False)])
def test_a_shard_of_a_leaving_actor_moves_to_another_without_a_retry(two_actors, monkeypatch, is_leaving, succeeds):
    first, second = two_actors
    for actor in (first, second):
        actor.handle.evaluate = SimpleNamespace(remote=lambda request, name=actor.name: f"{name} evaluates")
    failing = {"actor.0 evaluates"}

    def get(call):
        if call in failing:
            raise RayActorError
        return call

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(evaluation_module, "done", lambda call: True)
    evaluation = Evaluation([first], lambda: [second], 8, None, timeout_s=60, max_retries=0)
    first.leaving = "a stop call" if is_leaving else None
    if not succeeds:
        with pytest.raises(RunFailed, match=r"actor\.0 failed to evaluate"):
            evaluation.poll()
        return
    assert evaluation.poll() is None
    assert evaluation.poll() == ["actor.1 evaluates"]


def test_an_actor_restarted_after_its_death_in_an_evaluation_is_kept(two_actors, monkeypatch):
    first, second = two_actors
    for actor in (first, second):
        actor.handle.evaluate = SimpleNamespace(remote=lambda request: "an evaluation")
    evaluation = Evaluation([first], lambda: [second], 8, None, timeout_s=60, max_retries=1)
    first.handle, first.running = Handle(), None  # set by the pools if they detect the death first

    def get(call):
        raise RayActorError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(evaluation_module, "done", lambda call: True)
    assert evaluation.poll() is None
    assert first.running is None, "a kept call would count as a second death"


def test_an_actor_ended_by_sigterm_costs_no_retry_and_gets_no_request(two_actors, monkeypatch):
    first, second = two_actors
    for actor in (first, second):
        actor.handle.evaluate = SimpleNamespace(remote=lambda request, name=actor.name: f"{name} evaluates")
    first.running = None  # no training call runs before training starts
    evaluation = Evaluation([first], lambda: [second], 8, None, timeout_s=60, max_retries=0)

    def get(call):
        if call == "actor.0 evaluates":
            raise RayTaskError("evaluate", "a page of text", Terminated(3, 0))
        return call

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(evaluation_module, "done", lambda call: True)
    assert evaluation.poll() is None
    assert evaluation.poll() == ["actor.1 evaluates"]
    assert first.running == "actor.0 evaluates", "the pools read the outcome of the ended call"


def test_a_shard_waits_for_a_ready_actor_without_blocking_others(two_actors, monkeypatch):
    first, second = two_actors
    for actor in (first, second):
        actor.handle.evaluate = SimpleNamespace(remote=lambda request, name=actor.name: (name, request.shard))
    failing = {("actor.0", 0), ("actor.1", 1)}

    def get(call):
        if call in failing:
            failing.remove(call)
            raise RayActorError
        return call

    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(evaluation_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(evaluation_module, "done", lambda call: True)
    ready = []
    evaluation = Evaluation([first, second], lambda: ready, 8, None, timeout_s=60, max_retries=2)
    assert [evaluation.poll() for _ in range(3)] == [None, None, None]
    clock.now_s = 61.0
    with pytest.raises(RunFailed, match=r"actors \(none is ready\) did not finish an evaluation within 60 s"):
        evaluation.poll()
    clock.now_s = 59.0
    ready = [first]
    assert evaluation.poll() is None
    assert evaluation.poll() == [("actor.0", 0), ("actor.0", 1)]
