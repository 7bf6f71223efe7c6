"""A run that drains goes on draining, whatever happens to its learner; an actor can be taken out of it."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from buffer.protocol import Nonsense
from launch.checks import check
from launch.config import load_config
from launch.observe.status import PollResult
from launch.pools import actor_pools
from launch.processes import actor_pools as pools_module
from launch.processes import ray_cluster as ray_module
from launch.processes import supervisor as supervisor_module
from launch.processes.actor_pools import ActorProcess
from launch.processes.ray_cluster import was_abandoned
from launch.processes.role_process import LASTING_S, MAX_RESTARTS, RunFailed
from launch.processes.supervisor import Supervisor
from tests.unit.fake_actor_process import Handle, Room, worker

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


class Admission:
    """Stands for the buffer services and their client: open or closed."""

    processes = ()

    def __init__(self, *_: object) -> None:
        self.is_open = True
        self.nonsense: dict[str, Nonsense] = {}

    def watch(self) -> None:
        pass

    def drain(self) -> None:
        self.is_open = False

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(nonsense=dict(self.nonsense))

    def ask(self, request) -> object:
        return request(self)

    def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


class RestartedLearner:
    """Stands for the stages; each restart opens admission, as a new incarnation does."""

    def __init__(self, *_: object) -> None:
        self.news: list[PollResult] = []
        self.restarts_in_export: list[Admission] = []

    def restart(self, admission: Admission, step: int) -> None:
        admission.is_open = True
        self.news.append(PollResult(resumed_at=step, resumed_version=2 * step))

    def watch(self) -> None:
        pass

    def facts(self) -> list[object]:
        return []

    def poll(self, patience_s: float) -> PollResult:
        return self.news.pop(0) if self.news else PollResult()

    def request_stop(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def export(self, folder: Path) -> None:
        for admission in self.restarts_in_export:
            self.restart(admission, 10)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A supervisor with its fakes; its only actor is starting."""
    monkeypatch.setattr(supervisor_module, "BufferHost", Admission)
    monkeypatch.setattr(supervisor_module, "WeightsHost", Admission)
    monkeypatch.setattr(supervisor_module, "LearnerGroup", RestartedLearner)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns=1, timeout=None: ([], calls))
    plan = check(load_config(DEMO, []), tmp_path / "run")
    events: list[tuple[str, str]] = []
    supervisor = Supervisor(plan, plan.context(tmp_path, plan.model), lambda kind, text: events.append((kind, text)))
    supervisor.actors.actors = [worker(0, tmp_path, starting="a call")]
    return SimpleNamespace(
        supervisor=supervisor, admission=supervisor._buffer, learner=supervisor.learner, events=events
    )


def test_a_learner_that_is_started_again_leaves_admission_open_while_the_run_goes_on(run):
    run.learner.restart(run.admission, 4)
    news = run.supervisor.poll()
    assert (news.resumed_at, news.resumed_version) == (4, 8)
    assert run.admission.is_open


def test_who_sends_the_buffer_nonsense_is_told_once_however_much_it_sends(run):
    for count in (1, 20_000):
        run.admission.nonsense = {"actor-1": Nonsense(count, "failed validation: header")}
        run.supervisor.poll()
    run.admission.nonsense["others"] = Nonsense(1, "Drain is for launch")
    run.supervisor.poll()
    said = "the buffer refuses some of what {} sends, at first: {}"
    assert run.events == [
        ("nonsense", said.format("actor-1", "failed validation: header")),
        ("nonsense", said.format("others", "Drain is for launch")),
    ]


def test_after_an_interrupt_admission_stays_closed_although_the_learner_is_started_again(run):
    run.supervisor.request_stop()
    assert not run.admission.is_open
    for step in (4, 6):
        run.learner.restart(run.admission, step)
        run.supervisor.poll()
        assert not run.admission.is_open


def test_an_interrupt_in_the_middle_of_a_restart_closes_admission_once_the_learner_is_back(run):
    run.supervisor.poll()
    run.supervisor.request_stop()  # the learner is not there yet
    run.learner.restart(run.admission, 4)
    run.supervisor.poll()
    assert not run.admission.is_open


def test_a_restart_in_the_export_leaves_admission_closed_and_is_told(run, tmp_path):
    run.supervisor.drain()
    run.learner.restarts_in_export = [run.admission]
    run.supervisor.export(tmp_path / "model")
    assert not run.admission.is_open
    assert run.supervisor.poll().resumed_at == 10


@pytest.fixture
def two_actors(run, tmp_path, monkeypatch):
    """The run with two actors that work; `run.killed` are the handles of those that were killed."""
    run.killed = []
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: run.killed.append(handle))
    run.pools = run.supervisor.actors
    run.pools.actors = [worker(number, tmp_path, starting="a call", running="a call") for number in range(2)]
    run.pools._next_number = 2
    return run


def test_an_actor_that_is_taken_out_is_killed_never_started_again_and_told(two_actors):
    supervisor = two_actors.supervisor
    assert supervisor.poll().working == {"actor-0", "actor-1"}
    for _ in range(2):
        supervisor.actors.quarantine("actor-1", "its weights are not the learner's")
    assert two_actors.killed == [supervisor.actors.actors[1].handle]
    news = supervisor.poll()
    assert (news.working, news.quarantined) == ({"actor-0"}, ("actor-1",))
    assert [kind for kind, _ in two_actors.events] == ["quarantined"]
    assert "its weights are not the learner's" in two_actors.events[0][1]


def test_when_the_last_actor_is_taken_out_the_run_fails_with_the_reason(two_actors):
    two_actors.supervisor.actors.quarantine("actor-0", "of one thing")
    with pytest.raises(RunFailed, match=r"no actor is left: actor-1 was the last, .*: of another"):
        two_actors.supervisor.actors.quarantine("actor-1", "of another")


def test_the_services_are_asked_to_stop_only_after_the_actorshave_ended_for_these_hand_back_what_they_hold(
    two_actors, monkeypatch
):
    order: list[str] = []
    waits: list[list[str]] = []
    for actor in two_actors.pools.actors:
        actor.handle.stop = SimpleNamespace(remote=lambda name=actor.name: order.append(name) or name)
    for service in ("_buffer", "_weights"):
        asked = getattr(two_actors.supervisor, service)
        asked.ask_to_stop = lambda name=service: order.append(name) or [name]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (order.append("waited"), waits.append(calls)))
    monkeypatch.setattr(supervisor_module, "end_ray", lambda: None)
    two_actors.supervisor.stop()
    assert order == ["actor.0", "actor.1", "waited", "_buffer", "_weights", "waited"]
    assert waits == [["actor.0", "actor.1"], ["_buffer", "_weights"]]


@pytest.fixture
def ended(monkeypatch):
    """Calls that have ended, with their error or ''; `room` says what a place is like."""
    calls: dict[str, str] = {}
    monkeypatch.setattr(pools_module, "done", lambda call: call in calls)
    monkeypatch.setattr(pools_module, "outcome", lambda call: calls[call])
    return calls


@pytest.fixture
def started(two_actors, monkeypatch):
    """Every actor that is started; the places are given out by `Room`."""
    handles: list[Handle] = []

    def spawn(*_: object, variables: dict[str, str], **__: object) -> Handle:
        handles.append(Handle())
        handles[-1].variables = variables
        return handles[-1]

    monkeypatch.setattr(pools_module, "spawn", spawn)
    monkeypatch.setattr(pools_module, "place_of", lambda *_: Room())
    monkeypatch.setattr(two_actors.pools, "_context", two_actors.supervisor._context)
    return handles


def states(run) -> dict[str, str]:
    return {actor.name: actor.state for actor in run.pools.actors}


def test_a_pool_that_is_made_larger_starts_actorswith_new_numbers_where_there_is_room(two_actors, started, ended):
    pools = two_actors.pools
    assert pools.scale("actors", 4) == "pool 'actors' had 2 actors and is to have 4"
    assert states(two_actors) == {
        **{"actor.0": "working", "actor.1": "working"},
        **{"actor.2": "waiting for resources", "actor.3": "waiting for resources"},
    }
    pools.actors[3].placement.is_placed = False
    assert [actor.number for actor in pools.watch()] == [0, 1]
    assert (len(started), states(two_actors)["actor.2"]) == (1, "starting")
    pools.actors[3].placement.missing_s = 61.0
    pools.watch()
    assert states(two_actors)["actor.3"] == "lost: given up: no host has room"
    assert two_actors.events[-1] == ("given_up", "actor.3 is given up: no host has room")
    assert [actor.number for actor in pools.watch()] == [0, 1], "the run goes on with what is left"


def test_an_actor_is_told_how_long_its_engine_may_take_and_the_variables_of_the_config(two_actors, started, ended):
    pools = two_actors.pools
    pools._config = load_config(DEMO, ["--actors.gpus", "1", "--launch.env.NCCL_DEBUG", "INFO"])
    pools.scale("actors", 3)
    pools.watch()
    assert started[0].variables == {"VLLM_ENGINE_READY_TIMEOUT_S": "1800", "NCCL_DEBUG": "INFO"}


def test_an_actor_that_shares_its_gpu_with_the_learner_stays_alone(two_actors, started, ended):
    pools = two_actors.pools
    pools._config = load_config(DEMO, ["--launch.colocate", "true"])
    with pytest.raises(ValueError, match=r"^launch\.colocate = true is for one actor"):
        pools.scale("actors", 3)
    assert (pools.wanted, len(pools.actors), pools.room("actors")) == ({"actors": 2}, 2, 0)


@pytest.mark.parametrize(
    ("free", "room"),
    [
        ([{"CPU": 8.0, "GPU": 1.0}], 1),
        ([{"CPU": 8.0, "GPU": 0.5}], 0),
        ([{"CPU": 0.5, "GPU": 1.0}, {"CPU": 8.0, "GPU": 3.0}, {"CPU": 9.0}], 3),
    ],
)
def test_a_pool_has_room_for_what_each_host_holds(two_actors, monkeypatch, free, room):
    two_actors.pools._config = load_config(DEMO, ["--actors.gpus", "1", "--actors.cpus", "1"])
    two_actors.pools.pools = {pool.name: pool for pool in actor_pools(two_actors.pools._config)}
    state = SimpleNamespace(available_resources_per_node=lambda: dict(enumerate(free)))
    monkeypatch.setattr(ray._private, "state", state)
    assert two_actors.pools.room("actors") == room


def test_room_is_counted_from_the_actors_that_are_there_and_thirds_of_a_host_are_three(two_actors, monkeypatch):
    pools = two_actors.pools
    pools.actors[1].lost = "given up"
    pools.wanted["actors"] = 2
    assert pools.staying("actors") == pools.actors[:1]
    pools.pools = {"actors": replace(pools.pools["actors"], bundle={"CPU": 0.1})}
    state = SimpleNamespace(available_resources_per_node=lambda: {"a": {"CPU": 0.3}})
    monkeypatch.setattr(ray._private, "state", state)
    assert pools.room("actors") == 3
    pools.pools = {"actors": replace(pools.pools["actors"], bundle={})}
    assert pools.room("actors") > 100, "who reserves nothing has a place anywhere"


def test_a_pool_that_is_made_smaller_ends_its_youngest_politely_and_gives_the_place_back(two_actors, ended):
    pools = two_actors.pools
    leaver = pools.actors[1]
    leaver.handle.stop = SimpleNamespace(remote=lambda: "goodbye")
    pools.scale("actors", 1)
    assert (states(two_actors)["actor.1"], two_actors.killed) == ("leaving", [])
    assert [actor.number for actor in pools.watch()] == [0]
    assert not leaver.is_ready, "nobody asks it to evaluate"
    ended["goodbye"] = ""
    pools.watch()
    assert (states(two_actors).keys(), two_actors.killed) == ({"actor.0"}, [leaver.handle])
    assert leaver.placement.released
    assert [kind for kind, _ in two_actors.events] == ["scaled", "left"]


def test_an_actor_that_does_not_leave_is_killed_after_a_while(two_actors, ended, monkeypatch):
    monkeypatch.setattr(pools_module, "GOODBYE_S", 0.0)
    leaver = two_actors.pools.actors[1]
    two_actors.pools.scale("actors", 1)
    two_actors.pools.watch()
    assert two_actors.killed == [leaver.handle]


def test_the_last_actor_stays_and_unknown_pools_are_refused(two_actors):
    with pytest.raises(ValueError, match="would leave the run with 0"):
        two_actors.pools.scale("actors", 0)
    with pytest.raises(ValueError, match="no pool 'big'; the pools of actors are actors"):
        two_actors.pools.scale("big", 2)
    assert two_actors.events == []


def test_an_actor_that_keeps_dying_is_started_again_so_often_and_then_given_up_with_its_reason(
    two_actors, started, ended
):
    ended["a call"] = "out of memory"
    pools = two_actors.pools
    for actor in pools.actors:
        for _ in range(MAX_RESTARTS):
            actor.restarts.count()
    first = pools.actors[0]
    first.restarts.working_since_s = time.monotonic() - LASTING_S  # an hour of work forgives its restarts
    pools.watch()
    assert (len(started), first.state, pools.actors[1].state) == (1, "starting", "lost: given up: out of memory")
    assert [kind for kind, _ in two_actors.events] == ["restart", "given_up"]
    assert "out of memory; 1 other actor left" in two_actors.events[1][1]
    pools.scale("actors", 2)
    assert [actor.number for actor in pools.actors] == [0, 1, 2], "who was given up is replaced"
    assert two_actors.supervisor.poll().wanted == {"actors": 2}
    pools.scale("actors", 1)
    assert two_actors.supervisor.poll().wanted == {"actors": 1}


def test_an_actor_whose_host_was_cut_off_is_asked_again_and_not_started_again(two_actors, started, ended, monkeypatch):
    pools = two_actors.pools
    cut, other = pools.actors
    other.running = "goes on"
    handle = cut.handle
    handle.run = SimpleNamespace(remote=lambda: "asked again")
    ended["a call"] = "unavailable"
    monkeypatch.setattr(pools_module, "failure", lambda call: ActorUnavailableError("reset by peer", None))
    pools.watch()
    assert (cut.running, cut.state, two_actors.killed, started) == ("asked again", "working", [], [])
    ((kind, text),) = two_actors.events
    assert kind == "unreachable"
    assert "reset by peer" in text
    later_s = cut._cut_since_s + 61.0
    monkeypatch.setattr(pools_module.time, "monotonic", lambda: later_s)
    ended["asked again"] = "unavailable"
    pools.watch()
    assert (two_actors.killed, [kind for kind, _ in two_actors.events]) == ([handle], ["unreachable", "restart"])


class WithReadiness(ActorProcess):
    """An actor of which the test says whether it is ready."""

    is_ready = True


def test_who_waits_for_a_host_leaves_before_who_works(two_actors):
    pools = two_actors.pools
    for actor in pools.actors:
        actor.__class__ = WithReadiness
    pools.actors[0].forget()  # its host was lost
    pools.actors[0].is_ready = False
    pools.scale("actors", 1)
    assert [actor.number for actor in pools.actors] == [1]
    assert not pools.actors[0].is_going


def test_the_last_actor_that_lives_stays_though_another_pool_is_to_have_one_that_is_lost(two_actors):
    pools = two_actors.pools
    pools.pools["other"] = pools.pools["actors"]
    pools.actors[1].pool, pools.actors[1].lost = "other", "given up"
    with pytest.raises(ValueError, match="would leave the run with 0"):
        pools.scale("actors", 0)


def test_only_actorsthat_are_up_begin(two_actors):
    pools = two_actors.pools
    for actor in pools.actors:
        actor.__class__, actor.running = WithReadiness, None
    pools.actors[0].forget()
    pools.actors[0].is_ready = False
    pools.begin()
    assert [actor.running for actor in pools.actors] == [None, "a call"]


def test_an_actor_is_called_what_it_is_before_it_works_and_is_heard_while_it_evaluates(run, ended, monkeypatch):
    actor = run.supervisor.actors.actors[0]
    answers: list[object] = []
    monkeypatch.setattr(actor, "ask", lambda method, patience_s, notify: answers.pop() if answers else None)
    report = SimpleNamespace(task_fingerprint=run.supervisor._plan.task.fingerprint)
    assert (actor.state, run.supervisor.hear_actors().working) == ("starting", frozenset())
    ended["a call"] = ""  # that of its start
    assert actor.state == "ready"
    actor.handle.evaluate = SimpleNamespace(remote=lambda request: "an evaluation")
    run.supervisor.actors.ready = lambda: [actor]
    run.supervisor.evaluate(8, None)
    answers.append(report)
    news = run.supervisor.hear_actors()
    assert (news.actors, news.working, actor.state) == ([report], {"actor-0"}, "evaluating")
    assert actor.running is None, "nothing is begun meanwhile"
    actor.running = "its work"
    assert actor.state == "working"
    actor.running, ended["an evaluation"] = None, ""
    assert actor.state == "ready"


def test_services_are_watched_also_while_an_evaluation_is_all_that_goes_on(run, monkeypatch):
    watched: list[str] = []
    monkeypatch.setattr(run.supervisor._weights, "watch", lambda: watched.append("weights"))
    monkeypatch.setattr(run.admission, "watch", lambda: watched.append("buffers"))
    actor = run.supervisor.actors.actors[0]
    actor.handle.evaluate = SimpleNamespace(remote=lambda request: "an evaluation")
    run.supervisor.actors.ready = lambda: [actor]
    assert run.supervisor.evaluate(8, None).poll() is None
    assert watched == ["weights", "buffers"]


def test_where_ray_is_dead_nothing_is_asked_of_it_in_the_end(two_actors, monkeypatch):
    asked: list[str] = []
    watch = SimpleNamespace(is_dead=False, end_all=lambda: asked.append("ended"), close=lambda: asked.append("closed"))

    def check() -> None:
        watch.is_dead = True  # it is seen only now
        raise RunFailed("Ray's node manager died")

    watch.check = check
    two_actors.supervisor._ray = watch
    monkeypatch.setattr(ray_module, "_abandoned", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: pytest.fail("Ray was asked"))
    with pytest.raises(RunFailed, match="node manager died"):
        two_actors.supervisor.poll()
    two_actors.supervisor.stop()
    assert asked == ["ended", "closed"]
    assert was_abandoned()
