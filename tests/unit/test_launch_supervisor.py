"""The supervisor: draining across learner restarts, quarantine, scaling and lost actors."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from leeway.buffer.protocol import InvalidMessages
from leeway.launch.checks import check
from leeway.launch.config import load_config
from leeway.launch.observe.status import PollResult
from leeway.launch.pools import actor_pools
from leeway.launch.processes import actor_pools as pools_module
from leeway.launch.processes import ray_cluster
from leeway.launch.processes import ray_cluster as ray_module
from leeway.launch.processes import supervisor as supervisor_module
from leeway.launch.processes.actor_pools import ActorProcess
from leeway.launch.processes.role_process import MAX_RESTARTS, RESTART_RESET_S, RunFailed
from leeway.launch.processes.supervisor import Supervisor
from tests.unit.fake_actor_process import Handle, Room, worker

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"


class Admission:
    """Fake buffer service and client, whose admission is open or closed."""

    processes = ()

    def __init__(self, *_: object) -> None:
        self.is_open = True
        self.invalid_messages: dict[str, InvalidMessages] = {}

    def watch(self) -> None:
        pass

    def drain(self) -> None:
        self.is_open = False

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(invalid_messages=dict(self.invalid_messages))

    def ask(self, request) -> object:
        return request(self)

    def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


class RestartedLearner:
    """Fake stages; each restart opens admission, as a new incarnation of the learner does."""

    def __init__(self, *_: object) -> None:
        self.polls: list[PollResult] = []
        self.restarts_in_export: list[Admission] = []

    def restart(self, admission: Admission, step: int) -> None:
        admission.is_open = True
        self.polls.append(PollResult(resumed_at=step, resumed_version=2 * step))

    def watch(self) -> None:
        pass

    def facts(self) -> list[object]:
        return []

    def poll(self, patience_s: float) -> PollResult:
        return self.polls.pop(0) if self.polls else PollResult()

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


def test_a_restart_of_the_learner_leaves_admission_open(run):
    run.learner.restart(run.admission, 4)
    poll = run.supervisor.poll()
    assert (poll.resumed_at, poll.resumed_version) == (4, 8)
    assert run.admission.is_open


def test_a_sender_of_invalid_messages_is_reported_once(run):
    for count in (1, 20_000):
        run.admission.invalid_messages = {"actor-1": InvalidMessages(count, "failed validation: header")}
        run.supervisor.poll()
    run.admission.invalid_messages["others"] = InvalidMessages(1, "Drain is for launch")
    run.supervisor.poll()
    text = "the buffer rejects messages from {}; the first: {}"
    assert run.events == [
        ("invalid_messages", text.format("actor-1", "failed validation: header")),
        ("invalid_messages", text.format("others", "Drain is for launch")),
    ]


def test_after_an_interrupt_admission_stays_closed_across_restarts(run):
    run.supervisor.request_stop()
    assert not run.admission.is_open
    for step in (4, 6):
        run.learner.restart(run.admission, step)
        run.supervisor.poll()
        assert not run.admission.is_open


def test_an_interrupt_during_a_restart_closes_admission_after_it(run):
    run.supervisor.poll()
    run.supervisor.request_stop()  # the request comes while the learner restarts
    run.learner.restart(run.admission, 4)
    run.supervisor.poll()
    assert not run.admission.is_open


def test_a_restart_in_the_export_leaves_admission_closed_and_is_reported(run, tmp_path):
    run.supervisor.drain()
    run.learner.restarts_in_export = [run.admission]
    run.supervisor.export(tmp_path / "model")
    assert not run.admission.is_open
    assert run.supervisor.poll().resumed_at == 10


@pytest.fixture
def two_actors(run, tmp_path, monkeypatch):
    """The run with two working actors; `run.killed` lists the handles of killed actors."""
    run.killed = []
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: run.killed.append(handle))
    run.pools = run.supervisor.actors
    run.pools.actors = [worker(number, tmp_path, starting="a call", running="a call") for number in range(2)]
    run.pools._next_number = 2
    return run


def test_a_quarantined_actor_is_killed_and_reported_and_not_restarted(two_actors):
    supervisor = two_actors.supervisor
    assert supervisor.poll().working == {"actor-0", "actor-1"}
    for _ in range(2):
        supervisor.actors.quarantine("actor-1", "its weights are not the learner's")
    assert two_actors.killed == [supervisor.actors.actors[1].handle]
    poll = supervisor.poll()
    assert (poll.working, poll.quarantined) == ({"actor-0"}, ("actor-1",))
    assert [kind for kind, _ in two_actors.events] == ["quarantined"]
    assert "its weights are not the learner's" in two_actors.events[0][1]


def test_quarantine_of_the_last_actor_fails_the_run_with_the_reason(two_actors):
    two_actors.supervisor.actors.quarantine("actor-0", "of one thing")
    with pytest.raises(RunFailed, match=r"no actor is left: actor-1, the last one, .*: of another"):
        two_actors.supervisor.actors.quarantine("actor-1", "of another")


def test_services_stop_after_the_actors_which_return_their_leases(two_actors, monkeypatch):
    order: list[str] = []
    waits: list[list[str]] = []
    for actor in two_actors.pools.actors:
        actor.handle.stop = SimpleNamespace(remote=lambda name=actor.name: order.append(name) or name)
    for service in ("_buffer", "_weights"):
        service_host = getattr(two_actors.supervisor, service)
        service_host.request_stop = lambda name=service: order.append(name) or [name]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (order.append("waited"), waits.append(calls)))
    monkeypatch.setattr(supervisor_module, "end_ray", lambda: None)
    two_actors.supervisor.stop()
    assert order == ["actor.0", "actor.1", "waited", "_buffer", "_weights", "waited"]
    assert waits == [["actor.0", "actor.1"], ["_buffer", "_weights"]]


@pytest.fixture
def ended(monkeypatch):
    """Mapping of each ended call to its error, or to '' if the call succeeded."""
    calls: dict[str, str] = {}
    monkeypatch.setattr(pools_module, "done", lambda call: call in calls)
    monkeypatch.setattr(pools_module, "outcome", lambda call: calls[call])
    return calls


@pytest.fixture
def started(two_actors, monkeypatch):
    """Handles of all started actors; `Room` gives each actor a place."""
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


def test_a_larger_pool_starts_actors_with_new_numbers_on_free_hosts(two_actors, started, ended):
    pools = two_actors.pools
    assert pools.scale("actors", 4) == "pool 'actors' scales from 2 to 4 actors"
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
    assert [actor.number for actor in pools.watch()] == [0, 1], "the run continues with two actors"


def test_an_actor_receives_the_engine_timeout_and_the_variables_of_the_config(two_actors, started, ended):
    pools = two_actors.pools
    pools._config = load_config(DEMO, ["--actors.gpus", "1", "--launch.env.NCCL_DEBUG", "INFO"])
    pools.scale("actors", 3)
    pools.watch()
    assert started[0].variables == {"VLLM_ENGINE_READY_TIMEOUT_S": "1800", "NCCL_DEBUG": "INFO"}


def test_an_actor_colocated_with_the_learner_stays_alone(two_actors, started, ended):
    pools = two_actors.pools
    pools._config = load_config(DEMO, ["--launch.colocate", "true"])
    with pytest.raises(ValueError, match=r"^launch\.colocate = true supports only one actor"):
        pools.scale("actors", 3)
    assert (pools.desired, len(pools.actors), pools.room("actors")) == ({"actors": 2}, 2, 0)


@pytest.mark.parametrize(
    ("free", "room"),
    [
        ([{"CPU": 8.0, "GPU": 1.0}], 1),
        ([{"CPU": 8.0, "GPU": 0.5}], 0),
        ([{"CPU": 0.5, "GPU": 1.0}, {"CPU": 8.0, "GPU": 3.0}, {"CPU": 9.0}], 3),
    ],
)
def test_the_room_of_a_pool_is_counted_by_host(two_actors, monkeypatch, free, room):
    two_actors.pools._config = load_config(DEMO, ["--actors.gpus", "1", "--actors.cpus", "1"])
    two_actors.pools.pools = {pool.name: pool for pool in actor_pools(two_actors.pools._config)}
    state = SimpleNamespace(available_resources_per_node=lambda: dict(enumerate(free)))
    monkeypatch.setattr(ray._private, "state", state)
    assert two_actors.pools.room("actors") == room


def test_lost_actors_do_not_stay_and_room_is_counted_without_rounding_errors(two_actors, monkeypatch):
    pools = two_actors.pools
    pools.actors[1].lost = "given up"
    pools.desired["actors"] = 2
    assert pools.staying("actors") == pools.actors[:1]
    pools.pools = {"actors": replace(pools.pools["actors"], bundle={"CPU": 0.1})}
    state = SimpleNamespace(available_resources_per_node=lambda: {"a": {"CPU": 0.3}})
    monkeypatch.setattr(ray._private, "state", state)
    assert pools.room("actors") == 3
    pools.pools = {"actors": replace(pools.pools["actors"], bundle={})}
    assert pools.room("actors") > 100, "actors without a reservation fit anywhere"


def test_a_smaller_pool_drains_its_newest_actor_and_releases_its_place(two_actors, ended):
    pools = two_actors.pools
    leaving = pools.actors[1]
    leaving.handle.stop = SimpleNamespace(remote=lambda: "a stop call")
    pools.scale("actors", 1)
    assert (states(two_actors)["actor.1"], two_actors.killed) == ("leaving", [])
    assert [actor.number for actor in pools.watch()] == [0]
    assert not leaving.is_ready, "a leaving actor gets no evaluation"
    ended["a stop call"] = ""
    pools.watch()
    assert (states(two_actors).keys(), two_actors.killed) == ({"actor.0"}, [leaving.handle])
    assert leaving.placement.released
    assert [kind for kind, _ in two_actors.events] == ["scaled", "left"]


def test_an_actor_that_does_not_leave_is_killed_after_the_grace_period(two_actors, ended, monkeypatch):
    monkeypatch.setattr(pools_module, "SHUTDOWN_GRACE_S", 0.0)
    leaving = two_actors.pools.actors[1]
    two_actors.pools.scale("actors", 1)
    two_actors.pools.watch()
    assert two_actors.killed == [leaving.handle]


def test_the_last_actor_stays_and_unknown_pools_are_refused(two_actors):
    with pytest.raises(ValueError, match="leave 0 actors in the run"):
        two_actors.pools.scale("actors", 0)
    with pytest.raises(ValueError, match="unknown pool 'big': use one of actors"):
        two_actors.pools.scale("big", 2)
    assert two_actors.events == []


def test_an_actor_that_keeps_dying_is_restarted_up_to_a_limit_and_given_up(two_actors, started, ended):
    ended["a call"] = "out of memory"
    pools = two_actors.pools
    for actor in pools.actors:
        for _ in range(MAX_RESTARTS):
            actor.restarts.count()
    first = pools.actors[0]
    first.restarts.working_since_s = time.monotonic() - RESTART_RESET_S  # an hour of work resets the count of restarts
    pools.watch()
    assert (len(started), first.state, pools.actors[1].state) == (1, "starting", "lost: given up: out of memory")
    assert [kind for kind, _ in two_actors.events] == ["restart", "given_up"]
    assert "out of memory; 1 other actor left" in two_actors.events[1][1]
    pools.scale("actors", 2)
    assert [actor.number for actor in pools.actors] == [0, 1, 2], "an actor that was given up is replaced"
    assert two_actors.supervisor.poll().desired == {"actors": 2}
    pools.scale("actors", 1)
    assert two_actors.supervisor.poll().desired == {"actors": 1}


def test_an_unreachable_actor_is_called_again_and_not_restarted(two_actors, started, ended, monkeypatch):
    pools = two_actors.pools
    cut, other = pools.actors
    other.running = "pending"
    handle = cut.handle
    handle.run = SimpleNamespace(remote=lambda: "second call")
    ended["a call"] = "unavailable"
    monkeypatch.setattr(pools_module, "failure", lambda call: ActorUnavailableError("reset by peer", None))
    pools.watch()
    assert (cut.running, cut.state, two_actors.killed, started) == ("second call", "working", [], [])
    ((kind, text),) = two_actors.events
    assert kind == "unreachable"
    assert "reset by peer" in text
    later_s = cut._disconnected_s + 61.0
    monkeypatch.setattr(pools_module.time, "monotonic", lambda: later_s)
    ended["second call"] = "unavailable"
    pools.watch()
    assert (two_actors.killed, [kind for kind, _ in two_actors.events]) == ([handle], ["unreachable", "restart"])


class WithReadiness(ActorProcess):
    """An actor whose readiness the test sets."""

    is_ready = True


def test_an_actor_that_waits_for_a_host_leaves_before_a_working_one(two_actors):
    pools = two_actors.pools
    for actor in pools.actors:
        actor.__class__ = WithReadiness
    pools.actors[0].forget()  # its host was lost
    pools.actors[0].is_ready = False
    pools.scale("actors", 1)
    assert [actor.number for actor in pools.actors] == [1]
    assert not pools.actors[0].is_going


def test_the_last_live_actor_stays_although_another_pool_has_a_lost_one(two_actors):
    pools = two_actors.pools
    pools.pools["other"] = pools.pools["actors"]
    pools.actors[1].pool, pools.actors[1].lost = "other", "given up"
    with pytest.raises(ValueError, match="leave 0 actors in the run"):
        pools.scale("actors", 0)


def test_only_ready_actors_begin(two_actors):
    pools = two_actors.pools
    for actor in pools.actors:
        actor.__class__, actor.running = WithReadiness, None
    pools.actors[0].forget()
    pools.actors[0].is_ready = False
    pools.begin()
    assert [actor.running for actor in pools.actors] == [None, "a call"]


def test_an_actor_has_a_state_before_it_works_and_reports_while_it_evaluates(run, ended, monkeypatch):
    actor = run.supervisor.actors.actors[0]
    answers: list[object] = []
    monkeypatch.setattr(actor, "ask", lambda method, patience_s, notify: answers.pop() if answers else None)
    report = SimpleNamespace(task_fingerprint=run.supervisor._plan.task.fingerprint)
    assert (actor.state, run.supervisor.poll_actors().working) == ("starting", frozenset())
    ended["a call"] = ""  # the call that starts the actor has ended
    assert actor.state == "ready"
    actor.handle.evaluate = SimpleNamespace(remote=lambda request: "an evaluation")
    run.supervisor.actors.ready = lambda: [actor]
    run.supervisor.evaluate(8, None)
    answers.append(report)
    poll = run.supervisor.poll_actors()
    assert (poll.actors, poll.working, actor.state) == ([report], {"actor-0"}, "evaluating")
    assert actor.running is None, "no work begins during the evaluation"
    actor.running = "its work"
    assert actor.state == "working"
    actor.running, ended["an evaluation"] = None, ""
    assert actor.state == "ready"


def test_services_are_watched_during_an_evaluation(run, monkeypatch):
    watched: list[str] = []
    monkeypatch.setattr(run.supervisor._weights, "watch", lambda: watched.append("weights"))
    monkeypatch.setattr(run.admission, "watch", lambda: watched.append("buffers"))
    actor = run.supervisor.actors.actors[0]
    actor.handle.evaluate = SimpleNamespace(remote=lambda request: "an evaluation")
    run.supervisor.actors.ready = lambda: [actor]
    assert run.supervisor.evaluate(8, None).poll() is None
    assert watched == ["weights", "buffers"]


def test_a_dead_ray_is_not_called_at_the_end(two_actors, monkeypatch):
    calls: list[str] = []
    watch = SimpleNamespace(is_dead=False, end_all=lambda: calls.append("ended"), close=lambda: calls.append("closed"))

    def check() -> None:
        watch.is_dead = True  # the check detects the death of Ray
        raise RunFailed("Ray's node manager died")

    watch.check = check
    two_actors.supervisor._ray = watch
    monkeypatch.setattr(ray_module, "_abandoned", False)
    monkeypatch.setattr(ray, "is_initialized", lambda: pytest.fail("Ray was called"))
    with pytest.raises(RunFailed, match="node manager died"):
        two_actors.supervisor.poll()
    two_actors.supervisor.stop()
    assert calls == ["ended", "closed"]
    assert ray_cluster._abandoned
