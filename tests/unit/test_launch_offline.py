"""Runs on recorded samples: the config and the samples are checked against each other before the start."""

import json
import os
from pathlib import Path

import pytest

from leeway.buffer.offline.inspect import Inspection
from leeway.buffer.store import own
from leeway.launch.checks import check, check_fetched
from leeway.launch.cli import main
from leeway.launch.config import load_config
from leeway.launch.errors import ConfigError, ExitStatus
from leeway.launch.offline import fill_buffer
from leeway.launch.resume import resume
from leeway.launch.run_folder import RunIdentity, claimed
from leeway.learner.checkpoint_files import CheckpointMeta, TrainingProgress
from tests.unit.made_up_run import context
from tests.world.command import leeway_here

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
SMALL = (
    *("--task.num_train", "64", "--task.num_heldout", "8"),
    *("--tracking.to", "[]", "--learner.groups_per_step", "2", "--learner.num_steps", "3"),
)
UNBOUNDED = ("--weight_sync.max_lag", "unbounded")


def samples(path: Path, num_groups: int = 6, size: int = 2, **fields: object) -> Path:
    """Write groups of `size` samples; a field may be a function of group and index."""
    rows = [
        {"prompt_ids": [3 + group % 8, 12], "completion_ids": [4, 1], "logprobs": [-0.5, -0.25], "reward": group / 4.0}
        | {name: value(group, index) if callable(value) else value for name, value in fields.items()}
        for group in range(num_groups)
        for index in range(size)
    ]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    return path


@pytest.fixture
def train(tmp_path, capsys):
    """`train(source, *overrides)` returns status, output and errors of a dry run, which leaves no folder."""

    def run(source, *overrides, config=DEMO):
        out = tmp_path / "runs"
        arguments = ["train", config, "--from", source, "--run.dir", out, *SMALL, *UNBOUNDED, *overrides, "--dry-run"]
        result = leeway_here(capsys, *arguments)
        assert not out.exists()
        return result

    return run


def plan(source: Path, folder: Path, *overrides: str):
    return check(
        load_config(DEMO, [f"--buffer.source={json.dumps(str(source))}", *SMALL, *UNBOUNDED, *overrides]), folder
    )


def test_a_dry_run_shows_the_recorded_samples(train, tmp_path):
    path = samples(tmp_path / "samples.jsonl")
    status, out, err = train(path, "--actors.num_actors", "0")
    assert status == ExitStatus.OK, err
    assert f"samples    12 recorded in 6 groups, 6 of them usable for training: {path}" in out
    assert "actors     0, for evaluation" in out
    assert "3 steps of 2 prompts (4 samples)" in out
    assert "1, for evaluation" in train(path)[1]


def test_the_buffer_is_filled_before_the_start_and_replaces_its_source(tmp_path):
    path = samples(tmp_path / "samples.jsonl", completion_ids=[4] * 18, logprobs=[-0.5] * 18)
    made = plan(path, tmp_path / "run")
    made.folder.create(made.config)
    facts = context(made).facts
    assert (facts.group_size, facts.num_prompts) == (2, 6), "these values come from the samples, not from the task"
    fill_buffer(made.config, facts, made.folder, made.recorded)
    with Inspection.open(made.folder.buffer) as inspection:
        assert inspection.state().ledger.waiting == 12
        assert inspection.store.facts == facts
    fingerprint = made.task.fingerprint
    identity = RunIdentity(run_id=made.run_id, task_fingerprint=fingerprint, started_s=(1.0,), recorded=made.recorded)
    made.folder.write_identity(identity)
    path.unlink()
    found = resume(made.folder, ["--actors.num_actors", "1"], print)
    assert context(found.plan).facts == facts
    with pytest.raises(ConfigError, match="enough for 3 steps"):
        resume(made.folder, ["--learner.num_steps", "4"], print)
    with pytest.raises(ConfigError, match=r"learner.token_budget = 19, but .* has a sample of 20 tokens"):
        resume(made.folder, ["--learner.token_budget", "19"], print)
    older = identity.model_dump_json(exclude={"recorded": {"longest", "num_uninformative"}})
    assert RunIdentity.model_validate_json(older).recorded.longest == 0, (
        "the identity file of an older run lacks these fields"
    )
    step = made.folder.checkpoints / "step-00000003"
    step.mkdir()
    (step / "meta.json").write_bytes(CheckpointMeta(TrainingProgress(3, 3, 0), 2, 1, "", {}).encode())
    made.folder.summary.write_text(json.dumps({"accuracy_after": None, "num_steps": 3}))
    with pytest.raises(ConfigError, match="raise it to continue"):
        resume(made.folder, ["--actors.num_actors", "0"], print)
    assert resume(made.folder, ["--actors.num_actors", "1"], print).step == 3, "the final evaluation can still run"
    with pytest.raises(ConfigError, match=r"buffer.source = .* cannot become .*the stored groups"):
        resume(made.folder, ["--buffer.source", "elsewhere.jsonl"], print)


def test_samples_that_change_between_check_and_start_are_refused(tmp_path):
    made = plan(samples(tmp_path / "samples.jsonl"), tmp_path / "run")
    samples(tmp_path / "samples.jsonl", num_groups=5)
    with pytest.raises(ConfigError, match="changed from 12 to 10 samples"):
        fill_buffer(made.config, context(made).facts, made.folder, made.recorded)


@pytest.mark.parametrize(
    ("fields", "overrides", "why"),
    [
        ({}, ["--weight_sync.max_lag", "4"], "which is unknown: set weight_sync.max_lag = 'unbounded'"),
        ({}, ["--buffer.sampler", "on_policy_share"], "set buffer.sampler = 'uniform'"),
        ({}, ["--launch.autoscale", "on"], "launch.autoscale = 'on' has no effect on the recorded samples of"),
        ({}, ["--learner.num_steps", "4"], "has 6 usable groups, enough for 3 steps: lower"),
        ({}, ["--learner.groups_per_step", "7"], "enough for 0 steps"),
        (
            {"reward": lambda group, index: group % 2 * index},
            ["--buffer.refill_uninformative", "1.0"],
            "has 6 usable groups, of which buffer.refill_uninformative may exclude 3, enough for 1 steps",
        ),
        ({}, ["--buffer.source", "nowhere"], "nowhere: pass the folder of"),
        ({}, ["--actors.num_actors", "0", "--actors.eval_every", "5"], "actors.eval_every = 5 needs an actor"),
        ({"completion_ids": [4, 16]}, [], "row 1: token outside the vocabulary of 16"),
        ({"completion_ids": [4] * 63, "logprobs": None}, [], "row 1: longer than max_tokens = 64"),
        ({"logprob": 1.0}, [], "unknown field `logprob`; did you mean 'logprobs'?"),
        ({"logprobs": None}, [], "12 of 12 samples have no logprobs, but algorithm.type = 'trajectory_balance' wi"),
        (
            {"logprobs": lambda group, index: [-1.0, -1.0] if group else None},
            ["--algorithm.type", "oapl"],
            "2 of 12 samples have no logprobs, but algorithm.type = 'oapl'",
        ),
        ({}, ["--weight_sync.lag_control", "on"], "has no effect with max_lag = unbounded, because there is no bound"),
        ({"reward": None}, [], "none of 12 samples has a reward, but trajectory_balance trains on rewards: add"),
        ({"reward": None}, ["--buffer.sampler", "prioritised"], "buffer.sampler = 'prioritised' weights by rewards"),
        ({"group": lambda group, index: 2 * group + index}, [], "row 1 is alone in its group, but algorithm.type = 't"),
        ({"group": lambda group, index: group or -index}, [], "row 1 is alone in its group"),
    ],
)
def test_unsuitable_samples_or_settings_are_refused_with_one_sentence(train, tmp_path, fields, overrides, why):
    status, _, err = train(samples(tmp_path / "samples.jsonl", **fields), *overrides)
    assert status == ExitStatus.WRONG_INPUT
    assert why in err
    assert err.count("\n") == 1


def test_fields_that_a_loss_does_not_read_may_be_missing(train, tmp_path):
    path = samples(tmp_path / "samples.jsonl", logprobs=None)
    assert train(path, "--algorithm.corrections", "[]")[0] == ExitStatus.OK
    alone = samples(tmp_path / "alone.jsonl", 12, 1, group=lambda group, _: group)
    status, out, err = train(alone, "--algorithm.baseline", "value_head", config=DEMO.with_name("demo-ppo.toml"))
    assert status == ExitStatus.OK, err
    assert "12 of them usable for training" in out


def test_a_model_fetched_later_is_checked_against_the_samples(tmp_path):
    later = ("--model.path", "some/model")
    made = plan(samples(tmp_path / "samples.jsonl", completion_ids=[40, 1]), tmp_path / "run", *later)
    assert made.model is None
    with pytest.raises(ConfigError, match="has token 40, but the model has only 16"):
        check_fetched(made, DEMO.parent / "demo_model")


def test_a_run_without_actors_and_samples_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"actors\.num_actors = 0 generates no samples"):
        check(load_config(DEMO, [*SMALL, "--actors.num_actors", "0"]), tmp_path / "run")


def test_a_source_that_is_running_or_has_another_temperature_is_refused(tmp_path):
    made = plan(samples(tmp_path / "samples.jsonl"), tmp_path / "first")
    made.folder.create(made.config)
    fill_buffer(made.config, context(made).facts, made.folder, made.recorded)
    assert plan(made.folder.root, tmp_path / "second").recorded == made.recorded
    with claimed(made.folder), pytest.raises(ConfigError, match=rf"is a running job \(process {os.getpid()}\)"):
        plan(made.folder.root, tmp_path / "second")
    with pytest.raises(ConfigError, match=r"actors.temperature = 0.5, but .* were generated at 1: set"):
        plan(made.folder.root, tmp_path / "second", "--actors.temperature", "0.5")
    lock = own(made.folder.buffer)
    with pytest.raises(ConfigError, match="is being written by a live run"):
        plan(made.folder.buffer, tmp_path / "second")
    os.close(lock)


def test_a_source_may_be_the_name_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = plan(samples(tmp_path / "samples.jsonl"), tmp_path / "runs" / "first")
    made.folder.create(made.config)
    fill_buffer(made.config, context(made).facts, made.folder, made.recorded)
    assert main(["train", str(DEMO), "--from", "first", *SMALL, *UNBOUNDED, "--dry-run"]) == ExitStatus.OK
    assert f"usable for training: {tmp_path / 'runs' / 'first'}" in capsys.readouterr().out
