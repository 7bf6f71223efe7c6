"""The registry, and an algorithm in a file of a user's, as docs/algorithms/README.md has it.

As a script this file is a run that has that algorithm: `python -m tests.integration.test_algorithms_registry FOLDER`.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from algorithms.base import AlgorithmSection
from algorithms.registry import ALGORITHMS, FILES, AlgorithmConfig
from launch.config import Config, load_config, to_toml
from launch.errors import ConfigError
from tests.unit.loss_batches import gradient, make_inputs

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


def test_an_algorithm_in_a_file_of_a_users_is_checked_trained_and_kept_in_the_runs_config(tmp_path):
    (source,) = blocks("python")
    (section,) = blocks("toml")
    (tmp_path / "reinforce.py").write_text(source)
    (tmp_path / "run.toml").write_text(TOML + section)
    said = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.integration.test_algorithms_registry", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert said.returncode == 0, said.stderr
    seen = json.loads(said.stdout.splitlines()[-1])
    assert seen["type"] == f"{tmp_path / 'reinforce.py'}:ALGORITHM"
    assert seen["reward_scale"] == 2.0
    assert seen["kept"]
    known = f"keys of {seen['type']} are compare, reward_scale"
    assert seen["refused"] == f"[algorithm] reward_scal: extra inputs are not permitted; {known}"
    assert seen["taken"] == [True]
    assert seen["logged"] == pytest.approx(seen["advantage_abs"])
    assert seen["objective_after"] > seen["objective_before"] + 1e-4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ALGORITHM = 3", "is no Algorithm: write NAME = Algorithm"),
        ("OTHER = 3", "the file defines no 'ALGORITHM', but OTHER"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        (None, "there is no file"),
    ],
)
def test_a_file_without_an_algorithm_is_refused_by_name(tmp_path, source, message):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    (tmp_path / "run.toml").write_text(TOML + '[algorithm]\ntype = "mine.py:ALGORITHM"\n')
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / "run.toml")
    assert str(tmp_path / "mine.py") in str(caught.value)


def test_what_is_wrong_with_a_users_section_as_a_whole_is_said_as_of_one_of_ours(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from algorithms.base import Algorithm\n"
        "from algorithms.corrections import WeighedSection\n"
        "ALGORITHM = Algorithm(WeighedSection, None)\n"
    )
    section = '[algorithm]\ntype = "mine.py:ALGORITHM"\ncorrections = ["token_tis", "sequence_tis"]\n'
    (tmp_path / "run.toml").write_text(TOML + section)
    with pytest.raises(
        ConfigError, match=r"\[algorithm\] corrections 'token_tis' .* one of them; keys of .* are corrections"
    ):
        load_config(tmp_path / "run.toml")


def test_a_baseline_in_a_file_of_a_users_weighs_the_sequences(tmp_path):
    (tmp_path / "mine.py").write_text("def centred(inputs, rewards_B):\n    return rewards_B - rewards_B.mean()\n")
    (tmp_path / "run.toml").write_text(TOML + '[algorithm]\ntype = "off_policy_ppo"\nbaseline = "mine.py:centred"\n')
    config = load_config(tmp_path / "run.toml").algorithm
    assert config.needs.separable is None, "nobody knows what it reads"
    inputs = make_inputs()
    fresh = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    advantage_B = inputs.rewards_B - inputs.rewards_B.mean()
    expected_T = -advantage_B[inputs.sequence_T] / inputs.logprobs_T.numel()
    torch.testing.assert_close(gradient(config, fresh)[1], expected_T, rtol=0, atol=1e-12)
    (tmp_path / "wrong.py").write_text("def centred(inputs, rewards_B):\n    return rewards_B.mean()\n")
    wrong = load_config(tmp_path / "run.toml", ["--algorithm.baseline", f"{tmp_path}/wrong.py:centred"]).algorithm
    with pytest.raises(ValueError, match=r"returned the shape \[\] for \[9\]"):
        gradient(wrong, fresh)


def learn_with_it(folder: Path) -> dict:
    """Load its config, and take a step of the learner with it on one rank."""
    from learner.config import LearnerConfig
    from learner.step import TrainStep
    from tests.world.learner import SEED, alone, build, make_models, make_networks, make_rows

    whole = load_config(folder / "run.toml")
    (folder / "kept.toml").write_text(to_toml(whole))
    algorithm = whole.algorithm
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
        "type": algorithm.type,
        "reward_scale": algorithm.reward_scale,
        "kept": load_config(folder / "kept.toml") == whole == Config.model_validate_json(whole.model_dump_json()),
        "refused": refused,
        "taken": [update.result.taken for update in result.updates],
        "logged": result.metrics["reinforce/advantage_abs"],
        "advantage_abs": sum(map(abs, advantages)) / len(rows),
        "objective_before": before,
        "objective_after": after,
    }


if __name__ == "__main__":
    print(json.dumps(learn_with_it(Path(sys.argv[1]))))
