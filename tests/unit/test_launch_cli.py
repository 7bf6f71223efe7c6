"""The subcommands of `leeway`: help, argument errors and shell completion."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from leeway.launch.cli import app, main
from leeway.launch.config import Config
from leeway.launch.config_errors import models_of
from leeway.launch.errors import ExitStatus
from tests.world.command import leeway_here

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
VERBS = get_command(app).commands


def test_help_has_a_complete_line_for_each_subcommand(capsys):
    for flag in ("--help", "-h"):
        status, listed, _ = leeway_here(capsys, flag)
        assert status == ExitStatus.OK
        lines = [line.split(maxsplit=1) for line in listed.partition("Commands:\n")[2].splitlines()]
        assert [verb for verb, _ in lines] == list(VERBS)
        assert [text for _, text in lines if not text.endswith(".") or text.endswith("...")] == []


@pytest.mark.parametrize("verb", VERBS)
def test_each_subcommand_has_help(capsys, verb):
    status, shown, _ = leeway_here(capsys, verb, "--help")
    assert status == ExitStatus.OK
    assert f"Usage: leeway {verb} " in shown


def test_the_help_of_train_lists_every_key_with_its_values_and_default(capsys):
    _, shown, _ = leeway_here(capsys, "train", "--help")
    words, keys = set(shown.split()), []
    for section, info in Config.model_fields.items():
        assert f"\nKeys of [{section}]:\n" in shown
        place = f"{section}.NAME" if section == "pools" else section
        keys += [f"--{place}.{key}" for model in models_of(info.annotation) for key in model.model_fields]
    assert [key for key in keys if key not in words] == []
    text = " ".join(shown.split())
    assert "--learner.num_steps <int>." in text
    assert "--weight_sync.on_stale <drop|wait>." in text
    assert "--algorithm.beta <float>, of type trajectory_balance, online_dpo, oapl." in text
    assert f"[default: {Config.model_fields['learner'].default.num_steps}]" in text
    assert "--algorithm.corrections <list>." in text
    assert "[default: ['token_tis']]" in text
    assert "[default: true]" in text
    assert text.index("--task.type ") < text.index("--task.template ")
    assert text.index("--learner.gpus ") < text.index("--learner.num_chunks "), "basic keys come first"
    assert "--task.path <str>, of type file. JSONL, Parquet or CSV file with one row per prompt; a folder" in text


def test_other_subcommands_with_a_config_refer_to_the_help_of_train(capsys):
    _, shown, _ = leeway_here(capsys, "resume", "--help")
    assert "`leeway train --help` lists them" in shown
    assert "--learner.num_stages" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Missing command. See `leeway --help`"),
        (["trian"], "No such command 'trian'. Did you mean 'train'"),
        (["paln", "x.toml"], "No such command 'paln'. Did you mean 'plan'"),
        (["--frob"], "No such option: --frob. See `leeway --help`"),
        (["export"], "Missing argument 'RUN'. See `leeway export --help`"),
        (["export", "run", "out", "more"], "Got unexpected extra argument(s) (more). See `leeway export --help`"),
        (["scale", "run", "--cuont", "3"], "No such option: --cuont (Possible options: --count)"),
        (["train", DEMO, "--dryrun"], "No such option: --dryrun (Possible options: --dry-run)"),
        (["train", DEMO, "--dry-run=yes"], "Option '--dry-run' does not take a value"),
        (["doctor", "--run.dir", "x"], "give CONFIG first, and --run.dir after it. See `leeway doctor --help`"),
        (["check-reward", DEMO, "--num", "0"], "Invalid value for '--num': Input should be greater than or equal to 1"),
        (["train", DEMO, "--learner"], "--learner has no value"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_status_2(capsys, words, expected):
    status, out, error = leeway_here(capsys, *words)
    assert (status, out, error.count("\n")) == (ExitStatus.WRONG_INPUT, "", 1)
    assert error.startswith(f"leeway: {expected}")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("leeway re", {"resume", "report"}),
        ("leeway buffer ex", {"export"}),
        ("leeway pro", {"profile"}),
        ("leeway status fir", {"first", "first-2"}),
        ("leeway buffer show fir", {"first", "first-2"}),
        ("leeway train ", set()),  # the shell itself completes file names
    ],
)
def test_a_shell_completes_subcommands_and_runs(tmp_path, monkeypatch, typed, expected):
    for name in ("first", "first-2", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "runs" / "first-3").mkdir()
    monkeypatch.chdir(tmp_path)
    env = {"_LEEWAY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    found = CliRunner().invoke(app, [], prog_name="leeway", env=env)
    assert set(found.stdout.split()) == expected


@pytest.mark.process
def test_the_command_completes_a_subcommand_for_a_shell():
    env = {"_LEEWAY_COMPLETE": "complete_bash", "COMP_WORDS": "leeway sca", "COMP_CWORD": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "leeway"], capture_output=True, text=True, check=True, env=env, cwd=DEMO.parents[1]
    )
    assert done.stdout == "scale\n"


@pytest.mark.process
def test_help_imports_no_modules_of_subcommands():
    code = "import sys; from leeway.launch.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=DEMO.parents[1])
    imported = set(done.stdout.splitlines()[-1].split())
    heavy = {"pydantic", "numpy", "psutil", "asyncio", "rich", "msgspec", "leeway.launch.buffer_cli"}
    assert imported & heavy == set()
    assert "leeway.planning" not in imported


def test_a_missing_subcommand_exits_with_2_and_help_with_0():
    assert main([]) == ExitStatus.WRONG_INPUT
    assert main(["buffer", "--help"]) == ExitStatus.OK
