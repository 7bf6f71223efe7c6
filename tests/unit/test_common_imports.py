"""`gc_disabled` disables the garbage collector in its block and then restores its state."""

import contextlib
import gc
import multiprocessing

import pytest

from leeway.actors.engine_setup import gc_disabled_children
from leeway.common.process import gc_disabled


def test_the_collector_is_disabled_in_the_block_and_enabled_after_an_error():
    with contextlib.suppress(ImportError), gc_disabled():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.process
def test_only_processes_spawned_in_gc_disabled_children_start_without_the_collector():
    context = multiprocessing.get_context("spawn")
    found = []
    for block in (gc_disabled_children(), gc_disabled()):
        with block, context.Pool(1) as pool:
            found.append(pool.apply(gc.isenabled))
    assert found == [False, True]
