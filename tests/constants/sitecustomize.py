"""Gives constants of the product other values in every process that has this folder in PYTHONPATH.

Python imports a module of this name at its start. LEEWAY_TEST_CONSTANTS holds the values by dotted name, as JSON:

    {"learner.coordinator.BATCH_TIMEOUT_S": 2}

Each is put in place as soon as its module is imported, before another module can take it from there. So a test waits
seconds for what takes minutes in a run, and the product has no way in for it. `tests.constants.environment` makes both
variables; a test of one process patches the module instead.
"""

import json
import os
import sys
from importlib.machinery import PathFinder

VALUES = json.loads(os.environ.get("LEEWAY_TEST_CONSTANTS", "{}"))


class _Finder:
    """Finds the modules that have constants to change."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        values = {
            constant: value
            for module, _, constant in (key.rpartition(".") for key in VALUES)
            if module == name
            for value in [VALUES[f"{module}.{constant}"]]
        }
        spec = PathFinder.find_spec(name, path, target) if values else None
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                for constant, value in values.items():
                    getattr(module, constant)  # one that is gone would change nothing
                    setattr(module, constant, value)

            spec.loader.exec_module = exec_module
        return spec


if VALUES:
    sys.meta_path.insert(0, _Finder)
