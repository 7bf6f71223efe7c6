"""What the command leaves in a run's folder where it does not come to its end, and how long it waits for that end."""

import signal
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from launch.errors import ConfigError, ExitStatus, Interrupts, Stopped
from launch.observe.status import Accuracy, PollResult, PoolStatus
from launch.processes.role_process import RunFailed, WrongInput
from launch.resume import History
from launch.run_folder import RunFolder, RunIdentity
from launch.train import _Run, train
from planning.autoscale import Advice
from tests.unit.made_up_run import context, plan


@pytest.fixture(autouse=True)
def no_farewell(monkeypatch):
    """Where the command would end its process, it returns instead."""
    monkeypatch.setattr("launch.train.leave", lambda status: None)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("it is claimed")])
def test_a_folder_that_could_be_made_only_in_part_leaves_its_name_free(tmp_path, monkeypatch, capsys, error):
    def fails(folder, identity):
        raise error

    monkeypatch.setattr(RunFolder, "write_identity", fails)
    made = plan(tmp_path / "run")
    assert train(made) == ExitStatus.WRONG_INPUT
    assert str(error) in capsys.readouterr().err
    assert not made.folder.root.exists()


def test_no_model_is_fetched_for_a_run_whose_port_is_taken(tmp_path, monkeypatch):
    fetched = []

    def refuses(config):
        raise ConfigError("no port")

    monkeypatch.setattr("launch.train.Exporter", refuses)
    monkeypatch.setattr("launch.train.fetch_model", lambda model, was_here: fetched.append(model))
    assert train(plan(tmp_path / "run")) == ExitStatus.WRONG_INPUT
    assert fetched == []


def test_a_folder_of_a_run_that_is_gone_on_with_stays_whatever_fails(tmp_path, monkeypatch):
    def fails(folder, identity):
        raise OSError(28, "No space left on device")

    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    monkeypatch.setattr(RunFolder, "write_identity", fails)
    assert train(made, earlier(made)) == ExitStatus.WRONG_INPUT
    assert made.folder.config.is_file()


def test_a_run_that_is_not_gone_on_with_stays_as_it_was(tmp_path, monkeypatch, capsys):
    def refuses(*_):
        raise ConfigError("W&B does not answer")

    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    identity = earlier(made).identity
    made.folder.write_identity(identity)
    written = made.folder.config.read_bytes()
    monkeypatch.setattr("launch.train.Tracker", refuses)
    learner = made.config.learner.model_copy(update={"num_steps": 999})
    longer = replace(made, config=made.config.model_copy(update={"learner": learner}))
    assert train(longer, earlier(made)) == ExitStatus.WRONG_INPUT
    assert "W&B does not answer" in capsys.readouterr().err
    assert (made.folder.config.read_bytes(), made.folder.read_identity()) == (written, identity)


def test_an_exported_model_stays_until_the_run_that_is_gone_on_with_exports_its_own(tmp_path):
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    made.folder.export.mkdir()
    had_model = {}

    def noting(what: str, result: object = None):
        def note(*_: object) -> object:
            had_model[what] = made.folder.export.exists()
            return result

        return note

    supervisor = MagicMock()
    supervisor.drain.side_effect, supervisor.export.side_effect = noting("trained"), noting("exporting")
    run = _Run(made, context(made).facts.contract, earlier(made), supervisor, MagicMock(), MagicMock())
    run._train, run._digest, run._finish = noting("training", result=True), MagicMock(), MagicMock()
    assert run.go() == ExitStatus.INTERRUPTED
    assert had_model == {"training": True, "trained": True, "exporting": False}


def test_while_an_evaluation_is_all_that_goes_on_the_actors_are_heard_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.train.POLL_S", 0.0)
    monkeypatch.setattr("launch.train.EVALUATION_POLL_S", 0.0)
    supervisor, sinks, evaluation = MagicMock(), MagicMock(), MagicMock()
    evaluation.poll.side_effect = [None, None, []]
    supervisor.hear_actors.return_value = PollResult()
    made = plan(tmp_path / "run")
    made.folder.create(made.config)
    run = _Run(made, context(made).facts.contract, None, supervisor, sinks, MagicMock())
    run._evaluated_alone(evaluation)
    assert sinks.observer.take_in.call_args_list == 2 * [((supervisor.hear_actors(),),)]
    assert sinks.observer.polled.call_count == 2


def test_where_nobody_is_ready_to_evaluate_an_actor_is_waited_for_only_when_nothing_else_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.train.EVALUATION_POLL_S", 0.0)
    supervisor, evaluation = MagicMock(), MagicMock()
    supervisor.evaluate.return_value = evaluation
    supervisor.actors.ready.return_value = []
    made = plan(tmp_path / "run", "--actors.eval_every", "1")
    made.folder.create(made.config)
    run = _Run(made, context(made).facts.contract, None, supervisor, MagicMock(), MagicMock())
    run._observer.status.version = 1
    run._evaluate_now_and_then()
    supervisor.evaluate.assert_not_called()
    supervisor.actors.ready.return_value = ["an actor"]
    run._evaluate_now_and_then()
    supervisor.evaluate.assert_called_once()
    supervisor.actors.wait_until_ready.assert_not_called()
    evaluation.poll.side_effect = [None, []]
    run._evaluated_alone(evaluation)
    supervisor.actors.wait_until_ready.assert_called_once_with()


def test_advice_that_is_refused_is_an_event_and_lost_actors_are_not_waited_for(tmp_path):
    supervisor, sinks, looks = MagicMock(), MagicMock(), []
    supervisor.actors.scale.side_effect = ValueError("a GPU is too small for all")
    supervisor.actors.staying.return_value = ["one that is not lost"]
    made = plan(tmp_path / "run", "--launch.autoscale", "on")
    made.folder.create(made.config)
    run = _Run(made, context(made).facts.contract, None, supervisor, sinks, MagicMock())
    run._observer.status.pools = [PoolStatus(name="actors", wanted=2, working=1)]
    run._autoscale.look = lambda row, pools, room: looks.append(pools) or Advice("grow", "one more", "actors", 2)
    run._scale([{}], run._autoscale)
    assert [each.wanted for each in looks[0]] == [1]
    refused = (("not_scaled", "pool 'actors' stays as it is: a GPU is too small for all"),)
    assert sinks.event.call_args_list[-1] == refused


@pytest.fixture
def never_done(tmp_path, monkeypatch):
    """`never_done(10.0)`: the run of a learner that never finishes; it is interrupted at these seconds."""
    clock = SimpleNamespace(now_s=0.0)

    def make(*seconds):
        to_come = list(seconds)

        def sleep(duration_s):
            clock.now_s += duration_s
            if to_come and clock.now_s > to_come[0]:
                to_come.pop(0)
                signal.raise_signal(signal.SIGINT)
            assert clock.now_s < 1000.0, "it is waited for without end"

        monkeypatch.setattr("launch.train.time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock.now_s))
        monkeypatch.setattr("launch.train.SHUTDOWN_TIMEOUT_S", 90.0)
        supervisor = MagicMock()
        supervisor.learner.are_finished = False
        made = plan(tmp_path / "run")
        made.folder.create(made.config)
        run = _Run(
            made, context(made).facts.contract, None, supervisor, MagicMock(), Interrupts(clock=lambda: clock.now_s)
        )
        run._digest, run._evaluate_now_and_then = MagicMock(), MagicMock()
        return run, supervisor, clock

    return make


def test_a_learner_that_does_not_finish_its_step_after_an_interrupt_is_given_up_at_the_limit(never_done):
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


def test_after_an_interrupt_no_evaluation_is_waited_for_whose_actors_may_be_gone(never_done):
    run, _, clock = never_done(200.0)
    evaluated_s = []
    run._evaluate_now_and_then.side_effect = lambda: evaluated_s.append(clock.now_s)
    with run.interrupts, pytest.raises(RunFailed):
        run._train()
    assert 190.0 < evaluated_s[-1] <= 200.0


def earlier(made) -> History:
    """Of a run that has taken no step."""
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
def test_a_run_that_a_process_refuses_before_it_has_begun_leaves_no_folder_and_any_other_stays(
    tmp_path, monkeypatch, capsys, error, begins, is_new, status
):
    supervisor, reported = MagicMock(), []
    (supervisor.status if begins else supervisor.start).side_effect = error
    monkeypatch.setattr("launch.train.Supervisor", lambda *_: supervisor)
    monkeypatch.setattr("launch.train.report_at_end", lambda folder, *_: reported.append(folder.root.is_dir()))
    monkeypatch.setattr("launch.train.configure_logging", lambda file: None)
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
    goes_on = f". Once that is mended, `leeway resume {made.folder.root}` goes on" if begins or not is_new else ""
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("leeway: ")] == [
        f"leeway: {error}{goes_on}"
    ]
