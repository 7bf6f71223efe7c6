"""Shared by all tests: one thread per process, no network, no W&B."""

import os

import pytest

from tests.full import FULL

# before torch, vLLM or tokenizers are imported by a test
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: for the full run alone, `make full`")
    config.addinivalue_line("markers", "process: starts a process of ours; `make unit` leaves it out")


def pytest_runtest_setup(item):
    if item.get_closest_marker("full") and not FULL:
        pytest.skip("for the full run alone: make full")
