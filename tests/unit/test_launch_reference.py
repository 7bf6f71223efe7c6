"""The written reference says what the code says."""

import re
from pathlib import Path

import pytest

from launch import reference
from launch.metrics import METRICS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("config.md", reference.config_reference()), ("metrics.md", reference.metrics_reference())],
)
def test_the_reference_is_what_the_code_would_write(name, expected):
    assert (ROOT / "docs" / name).read_text() == expected, "run `python -m launch.reference`"


def test_every_key_has_a_description():
    assert "|  |" not in reference.config_reference()


def test_every_metric_named_in_the_code_is_registered():
    pattern = re.compile(
        r'"((?:lag|mismatch|off_policy|tb|dpo|ppo|batch|buffer|time|perf|eval|overlap|length|reward)/\w+)"'
    )
    named = {
        name
        for package in ("algorithms", "learner", "launch")
        for file in (ROOT / package).rglob("*.py")
        for name in pattern.findall(file.read_text())
    }
    assert named
    assert sorted(named - METRICS.keys()) == []
