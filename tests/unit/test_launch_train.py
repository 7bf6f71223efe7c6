"""Launches that do not complete: the files that stay in the run folder, and timeouts of the shutdown."""

import signal
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from leeway.launch.errors import ConfigError, ExitStatus, Interrupts, Stopped
from leeway.launch.observe.status import Accuracy, PollResult, PoolStatus
from leeway.launch.processes.role_process import RunFailed, WrongInput
from leeway.launch.resume import History
from leeway.launch.run_folder import RunFolder, RunIdentity
from leeway.launch.train import _Run, train
from leeway.planning.autoscale import Advice
from tests.unit.made_up_run import context, plan


@pytest.fixture(autouse=True)
def return_at_exit(monkeypatch):
    """Let the launcher return instead of ending its process."""
    monkeypatch.setattr("leeway.launch.train.exit_if_abandoned", lambda status: None)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("it is claimed")])
def test_a_folder_that_is_created_only_in_part_is_removed(tmp_path, monkeypatch, capsys, error):
    def fails(folder, identity):
        raise error

    monkeypatch.setattr(RunFolder, "write_identity", fails)
    made = plan(tmp_path / "run")
    assert train(made) == ExitStatus.WRONG_INPUT
    assert str(error) in capsys.readouterr().err
    assert not made.folder.root.exists()


def test_no_model_is_fetched_for_a_run_whose_port_is_in_use(tmp_path, monkeypatch):
    fetched = []

    def refuses(config):
        raise ConfigError("no port")

    monkeypatch.setattr("leeway.launch.train.Exporter", refuses)
    monkeypatch.setattr("leeway.launch.train.fetch_model", lambda model, was_here: fetched.append(model))
    assert train(plan(tmp_path / "run")) == ExitStatus.WRONG_INPUT
    assert fetched == []


def test_the_folder_of_a_resumed_run_stays_after_a_failure(tmp_path, monkeypatch):
    def fails(folder, identity):
        raise OSError(28, "No space left on device")

    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    monkeypatch.setattr(RunFolder, "write_identity", fails)
    assert train(made, earlier(made)) == ExitStatus.WRONG_INPUT
    assert made.folder.config.is_file()


def test_a_run_that_fails_to_resume_stays_unchanged(tmp_path, monkeypatch, capsys):
    def refuses(*_):
        raise ConfigError("W&B does not answer")

    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    identity = earlier(made).identity
    made.folder.write_identity(identity)
    written = made.folder.config.read_bytes()
    monkeypatch.setattr("leeway.launch.train.Tracker", refuses)
    learner = made.config.learner.model_copy(update={"num_steps": 999})
    longer = replace(made, config=made.config.model_copy(update={"learner": learner}))
    assert train(longer, earlier(made)) == ExitStatus.WRONG_INPUT
    assert "W&B does not answer" in capsys.readouterr().err
    assert (made.folder.config.read_bytes(), made.folder.read_identity()) == (written, identity)


def test_an_exported_model_stays_until_the_resumed_run_exports_its_own(tmp_path):
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    made.folder.export.mkdir()
    had_model = {}

    def noting(phase: str, result: object = None):
        def note(*_: object) -> object:
            had_model[phase] = made.folder.export.exists()
            return result

        return note

    supervisor = MagicMock()
    supervisor.drain.side_effect, supervisor.export.side_effect = noting("trained"), noting("exporting")
    run = _Run(made, context(made).facts.contract, earlier(made), supervisor, MagicMock(), MagicMock())
    run._train, run._handle_poll, run._finish = noting("training", result=True), MagicMock(), MagicMock()
    assert run.go() == ExitStatus.INTERRUPTED
    assert had_model == {"training": True, "trained": True, "exporting": False}


def test_during_an_evaluation_actors_are_polled_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("leeway.launch.train.POLL_S", 0.0)
    monkeypatch.setattr("leeway.launch.train.EVALUATION_POLL_S", 0.0)
    supervisor, sinks, evaluation = MagicMock(), MagicMock(), MagicMock()
    evaluation.poll.side_effect = [None, None, []]
    supervisor.poll_actors.return_value = PollResult()
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    run = _Run(made, context(made).facts.contract, None, supervisor, sinks, MagicMock())
    run._wait_for_evaluation(evaluation)
    # twice during the evaluation, once after its end, and for the alerts of its result
    assert sinks.observer.ingest.call_args_list == 3 * [((supervisor.poll_actors(),),)]
    assert sinks.observer.polled.call_count == 4


def test_training_does_not_wait_for_an_actor_to_evaluate(tmp_path, monkeypatch):
    monkeypatch.setattr("leeway.launch.train.EVALUATION_POLL_S", 0.0)
    supervisor, evaluation = MagicMock(), MagicMock()
    supervisor.evaluate.return_value, supervisor.poll_actors.return_value = evaluation, PollResult()
    supervisor.actors.ready.return_value = []
    made = plan(tmp_path / "run", "--actors.eval_every", "1")
    made.folder.create(made.config)
    run = _Run(made, context(made).facts.contract, None, supervisor, MagicMock(), MagicMock())
    run._observer.status.version = 1
    run._evaluate_periodically()
    supervisor.evaluate.assert_not_called()
    supervisor.actors.ready.return_value = ["an actor"]
    run._evaluate_periodically()
    supervisor.evaluate.assert_called_once()
    supervisor.actors.wait_until_ready.assert_not_called()
    evaluation.poll.side_effect = [None, []]
    run._wait_for_evaluation(evaluation)
    supervisor.actors.wait_until_ready.assert_called_once_with()


def test_refused_advice_is_an_event_and_lost_actors_do_not_count(tmp_path):
    supervisor, sinks, observed = MagicMock(), MagicMock(), []
    supervisor.actors.scale.side_effect = ValueError("a GPU is too small for all")
    supervisor.actors.staying.return_value = ["a live actor"]
    made = plan(tmp_path / "run", "--launch.autoscale", "on")
    made.folder.create(made.config)
    run = _Run(made, context(made).facts.contract, None, supervisor, sinks, MagicMock())
    run._observer.status.pools = [PoolStatus(name="actors", wanted=2, working=1)]
    run._autoscale.observe = lambda row, pools, room: observed.append(pools) or Advice("grow", "one more", "actors", 2)
    run._scale([{}], run._autoscale)
    assert [each.wanted for each in observed[0]] == [1]
    refused = (("not_scaled", "pool 'actors' is not scaled: a GPU is too small for all"),)
    assert sinks.event.call_args_list[-1] == refused


@pytest.fixture
def never_done(tmp_path, monkeypatch):
    """`never_done(10.0)` makes a run whose learner never finishes and that is interrupted after 10 s."""
    clock = SimpleNamespace(now_s=0.0)

    def make(*seconds):
        to_come = list(seconds)

        def sleep(duration_s):
            clock.now_s += duration_s
            if to_come and clock.now_s > to_come[0]:
                to_come.pop(0)
                signal.raise_signal(signal.SIGINT)
            assert clock.now_s < 1000.0, "the wait has no bound"

        monkeypatch.setattr("leeway.launch.train.time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now_s))
        monkeypatch.setattr("leeway.launch.train.SHUTDOWN_TIMEOUT_S", 90.0)
        supervisor = MagicMock()
        supervisor.learner.are_finished = False
        made = plan(tmp_path / "run")
        made.folder.create(made.config)
        run = _Run(
            made, context(made).facts.contract, None, supervisor, MagicMock(), Interrupts(clock=lambda: clock.now_s)
        )
        run._handle_poll, run._evaluate_periodically = MagicMock(), MagicMock()
        return run, supervisor, clock

    return make


def test_a_learner_that_does_not_finish_its_step_after_an_interrupt_times_out(never_done):
    run, supervisor, clock = never_done(200.0)
    why = r"within 90 s of the interrupt; the newest checkpoint is in .*/run/"
    with run.interrupts, pytest.raises(RunFailed, match=why):
        run._train()
    supervisor.request_stop.assert_called_once_with()
    assert 290.0 <= clock.now_s < 300.0


def test_a_second_interrupt_does_not_wait_for_the_learner(never_done):
    run, supervisor, clock = never_done(200.0, 210.0)
    with run.interrupts, pytest.raises(Stopped):
        run._train()
    supervisor.request_stop.assert_called_once_with()
    assert 210.0 <= clock.now_s < 220.0


def test_after_an_interrupt_no_evaluation_is_polled(never_done):
    run, _, clock = never_done(200.0)
    evaluated_s = []
    run._evaluate_periodically.side_effect = lambda: evaluated_s.append(clock.now_s)
    with run.interrupts, pytest.raises(RunFailed):
        run._train()
    assert 190.0 < evaluated_s[-1] <= 200.0


def earlier(made) -> History:
    """Return the history of a run without steps."""
    identity = RunIdentity(run_id=made.run_id, task_fingerprint=made.task.fingerprint, started_s=(100.0,))
    before = Accuracy(greedy=0.5, sampled=0.5, num_failed=0, num_problems=8, versions="0.0")
    return History(identity, 0, [before], 0.0)


@pytest.mark.parametrize(
    ("error", "begins", "is_new", "status"),
    [
        (WrongInput("actor.0: 3 prompts are too long"), False, True, ExitStatus.WRONG_INPUT),
        (WrongInput("actor.0: 3 prompts are too long"), False, False, ExitStatus.FAILED),
        (WrongInput("stage.0: the model is gone"), True, True, ExitStatus.FAILED),
        (RunFailed("actor.0 failed: see its log"), False, True, ExitStatus.FAILED),
    ],
)
def test_only_a_new_run_that_is_refused_before_its_start_leaves_no_folder(
    tmp_path, monkeypatch, capsys, error, begins, is_new, status
):
    supervisor, reported = MagicMock(), []
    (supervisor.status if begins else supervisor.start).side_effect = error
    monkeypatch.setattr("leeway.launch.train.Supervisor", lambda *_: supervisor)
    monkeypatch.setattr("leeway.launch.train.report_at_end", lambda folder, *_: reported.append(folder.root.is_dir()))
    monkeypatch.setattr("leeway.launch.train.configure_logging", lambda file: None)
    made = plan(tmp_path / "run")
    history = None
    if not is_new:
        made.folder.create(made.config)
        history = replace(earlier(made), evaluations=[])
    assert train(made, history) == status
    supervisor.stop.assert_called_once_with()
    leaves_nothing = status is ExitStatus.WRONG_INPUT
    assert made.folder.root.exists() is not leaves_nothing
    assert reported == ([] if leaves_nothing else [True])
    advice = f". Fix the cause, then resume: `leeway resume {made.folder.root}`" if begins or not is_new else ""
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("leeway: ")] == [
        f"leeway: {error}{advice}"
    ]
