"""Invalid input exits with status 2 and one sentence before any process or folder exists."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leeway.launch.checks import check, check_fetched
from leeway.launch.cli import main
from leeway.launch.config import load_config
from leeway.launch.errors import ConfigError, ExitStatus
from leeway.launch.run_folder import claimed_weights
from tests.unit.small_models import Model
from tests.world.command import leeway_here

OK, WRONG_INPUT = ExitStatus.OK, ExitStatus.WRONG_INPUT

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests" / "world" / "demo.toml"

FILE_TASK = """
[model]
path = "{model}"
[task]
type = "file"
path = "questions.jsonl"
template = "{{question}}="
rewards = [{rewards}]
[algorithm]
type = "online_dpo"
[actors]
max_prompt_tokens = 8
max_new_tokens = 8
"""


@pytest.fixture
def file_task(tmp_path):
    """A function that writes the config of a file task with the given reward functions."""

    def write(*rewards: str) -> Path:
        questions = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(10, 40) for b in range(10, 40)]
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        (tmp_path / "reward.py").write_text("def exact(prompts, completions, answer, **_):\n    return []\n")
        path = tmp_path / "task.toml"
        named = ", ".join(f'"{reward}"' for reward in rewards)
        path.write_text(FILE_TASK.format(model=DEMO.parent / "demo_model", rewards=named))
        return path

    return write


def run(capsys, *arguments: object) -> tuple[int, str]:
    status, _, errors = leeway_here(capsys, "train", *arguments)
    return status, errors


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--learner.num_stage", "2"], "did you mean learner.num_stages?"),
        (["--model.path", "/nowhere"], "no such folder"),
        (["--model.path", "."], "config.json"),
        (["--learner.num_stages", "9"], "has only 2 layers"),
        (["--learner.num_chunks", "2"], "learner.schedule = '1f1b' supports one chunk per stage"),
        (
            ["--learner.num_chunks", "2", "--learner.schedule", "zero_bubble", "--learner.num_stages", "1"],
            "learner.num_stages = 1 has no bubble to fill",
        ),
        (
            ["--learner.num_chunks", "2", "--learner.schedule", "interleaved_1f1b"],
            "learner.num_stages * learner.num_chunks = 4, but",
        ),
        (["--learner.schedule", "1f1"], "learner.schedule = '1f1'"),
        (
            ["--learner.schedule", "fused", "--learner.num_stages", "1"],
            "'fused' with learner.num_stages = 1 has no bubble",
        ),
        (
            ["--learner.schedule", "fused"],
            "learner.schedule = 'fused' needs a critic model",
        ),
        (
            ["--learner.activation_checkpointing", "true", "--learner.schedule", "zero_bubble"],
            "learner.activation_checkpointing = true with learner.schedule = 'zero_bubble'",
        ),
        (["--weight_sync.max_lag", "0", "--weight_sync.publish_every", "2"], "can never be met"),
        (["--actors.group_size", "1"], "set group_size to at least 2"),
        (["--learner.num_minibatches", "64"], "each minibatch needs at least one whole group"),
        (["--learner.num_epochs", "9"], "can never be met with 9 updates per step (learner.num_minibatches"),
        (["--weight_sync.max_lag", "0", "--learner.num_minibatches", "2"], "Raise weight_sync.max_lag to 1"),
        (["--weight_sync.lag_control", "maybe"], "weight_sync.lag_control = 'maybe'"),
        (["--weight_sync.lag_control", "on", "--weight_sync.max_lag", "0"], "max_lag = 0, because samples have no lag"),
        (["--learner.critic_learning_rate", "1e-3"], "but the configured algorithm has no critic"),
        (["--learner.token_budget", "8"], "raise learner.token_budget"),
        (["--task.name", "chain_sun"], "is not a dataset of reasoning-gym"),
        (["--task.params.min_digits", "1", "--task.params.max_digits", "1"], "distinct"),
        (["--task.template", "{metadata[expresion]}="], "did you mean 'expression'?"),
        (["--actors.max_prompt_tokens", "100"], "supports at most 64 tokens"),
        (["--algorithm.beta", "0"], "algorithm.beta = 0"),
        (["--buffer.capacity_trajectories", "10"], "may be outstanding at once"),
        (["--buffer.capacity_trajectories", "1024"], "is below the 1280 samples"),
        (["--weight_sync.on_stale", "wait", "--buffer.sampler", "uniform"], "on_stale = 'wait' drops no group"),
        (["--actors.tensor_parallel_size", "2"], "needs an equal number of GPUs"),
        (["--run.name", "a/b"], "is not a folder name"),
        (["--run.name", "x" * 300], "is not a folder name"),
        (["--run.dir", "/proc"], "/proc cannot be written ("),
        (["--weight_sync.max_lag", "1", "--weight_sync.max_actor_lag", "2"], "contradicts max_actor_lag = 2"),
        (["--weight_sync.transport", "pigeon"], "weight_sync.transport = 'pigeon'"),
        (["--tracking.prometheus_port", "65536"], "tracking.prometheus_port"),
        (["--launch.host", "192.0.2.7"], "launch.host = '192.0.2.7' cannot be bound ("),
        (["--launch.ray_address", "local"], "remove the key to start a local Ray"),
        (["--launch.ray_address", "ray://10.0.0.1:10001"], "is for Ray Client, which cannot place a run"),
        (["--weight_sync.folder", "/proc/weights"], "/proc cannot be written ("),
        (["--weight_sync.folder", "/etc/hostname/weights"], "/etc/hostname is a file; choose a folder"),
    ],
)
def test_invalid_input_is_one_sentence_and_status_2(capsys, tmp_path, overrides, expected):
    status, error = run(capsys, DEMO, "--run.dir", tmp_path / "runs", *overrides)
    assert (status, expected in error, error.count("\n")) == (WRONG_INPUT, True, 1), error
    assert error.startswith("leeway: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"),
            "damaged, or only a Git LFS pointer",
        ),
        (lambda folder: set_model_type(folder, "gpt2"), "is of type 'gpt2'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(capsys, tmp_path, damage, expected):
    folder = tmp_path / "model"
    shutil.copytree(DEMO.parent / "demo_model", folder)
    damage(folder)
    status, error = run(capsys, DEMO, "--model.path", folder, "--dry-run")
    assert status == WRONG_INPUT
    assert expected in error


def set_model_type(folder: Path, model_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))


def test_a_teacher_may_differ_in_depth_but_not_in_vocabulary(capsys, tmp_path):
    teacher = Model("llama", tied=True).save(tmp_path / "teacher", max_position_embeddings=64)
    text = DEMO.read_text().replace('"trajectory_balance"\nbeta = 0.2', '"distillation"')
    (tmp_path / "distil.toml").write_text(text.replace("demo_model", str(DEMO.parent / "demo_model")))
    overrides = ["--model.reference_path", teacher, "--run.dir", tmp_path / "runs"]
    status, error = run(capsys, tmp_path / "distil.toml", *overrides)
    assert status == WRONG_INPUT
    assert "model.reference_path has a vocabulary of 48 tokens, but the model has" in error
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_folder_is_refused(capsys, tmp_path):
    (tmp_path / "first").mkdir()
    status, error = run(capsys, DEMO, "--run.dir", tmp_path, "--run.name", "first")
    assert status == WRONG_INPUT
    assert "already exists" in error


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("reward.py:exacts", "did you mean 'exact'?"),
        ("rewards.py:exact", "no file /"),
        ("reward.py", "FILE.py:FUNCTION"),
    ],
)
def test_a_task_file_without_its_reward_function_is_refused(capsys, file_task, reward, expected):
    status, error = run(capsys, file_task(reward), "--dry-run")
    assert status == WRONG_INPUT
    assert expected in error


def test_a_file_task_needs_a_reward_function(capsys, file_task):
    status, error = run(capsys, file_task(), "--dry-run")
    assert status == WRONG_INPUT
    assert "task.rewards" in error


def examples() -> list:
    """Return all examples; an example with a reward file has the mark `process`, as the file runs in a process."""
    paths = sorted((ROOT / "examples").glob("*.toml"))
    return [
        pytest.param(path, id=path.stem, marks=[pytest.mark.process] if "reward.py:" in path.read_text() else [])
        for path in paths
    ]


@pytest.mark.parametrize("path", examples())
def test_every_example_passes_a_dry_run(capsys, tmp_path, monkeypatch, path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("WANDB_API_KEY", 40 * "k")
    folder = load_config(path).model.folder
    later = [] if folder is None or folder.exists() else ["--model.path", "some/model"]
    assert main(["train", str(path), "--run.dir", str(tmp_path / "runs"), "--dry-run", *later]) == OK
    assert "All checks that run before" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("to", "neptune", "tracking.to.0 = 'neptune': input should be 'wandb', 'tensorboard', 'mlflow' or 'trackio'"),
        ("to", "mlflow", "tracking.to names 'mlflow', which is not installed: run `pip install 'leeway-rl[mlflow]'`"),
        ("wandb", "offline", "tracking.wandb was removed: it became tracking.to = ['wandb']"),
    ],
)
def test_an_unknown_a_missing_and_a_removed_tracker_are_one_sentence(
    capsys, tmp_path, monkeypatch, key, value, expected
):
    monkeypatch.setattr("leeway.launch.checks.find_spec", lambda name: None)
    status, error = run(capsys, DEMO, "--run.dir", tmp_path / "runs", f"--tracking.{key}", value)
    assert (status, expected in error, error.count("\n")) == (WRONG_INPUT, True, 1), error
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_folder_is_reported_with_the_script_that_creates_it(capsys, tmp_path):
    (tmp_path / "sums.toml").write_text((ROOT / "examples" / "sums.toml").read_text())
    status, error = run(capsys, tmp_path / "sums.toml", "--dry-run")
    named = f"model.path: {tmp_path}/sums_model: no such folder; give the folder"
    assert (status, named in error) == (WRONG_INPUT, True)
    (tmp_path / "sums_model.py").touch()
    status, error = run(capsys, tmp_path / "sums.toml", "--dry-run")
    assert (status, f"no such folder; run `python {tmp_path}/sums_model.py` once" in error) == (WRONG_INPUT, True)


def test_a_dry_run_reports_a_missing_wandb_login_and_a_port_in_use(capsys, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("WANDB_MODE", "online")
    status, error = run(capsys, DEMO, "--run.dir", tmp_path / "runs", "--dry-run")
    assert (status, "WANDB_MODE=online needs a login" in error) == (WRONG_INPUT, True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        key = ["--tracking.prometheus_port", taken.getsockname()[1]]
        status, error = run(capsys, DEMO, "--run.dir", tmp_path / "runs", "--dry-run", *key)
    assert (status, "tracking.prometheus_port" in error) == (WRONG_INPUT, True)


def test_the_sums_example_states_that_distillation_needs_a_teacher(capsys, tmp_path):
    sums = ROOT / "examples" / "sums.toml"
    status, error = run(capsys, sums, "--run.dir", tmp_path / "runs", "--algorithm.type", "distillation", "--dry-run")
    assert (status, "there is no teacher" in error) == (WRONG_INPUT, True)
    assert "except distillation, which needs a teacher" in sums.read_text()


@pytest.mark.parametrize(("verb", "metavar"), [("train", "CONFIG"), ("resume", "RUN")])
def test_an_override_before_the_config_is_refused_with_the_order(capsys, verb, metavar):
    for words in (["--learner.num_steps", "20"], ["--learner.num_steps=20"]):
        assert main([verb, *words, str(DEMO)]) == WRONG_INPUT
        assert f"give {metavar} first, and --learner.num_steps after it" in capsys.readouterr().err


def test_a_dry_run_passes_on_a_small_machine_and_reports_the_shortage(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    overrides = ["--run.dir", tmp_path / "runs", "--actors.gpus", "1"]
    shortage = "gpus of the workers add up to 2 (pool 'actors' requests 2 x {CPU: 0.5, GPU: 1}), but this machine has 1"
    status, error = run(capsys, DEMO, *overrides)
    assert (status, shortage in error, (tmp_path / "runs").exists()) == (WRONG_INPUT, True, False), error
    assert main(["train", str(DEMO), *map(str, overrides), "--dry-run"]) == OK
    output = capsys.readouterr().out
    assert f"The run would not start on this machine: {shortage}" in output
    assert "in order" not in output


@pytest.mark.parametrize("end", ["<end>", "<eos>"])
def test_a_chat_template_whose_end_token_does_not_end_generation_is_noted(capsys, tmp_path, end):
    from transformers import AutoTokenizer

    model = shutil.copytree(ROOT / "examples" / "demo_model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == "<eos>"
    tokenizer.add_tokens([end])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + end
    tokenizer.chat_template += "{% endif %}{% endfor %}"
    tokenizer.save_pretrained(model)
    overrides = ["--run.dir", str(tmp_path / "runs"), "--model.path", str(model), "--task.chat", "true"]
    assert main(["train", str(DEMO), *overrides, "--dry-run"]) == OK
    output = capsys.readouterr().out
    assert ("note       the chat template ends an answer with <end> (token 16)" in output) == (end == "<end>"), output
    assert "All checks that run before" in output
    fetched = check_fetched(replace(check(load_config(DEMO, overrides), tmp_path / "run"), model=None), model)
    assert any("add 16 to eos_token_id" in note for note in fetched.notes) == (end == "<end>")


def test_a_tokenizer_whose_end_token_does_not_end_generation_is_noted(capsys, tmp_path):
    model = shutil.copytree(ROOT / "examples" / "demo_model", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    overrides = ["--run.dir", str(tmp_path / "runs"), "--model.path", str(model)]
    assert main(["train", str(DEMO), *overrides, "--dry-run"]) == OK
    output = capsys.readouterr().out
    assert "note       the tokenizer ends an answer with <eos> (token 1), but generation does not stop there" in output
    assert "eos_token_id is 7, 2." in output
    assert "task.chat" not in output
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert main(["train", str(DEMO), *overrides, "--dry-run"]) == OK
    assert "note " not in capsys.readouterr().out


def test_model_overrides_of_the_engine_alone_are_noted(tmp_path):
    override = "--actors.engine_args.hf_overrides={rope_theta = 1e6, head_dtype = 'model'}"
    notes = check(load_config(DEMO, [override]), tmp_path / "run").notes
    assert [note for note in notes if "hf_overrides sets rope_theta only for the engine" in note]
    same = load_config(DEMO, ["--actors.engine_args.hf_overrides={head_dtype = 'model'}"])
    assert not check(same, tmp_path / "run").notes


@pytest.mark.process
def test_packages_of_the_user_with_the_names_of_ours_do_not_affect_the_command(tmp_path):
    (tmp_path / "common").mkdir()
    for name in ("launch.py", "common/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('the file of the user was imported')")
    command = [sys.executable, "-m", "leeway", "train", str(DEMO), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (OK, "")


def test_a_dry_run_shows_the_replicas_stages_and_schedule_of_the_learner(capsys, tmp_path):
    overrides = ["--learner.num_replicas", "3", "--learner.num_stages", "1"]
    assert main(["train", str(DEMO), "--run.dir", str(tmp_path / "runs"), "--dry-run", *overrides]) == OK
    assert "learner    3 replicas of 1 stage, schedule 1f1b; 120 steps" in capsys.readouterr().out


def test_a_dry_run_shows_the_layers_and_cost_of_each_stage(capsys, tmp_path):
    arguments = ["train", str(DEMO), "--run.dir", str(tmp_path / "runs"), "--dry-run", "--learner.num_stages"]
    assert main([*arguments, "2"]) == OK
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layers ")]
    found = re.fullmatch(r"layers     0-0 \((\d+)% of the cost\), 1-1 \((\d+)% of the cost\)", line)
    assert int(found[1]) + int(found[2]) == 100
    assert main([*arguments, "1"]) == OK
    assert "\nlayers" not in capsys.readouterr().out


def test_a_dry_run_shows_transport_and_folder_of_weights_and_creates_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["--weight_sync.transport", "network", "--weight_sync.folder", "disk/weights"]
    assert main(["train", str(DEMO), "--run.dir", str(tmp_path / "runs"), "--dry-run", *overrides]) == OK
    assert f"weights    transport = network, in float32, {tmp_path}/disk/weights" in capsys.readouterr().out
    assert not (tmp_path / "disk").exists()
    assert main(["train", str(DEMO), "--run.dir", "runs", "--run.name", "a", "--dry-run"]) == OK
    assert f"transport = auto, in float32, {tmp_path}/runs/a/weights" in capsys.readouterr().out


def test_a_weights_folder_of_a_running_job_is_refused_until_the_job_ends(capsys, tmp_path):
    folder, overrides = (
        tmp_path / "weights",
        ["--run.dir", tmp_path / "runs", "--weight_sync.folder", tmp_path / "weights"],
    )
    with claimed_weights(folder, tmp_path / "runs" / "first"):
        status, error = run(capsys, DEMO, *overrides)
        assert (status, error.count("\n")) == (WRONG_INPUT, 1)
        assert f"in use by a running job ({tmp_path}/runs/first, process {os.getpid()})" in error
        with (
            pytest.raises(ConfigError, match="in use by a running job"),
            claimed_weights(folder, tmp_path / "second"),
        ):
            pytest.fail("two runs claimed one folder")
    assert run(capsys, DEMO, *overrides, "--dry-run") == (OK, "")


def test_a_weights_folder_with_the_versions_of_an_earlier_run_is_refused(capsys, tmp_path):
    (tmp_path / "NEWEST").write_text("0.12\n")
    status, error = run(capsys, DEMO, "--run.dir", tmp_path / "runs", "--weight_sync.folder", tmp_path)
    assert status == WRONG_INPUT
    assert "holds the weights of an earlier run, up to version 12" in error


@pytest.mark.parametrize(
    ("algorithm", "groups", "expected"),
    [
        ('type = "off_policy_ppo"', 4, "off_policy_ppo compares the samples of a prompt"),
        ('type = "off_policy_ppo"\nbaseline = "critic"', 4, None),
        ('type = "off_policy_ppo"\nbaseline = "batch"', 4, None),
        ('type = "off_policy_ppo"\nbaseline = "batch"', 1, "off_policy_ppo compares the samples of an update"),
    ],
)
@pytest.mark.process
def test_groups_of_one_are_refused_only_if_the_loss_compares_samples(capsys, file_task, algorithm, groups, expected):
    path = file_task("reward.py:exact")
    path.write_text(path.read_text().replace('type = "online_dpo"', algorithm))
    overrides = ("--actors.group_size", "1", "--learner.groups_per_step", str(groups))
    status, error = run(capsys, path, *overrides, "--dry-run")
    assert status == (OK if expected is None else WRONG_INPUT), error
    assert (expected or "") in error


@pytest.mark.process
def test_a_file_task_with_its_reward_passes_a_dry_run(capsys, file_task, tmp_path):
    arguments = ["train", str(file_task("reward.py:exact")), "--run.dir", str(tmp_path / "runs"), "--dry-run"]
    assert main(arguments) == OK, capsys.readouterr().err


def test_transformers_can_read_the_checkpoint_that_the_smollm2_example_downloads():
    from transformers.utils import is_accelerate_available, is_gguf_available

    assert is_gguf_available()
    assert is_accelerate_available()
