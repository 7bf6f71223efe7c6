"""Resuming a run: keys that may change, files after a crash, and other processes of the run."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leeway.launch.cli import main
from leeway.launch.config import ModelConfig, fixed_because, load_config
from leeway.launch.errors import ConfigError, ExitStatus
from leeway.launch.observe.observer import Observer
from leeway.launch.observe.sinks import Tracker
from leeway.launch.observe.status import Accuracy, read_status
from leeway.launch.resume import History, contents, identity_of, resume, wait_for_earlier_processes
from leeway.launch.run_folder import RunFolder, RunIdentity, claimed, owner_of
from tests.unit.made_up_run import context, plan, status

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests" / "world" / "demo.toml"
SMALL = ["--task.num_train", "64", "--task.num_heldout", "8"]
LOCKS = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print('locked', flush=True); "


@pytest.fixture
def folder(tmp_path):
    """A run that ended before its buffer was created."""
    from leeway.launch.checks import check

    config = load_config(DEMO, SMALL)
    plan = check(config, tmp_path / "run")
    plan.folder.create(config)
    plan.folder.write_identity(
        RunIdentity(run_id=plan.run_id, task_fingerprint=plan.task.fingerprint, started_s=(100.0,))
    )
    return plan.folder


def row(step: int, restarts: int = 0, **more) -> dict:
    values = {"loss": 0.5, "step": step, "version": step, "skipped": False, "restarts": restarts}
    values |= {"batch/completion_tokens": 10, "lag/token_mean": 1.0, "lag/token_max": 2, "buffer/ledger_gap": 0}
    return values | more


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_fixed_key_has_its_own_reason_or_that_of_its_section():
    assert fixed_because("run.seed") == fixed_because("run") != ""
    assert "leased groups of that size" in fixed_because("actors.group_size")
    assert "trained with this loss" in fixed_because("algorithm.type")
    for key in ("actors", "actors.num_actors", "algorithm.beta", "algorithm.knob_of_a_user", "pools.big"):
        assert fixed_because(key) == "", key


def test_a_key_may_change_although_its_section_may_not():
    assert fixed_because("buffer") == fixed_because("buffer.sampler") == fixed_because("buffer.unknown") != ""
    assert fixed_because("buffer.durability") == ""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--run.seed", "7"], "run.seed = 0 cannot become 7 in a resumed run: the name and the folder"),
        (["--model.path", "elsewhere"], "the stored reference log-probabilities belong to that model"),
        (["--task.num_train", "65"], "the buffer stores prompt ids of that task"),
        (["--algorithm.type", "online_dpo"], "the checkpoint was trained with this loss"),
        (["--actors.group_size", "4"], "the buffer has leased groups of that size"),
        (["--actors.temperature", "0.7"], "the stored samples were generated at that temperature"),
        (["--buffer.sampler", "uniform"], "the stored groups and the recorded batches depend on it"),
        (["--learner.groups_per_step", "16"], "the buffer's records of draws depend on it"),
        (["--learner.num_minibatches", "2"], "the buffer's records of draws depend on it"),
        (["--weight_sync.max_lag", "8"], "the buffer admitted prompts by these rules"),
    ],
)
def test_a_changed_key_that_stored_data_depend_on_is_refused(folder, overrides, expected):
    with pytest.raises(ConfigError) as error:
        resume(folder, overrides, print)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_with_keys_of_another_version_is_refused_with_all_of_them(folder):
    text = folder.config.read_text().replace("[buffer]", "[buffer]\nshards = 1\npack_tokens = 0")
    folder.config.write_text(text.replace("[algorithm]", "[algorithm]\nlog_ratio = 'sum'"))
    with pytest.raises(ConfigError) as error:
        resume(folder, [], print)
    assert "this version lacks: algorithm.log_ratio, buffer.shards, buffer.pack_tokens. Resume it with" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_a_key_set_to_its_old_value_is_no_change(folder):
    assert resume(folder, ["--run.seed", "0", "--buffer.max_uses", "1"], print).history.changes == ""


def test_steps_actors_and_learning_rate_may_change_and_are_reported(folder):
    found = resume(
        folder, ["--learner.num_steps", "240", "--actors.num_actors", "3", "--learner.learning_rate", "1e-5"], print
    )
    assert found.plan.config.learner.num_steps == 240
    assert found.history.changes == (
        "actors.num_actors = 3 (was 2), learner.num_steps = 240 (was 120), learner.learning_rate = 1e-05 (was 0.0001)"
    )
    assert found.plan.run_id == folder.read_identity().run_id


def test_a_task_with_other_prompts_is_refused(folder):
    identity = folder.read_identity()
    folder.write_identity(identity.model_copy(update={"task_fingerprint": "another"}))
    with pytest.raises(ConfigError, match="changed since the run was created"):
        resume(folder, [], print)


@pytest.fixture
def user_run(tmp_path, monkeypatch):
    """A run on files of a user: a reward that imports two modules, a file of rows, and two models."""
    from leeway.launch.checks import check

    monkeypatch.setattr("leeway.actors.tasks.try_imports", lambda *_, **__: None)
    for name in ("file.toml", "file_rows.jsonl", "demo_model"):
        source = ROOT / "examples" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    shutil.copytree(tmp_path / "demo_model", tmp_path / "reference")
    (tmp_path / "file_reward.py").write_text(
        "import json, beside\nfrom parts.scale import SCALE\n"
        "def exact(completions, answer, **columns):\n    return [SCALE * beside.ONE for _ in answer]\n"
    )
    (tmp_path / "beside.py").write_text("ONE = 1.0\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "scale.py").write_text("SCALE = 1.0\n")
    overrides = ["--model.reference_path", str(tmp_path / "reference")]
    overrides += ["--task.rewards", json.dumps([f"{tmp_path}/file_reward.py:exact"])]
    config = load_config(tmp_path / "file.toml", overrides)
    plan = check(config, tmp_path / "runs" / "first")
    plan.folder.create(config)
    plan.folder.write_identity(identity_of(plan, tmp_path / "demo_model", None))
    return plan.folder


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("file_reward.py", "SCALE *", "0.5 * SCALE *", "the content of {}/file_reward.py"),
        ("beside.py", "1.0", "2.0", "the content of {}/beside.py"),
        ("parts/scale.py", "1.0", "2.0", "the content of {}/parts/scale.py"),
        ("file_rows.jsonl", '"answer": "46"', '"answer": "47"', "the content of column answer of the task"),
        ("demo_model/generation_config.json", "{", "{ ", "the content of model: generation_config.json"),
        ("file.toml", "[model]", "[model] ", ""),
    ],
)
def test_changed_files_of_a_config_are_reported_by_name(user_run, file, old, new, named):
    place = user_run.root.parents[1]
    assert resume(user_run, [], print).history.changes == ""
    changed(place / file, old, new)
    found = resume(user_run, [], print)
    assert found.history.changes == named.format(place)
    assert named.format(place) in found.describe()
    (place / "unread.py").write_text("")
    assert (
        identity_of(found.plan, place / "demo_model", found.history).digests != user_run.read_identity().digests
        or not named
    )


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda place: flip(place / "demo_model" / "model.safetensors"), "model: model.safetensors:"),
        (lambda place: flip(place / "reference" / "model.safetensors"), "model.reference_path: model.safetensors:"),
        (lambda place: changed(place / "demo_model" / "tokenizer.json", "{", "{ "), "model: tokenizer.json:"),
        (lambda place: (place / "demo_model" / "chat_template.jinja").write_text("x"), "model: chat_template.jinja:"),
        (
            lambda place: changed(place / "demo_model" / "config.json", '"rms_norm_eps": 1', '"rms_norm_eps": 2'),
            "model: config.json:",
        ),
    ],
)
def test_another_model_or_tokenizer_under_the_same_name_is_refused(user_run, change, named):
    change(user_run.root.parents[1])
    with pytest.raises(ConfigError) as error:
        resume(user_run, [], print)
    assert str(error.value).startswith(named)
    assert "reference log-probabilities belong to that model. Restore the earlier content, or start a new run" in str(
        error.value
    )


def test_a_model_fetched_at_the_start_is_compared_then(user_run):
    found = resume(user_run, [], print)
    place = user_run.root.parents[1] / "demo_model"
    history = replace(found.history, digests=contents(found.plan, None))
    assert identity_of(found.plan, place, history).digests == user_run.read_identity().digests
    flip(place / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model: model\.safetensors"):
        identity_of(found.plan, place, history)


def test_a_run_folder_without_digests_is_resumed_and_gets_them(user_run):
    identity = user_run.read_identity()
    user_run.write_identity(identity.model_copy(update={"digests": {}}))
    flip(user_run.root.parents[1] / "demo_model" / "model.safetensors")
    found = resume(user_run, [], print)
    assert found.history.changes == ""
    digests = identity_of(found.plan, user_run.root.parents[1] / "demo_model", found.history).digests
    assert {name for name in digests if digests[name] != identity.digests[name]} == {"model: model.safetensors"}


def test_the_commit_of_a_hub_model_is_kept(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    for path in ("some/model", "some/model@v2"):
        assert ModelConfig(path=path).pinned(tmp_path / "snapshots" / commit).on_hub == ("some/model", commit)
    assert ModelConfig(path="some/model@v2").pinned(tmp_path / "elsewhere").path == "some/model@v2"
    assert ModelConfig(path="/m").pinned(tmp_path / commit).path == "/m"


def test_a_buffer_of_another_run_is_refused(folder):
    from leeway.buffer.store import Store

    other = plan(folder.root.parent / "other", *SMALL)
    Store(folder.buffer, context(other).facts).close()
    with pytest.raises(ConfigError, match="belongs to the run"):
        resume(folder, [], print)


def test_a_finished_run_requires_more_steps(folder):
    from leeway.learner.checkpoint_files import CheckpointMeta
    from leeway.learner.checkpoint_files import TrainingProgress as Reached

    step = folder.checkpoints / "step-00000120"
    step.mkdir()
    (step / "meta.json").write_bytes(CheckpointMeta(Reached(120, 120, 0), 2, 1, "", {}).encode())
    folder.summary.write_text(json.dumps({"accuracy_after": 0.9, "num_steps": 120}))
    with pytest.raises(ConfigError, match=r"is finished after learner.num_steps = 120: raise it"):
        resume(folder, [], print)
    assert resume(folder, ["--learner.num_steps", "150"], print).step == 120
    folder.summary.write_text(json.dumps({"accuracy_after": 0.8, "num_steps": 100}))
    assert resume(folder, [], print).step == 120, "the extended run still needs its evaluation"
    no_actors = ["--actors.num_actors", "0"]
    with pytest.raises(ConfigError, match="generates no samples"):  # the run is not finished
        resume(folder, no_actors, print)
    folder.summary.write_text(json.dumps({"accuracy_after": None, "num_steps": 120}))
    with pytest.raises(ConfigError, match="is finished"):
        resume(folder, no_actors, print)
    folder.summary.unlink()
    assert resume(folder, [], print).step == 120, "a run without a summary still needs its evaluation"


def test_a_torn_last_line_is_removed_before_appending(folder):
    for path in (folder.actors, folder.events, folder.evaluations):
        write_lines(path, [row(1), row(2)])
        with path.open("ab") as file:
            file.write(b'{"step": 3, "lo')
    with Tracker(load_config(folder.config, ["--tracking.to", "[]"]), folder) as tracker:
        tracker.event("restart", "actor.0")
        tracker.step({"step": 3})
    for path, count in ((folder.actors, 3), (folder.events, 3), (folder.evaluations, 2)):
        assert len([json.loads(line) for line in path.read_text().splitlines()]) == count


def accuracy(version: int) -> Accuracy:
    return Accuracy(versions=str(version), policy_version=version, greedy=0.5, sampled=None, num_problems=8)


@pytest.mark.parametrize("versions", [(0, 10), (10, 20), ()])
def test_the_history_has_the_evaluations_and_the_wall_time(folder, versions):
    write_lines(folder.metrics, [row(1, finished_s=140.0), row(2, finished_s=150.0)])
    assert History.read(folder).wall_s == 0.0, "no launcher has written a status"
    other = plan(folder.root.with_name("other"))
    other.folder.root.mkdir()
    with Observer(other, clock=lambda: 80.0, started_s=0.0) as observer:
        for version in versions:
            observer.evaluated(accuracy(version))
        observer.phase("training")
    other.folder.status.rename(folder.status)
    history = History.read(folder)
    assert [each.policy_version for each in history.evaluations] == [*versions]
    assert history.before == (accuracy(0) if 0 in versions else None), (
        "without version 0, the run started without actors"
    )
    assert (history.wall_s, history.last_step) == (80.0, 2)


def test_the_observer_continues_the_counts_of_earlier_launches(folder):
    rows = [row(1), row(2, restarts=1, **{"lag/token_max": 4}), row(3, restarts=1)]
    rows[0]["mismatch/lag0_abs"] = 1e-6
    write_lines(folder.metrics, rows)
    earlier = History(folder.read_identity(), 5, [accuracy(0)], 93.0, 3)
    made = replace(plan(folder.root.with_name("other")), folder=folder)
    observer = Observer(made, clock=lambda: 7.0, started_s=0.0, earlier=earlier)
    observer.phase("starting")
    assert read_status(folder.status).evaluations == [accuracy(0)], "a launch keeps the evaluations of earlier launches"
    observer.resume_at(3, 3, num_redone=2)
    summary = observer.summary(Accuracy(versions="0", greedy=None, sampled=None, num_problems=0), None, status())
    assert (summary["num_steps"], summary["version"], summary["wall_s"]) == (3, 3, 100.0)
    assert (summary["lag_max"], summary["learner_restarts"], summary["mismatch_lag0_abs"]) == (4, 2, 1e-6)
    assert (summary["trained_tokens"], summary["steps_redone"]) == (30, 5)


def test_a_run_with_a_live_launcher_is_refused_with_its_process(folder, capsys):
    with claimed(folder):
        assert owner_of(folder) == os.getpid()
        assert main(["resume", str(folder.root)]) == ExitStatus.WRONG_INPUT
    error = capsys.readouterr().err
    assert f"is running (process {os.getpid()})" in error
    assert f"kill -INT {os.getpid()}" in error
    assert owner_of(folder) is None


@pytest.mark.process
def test_the_claim_of_a_killed_launcher_is_released(folder):
    with claimed(folder):
        pass
    command = [sys.executable, "-c", LOCKS + "time.sleep(60)", str(folder.claim)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="is running"), claimed(folder):
            pass
        process.kill()
    with claimed(folder):
        assert owner_of(folder) == os.getpid()


@pytest.mark.parametrize("role", ["stage", "ranker"])
def test_processes_of_a_dead_launcher_are_awaited_and_named_on_timeout(folder, role, tmp_path):
    """The folder is reached through a symlink."""
    messages: list[str] = []
    (tmp_path / "link").symlink_to(folder.root)
    folder = RunFolder(tmp_path / "link")
    with folder.log(role, 1).open("wb") as log, subprocess.Popen(["sleep", "60"], stdout=log) as process:
        with pytest.raises(ConfigError) as error:
            wait_for_earlier_processes(folder, messages.append, limit_s=0.3, pause_s=0.1)
        assert f"{role}.1 (process {process.pid})" in str(error.value)
        assert f"kill -9 {process.pid}" in str(error.value)
        process.kill()
    wait_for_earlier_processes(folder, messages.append, limit_s=15.0)
    assert messages == [f"waiting for {role}.1 (process {process.pid}) of an earlier launch to exit"]


@pytest.mark.process
def test_a_shell_that_writes_to_the_log_folder_is_no_process_of_the_run(folder):
    program = (
        "import sys; from pathlib import Path; from leeway.launch.host import role_processes; "
        "print([each.name for each in role_processes() if each.run == Path(sys.argv[1])], file=sys.stderr)"
    )
    other = (folder.logs / "mine.txt").open("wb")
    with other, subprocess.Popen(["sleep", "60"], stdout=other) as bystander, folder.log("actor", 0).open("wb") as log:
        shell = ["sh", "-c", '"$0" -c "$1" "$2"; exit $?', sys.executable, program, folder.root]
        done = subprocess.run(shell, stdout=log, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=ROOT)
        bystander.kill()
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_folder_without_its_identity_is_refused(folder, capsys):
    folder.identity.write_text("{}")
    assert main(["resume", str(folder.root)]) == ExitStatus.WRONG_INPUT
    assert "run.json is damaged" in capsys.readouterr().err
    folder.identity.unlink()
    assert main(["resume", str(folder.root)]) == ExitStatus.WRONG_INPUT
    assert "so the run has no identity" in capsys.readouterr().err


def test_a_dry_run_shows_the_resume_point_and_changes_nothing(folder, capsys):
    before = folder.config.read_text(), folder.identity.read_text()
    assert main(["resume", str(folder.root), "--dry-run", "--learner.num_steps", "9"]) == ExitStatus.OK
    assert "from the initial model, because there is no checkpoint; changed: learner.num_steps = 9 (was 120)" in (
        capsys.readouterr().out
    )
    assert (folder.config.read_text(), folder.identity.read_text()) == before


def test_a_folder_that_cannot_be_created_leaves_nothing_behind(tmp_path, monkeypatch):
    def no_space(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leeway.launch.run_folder.write_durably", no_space)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot be created: No space left on device; give another folder"):
        folder.create(load_config(DEMO))
    assert not folder.root.exists()
