"""Tripwires: weights that go wrong or do not arrive are told once, with who and what is done, and when it is over."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.report import ActorReport
from actors.rewards import FailingReward
from common.staleness import StalenessConfig, StalenessContract
from launch import train
from launch.checks import check
from launch.config import LaunchConfig, load_config
from launch.observe import tripwires
from launch.observe.observer import Observer
from launch.observe.sinks import Tracker
from launch.observe.status import PollResult, read_status
from launch.observe.trace import Trace
from launch.observe.tripwires import LEARNER, MISMATCH_TOKENS, PUBLISHING_S, Trip, Tripwires, mismatch_limit
from launch.processes.role_process import RunFailed
from launch.train import Sinks, _Run
from tests.unit.made_up_run import context, process
from tests.unit.made_up_run import report as made_up_report
from tests.unit.made_up_run import status as made_up_status

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
ACTIONS = ("warn", "quarantine", "stop")


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(tripwires, "STUCK_AFTER_S", 20.0)
    monkeypatch.setattr(tripwires, "BEHIND_AFTER_S", 5.0)


def report(name: str, version: int, *, incarnation: int = 0, **fields: object) -> ActorReport:
    return made_up_report(name, version=(incarnation, version), **fields)


def row(**means: float) -> dict:
    """A step's report: of every actor the mean difference, over enough tokens."""
    by_actor = {name.replace("_", "-"): (mean, MISMATCH_TOKENS) for name, mean in means.items()}
    return {"lag0_by_actor": by_actor}


class Watched:
    """Tripwires under a clock of their own, which moves by a second at every look."""

    def __init__(self, limits: dict[str, float] | None = None, **knobs: object) -> None:
        self.now_s = 100.0
        actions = {name: knobs.pop(name) for name in list(knobs) if name.startswith("on_")}
        config = load_config(DEMO).model_copy(update={"launch": LaunchConfig(**actions)})
        staleness = StalenessConfig(max_actor_lag=1, **knobs)
        contract = StalenessContract(staleness, groups_per_step=1)
        self.wires = Tripwires(config, contract, clock=lambda: self.now_s)
        self.wires._mismatch_limits = limits or self.wires._mismatch_limits

    def look(
        self, *reports: ActorReport, newest: int | None = None, version: int | None = None, **fields
    ) -> list[Trip]:
        self.now_s += 1.0
        if newest is not None:
            learner = newest if version is None else version
            newest_version = fields.pop("incarnation", 0), newest
            fields["status"] = made_up_status(newest=newest_version, version=learner)
        evaluating = fields.pop("evaluating", False)
        return self.wires.look(PollResult(actors=list(reports), **fields), evaluating=evaluating)

    def looks(self, count: int, *reports: ActorReport, **fields) -> list[Trip]:
        return [trip for _ in range(count) for trip in self.look(*reports, **fields)]


def kinds(trips: list[Trip]) -> list[tuple[str, str]]:
    return [(trip.kind, trip.who) for trip in trips]


def test_lengths_that_are_not_those_generated_and_damaged_records_are_reported_once_and_when_they_are_over():
    watched = Watched()
    seen = [
        watched.look(status=made_up_status(fidelity_alarm=is_alarming, num_damaged=num_damaged))
        for is_alarming, num_damaged in ((False, 0), (True, 2), (True, 3), (False, 3))
    ]
    assert [kinds(trips) for trips in seen] == [
        [],
        [("fidelity", "buffer"), ("damage", "buffer")],
        [],
        [("fidelity_ended", "buffer")],
    ]
    (standing,) = watched.wires.standing
    assert standing.text.startswith("3 blocks of records of the buffer are damaged")


# --- mismatch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_the_actor_whose_log_probabilities_are_not_the_learners_is_named_and_no_other(action):
    watched = Watched(on_mismatch=action)
    assert watched.look(steps=[row(actor_0=1e-5, actor_1=2e-5)]) == []
    (trip,) = watched.look(steps=[row(actor_0=1e-5, actor_1=0.5)])
    assert (trip.kind, trip.who, trip.action) == ("mismatch", "actor-1", action)
    assert "actor-1" in trip.text
    assert "0.5" in trip.text
    assert "at most 0.001 is expected" in trip.text


def test_every_pool_has_the_limit_of_its_precision():
    watched = Watched(limits={"exact": 1e-3, "coarse": 0.2})
    reports = [report("actor-0", 0, pool="exact"), report("actor-1", 0, pool="coarse")]
    (trip,) = watched.look(*reports, steps=[row(actor_0=0.1, actor_1=0.1)])
    assert trip.who == "actor-0"


def test_a_mismatch_is_told_once_until_it_is_well_below_the_limit_and_then_anew():
    watched = Watched()
    seen = [watched.look(steps=[row(actor_0=mean)]) for mean in (0.5, 0.6, 0.0009, 0.5, 0.0004, 0.0002, 0.5)]
    told = [[trip.kind for trip in trips] for trips in seen]
    assert told == [["mismatch"], [], [], [], ["mismatch_ended"], [], ["mismatch"]]
    assert [trip.who for trip in watched.wires.standing] == ["actor-0"]


def test_a_difference_that_is_no_number_is_a_mismatch():
    assert kinds(Watched().look(steps=[row(actor_0=float("nan"))])) == [("mismatch", "actor-0")]


def test_a_few_tokens_are_judged_with_those_that_follow():
    watched = Watched()
    few = {"lag0_by_actor": {"actor-0": (0.5, MISMATCH_TOKENS // 2)}}
    assert watched.look(steps=[few]) == []
    assert kinds(watched.look(steps=[few])) == [("mismatch", "actor-0")]


def test_samples_of_an_actor_that_is_out_of_the_run_do_not_trip_again():
    watched = Watched()
    assert watched.look(steps=[row(actor_0=0.5)], working=frozenset({"actor-1"})) == []


@pytest.mark.parametrize(("dtypes", "limit"), [(("float32", "float32"), 1e-3), (("float32", "bfloat16"), 0.2)])
def test_the_limit_is_that_of_the_coarser_arithmetic(dtypes, limit):
    assert mismatch_limit(*dtypes) == limit


# --- stuck --------------------------------------------------------------------------------------------


def test_a_learner_that_takes_updates_and_publishes_none_is_told_with_what_it_waits_for():
    watched = Watched()
    assert watched.looks(15, newest=3, version=3) == []
    trips = watched.looks(25, newest=3, version=4, publishing="space in /w (No space left on device), for 9 s")
    stuck = next(trip for trip in trips if trip.kind == "stuck")
    assert (stuck.who, stuck.action) == (LEARNER, None)
    assert "version 4, and the newest published is 3 for 20 s" in stuck.text
    assert "No space left on device" in stuck.text
    assert kinds(watched.looks(3, newest=4, version=4, publishing="")) == [
        ("stuck_ended", LEARNER),
        ("publishing_ended", LEARNER),
    ]


def test_a_learner_that_publishes_every_few_steps_is_not_stuck_between_them():
    watched = Watched(publish_every=3, max_lag=8)
    assert watched.looks(60, newest=3, version=5) == []
    assert kinds(watched.looks(60, newest=3, version=6)) == [("stuck", LEARNER)]


def test_every_version_that_is_published_starts_the_time_anew():
    watched = Watched()
    for newest in range(8):
        assert watched.looks(15, newest=newest, version=newest + 1) == []


def test_an_actor_that_refuses_updates_is_told_with_what_it_refused_and_is_behind_in_time():
    watched = Watched(max_lag=4)
    old = report("actor-0", 3, refused="0.4: its checksum is not that of the manifest")
    assert kinds(watched.looks(30, old, report("actor-1", 4), newest=4)) == [("refused", "actor-0")]
    (trip,) = watched.looks(9, old, report("actor-1", 5), newest=5)
    assert (trip.kind, trip.who) == ("behind", "actor-0")
    assert "it refused 0.4: its checksum" in trip.text


def test_an_actor_that_takes_every_version_late_is_not_behind():
    watched = Watched()
    assert [
        trip for version in range(9) for trip in watched.looks(15, report("actor-0", version), newest=version + 1)
    ] == []


def test_an_evaluation_does_not_make_an_actor_behind():
    watched = Watched()
    assert watched.looks(60, report("actor-0", 3), newest=9, evaluating=True) == []
    assert watched.looks(4, report("actor-0", 3), newest=9) == [], "the time begins after it"


# --- behind -------------------------------------------------------------------------------------------


def test_an_actor_beyond_max_actor_lag_is_named_after_its_time_also_where_its_version_moves():
    watched = Watched()
    assert watched.looks(9, report("actor-0", 3), newest=4) == [], "one version is allowed"
    trips = [trip for step in range(9) for trip in watched.look(report("actor-0", 3 + step), newest=5 + step)]
    (trip,) = trips
    assert (trip.kind, trip.who, trip.action) == ("behind", "actor-0", None)
    assert "more than max_actor_lag = 1 behind for 5 s" in trip.text
    assert kinds(watched.look(report("actor-0", 13), newest=14)) == [("behind_ended", "actor-0")]
    assert watched.wires.standing == []


def test_an_actor_that_does_not_answer_is_behind_with_its_last_version():
    watched = Watched()
    working = frozenset({"actor-0"})
    watched.look(report("actor-0", 3), newest=3, working=working)
    (trip,) = watched.looks(10, newest=6, working=working)
    assert (trip.kind, trip.who) == ("behind", "actor-0")
    assert "it has not answered for 6 s" in trip.text


def test_versions_of_an_abandoned_incarnation_are_behind_whatever_their_number():
    watched = Watched()
    trips = watched.looks(9, report("actor-0", 9), newest=5, incarnation=1)
    assert kinds(trips) == [("behind", "actor-0")]


def test_an_actor_that_is_started_again_begins_with_a_clean_sheet():
    watched = Watched()
    assert kinds(watched.looks(9, report("actor-0", 0), newest=6)) == [("behind", "actor-0")]
    assert watched.look(newest=6, working=frozenset()) == []
    assert watched.wires.standing == []
    assert watched.looks(4, report("actor-0", 0), newest=6, working=frozenset({"actor-0"})) == []


# --- told, and nothing else ---------------------------------------------------------------------------


def test_weights_that_wait_for_the_disk_are_told_with_the_folder_and_again_when_they_do_not():
    watched = Watched()
    brief = int(PUBLISHING_S) - 1
    assert watched.looks(brief, publishing="the part of stage 0") == []
    assert watched.look(publishing="") == []
    (trip,) = watched.looks(9, publishing="space in /disk/weights (No space left on device), for 4 s")
    assert (trip.kind, trip.action) == ("publishing", None)
    assert "/disk/weights" in trip.text
    assert watched.looks(5, publishing=None) == [], "a learner that did not say may still wait"
    assert kinds(watched.looks(3, publishing="")) == [("publishing_ended", LEARNER)]


def test_every_refusal_of_an_actor_is_told_once():
    watched = Watched(max_lag="unbounded")
    told = [
        trip.text
        for refused in ("0.4: cut", "0.4: cut", "0.5: of another model", "", "0.5: of another model")
        for trip in watched.look(report("actor-0", 3, refused=refused), newest=4)
    ]
    assert [text.split(": ", 1)[1] for text in told] == ["0.4: cut", "0.5: of another model", "0.5: of another model"]
    assert "actor-0 keeps version 3" in told[0]


# --- failing ------------------------------------------------------------------------------------------


def failing(num_samples, *, for_s=0.0, timeout_s=0.0, why="KeyError: 'answer'"):
    return FailingReward("exact", why, num_samples, for_s, timeout_s, "2+2=", "5")


def test_a_reward_that_fails_on_sample_after_sample_stops_the_run_with_its_reason_and_a_prompt():
    watched = Watched()
    assert watched.look(report("actor-0", 0, failing=[failing(199)]), report("actor-1", 0)) == []
    (trip,) = watched.look(report("actor-0", 0, failing=[failing(200)]), report("actor-1", 0))
    assert (trip.kind, trip.who, trip.action) == ("failing", "actor-0", "stop")
    assert "reward exact failed in actor-0 on 200 samples in a row: KeyError: 'answer'" in trip.text
    assert "prompt '2+2=' and the completion '5'" in trip.text
    assert "leeway check-reward" in trip.text
    assert "leeway resume" in trip.text
    assert watched.look(report("actor-0", 0, failing=[failing(300)])) == []
    assert kinds(watched.look(report("actor-0", 0))) == [("failing_ended", "actor-0")]


def test_one_that_hangs_on_every_sample_is_not_waited_for_hundreds_of_times():
    watched = Watched()
    slow = {"timeout_s": 60.0, "why": "took longer than 60 s"}
    assert watched.look(report("actor-0", 0, failing=[failing(20, for_s=299.0, **slow)])) == []
    assert watched.look(report("actor-0", 0, failing=[failing(4, for_s=900.0, **slow)])) == [], "it was idle meanwhile"
    assert watched.look(report("actor-0", 0, failing=[failing(20, for_s=900.0)])) == [], "quick failures are counted"
    (trip,) = watched.look(report("actor-0", 0, failing=[failing(5, for_s=300.0, **slow)]))
    assert (trip.kind, trip.action) == ("failing", "stop")


def test_it_is_looked_for_in_an_evaluation_too_where_versions_are_not():
    watched = Watched()
    (trip,) = watched.look(report("actor-0", 0, failing=[failing(200)]), newest=9, evaluating=True)
    assert trip.kind == "failing"


# --- wired into the run -------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, request):
    """A run that only takes in polls; `run.quarantined` are the actors that it had taken out."""

    def make(*overrides: str) -> SimpleNamespace:
        plan = check(load_config(DEMO, ["--tracking.wandb", "disabled", *overrides]), tmp_path / "run")
        plan.folder.create(plan.config)
        quarantined: list[str] = []
        actors = SimpleNamespace(quarantine=lambda name, why: quarantined.append(name), wait_until_ready=lambda: None)
        supervisor = SimpleNamespace(actors=actors)
        said: list[str] = []
        display = SimpleNamespace(say=said.append, update=lambda progress: None)
        tracker = Tracker(plan.config, plan.folder)
        request.addfinalizer(tracker.__exit__)
        interrupts, observer = SimpleNamespace(count=0, training=False), Observer(plan)
        trace = Trace(plan.folder.timeline)
        request.addfinalizer(trace.close)
        sinks = Sinks(tracker, display, trace, observer)
        run = _Run(plan, context(plan).facts.contract, None, supervisor, sinks, interrupts)
        observer.take_in(PollResult(processes=(process("actor.0"), process("actor.1"))))

        def events() -> list[dict]:
            return [json.loads(line) for line in plan.folder.events.read_text().splitlines()]

        return SimpleNamespace(run=run, quarantined=quarantined, said=said, events=events, folder=plan.folder)

    return make


def a_step(**means: float) -> dict:
    common = {"step": 1, "version": 1, "started_s": 1.0, "finished_s": 2.0, "skipped": False}
    figures = {"batch/completion_tokens": 9, "lag/token_mean": 0.0, "lag/token_max": 0.0, "buffer/ledger_gap": 0}
    return common | figures | row(**means)


@pytest.mark.parametrize(("action", "taken_out"), [("warn", []), ("quarantine", ["actor-1"])])
def test_what_trips_is_an_event_and_on_the_display_and_the_actor_is_taken_out_where_the_knob_says_so(
    run, action, taken_out
):
    watched = run("--launch.on_mismatch", action)
    watched.run._digest(PollResult(steps=[a_step(actor_0=1e-6, actor_1=0.5)]))
    (event,) = watched.events()
    assert (event["kind"], event["who"], event["action"]) == ("mismatch", "actor-1", action)
    assert watched.said == [event["text"]]
    assert read_status(watched.folder.status).tripped == [event["text"]]
    assert watched.quarantined == taken_out


def test_a_trip_that_is_to_stop_the_run_fails_it_with_its_name(run):
    watched = run("--launch.on_mismatch", "stop")
    with pytest.raises(RunFailed, match="actor-1 and the learner differ"):
        watched.run._digest(PollResult(steps=[a_step(actor_1=0.5)]))
    assert [event["kind"] for event in watched.events()] == ["mismatch"]


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_run_whose_samples_all_fail_stops_with_the_sentence_also_in_an_evaluation(run, monkeypatch, evaluating):
    monkeypatch.setattr("launch.observe.tripwires.FAILING_SAMPLES", 3)
    watched = run()
    news = PollResult(actors=[report("actor-0", 0, failing=[failing(3)])])
    monkeypatch.setattr(train, "POLL_S", 0.0)
    watched.run.supervisor.hear_actors = lambda: news
    sentence = r"reward exact failed in actor-0 on 3 .*KeyError.*'2\+2='"
    evaluation = SimpleNamespace(poll=lambda: None)
    with pytest.raises(RunFailed, match=sentence):
        watched.run._evaluated_alone(evaluation) if evaluating else watched.run._digest(news)
    assert [event["kind"] for event in watched.events()] == ["failing"]


def test_a_status_has_the_mismatch_of_each_actor_in_its_place_and_not_in_the_row(run):
    watched = run()
    watched.run._digest(PollResult(steps=[a_step(actor_1=1e-6)]))
    assert "lag0_by_actor" not in read_status(watched.folder.status).row
    seen = {actor.name: actor.mismatch_lag0_abs for actor in read_status(watched.folder.status).actors}
    assert seen == {"actor-0": None, "actor-1": 1e-6}
