"""Imports without the garbage collector: it is off in the block, and afterwards as it was."""

import contextlib
import gc
import multiprocessing

import pytest

from actors.engine_setup import uncollected_children
from common.process import uncollected


def test_the_collector_is_off_in_the_block_and_on_again_after_an_error():
    with contextlib.suppress(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.process
def test_processes_that_are_spawned_in_the_block_begin_without_and_others_with():
    context = multiprocessing.get_context("spawn")
    found = []
    for block in (uncollected_children(), uncollected()):
        with block, context.Pool(1) as pool:
            found.append(pool.apply(gc.isenabled))
    assert found == [False, True]
