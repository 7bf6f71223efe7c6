"""Alerts: each alert is reported once when it starts, with its source and action, and once when it ends."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from leeway.actors.report import ActorReport
from leeway.actors.rewards import FailingReward
from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.launch import train
from leeway.launch.checks import check
from leeway.launch.config import LaunchConfig, load_config
from leeway.launch.observe import alerts
from leeway.launch.observe.alerts import LEARNER, MISMATCH_TOKENS, PUBLISHING_S, Alert, Alerts, mismatch_limit
from leeway.launch.observe.observer import Observer
from leeway.launch.observe.sinks import Tracker
from leeway.launch.observe.status import PollResult, read_status
from leeway.launch.observe.trace import Trace
from leeway.launch.processes.role_process import RunFailed
from leeway.launch.train import Sinks, _Run
from tests.unit.made_up_run import context, process
from tests.unit.made_up_run import report as made_up_report
from tests.unit.made_up_run import status as made_up_status

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
ACTIONS = ("warn", "quarantine", "stop")


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(alerts, "STUCK_AFTER_S", 20.0)
    monkeypatch.setattr(alerts, "BEHIND_AFTER_S", 5.0)


def report(name: str, version: int, *, incarnation: int = 0, **fields: object) -> ActorReport:
    return made_up_report(name, version=(incarnation, version), **fields)


def row(**means: float) -> dict:
    """Return a metrics row with this mean mismatch per actor, each over enough tokens to raise an alert."""
    by_actor = {name.replace("_", "-"): (mean, MISMATCH_TOKENS) for name, mean in means.items()}
    return {"lag0_by_actor": by_actor}


class PolledAlerts:
    """Alerts with a fake clock that advances by 1 s per poll."""

    def __init__(self, limits: dict[str, float] | None = None, **knobs: object) -> None:
        self.now_s = 100.0
        actions = {name: knobs.pop(name) for name in list(knobs) if name.startswith("on_")}
        config = load_config(DEMO).model_copy(update={"launch": LaunchConfig(**actions)})
        staleness = StalenessConfig(max_actor_lag=1, **knobs)
        contract = StalenessContract(staleness, groups_per_step=1)
        self.alerts = Alerts(config, contract, clock=lambda: self.now_s)
        self.alerts._mismatch_limits = limits or self.alerts._mismatch_limits

    def poll(
        self, *reports: ActorReport, newest: int | None = None, version: int | None = None, **fields
    ) -> list[Alert]:
        self.now_s += 1.0
        if newest is not None:
            learner = newest if version is None else version
            newest_version = fields.pop("incarnation", 0), newest
            fields["status"] = made_up_status(newest=newest_version, version=learner)
        evaluating = fields.pop("evaluating", False)
        return self.alerts.check(PollResult(actors=list(reports), **fields), evaluating=evaluating)

    def poll_times(self, count: int, *reports: ActorReport, **fields) -> list[Alert]:
        return [alert for _ in range(count) for alert in self.poll(*reports, **fields)]


def kinds(found: list[Alert]) -> list[tuple[str, str]]:
    return [(alert.kind, alert.source) for alert in found]


def test_buffer_alerts_are_reported_once_at_their_start_and_end():
    polled = PolledAlerts()
    seen = [
        polled.poll(status=made_up_status(fidelity_alarm=is_alarming, num_damaged=num_damaged))
        for is_alarming, num_damaged in ((False, 0), (True, 2), (True, 3), (False, 3))
    ]
    assert [kinds(found) for found in seen] == [
        [],
        [("fidelity", "buffer"), ("damage", "buffer")],
        [],
        [("fidelity_ended", "buffer")],
    ]
    (active,) = polled.alerts.active
    assert active.text.startswith("3 blocks of buffer records are damaged")


# --- mismatch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_a_mismatch_alert_names_only_the_mismatching_actor(action):
    polled = PolledAlerts(on_mismatch=action)
    assert polled.poll(steps=[row(actor_0=1e-5, actor_1=2e-5)]) == []
    (alert,) = polled.poll(steps=[row(actor_0=1e-5, actor_1=0.5)])
    assert (alert.kind, alert.source, alert.action) == ("mismatch", "actor-1", action)
    assert "actor-1" in alert.text
    assert "0.5" in alert.text
    assert "limit 0.001" in alert.text


def test_the_mismatch_limit_depends_on_the_precision_of_the_pool():
    polled = PolledAlerts(limits={"exact": 1e-3, "coarse": 0.2})
    reports = [report("actor-0", 0, pool="exact"), report("actor-1", 0, pool="coarse")]
    (alert,) = polled.poll(*reports, steps=[row(actor_0=0.1, actor_1=0.1)])
    assert alert.source == "actor-0"


def test_a_mismatch_is_reported_again_only_after_it_fell_well_below_the_limit():
    polled = PolledAlerts()
    seen = [polled.poll(steps=[row(actor_0=mean)]) for mean in (0.5, 0.6, 0.0009, 0.5, 0.0004, 0.0002, 0.5)]
    reported = [[alert.kind for alert in found] for found in seen]
    assert reported == [["mismatch"], [], [], [], ["mismatch_ended"], [], ["mismatch"]]
    assert [alert.source for alert in polled.alerts.active] == ["actor-0"]


def test_a_nan_difference_is_a_mismatch():
    assert kinds(PolledAlerts().poll(steps=[row(actor_0=float("nan"))])) == [("mismatch", "actor-0")]


def test_too_few_tokens_are_carried_over_to_the_next_step():
    polled = PolledAlerts()
    few = {"lag0_by_actor": {"actor-0": (0.5, MISMATCH_TOKENS // 2)}}
    assert polled.poll(steps=[few]) == []
    assert kinds(polled.poll(steps=[few])) == [("mismatch", "actor-0")]


def test_samples_of_a_removed_actor_raise_no_alert():
    polled = PolledAlerts()
    assert polled.poll(steps=[row(actor_0=0.5)], working=frozenset({"actor-1"})) == []


@pytest.mark.parametrize(("dtypes", "limit"), [(("float32", "float32"), 1e-3), (("float32", "bfloat16"), 0.2)])
def test_the_mismatch_limit_is_that_of_the_coarser_dtype(dtypes, limit):
    assert mismatch_limit(*dtypes) == limit


# --- stuck --------------------------------------------------------------------------------------------


def test_a_stuck_alert_states_the_versions_and_the_cause_of_the_wait():
    polled = PolledAlerts()
    assert polled.poll_times(15, newest=3, version=3) == []
    found = polled.poll_times(25, newest=3, version=4, publishing="space in /w (No space left on device), for 9 s")
    stuck = next(alert for alert in found if alert.kind == "stuck")
    assert (stuck.source, stuck.action) == (LEARNER, None)
    assert "version 4, but the newest published version has been 3 for 20 s" in stuck.text
    assert "No space left on device" in stuck.text
    assert kinds(polled.poll_times(3, newest=4, version=4, publishing="")) == [
        ("stuck_ended", LEARNER),
        ("publishing_ended", LEARNER),
    ]


def test_a_learner_is_not_stuck_between_two_publications():
    polled = PolledAlerts(publish_every=3, max_lag=8)
    assert polled.poll_times(60, newest=3, version=5) == []
    assert kinds(polled.poll_times(60, newest=3, version=6)) == [("stuck", LEARNER)]


def test_each_published_version_resets_the_stuck_timer():
    polled = PolledAlerts()
    for newest in range(8):
        assert polled.poll_times(15, newest=newest, version=newest + 1) == []


def test_an_actor_that_refuses_updates_is_reported_and_later_falls_behind():
    polled = PolledAlerts(max_lag=4)
    old = report("actor-0", 3, refused="0.4: its checksum is not that of the manifest")
    assert kinds(polled.poll_times(30, old, report("actor-1", 4), newest=4)) == [("refused", "actor-0")]
    (alert,) = polled.poll_times(9, old, report("actor-1", 5), newest=5)
    assert (alert.kind, alert.source) == ("behind", "actor-0")
    assert "it refused 0.4: its checksum" in alert.text


def test_an_actor_that_applies_every_version_late_is_not_behind():
    polled = PolledAlerts()
    assert [
        alert for version in range(9) for alert in polled.poll_times(15, report("actor-0", version), newest=version + 1)
    ] == []


def test_an_actor_does_not_fall_behind_during_an_evaluation():
    polled = PolledAlerts()
    assert polled.poll_times(60, report("actor-0", 3), newest=9, evaluating=True) == []
    assert polled.poll_times(4, report("actor-0", 3), newest=9) == [], "the time starts at the end of the evaluation"


# --- behind -------------------------------------------------------------------------------------------


def test_an_actor_beyond_max_actor_lag_is_reported_even_if_its_version_advances():
    polled = PolledAlerts()
    assert polled.poll_times(9, report("actor-0", 3), newest=4) == [], "a lag of one version is allowed"
    found = [alert for step in range(9) for alert in polled.poll(report("actor-0", 3 + step), newest=5 + step)]
    (alert,) = found
    assert (alert.kind, alert.source, alert.action) == ("behind", "actor-0", None)
    assert "more than max_actor_lag = 1 behind for 5 s" in alert.text
    assert kinds(polled.poll(report("actor-0", 13), newest=14)) == [("behind_ended", "actor-0")]
    assert polled.alerts.active == []


def test_an_unresponsive_actor_is_behind_with_its_last_version():
    polled = PolledAlerts()
    working = frozenset({"actor-0"})
    polled.poll(report("actor-0", 3), newest=3, working=working)
    (alert,) = polled.poll_times(10, newest=6, working=working)
    assert (alert.kind, alert.source) == ("behind", "actor-0")
    assert "it has not responded for 6 s" in alert.text


def test_every_version_of_an_abandoned_incarnation_is_behind():
    polled = PolledAlerts()
    found = polled.poll_times(9, report("actor-0", 9), newest=5, incarnation=1)
    assert kinds(found) == [("behind", "actor-0")]


def test_a_restarted_actor_starts_without_alerts():
    polled = PolledAlerts()
    assert kinds(polled.poll_times(9, report("actor-0", 0), newest=6)) == [("behind", "actor-0")]
    assert polled.poll(newest=6, working=frozenset()) == []
    assert polled.alerts.active == []
    assert polled.poll_times(4, report("actor-0", 0), newest=6, working=frozenset({"actor-0"})) == []


# --- reported without an action -----------------------------------------------------------------------


def test_a_publishing_alert_names_the_folder_and_ends_with_the_wait():
    polled = PolledAlerts()
    brief = int(PUBLISHING_S) - 1
    assert polled.poll_times(brief, publishing="the part of stage 0") == []
    assert polled.poll(publishing="") == []
    (alert,) = polled.poll_times(9, publishing="space in /disk/weights (No space left on device), for 4 s")
    assert (alert.kind, alert.action) == ("publishing", None)
    assert "/disk/weights" in alert.text
    assert polled.poll_times(5, publishing=None) == [], "a missing report does not end the wait"
    assert kinds(polled.poll_times(3, publishing="")) == [("publishing_ended", LEARNER)]


def test_each_refused_update_is_reported_once():
    polled = PolledAlerts(max_lag="unbounded")
    texts = [
        alert.text
        for refused in ("0.4: cut", "0.4: cut", "0.5: of another model", "", "0.5: of another model")
        for alert in polled.poll(report("actor-0", 3, refused=refused), newest=4)
    ]
    assert [text.split(": ", 1)[1] for text in texts] == ["0.4: cut", "0.5: of another model", "0.5: of another model"]
    assert "actor-0 refused an update and keeps version 3" in texts[0]


# --- failing ------------------------------------------------------------------------------------------


def failing(num_samples, *, for_s=0.0, timeout_s=0.0, why="KeyError: 'answer'"):
    return FailingReward("exact", why, num_samples, for_s, timeout_s, "2+2=", "5")


def test_a_reward_that_fails_on_200_samples_in_a_row_stops_the_run():
    polled = PolledAlerts()
    assert polled.poll(report("actor-0", 0, failing=[failing(199)]), report("actor-1", 0)) == []
    (alert,) = polled.poll(report("actor-0", 0, failing=[failing(200)]), report("actor-1", 0))
    assert (alert.kind, alert.source, alert.action) == ("failing", "actor-0", "stop")
    assert "reward exact failed in actor-0 on 200 samples in a row: KeyError: 'answer'" in alert.text
    assert "prompt '2+2=' and the completion '5'" in alert.text
    assert "leeway check-reward" in alert.text
    assert "leeway resume" in alert.text
    assert polled.poll(report("actor-0", 0, failing=[failing(300)])) == []
    assert kinds(polled.poll(report("actor-0", 0))) == [("failing_ended", "actor-0")]


def test_a_reward_that_times_out_five_times_in_a_row_stops_the_run():
    polled = PolledAlerts()
    slow = {"timeout_s": 60.0, "why": "took longer than 60 s"}
    assert polled.poll(report("actor-0", 0, failing=[failing(20, for_s=299.0, **slow)])) == []
    assert polled.poll(report("actor-0", 0, failing=[failing(4, for_s=900.0, **slow)])) == [], (
        "4 timeouts are below the limit of 5"
    )
    assert polled.poll(report("actor-0", 0, failing=[failing(20, for_s=900.0)])) == [], (
        "20 fast failures are below the limit of 200"
    )
    (alert,) = polled.poll(report("actor-0", 0, failing=[failing(5, for_s=300.0, **slow)]))
    assert (alert.kind, alert.action) == ("failing", "stop")


def test_failing_rewards_are_reported_during_an_evaluation():
    polled = PolledAlerts()
    (alert,) = polled.poll(report("actor-0", 0, failing=[failing(200)]), newest=9, evaluating=True)
    assert alert.kind == "failing"


# --- alerts in a run ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, request):
    """Return a function that makes a run that only handles polls; `quarantined` lists its removed actors."""

    def make(*overrides: str) -> SimpleNamespace:
        plan = check(load_config(DEMO, ["--tracking.to", "[]", *overrides]), tmp_path / "run")
        plan.folder.create(plan.config)
        quarantined: list[str] = []
        actors = SimpleNamespace(quarantine=lambda name, why: quarantined.append(name), wait_until_ready=lambda: None)
        supervisor = SimpleNamespace(actors=actors)
        messages: list[str] = []
        display = SimpleNamespace(log=messages.append, update=lambda progress: None)
        tracker = Tracker(plan.config, plan.folder)
        request.addfinalizer(tracker.__exit__)
        interrupts, observer = SimpleNamespace(count=0, training=False), Observer(plan)
        trace = Trace(plan.folder.timeline)
        request.addfinalizer(trace.close)
        sinks = Sinks(tracker, display, trace, observer)
        run = _Run(plan, context(plan).facts.contract, None, supervisor, sinks, interrupts)
        observer.ingest(PollResult(processes=(process("actor.0"), process("actor.1"))))

        def events() -> list[dict]:
            return [json.loads(line) for line in plan.folder.events.read_text().splitlines()]

        return SimpleNamespace(run=run, quarantined=quarantined, messages=messages, events=events, folder=plan.folder)

    return make


def step_row(**means: float) -> dict:
    common = {"step": 1, "version": 1, "started_s": 1.0, "finished_s": 2.0, "skipped": False}
    figures = {"batch/completion_tokens": 9, "lag/token_mean": 0.0, "lag/token_max": 0.0, "buffer/ledger_gap": 0}
    return common | figures | row(**means)


@pytest.mark.parametrize(("action", "quarantined"), [("warn", []), ("quarantine", ["actor-1"])])
def test_an_alert_is_logged_and_displayed_and_its_action_is_taken(run, action, quarantined):
    made = run("--launch.on_mismatch", action)
    made.run._handle_poll(PollResult(steps=[step_row(actor_0=1e-6, actor_1=0.5)]))
    (event,) = made.events()
    assert (event["kind"], event["who"], event["action"]) == ("mismatch", "actor-1", action)
    assert made.messages == [event["text"]]
    assert read_status(made.folder.status).alerts == [event["text"]]
    assert made.quarantined == quarantined


def test_a_stop_action_fails_the_run_and_names_the_actor(run):
    made = run("--launch.on_mismatch", "stop")
    with pytest.raises(RunFailed, match="actor-1 and the learner differ"):
        made.run._handle_poll(PollResult(steps=[step_row(actor_1=0.5)]))
    assert [event["kind"] for event in made.events()] == ["mismatch"]


@pytest.mark.parametrize("evaluating", [False, True])
def test_failing_rewards_stop_training_and_evaluation(run, monkeypatch, evaluating):
    monkeypatch.setattr("leeway.launch.observe.alerts.FAILING_SAMPLES", 3)
    made = run()
    poll = PollResult(actors=[report("actor-0", 0, failing=[failing(3)])])
    monkeypatch.setattr(train, "POLL_S", 0.0)
    made.run.supervisor.poll_actors = lambda: poll
    pattern = r"reward exact failed in actor-0 on 3 .*KeyError.*'2\+2='"
    evaluation = SimpleNamespace(poll=lambda: None)
    with pytest.raises(RunFailed, match=pattern):
        made.run._wait_for_evaluation(evaluation) if evaluating else made.run._handle_poll(poll)
    assert [event["kind"] for event in made.events()] == ["failing"]


def test_the_status_lists_the_mismatch_of_each_actor_but_its_row_does_not(run):
    made = run()
    made.run._handle_poll(PollResult(steps=[step_row(actor_1=1e-6)]))
    assert "lag0_by_actor" not in read_status(made.folder.status).row
    seen = {actor.name: actor.mismatch_lag0_abs for actor in read_status(made.folder.status).actors}
    assert seen == {"actor-0": None, "actor-1": 1e-6}
