"""The plugin in a process of vLLM, tested with a stand-in for vLLM's registry that contains the backend."""

import gc
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from leeway.weight_sync import vllm_engine


@pytest.fixture
def register(monkeypatch):
    """`register(owner)` runs the plugin in this process, which is the owner or a child of the owner."""
    registry = SimpleNamespace(_registry={vllm_engine.BACKEND: None})
    stand_in = SimpleNamespace(WeightTransferEngineFactory=registry)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", stand_in)
    monkeypatch.setattr(vllm_engine, "_die_with", lambda owner: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    gc.unfreeze()  # a test before may have frozen objects

    def call(owner: int) -> tuple[bool, bool]:
        monkeypatch.setenv(vllm_engine.OWNER_ENV, str(owner))
        vllm_engine.register()
        return gc.get_freeze_count() > 0, signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    yield call
    gc.unfreeze()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_plugin_exempts_modules_from_collections_and_unblocks_sigterm_in_an_engine(register):
    assert register(os.getppid()) == (True, False)


def test_the_plugin_does_not_change_its_owner(register):
    assert register(os.getpid()) == (False, True)
