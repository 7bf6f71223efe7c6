"""`fast_imports` disables the garbage collector and hides modules in its block, and then restores the state."""

import contextlib
import gc
import importlib.util
import sys

import pytest

from leeway.common.process import fast_imports


def test_the_collector_is_disabled_in_the_block_and_enabled_after_an_error():
    with contextlib.suppress(ImportError), fast_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with fast_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_of_the_block_are_exempt_from_later_collections():
    gc.unfreeze()
    with fast_imports():
        made = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(made)
    gc.unfreeze()


def test_a_hidden_module_looks_uninstalled_in_the_block_and_can_be_imported_after_it():
    sys.modules.pop("colorsys", None)
    with fast_imports("colorsys", "gc"):
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
        assert importlib.import_module("gc") is gc  # imported before the block
    assert importlib.import_module("colorsys")
