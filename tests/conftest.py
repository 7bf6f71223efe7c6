"""Settings of all tests: one thread per process, no network, W&B offline."""

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.constants import environment
from tests.full import FULL

# These variables must be set before a test imports torch, vLLM or tokenizers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


# Every test session has its own caches, except for the two caches below, which take long to fill.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
os.environ.setdefault("HF_HOME", str(_CACHE / "huggingface"))
os.environ.setdefault("VLLM_CACHE_ROOT", str(_CACHE / "vllm"))

EXAMPLES = Path(__file__).parents[1] / "examples"

# no deadline, because a test must not fail on a busy machine
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs only in `make full`")
    config.addinivalue_line("markers", "process: starts a process of Leeway; `make unit` skips it")


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory):
    """Keep runs from writing to the user's cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def constants(monkeypatch):
    """Return `constants({"package.module.NAME": value})`, which sets constants in processes of the test."""

    def set_constants(values):
        for name, value in environment(values).items():
            monkeypatch.setenv(name, value)

    return set_constants


@pytest.fixture(autouse=True, scope="session")
def procedural_tasks_are_checked_once():
    """Cache the check of the demo task, which most configs use and which generates thousands of problems."""
    checks = sys.modules.get("leeway.launch.checks")  # slow to import, so only tests that need the module import it
    if checks is None:
        yield
        return
    check, results = checks.check_task, {}

    def check_once(config, **options):
        folder = options["model_folder"] or EXAMPLES
        if config.type != "reasoning_gym" or not folder.is_relative_to(EXAMPLES):
            return check(config, **options)
        key = (config.model_dump_json(), *options.values())
        if key not in results:
            results[key] = check(config, **options)
        return results[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks, "check_task", check_once)
        yield


def pytest_collection_modifyitems(items):
    """Start the longest test file first, so that the other files run in parallel with it."""
    items.sort(key=lambda item: item.path.name != "test_life_of_a_run.py")


def pytest_runtest_setup(item):
    if item.get_closest_marker("full") and not FULL:
        pytest.skip("this test runs only in `make full` and `make faults`")
