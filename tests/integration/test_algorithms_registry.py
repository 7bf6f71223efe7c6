"""The registry, and a fourth algorithm that is added to it as docs/algorithms/README.md says.

As a script this file is a run that knows that algorithm: `python -m tests.integration.test_algorithms_registry FOLDER`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

import algorithms
from algorithms.base import AlgorithmSection
from algorithms.registry import ALGORITHMS, FILES, AlgorithmConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "algorithms"
TOML = """
[model]
path = "model"
[task]
type = "reasoning_gym"
name = "chain_sum"
"""


@pytest.mark.parametrize("name", FILES)
def test_a_file_registers_a_frozen_config_of_its_own_name(name):
    config = ALGORITHMS[name].config_class()
    assert config.type == name
    assert isinstance(config, AlgorithmSection)
    with pytest.raises(ValidationError, match="frozen"):
        config.type = "other"
    for heading in ("Objective:", "Estimator:", "Where the off-policy correction enters:", "What we left out:"):
        assert heading in sys.modules[f"algorithms.{name}"].__doc__


def test_the_config_union_selects_by_type_and_refuses_unknown_keys():
    adapter = TypeAdapter(AlgorithmConfig)
    for name, algorithm in ALGORITHMS.items():
        assert type(adapter.validate_python({"type": name})) is algorithm.config_class
        with pytest.raises(ValidationError, match="bta"):
            adapter.validate_python({"type": name, "bta": 1})
    with pytest.raises(ValidationError, match=r"trajectory_balance.*online_dpo.*off_policy_ppo"):
        adapter.validate_python({"type": "reinforce"})


def test_every_algorithm_has_its_page():
    assert {path.stem for path in DOCS.glob("*.md")} == {"README", *FILES}
    index = (DOCS / "README.md").read_text()
    assert all(f"[`{name}`]({name}.md)" in index for name in FILES)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_a_fourth_algorithm_is_one_file_and_one_line(tmp_path):
    source, files = blocks("python")
    (section,) = blocks("toml")
    before = (ROOT / "algorithms" / "registry.py").read_text()
    known = re.search(r"^FILES = \(\n.*?^\)\n", before, re.DOTALL | re.MULTILINE).group()
    added = [line for line in files.splitlines() if line not in known.splitlines()]
    assert added == ['    "reinforce",']
    assert [line for line in files.splitlines() if line not in added] == known.splitlines()

    shutil.copytree(ROOT / "algorithms", tmp_path / "algorithms", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "algorithms" / "reinforce.py").write_text(source)
    (tmp_path / "algorithms" / "registry.py").write_text(before.replace(known, files))
    (tmp_path / "run.toml").write_text(TOML + section)
    said = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.integration.test_algorithms_registry", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert said.returncode == 0, said.stderr
    seen = json.loads(said.stdout.splitlines()[-1])
    assert seen["algorithms_from"] == str(tmp_path / "algorithms")
    assert seen["type"] == "reinforce"
    assert seen["reward_scale"] == 2.0
    assert seen["refused"] == "unknown key algorithm.reward_scal; did you mean algorithm.reward_scale?"
    assert seen["taken"] == [True]
    assert seen["logged"] == pytest.approx(seen["advantage_abs"])
    assert seen["objective_after"] > seen["objective_before"] + 1e-4


def learn_with_the_fourth_algorithm(folder: Path) -> dict:
    """Load its config, and take a step of the learner with it on one rank."""
    from launch.config import load_config
    from launch.errors import ConfigError
    from learner.config import LearnerConfig
    from learner.step import TrainStep
    from tests.world.learner import SEED, alone, build, make_models, make_networks, make_rows

    algorithm = load_config(folder / "run.toml").algorithm
    try:
        load_config(folder / "run.toml", ["--algorithm.reward_scal", "1.0"])
    except ConfigError as error:
        refused = str(error).removeprefix(f"{folder / 'run.toml'}: ")
    make_models(folder)
    config, rows = LearnerConfig(learning_rate=1e-3), make_rows(SEED)
    advantages = []
    for row in rows:
        others = [each.reward for each in rows if each.group_id == row.group_id and each is not row]
        advantages.append(algorithm.reward_scale * (row.reward - sum(others) / len(others)))
    with alone():
        networks, reference = make_networks(folder / "tied", config, algorithm)
        batch = build(rows)

        def objective() -> float:
            by_token = networks.forward_only(networks.on_device(batch.packed)).logprobs_T
            return sum(advantages[b] * float(x) for b, x in zip(batch.sequence_T, by_token, strict=True)) / len(rows)

        before = objective()
        result = TrainStep(networks, reference, algorithm, config, SEED).run(batch, 0)
        after = objective()
    return {
        "algorithms_from": str(Path(algorithms.__file__).parent),
        "type": algorithm.type,
        "reward_scale": algorithm.reward_scale,
        "refused": refused,
        "taken": [update.result.taken for update in result.updates],
        "logged": result.metrics["reinforce/advantage_abs"],
        "advantage_abs": sum(map(abs, advantages)) / len(rows),
        "objective_before": before,
        "objective_after": after,
    }


if __name__ == "__main__":
    print(json.dumps(learn_with_the_fourth_algorithm(Path(sys.argv[1]))))
