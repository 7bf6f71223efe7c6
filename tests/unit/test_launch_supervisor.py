"""A run that drains goes on draining, whatever happens to its learner."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from launch import supervisor as supervisor_module
from launch.checks import check
from launch.load import load_config
from launch.role_process import RoleProcess
from launch.stages import StageNews
from launch.supervisor import Supervisor

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


class Admission:
    """Stands for the buffer services and their client: open or closed."""

    def __init__(self, *_: object) -> None:
        self.is_open = True

    def watch(self) -> None:
        pass

    def drain(self) -> None:
        self.is_open = False

    def status(self) -> None:
        pass

    def ask(self, request) -> None:
        request(self)


class RestartedLearner:
    """Stands for the stages; each restart opens admission, as a new incarnation does."""

    def __init__(self, *_: object) -> None:
        self.news: list[StageNews] = []
        self.restarts_in_export: list[Admission] = []

    def restart(self, admission: Admission, step: int) -> None:
        admission.is_open = True
        self.news.append(StageNews(resumed_at=step, resumed_version=2 * step))

    def watch(self) -> None:
        pass

    def poll(self, patience_s: float) -> StageNews:
        return self.news.pop(0) if self.news else StageNews()

    def request_stop(self) -> None:
        pass

    def export(self, folder: Path) -> None:
        for admission in self.restarts_in_export:
            self.restart(admission, 10)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A supervisor with its fakes; its only actor is starting."""
    monkeypatch.setattr(supervisor_module, "Buffers", Admission)
    monkeypatch.setattr(supervisor_module, "Stages", RestartedLearner)
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns=1, timeout=None: ([], calls))
    plan = check(load_config(DEMO, []), tmp_path / "run")
    supervisor = Supervisor(plan, tmp_path, plan.model, tmp_path, lambda kind, text: None)
    supervisor._actors = [RoleProcess("actor", 0, None, tmp_path / "log", starting="a call")]
    return SimpleNamespace(supervisor=supervisor, admission=supervisor._buffers, learner=supervisor._stages)


def test_a_learner_that_is_started_again_leaves_admission_open_while_the_run_goes_on(run):
    run.learner.restart(run.admission, 4)
    news = run.supervisor.poll()
    assert (news.resumed_at, news.resumed_version) == (4, 8)
    assert run.admission.is_open


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
