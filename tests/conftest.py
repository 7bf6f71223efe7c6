"""Shared by all tests: one thread per process, no network, no W&B."""

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.constants import environment
from tests.full import FULL

# before torch, vLLM or tokenizers are imported by a test
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


# Caches of ours are a session's own, in its processes too; what these two hold takes long to fetch or make.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
os.environ.setdefault("HF_HOME", str(_CACHE / "huggingface"))
os.environ.setdefault("VLLM_CACHE_ROOT", str(_CACHE / "vllm"))

EXAMPLES = Path(__file__).parents[1] / "examples"

# a machine that has something else to do is no reason to fail
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: for the full run alone, `make full`")
    config.addinivalue_line("markers", "process: starts a process of ours; `make unit` leaves it out")


@pytest.fixture(autouse=True, scope="session")
def cache_of_this_session(tmp_path_factory):
    """What a run keeps for later ones is not kept in this user's cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def constants(monkeypatch):
    """`constants({"package.module.NAME": value})`: what the processes that this test starts have in place of ours."""

    def give(values):
        for name, value in environment(values).items():
            monkeypatch.setenv(name, value)

    return give


@pytest.fixture(autouse=True, scope="session")
def procedural_tasks_are_checked_once():
    """Most configs that are checked here have the task of the demo, whose thousands of problems are made for it."""
    checks = sys.modules.get("launch.checks")  # imported with the tests that need it, and slow to
    if checks is None:
        yield
        return
    check, known = checks.check_task, {}

    def check_once(config, **options):
        folder = options["model_folder"] or EXAMPLES
        if config.type != "reasoning_gym" or not folder.is_relative_to(EXAMPLES):
            return check(config, **options)
        key = (config.model_dump_json(), *options.values())
        if key not in known:
            known[key] = check(config, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks, "check_task", check_once)
        yield


def pytest_collection_modifyitems(items):
    """The longest file first, so that the others are done beside it."""
    items.sort(key=lambda item: item.path.name != "test_life_of_a_run.py")


def pytest_runtest_setup(item):
    if item.get_closest_marker("full") and not FULL:
        pytest.skip("for the full run alone: make full")
