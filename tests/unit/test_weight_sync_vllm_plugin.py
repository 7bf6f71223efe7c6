"""What our plugin does to a process of vLLM; vLLM itself is not imported: its registry is a stand-in that has us."""

import gc
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from weight_sync import vllm_engine


@pytest.fixture
def register(monkeypatch):
    """`register(owner)`: the plugin in a process that was started by this owner, or is the owner."""
    registry = SimpleNamespace(_registry={vllm_engine.BACKEND: None})
    stand_in = SimpleNamespace(WeightTransferEngineFactory=registry)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", stand_in)
    monkeypatch.setattr(vllm_engine, "_die_with", lambda owner: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    gc.disable()

    def call(owner: int) -> tuple[bool, bool]:
        monkeypatch.setenv(vllm_engine.OWNER_ENV, str(owner))
        vllm_engine.register()
        return gc.isenabled(), signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    yield call
    gc.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_an_engine_gets_its_collector_and_its_ear_for_sigterm_back(register):
    assert register(os.getppid()) == (True, False)


def test_its_owner_is_left_as_it_is(register):
    assert register(os.getpid()) == (False, True)
