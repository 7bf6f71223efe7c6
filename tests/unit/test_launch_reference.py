"""The reference pages match the code."""

import re
from pathlib import Path
from typing import get_args

import pytest

from leeway.algorithms.base import AlgorithmSection
from leeway.algorithms.corrections import AnySurrogate, AnyWeight
from leeway.algorithms.registry import ALGORITHMS
from leeway.launch.config import Config
from leeway.launch.observe.metrics import METRICS
from tests import reference
from tests.prose import pages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.md", reference.config_reference()),
        ("metrics.md", reference.metrics_reference()),
        ("api.md", reference.api_reference()),
    ],
)
def test_the_reference_pages_are_up_to_date(name, expected):
    assert (ROOT / "docs" / name).read_text() == expected, "run `python -m tests.reference`"


def test_every_key_has_a_description():
    assert "|  |" not in reference.config_reference()


def test_every_metric_named_in_the_code_is_registered():
    pattern = re.compile(
        r'"((?:lag|mismatch|off_policy|tb|dpo|ppo|ess|updates|critic|batch|buffer|time|perf|eval|overlap|length|reward|actors|weights)/\w+)"'
    )
    named = {
        name
        for package in ("algorithms", "learner", "launch")
        for file in (ROOT / package).rglob("*.py")
        for name in pattern.findall(file.read_text())
    }
    assert named
    assert sorted(named - METRICS.keys()) == []


def test_pages_name_only_registered_metrics():
    prefixes = {metric.partition("/")[0] for metric in METRICS if "/" in metric}
    named = {
        name
        for page in pages()
        for name in re.findall(r"`([a-z_0-9]+/[a-zA-Z_0-9/]+)`", page.read_text())
        if name.partition("/")[0] in prefixes and not any(ROOT.glob(f"{name}*"))
    }
    assert len(named) > 40
    assert sorted(named - METRICS.keys() - {"buffer/port"}) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_of_an_algorithm_names_all_of_its_knobs_and_metrics(name):
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    shared = {f"algorithm.{key}" for key in AlgorithmSection.model_fields}
    overview = (ROOT / "docs" / "algorithms" / "README.md").read_text()
    assert [each for each in shared if f"`{each}`" not in overview] == []
    knobs = {f"algorithm.{key}" for key in ALGORITHMS[name].config_class.model_fields} - shared
    prefixes = {
        "trajectory_balance": ("tb/",),
        "online_dpo": ("dpo/",),
        "off_policy_ppo": ("ppo/", "off_policy/"),
        "oapl": ("oapl/",),
        "distillation": ("distillation/",),
    }[name]
    metrics = {metric for metric in METRICS if metric.startswith(prefixes)} - {"off_policy/chi2"}
    assert sorted(each for each in knobs | metrics if f"`{each}`" not in page) == []


def test_the_page_of_ppo_names_every_correction():
    page = (ROOT / "docs" / "algorithms" / "off_policy_ppo.md").read_text()
    names = {each.model_fields["type"].default for each in (*get_args(AnyWeight), *get_args(AnySurrogate))}
    assert len(names) == 7
    assert sorted(name for name in names if f"| `{name}` |" not in page) == []


def test_every_key_is_listed_once_and_required_keys_are_basic():
    rows = [line.split("|") for line in reference.config_reference().splitlines() if line.startswith("| `")]
    keys = [row[1] for row in rows]
    assert sorted(key for key in set(keys) if keys.count(key) > 1) == []
    levels = [(row[2].strip(), row[3].strip()) for row in rows if "[" not in row[1]]
    assert {level for _, level in levels} == {"basic", "advanced"}
    assert {level for default, level in levels if default == "required"} == {"basic"}


def test_pages_name_only_keys_of_the_config():
    sections, reference_page = "|".join(Config.model_fields), reference.config_reference()
    named = {
        (page.name, key)
        for page in [ROOT / "README.md", *pages()]
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)`", page.read_text())
    }
    assert len(named) > 100
    unknown = sorted(
        (page, key)
        for page, key in named
        if f"| `{key}` |" not in reference_page and not key.endswith((".type", ".json", ".jsonl"))
    )
    assert unknown == []
