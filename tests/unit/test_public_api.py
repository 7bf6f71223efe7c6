"""The public API: what `import leeway` offers and loads, and how errors are reported. tests/e2e has whole runs."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from pydantic import BaseModel, PositiveFloat

import leeway
from leeway.algorithms.base import Algorithm, Needs
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.launch.observe.status import RunStatus, write_status
from tests.unit.made_up_run import DEMO

NAMES = {
    "Config",
    "LeewayError",
    "LossInputs",
    "LossOutput",
    "Run",
    "algorithm",
    "load_config",
    "load_run",
    "resume",
    "train",
}


@pytest.fixture
def folder(tmp_path):
    """A run folder with a config, a status and metrics whose last line is torn."""
    (tmp_path / "config.toml").write_text(DEMO.read_text())
    facts = {"run": "made-up", "run_id": "1", "folder": str(tmp_path), "host": "here", "num_steps": 3, "max_lag": 4}
    write_status(tmp_path / "status.json", RunStatus(**facts, pid=1, started_s=0.0))
    rows = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25, "reward/mean": 1.0}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(rows)
    return tmp_path


def test_the_package_offers_exactly_these_names():
    assert set(leeway.__all__) == NAMES
    assert all(getattr(leeway, name) is not None for name in NAMES)
    assert {*dir(leeway)} >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        leeway.tain  # noqa: B018


@pytest.mark.process
def test_importing_the_package_loads_no_library():
    heavy = {"torch", "ray", "vllm", "transformers", "pydantic", "pyarrow", "numpy"}
    code = f"import sys, leeway; print(sorted({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_key_raises_with_a_suggestion_and_starts_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(leeway.LeewayError, match=r"unknown key learner\.num_stepss; did you mean learner\.num_steps"):
        leeway.train(DEMO, learner={"num_stepss": 5})
    with pytest.raises(leeway.LeewayError, match="no such config file"):
        leeway.train("absent.toml")


@pytest.mark.parametrize("content", [None, '{"format": 2}', "{"])
def test_a_folder_that_is_not_a_readable_run_raises_one_sentence(folder, content):
    if content is None:
        (folder / "config.toml").unlink()
    else:
        (folder / "status.json").write_text(content)
    with pytest.raises(leeway.LeewayError) as raised:
        leeway.load_run(folder)
    assert "\n" not in str(raised.value)


def test_metrics_have_every_column_and_skip_a_torn_line(folder):
    table = leeway.load_run(folder).metrics()
    assert table.to_pylist() == [
        {"step": 1, "loss": 0.5, "reward/mean": None},
        {"step": 2, "loss": 0.25, "reward/mean": 1.0},
    ]


def test_a_model_that_is_not_exported_yet_is_an_error(folder):
    run = leeway.load_run(folder)
    with pytest.raises(leeway.LeewayError, match="has not exported its model yet"):
        _ = run.model_path
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    assert run.model_path == folder / "model"


# --- losses -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plain:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=list)


class Model(BaseModel):
    scale: PositiveFloat


def loss_of(config_class):
    def my_loss(config: config_class, inputs: leeway.LossInputs) -> leeway.LossOutput:
        assert type(config) is config_class
        return leeway.LossOutput(torch.tensor(config.scale))

    return my_loss


def test_a_function_becomes_an_algorithm_whose_config_fields_are_keys():
    found = leeway.algorithm(groups=True)(loss_of(Plain))
    assert isinstance(found, Algorithm)
    section = found.config_class.model_validate({"type": "mine.py:my_loss", "scale": 3})
    assert section.needs == Needs(groups=True)
    assert float(found.loss(section, None).loss) == 3.0
    assert section.names == []
    with pytest.raises(ValueError, match="scal"):
        found.config_class.model_validate({"type": "mine.py:my_loss", "scal": 3})


def test_the_config_of_a_loss_may_be_a_pydantic_model_or_a_section():
    found = leeway.algorithm(loss_of(Model))
    with pytest.raises(ValueError, match="greater than 0"):
        found.config_class.model_validate({"type": "mine.py:my_loss", "scale": -1})
    assert leeway.algorithm(loss_of(TrajectoryBalanceConfig)).config_class is TrajectoryBalanceConfig


def test_an_unknown_need_is_an_error():
    with pytest.raises(TypeError, match="referense"):
        leeway.algorithm(referense=True)(loss_of(Plain))
