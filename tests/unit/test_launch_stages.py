"""The learner restarts as a whole if a rank is lost; an error that would recur ends the run."""

import re

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from leeway.common.process import threads_of
from leeway.common.run import STARTUP_S
from leeway.launch.processes.learner_group import GRACE_S, StagePoll
from leeway.launch.processes.role_process import RunFailed
from leeway.learner.checkpoint_files import META_NAME, TrainingProgress, newest_progress, steps_in
from leeway.learner.coordinator import CoordinatorFailed
from leeway.learner.mesh import GpuFailed
from tests.unit.fake_stages import Learner, Rank, lost, raised, write_checkpoint
from tests.unit.made_up_run import write_rows


@pytest.fixture
def learner(tmp_path, monkeypatch):
    return Learner(tmp_path, monkeypatch)


def test_if_a_stage_dies_all_stages_restart_from_the_newest_checkpoint(learner):
    learner.start()
    learner.checkpoint(4)
    learner.checkpoint(6)
    (learner.checkpoints / ".step-00000008.tmp").mkdir()
    first = list(learner.ranks)
    first[0]("run").end(error=RayActorError())
    learner.stages.watch()
    assert [rank.is_killed for rank in first] == [True, True]
    kind, text = learner.events[-1]
    assert kind == "restart"
    assert re.match(r"stage.0 died .* from the checkpoint of step 6; see .*stage.0.log", text), text
    learner.get_ready()
    assert all("run" in rank.calls for rank in learner.live)
    assert learner.events[-1] == ("resumed", "the learner resumes from step 6")
    learner.end_all("run")
    assert learner.stages.are_finished


def test_watching_never_waits_for_a_restarting_learner(learner):
    learner.start()
    learner.ranks[1]("run").end(error=RayActorError())
    learner.stages.watch()
    for _ in range(3):  # a wait would call the fixture's `sleep`, which fails the test
        learner.stages.watch()
        assert "the restart" in learner.stages.poll(0.0).learner_waits_for
    assert not learner.stages.are_finished


def test_a_neighbour_that_reports_a_loss_first_is_not_named_as_dead(learner):
    learner.start()
    learner.ranks[0]("run").end(error=lost(0))
    learner.stages.watch()
    assert not learner.events, "the death of the other stage may be detected later"
    learner.ranks[1]("run").end(error=RayActorError())
    learner.stages.watch()
    assert learner.events[-1][1].startswith("stage.1 died")


def test_a_stage_that_hangs_is_named_after_the_grace_period(learner):
    learner.start()
    learner.ranks[0]("run").end(error=lost(0))
    learner.stages.watch()
    learner.now_s = GRACE_S + 0.1
    learner.stages.watch()
    kind, text = learner.events[-1]
    assert (kind, text.startswith("stage.1 did not respond to the other ranks (")) == ("restart", True), text
    assert learner.ranks[1].is_killed


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no checkpoint in /run/checkpoints can be read"),
        ValueError("this stage has reserved 1 GPUs, but torch sees none"),
        CoordinatorFailed("stage 1 gave up: no batch within 600 s"),
        TimeoutError("no batch within 600 s"),
    ],
)
def test_an_error_that_would_recur_ends_the_run_with_its_message(learner, error):
    learner.start()
    learner.ranks[1]("run").end(error=raised(error))
    learner.stages.watch()
    learner.now_s = GRACE_S + 0.1
    with pytest.raises(RunFailed, match=re.escape(str(error))) as failed:
        learner.stages.watch()
    assert str(failed.value).startswith("stage.1 failed: ")
    assert not any(rank.is_killed for rank in learner.ranks)


@pytest.mark.parametrize("lead_is_first", [True, False])
def test_the_error_of_the_lead_takes_precedence_over_reports_of_other_ranks(learner, lead_is_first):
    learner.start()
    failures = {0: CoordinatorFailed("the coordinator, rank 1, gave up: no batch"), 1: TimeoutError("no batch")}
    for rank in sorted(failures, reverse=lead_is_first):
        learner.ranks[rank]("run").end(error=raised(failures[rank]))
    with pytest.raises(RunFailed, match=r"^stage.1 failed: TimeoutError: no batch; see .*stage.1.log$"):
        learner.stages.watch()


def test_a_death_takes_precedence_over_other_errors(learner):
    learner.start()
    learner.ranks[0]("run").end(error=raised(RuntimeError("a write of the checkpoint failed")))
    learner.ranks[1]("run").end(error=RayActorError())
    learner.stages.watch()
    assert learner.events[-1][1].startswith("stage.1 died")


def test_a_stage_whose_gpu_failed_is_named_at_once(learner):
    learner.start()
    failed = "stage 0 could not train: its GPU cuda:0 failed: CUDA error: uncorrectable ECC error encountered"
    learner.ranks[0]("run").end(error=raised(GpuFailed(failed)))
    learner.stages.watch()
    kind, text = learner.events[-1]
    assert (kind, text.startswith(f"stage.0 lost its GPU (GpuFailed: {failed})")) == ("restart", True), text
    assert all(rank.is_killed for rank in learner.ranks[:2])


def test_restarts_without_a_new_checkpoint_end_the_run(learner):
    def lose() -> None:
        learner.live[0]("run").end(error=RayActorError())
        learner.stages.watch()

    learner.start()
    for _ in range(2):
        lose()
        learner.get_ready()
    learner.checkpoint(10)
    for _ in range(2):
        lose()
        learner.get_ready()
    with pytest.raises(RunFailed, match=r"stage.0 died .* 2 restarts in a row led to no new checkpoint"):
        lose()
    assert learner.stages.num_restarts == 4


def test_without_restarts_a_dead_stage_ends_the_run_with_its_name_and_log(tmp_path, monkeypatch):
    learner = Learner(tmp_path, monkeypatch, max_restarts=0)
    learner.start()
    learner.ranks[0]("run").end(error=RayActorError())
    with pytest.raises(RunFailed, match=r"stage.0 died \(.*\); see .*stage.0.log"):
        learner.stages.watch()


def test_a_rank_lost_during_a_restart_is_one_more_restart(learner):
    learner.start()
    learner.ranks[0]("run").end(error=RayActorError())
    learner.stages.watch()
    learner.stages.watch()
    learner.live[1]("setup").end(error=RayActorError())
    learner.stages.watch()
    assert learner.stages.num_restarts == 2
    learner.get_ready()
    assert all("run" in rank.calls for rank in learner.live)


def test_a_rank_that_restarts_too_slowly_is_one_more_restart_up_to_the_limit(learner):
    def time_out() -> None:
        learner.stages.watch()
        learner.live[1]("setup").end()
        learner.now_s += STARTUP_S + 1.0
        learner.stages.watch()

    learner.start()
    learner.ranks[0]("run").end(error=RayActorError())
    learner.stages.watch()
    time_out()
    assert learner.stages.num_restarts == 2
    assert learner.events[-1][1].startswith("stage.0 did not become ready again within 1800 s:")
    with pytest.raises(RunFailed, match=r"stage.0 did not become ready again .* 2 restarts in a row .*stage.0.log"):
        time_out()


def test_an_export_that_times_out_ends_the_run_also_after_a_restart(learner, tmp_path):
    learner.start()
    learner.ranks[0]("run").end(error=RayActorError())
    learner.stages.watch()
    learner.get_ready()
    learner.end_all("run")
    learner.on_sleep = lambda: setattr(learner, "now_s", learner.now_s + STARTUP_S + 1.0)
    with pytest.raises(RunFailed, match=r"timed out after 1800 s waiting for stage.0, stage.1; see"):
        learner.stages.export(tmp_path / "model")
    assert learner.stages.num_restarts == 1


def test_rows_of_steps_before_a_loss_are_kept_with_their_number_of_restarts(learner):
    learner.start()
    assert learner.stages.poll(0.0).steps == []
    write_rows(learner.folder, {"step": 1, "restarts": 0}, {"step": 2, "restarts": 0})
    learner.ranks[0]("run").end(error=RayActorError())
    learner.stages.watch()
    assert learner.stages.poll(0.0).steps == [{"step": 1, "restarts": 0}, {"step": 2, "restarts": 0}]
    write_rows(learner.folder)  # the coordinator of the next start truncates the file
    learner.get_ready()
    poll = learner.stages.poll(0.0)
    assert (poll.steps, poll.resumed_at) == ([], 0)
    write_rows(learner.folder, {"step": 1, "restarts": 1})
    poll = learner.stages.poll(0.0)
    assert (poll.steps, poll.resumed_at) == ([{"step": 1, "restarts": 1}], None)


def test_a_wait_of_the_publisher_is_reported_and_unknown_without_a_reply(learner):
    learner.start()
    assert learner.stages.poll(0.0).publishing is None, "the poll call is pending"
    learner.ranks[1]("poll").end(StagePoll("", "space in /w"))
    assert learner.stages.poll(0.0).publishing == "space in /w"
    assert learner.stages.poll(0.0).publishing is None
    learner.ranks[0]("run").end(error=RayActorError())
    learner.stages.watch()
    assert learner.stages.poll(0.0).publishing == "", "a restarting learner publishes nothing"


def test_a_checkpoint_that_cannot_be_removed_is_reported_once(learner):
    learner.start()
    for _ in range(3):
        learner.stages.poll(0.0)
        learner.ranks[1]("poll").end(StagePoll("", "", ["/c/.step-4.old cannot be removed"]))
        learner.stages.poll(0.0)
    assert learner.events == [("leftover", "/c/.step-4.old cannot be removed")]


def test_every_stage_receives_the_destination_and_dtype_of_weights(tmp_path, monkeypatch):
    learner = Learner(tmp_path, monkeypatch, "--actors.dtype", "bfloat16", "--weight_sync.folder", str(tmp_path / "w"))
    received = []
    monkeypatch.setattr(Rank, "on_setup", lambda self, *arguments: received.append(arguments))
    learner.start()
    assert [(rank, rendezvous) for _, rank, rendezvous in received] == [(0, "tcp://here:1"), (1, "tcp://here:1")]
    for context, _, _ in received:
        assert (context.weights_folder, context.weights_address) == (tmp_path / "w", "tcp://weights:1")
        assert context.serving_dtypes == ("bfloat16",)


def test_a_stop_requested_during_a_restart_reaches_the_new_learner(learner):
    learner.start()
    learner.ranks[0]("run").end(error=RayActorError())
    learner.stages.watch()
    learner.stages.request_stop()
    learner.get_ready()
    assert all("request_stop" in rank.calls and "run" in rank.calls for rank in learner.live)


def test_a_rank_that_dies_in_the_export_is_restarted_with_the_export(learner, tmp_path):
    learner.start()
    learner.end_all("run")
    learner.checkpoint(12)
    turns = iter(
        [
            lambda: learner.live[0]("export").end(error=RayActorError()),
            learner.get_ready,
            lambda: learner.end_all("run"),
            lambda: None,
            lambda: learner.end_all("export"),
        ]
    )
    learner.on_sleep = lambda: next(turns)()
    learner.stages.export(tmp_path / "model")
    assert learner.stages.num_restarts == 1
    assert next(turns, None) is None


def test_every_replica_has_its_stages_and_the_last_stage_of_the_first_leads(tmp_path, monkeypatch):
    learner = Learner(tmp_path, monkeypatch, "--learner.num_replicas", "3")
    learner.start()
    assert len(learner.ranks) == 6
    learner.stages.poll(0.0)
    assert [index for index, rank in enumerate(learner.ranks) if "poll" in rank.calls] == [1]


def test_an_unfinished_checkpoint_is_not_the_newest(tmp_path):
    assert (steps_in(tmp_path), newest_progress(tmp_path)) == ([], None)
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 14).rename(tmp_path / "damaged-step-00000014")
    for name in (".step-00000012.tmp", "step-x", "step-00000016"):  # step-00000016 has no metadata
        (tmp_path / name).mkdir()
    assert steps_in(tmp_path) == [2, 10]
    assert newest_progress(tmp_path) == TrainingProgress(10, 20, 0)


def test_training_does_not_resume_from_a_checkpoint_with_damaged_metadata(tmp_path):
    write_checkpoint(tmp_path, 2)
    meta = write_checkpoint(tmp_path, 10) / META_NAME
    meta.write_text(meta.read_text().replace('"version": 20', '"version": 21'))
    assert newest_progress(tmp_path) == TrainingProgress(2, 4, 0)


def test_a_restarted_learner_resumes_at_the_step_of_its_checkpoint(learner):
    learner.start()
    learner.checkpoint(10)
    learner.ranks[1]("run").end(error=RayActorError())
    learner.stages.watch()
    learner.get_ready()
    poll = learner.stages.poll(0.0)
    assert (poll.resumed_at, poll.resumed_version) == (10, 20)


def test_a_process_killed_for_memory_counts_as_dead(learner):
    learner.start()
    learner.ranks[0]("run").end(error=OutOfMemoryError("the node was low on memory"))
    learner.stages.watch()
    assert learner.events[-1][1].startswith("stage.0 died (the node was low on memory)")


def test_ranks_of_a_lost_host_wait_for_another_up_to_a_timeout(learner):
    learner.start()
    learner.ranks[0]("run").end(error=RayActorError())
    learner.room.is_placed = False
    learner.now_s += 10
    learner.stages.watch()
    assert [kind for kind, _ in learner.events] == ["restart"]
    learner.room.missing_s = 61.0
    with pytest.raises(RunFailed, match="the learner cannot restart: no room"):
        learner.stages.watch()


def test_a_rank_receives_the_resources_of_its_pool_and_the_variables_of_a_gpu(tmp_path, monkeypatch):
    received = []

    def on_setup(_self, context, rank, _rendezvous):
        learner = context.config.learner
        received.append((rank, learner.gpus, threads_of(learner.cpus)))

    monkeypatch.setattr(Rank, "on_setup", on_setup)
    first = '{role = "learner", count = 1, gpus = 1, cpus = 3}'
    pools = ["--pools.a", first, "--pools.b", '{role = "learner", gpus = 1}']
    learner = Learner(tmp_path, monkeypatch, *pools, "--launch.env.NCCL_DEBUG", "INFO")
    learner.start()
    assert received == [(0, 1.0, 3), (1, 1.0, 1)]
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "INFO"}
    assert [rank.variables for rank in learner.ranks] == [expected, expected]


def test_variables_of_the_config_take_precedence_over_those_of_a_gpu(tmp_path, monkeypatch):
    learner = Learner(tmp_path, monkeypatch, "--launch.env.NCCL_DEBUG", "INFO")
    learner.start()
    assert [rank.variables for rank in learner.ranks] == [{"NCCL_DEBUG": "INFO"}] * 2
    overrides = ["--learner.gpus", "1", "--launch.env.PYTORCH_ALLOC_CONF", "backend:native"]
    other = Learner(tmp_path / "other", monkeypatch, *overrides)
    other.start()
    assert other.ranks[0].variables == {"PYTORCH_ALLOC_CONF": "backend:native"}
