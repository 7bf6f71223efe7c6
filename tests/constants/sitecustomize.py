"""Override constants of the product in every process that has this folder in PYTHONPATH.

Python imports a module of this name at its start. LEEWAY_TEST_CONSTANTS holds the values by dotted name, as JSON:

    {"leeway.learner.coordinator.BATCH_TIMEOUT_S": 2}

Each value is set as soon as its module is imported, before another module can import it from there. This shortens
timeouts in tests without a hook in the product. `tests.constants.environment` returns both variables; a test that
starts no process patches the module instead.
"""

import json
import os
import sys
from importlib.machinery import PathFinder

VALUES = json.loads(os.environ.get("LEEWAY_TEST_CONSTANTS", "{}"))


class _Finder:
    """Import hook that overrides the constants of a module right after its import."""

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
                    getattr(module, constant)  # raises if the product no longer has it
                    setattr(module, constant, value)

            spec.loader.exec_module = exec_module
        return spec


if VALUES:
    sys.meta_path.insert(0, _Finder)
