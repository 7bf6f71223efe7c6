"""The algorithm registry, and user-defined algorithms as in docs/algorithms/README.md and examples/.

As a script, this file trains one step with a user-defined algorithm:
`python -m tests.integration.test_algorithms_registry FOLDER`.
"""

import datetime
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from ray import cloudpickle

from leeway.algorithms.base import AlgorithmSection, LossOutput
from leeway.algorithms.registry import ALGORITHMS, FILES, AlgorithmConfig, loss_for
from leeway.buffer import samplers
from leeway.common.user_input import UserFileError
from leeway.launch.config import Config, load_config, to_toml
from leeway.launch.errors import ConfigError
from tests.unit.loss_batches import gradient, make_inputs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "algorithms"
EXAMPLES = ROOT / "examples"
TOML = """
[model]
path = "model"
[task]
type = "reasoning_gym"
name = "chain_sum"
"""


@pytest.mark.parametrize("name", FILES)
def test_each_file_registers_a_frozen_config_with_its_name(name):
    config = ALGORITHMS[name].config_class()
    assert config.type == name
    assert isinstance(config, AlgorithmSection)
    with pytest.raises(ValidationError, match="frozen"):
        config.type = "other"
    for heading in ("Objective:", "Estimator:", "Where the off-policy correction enters:", "What we left out:"):
        assert heading in sys.modules[f"leeway.algorithms.{name}"].__doc__


def test_the_config_union_selects_by_type_and_rejects_unknown_keys():
    adapter = TypeAdapter(AlgorithmConfig)
    for name, algorithm in ALGORITHMS.items():
        assert type(adapter.validate_python({"type": name})) is algorithm.config_class
        with pytest.raises(ValidationError, match="bta"):
            adapter.validate_python({"type": name, "bta": 1})
    with pytest.raises(ValidationError, match=r"trajectory_balance.*online_dpo.*off_policy_ppo"):
        adapter.validate_python({"type": "reinforce"})


def test_every_algorithm_has_a_docs_page():
    assert {path.stem for path in DOCS.glob("*.md")} == {"README", *FILES}
    index = (DOCS / "README.md").read_text()
    assert all(f"[`{name}`]({name}.md)" in index for name in FILES)


def blocks(language, page=DOCS / "README.md"):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_docs_show_parts_of_the_examples():
    (algorithm,), (sampler, *_) = blocks("python"), blocks("python", DOCS.parent / "buffer.md")
    assert (EXAMPLES / "reinforce.py").read_text().endswith(algorithm)
    assert sampler in (EXAMPLES / "samplers.py").read_text()


@pytest.mark.parametrize("sampler", ["hard_ones", "newest_first", "same_prompt"])
def test_the_example_config_loads_its_loss_and_its_sampler(sampler):
    changed = ["--buffer.sampler", f"{EXAMPLES}/samplers.py:{sampler}"]
    config = load_config(EXAMPLES / "own-loss.toml", changed if sampler != "newest_first" else [])
    assert config.algorithm.type == f"{EXAMPLES / 'reinforce.py'}:ALGORITHM"
    assert config.buffer.sampler == f"{EXAMPLES / 'samplers.py'}:{sampler}"
    assert samplers.build(config.buffer)[0].choose is not None


def test_a_user_defined_algorithm_is_validated_trained_and_saved_in_the_config(tmp_path):
    section = blocks("toml")[-1]
    shutil.copy(EXAMPLES / "reinforce.py", tmp_path)
    (tmp_path / "run.toml").write_text(TOML + section)
    process = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.integration.test_algorithms_registry", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    seen = json.loads(process.stdout.splitlines()[-1])
    assert seen["type"] == f"{tmp_path / 'reinforce.py'}:ALGORITHM"
    assert seen["reward_scale"] == 2.0
    assert seen["is_saved"]
    known = f"valid keys of {seen['type']}: mask_truncated, compare, reward_scale"
    assert seen["error"] == f"[algorithm] reward_scal: extra inputs are not permitted; {known}"
    assert seen["taken"] == [True]
    assert seen["logged"] == pytest.approx(seen["advantage_abs"])
    assert seen["objective_after"] > seen["objective_before"] + 1e-4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ALGORITHM = 3", "is not an Algorithm: write NAME = Algorithm"),
        ("OTHER = 3", "the file does not define 'ALGORITHM'; it defines OTHER"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit()", "exited the process with status 0"),
        ("raise SystemExit('set KEY')", "exited the process with status 1: set KEY"),
        ("import os\nos._exit(0)", "exited the process with status 0"),
        ("from os import _exit\n_exit(7)", "exited the process with status 7"),
        (None, "no file /"),
    ],
)
def test_a_file_without_an_algorithm_is_rejected_with_its_path(tmp_path, source, message):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    (tmp_path / "run.toml").write_text(TOML + '[algorithm]\ntype = "mine.py:ALGORITHM"\n')
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / "run.toml")
    assert str(tmp_path / "mine.py") in str(caught.value)


def test_errors_of_a_whole_user_defined_section_are_reported_like_built_in_ones(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from leeway.algorithms.base import Algorithm\n"
        "from leeway.algorithms.corrections import WeighedSection\n"
        "ALGORITHM = Algorithm(WeighedSection, None)\n"
    )
    section = '[algorithm]\ntype = "mine.py:ALGORITHM"\ncorrections = ["token_tis", "sequence_tis"]\n'
    (tmp_path / "run.toml").write_text(TOML + section)
    with pytest.raises(
        ConfigError,
        match=r"\[algorithm\] corrections 'token_tis' .* one of them; valid keys of .*: mask_truncated, corrections",
    ):
        load_config(tmp_path / "run.toml")


SECTION = """
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import torch
from pydantic import AliasChoices, BaseModel, Field, field_validator

from leeway.algorithms.base import Algorithm, AlgorithmSection, LossOutput, Needs
from beside import HALF


class Kind(Enum):
    PLAIN = "plain"
    ODD = "odd"


@dataclass
class Pair:
    low: float
    high: float = 2.0


class Inner(BaseModel):
    pair: Pair = Field(default_factory=lambda: Pair(HALF))
    names: dict[str, tuple[int, ...]] = {}


class Mine(AlgorithmSection):
    kind: Kind = Kind.PLAIN
    inner: Inner = Inner()
    scale: float | None = None
    $FIELD


def loss(config, inputs):
    $LOSS


MINE = Algorithm(Mine, loss)
"""


@pytest.fixture
def mine(tmp_path):
    """Return a function that loads a config whose algorithm file has this loss and this section field."""

    def load(*overrides, loss="return LossOutput(inputs.logprobs_T.sum())", field="pass"):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "beside.py").write_text("HALF = 0.5\n")
        (folder / "mine.py").write_text(SECTION.replace("$LOSS", loss).replace("$FIELD", field))
        (folder / "run.toml").write_text(TOML + '[algorithm]\ntype = "mine.py:MINE"\n')
        return load_config(folder / "run.toml", overrides)

    return load


LOAD = """
import sys
from ray import cloudpickle
config = cloudpickle.load(sys.stdin.buffer)
print(config.model_dump_json())
"""


def load_elsewhere(sent: bytes, cwd: Path) -> subprocess.CompletedProcess:
    """Load a pickled config in another process, as Ray does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", LOAD],
        input=sent,
        capture_output=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env=environment,
    )


def test_a_user_defined_section_reaches_a_process_that_has_not_imported_its_file(mine, tmp_path):
    inner = "{ pair = { low = 1.0 }, names = { a = [1, 2] } }"
    config = mine("--algorithm.kind", "odd", "--algorithm.inner", inner)
    sent = cloudpickle.dumps({"config": config, "again": config.model_copy(update={"tracking": config.tracking})})
    assert b"odd" in sent
    process = load_elsewhere(cloudpickle.dumps(config), tmp_path)
    assert process.returncode == 0, process.stderr.decode()
    assert process.stdout.decode().strip() == config.model_dump_json()


def test_a_host_without_the_algorithm_file_reports_its_path(mine, tmp_path):
    config = mine()
    file = Path(config.algorithm.type.rpartition(":")[0])
    sent = cloudpickle.dumps(config)
    file.unlink()
    error = load_elsewhere(sent, tmp_path).stderr.decode().splitlines()[-1]
    assert error.endswith(f"no file {file} on host {socket.gethostname()}")


@pytest.mark.parametrize(
    ("field", "loss"),
    [
        ('rate: float = Field(default=1.0, alias="lr")', "pass"),
        ('rate: float = Field(default=1.0, validation_alias=AliasChoices("r"))', "pass"),
        ("share: float = 50.0\n\n    @field_validator('share')\n    def halve(cls, x): return x / 2", "pass"),
        ("model_config = {'arbitrary_types_allowed': True}\n    dtype: torch.dtype = torch.float32", "pass"),
        ("@property\n    def needs(self): return None", "pass"),
        ("@property\n    def needs(self): return Needs(grups=True)", "pass"),
        ("late: Unknown = None", "pass"),
    ],
)
def test_a_section_that_other_processes_cannot_rebuild_is_rejected_at_load(mine, field, loss):
    with pytest.raises(ConfigError, match=r"mine\.py:MINE"):
        mine("--algorithm.share", "10.0", field=field, loss=loss) if "share" in field else mine(field=field, loss=loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("return inputs.logprobs_T.sum()", r"returned a Tensor, .* but must return LossOutput"),
        ("return None", r"returned a NoneType, None, but must return LossOutput"),
        ("return LossOutput(inputs.logprobs_T)", r"returned a Tensor, torch.Size\(\[\d+\]\), .* one-element"),
        ("return LossOutput(inputs.logprobs_T.detach().sum())", "with gradients"),
        ("return LossOutput(0.0)", r"returned a float, 0.0, but must"),
        ("return {}['key']", r"line \d+ raised KeyError: 'key'"),
        ("import sys; sys.exit(3)", r"line \d+ raised SystemExit: 3"),
        ("class Own(Exception):\n        def __init__(self, a, b): pass\n    raise Own(1, 2)", r"raised Own: \(1, 2\)"),
        ("return inputs.reference_logprobs_T.sum()", r"return Needs\(reference=True"),
    ],
)
def test_an_error_in_a_user_defined_loss_names_the_loss_in_one_sentence(mine, loss, message):
    config = mine(loss=loss).algorithm
    with pytest.raises(UserFileError, match=message) as caught:
        loss_for(config)(make_inputs())
    assert cloudpickle.loads(cloudpickle.dumps(caught.value)).args == caught.value.args
    if "Needs" not in message:
        assert config.type in str(caught.value)


NUMBERS = [
    *(True, 3, -2.5, Decimal("0.5"), Fraction(1, 4), 10**30),
    *(np.int64(7), np.float16(0.5), np.bool_(True), np.array(2.0), np.array([[3]], np.uint8)),
    *(torch.tensor(2), torch.tensor(True), torch.tensor([1.5]), torch.tensor(0.5, requires_grad=True)),
    torch.tensor(0.5, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("found", NUMBERS, ids=repr)
def test_a_metric_may_have_any_numeric_type(found):
    (number,) = LossOutput(torch.zeros(()), {"mine": found}).metrics.values()
    assert type(number) is float
    assert number == float(found.item() if hasattr(found, "item") else found)


@pytest.mark.parametrize("found", [None, math.nan, np.float32("nan"), Decimal("nan"), torch.tensor(math.nan)], ids=repr)
def test_a_metric_that_does_not_apply_is_none(found):
    assert LossOutput(torch.zeros(()), {"mine": found}).metrics == {"mine": None}


@pytest.mark.parametrize(
    "found",
    [
        *("3", b"3", 1j, [1.0], {}, ..., 10**400, Decimal("sNaN"), np.str_("3"), np.complex64(1), np.zeros(2)),
        *(np.array(["3"]), np.array([]), torch.zeros(2), torch.zeros(0), torch.tensor(1j), datetime.timedelta(1)),
    ],
)
def test_a_metric_that_is_not_a_real_number_is_rejected_by_name(found):
    with pytest.raises(TypeError, match=rf"a {type(found).__name__}, .* as metric 'mine/odd'"):
        _ = LossOutput(torch.zeros(()), {"mine/odd": found}).metrics


def test_a_metric_whose_name_is_not_a_string_is_rejected():
    with pytest.raises(TypeError, match="as metric 3: return"):
        _ = LossOutput(torch.zeros(()), {3: 1.0}).metrics


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [float(each) for each in rewards_B]", None),
        ("return rewards_B.numpy() / 2", None),
        ("return (rewards_B > 0).int()", None),
        ("return rewards_B[0]", r"returned shape \[\], expected \[9\]"),
        ("return 'rloo'", "raised"),
        ("return None", "raised"),
        ("raise KeyError('x')", "line 2 raised KeyError: 'x'"),
    ],
)
def test_the_result_of_a_user_defined_baseline_is_accepted_or_rejected_by_name(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(f"def mine(inputs, rewards_B):\n    {body}\n")
    (tmp_path / "run.toml").write_text(TOML + '[algorithm]\ntype = "off_policy_ppo"\nbaseline = "mine.py:mine"\n')
    config = load_config(tmp_path / "run.toml").algorithm
    if message is None:
        assert torch.isfinite(gradient(config, make_inputs())[1]).all()
        return
    with pytest.raises(UserFileError, match=message) as caught:
        gradient(config, make_inputs())
    assert f"{tmp_path / 'mine.py'}:mine" in str(caught.value)


def test_a_user_defined_baseline_weighs_the_sequences(tmp_path):
    (tmp_path / "mine.py").write_text("def centred(inputs, rewards_B):\n    return rewards_B - rewards_B.mean()\n")
    (tmp_path / "run.toml").write_text(TOML + '[algorithm]\ntype = "off_policy_ppo"\nbaseline = "mine.py:centred"\n')
    config = load_config(tmp_path / "run.toml").algorithm
    assert config.needs.separable is None, "the inputs of a user's baseline are unknown"
    inputs = make_inputs()
    fresh = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    advantage_B = inputs.rewards_B - inputs.rewards_B.mean()
    expected_T = -advantage_B[inputs.sequence_T] / inputs.logprobs_T.numel()
    torch.testing.assert_close(gradient(config, fresh)[1], expected_T, rtol=0, atol=1e-12)
    (tmp_path / "wrong.py").write_text("def centred(inputs, rewards_B):\n    return rewards_B.mean()\n")
    wrong = load_config(tmp_path / "run.toml", ["--algorithm.baseline", f"{tmp_path}/wrong.py:centred"]).algorithm
    with pytest.raises(ValueError, match=r"returned shape \[\], expected \[9\]"):
        gradient(wrong, fresh)


def train_one_step(folder: Path) -> dict:
    """Load the config of `folder` and take one learner step with its algorithm on one rank."""
    from leeway.learner.config import LearnerConfig
    from leeway.learner.step import TrainStep
    from tests.world.learner import SEED, build, make_models, make_networks, make_rows, single_rank

    whole = load_config(folder / "run.toml")
    (folder / "saved.toml").write_text(to_toml(whole))
    algorithm = whole.algorithm
    try:
        load_config(folder / "run.toml", ["--algorithm.reward_scal", "1.0"])
    except ConfigError as caught:
        error = str(caught).removeprefix(f"{folder / 'run.toml'}: ")
    make_models(folder)
    config, rows = LearnerConfig(learning_rate=1e-3, warmup_steps=0), make_rows(SEED)
    advantages = []
    for row in rows:
        others = [each.reward for each in rows if each.group_id == row.group_id and each is not row]
        advantages.append(algorithm.reward_scale * (row.reward - sum(others) / len(others)))
    with single_rank():
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
        "is_saved": load_config(folder / "saved.toml") == whole == Config.model_validate_json(whole.model_dump_json()),
        "error": error,
        "taken": [update.result.taken for update in result.updates],
        "logged": result.metrics["reinforce/advantage_abs"],
        "advantage_abs": sum(map(abs, advantages)) / len(rows),
        "objective_before": before,
        "objective_after": after,
    }


if __name__ == "__main__":
    print(json.dumps(train_one_step(Path(sys.argv[1]))))
