"""A model that a recipe makes: its folder appears whole or not at all, and nothing goes on when the command ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launch.config import ModelConfig
from launch.errors import ConfigError
from launch.model_folder import _model_folder, fetch_model
from tests.world.waiting import wait_until

ROOT = Path(__file__).parents[2]
WRITES = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text("mine")
"""
GOES_ON = """
import time
begun.touch()
for _ in range(9000):
    if not begun.exists():
        break
    time.sleep(0.01)
"""


@pytest.fixture
def model(tmp_path):
    """`model(program)`: of a recipe that is this program."""

    def make(program: str) -> ModelConfig:
        recipe = tmp_path / "recipe.py"
        recipe.write_text(program)
        return ModelConfig(path=str(tmp_path / "models" / "small"), recipe=str(recipe))

    return make


def around(model: ModelConfig) -> list[str]:
    return sorted(path.name for path in Path(model.path).parent.iterdir())


def test_the_folder_is_what_the_recipe_wrote_and_nothing_else_stays(model):
    made = model(WRITES)
    assert (fetch_model(made, is_there=False) / "config.json").read_text() == "mine"
    assert around(made) == ["small"]


def test_a_recipe_that_fails_leaves_nothing(model):
    made = model(WRITES + "sys.exit(3)")
    with pytest.raises(ConfigError, match=r"recipe\.py' ended with exit status 3; what it said"):
        fetch_model(made, is_there=False)
    assert around(made) == []


def test_of_two_commands_one_makes_it_and_the_other_waits(model, tmp_path, capsys):
    begun = tmp_path / "begun"
    made = model(f"{WRITES}\nbegun = Path({str(begun)!r})\n{GOES_ON}")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(fetch_model, made, is_there=False)
        while not begun.exists():
            assert not first.done(), first.result()
            time.sleep(0.01)
        second = pool.submit(fetch_model, made, is_there=False)
        said = "waiting for another command that makes a model"
        wait_until(lambda: said in capsys.readouterr().out, "the other to wait")
        begun.unlink()
        assert (second.result(timeout=150) / "config.json").read_text() == "mine"
        first.result(timeout=60)
    assert not begun.exists(), "it was made twice"
    assert around(made) == ["small"]


def test_what_a_killed_command_left_is_removed_by_the_next(model, tmp_path):
    made = model(WRITES)
    (tmp_path / "models" / ".small.unfinished").mkdir(parents=True)
    fetch_model(made, is_there=False)
    assert around(made) == ["small"]


def test_a_model_that_the_hub_does_not_give_is_a_sentence_with_the_reason(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"model\.hub = 'no/such-model' cannot be fetched: .*Error: .*model\.path"):
        fetch_model(ModelConfig(hub="no/such-model"), is_there=False)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT])
def test_a_signal_in_the_recipe_ends_it_too_and_leaves_nothing(tmp_path, number):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    keys = {"model.path": tmp_path / "models" / "small", "model.recipe": recipe, "run.dir": tmp_path / "runs"}
    overrides = [f"--{key}={value}" for key, value in keys.items()]
    command = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "train", ROOT / "examples" / "demo.toml", *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while "begun" not in command.stdout.readline():
            assert command.poll() is None, command.stderr.read()
        (child,) = [each for each in psutil.Process(command.pid).children() if "recipe.py" in " ".join(each.cmdline())]
        os.kill(command.pid, number)
        _, said = command.communicate(timeout=60)
    finally:
        command.kill()
    assert (command.returncode, said) == (130, "leeway: stopped before anything was started\n")
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the recipe goes on"
        time.sleep(0.05)
    assert list((tmp_path / "models").iterdir()) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("hub", "revision"), [("org/model", "main"), ("org/model@v1.2", "v1.2")])
def test_a_model_of_the_hub_is_that_of_main_or_of_the_revision_that_is_named(monkeypatch, hub, revision):
    asked = []

    def run(command, **_):
        asked.extend(command[-2:])
        return SimpleNamespace(returncode=0, stdout="/cache/model\n")

    monkeypatch.setattr("launch.model_folder.subprocess.run", run)
    assert fetch_model(ModelConfig(hub=hub), is_there=False) == Path("/cache/model")
    assert asked == ["org/model", revision]


def test_a_model_of_the_hub_that_is_gone_is_fetched_again_with_a_command_that_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="needed: hf download nobody/nothing --revision v1"):
        _model_folder(SimpleNamespace(model=ModelConfig(hub="nobody/nothing@v1")))
    assert "hf" in {each.name for each in entry_points(group="console_scripts")}
