"""Override constants of the product in the processes that a test starts; see `sitecustomize`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent


def environment(values: Mapping[str, object]) -> dict[str, str]:
    """Return the environment variables that set these values, by dotted name, in a process and its children."""
    assert all(name.startswith("leeway.") for name in values), "other names import another copy of a module"
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != str(HERE)]
    known = json.loads(os.environ.get("LEEWAY_TEST_CONSTANTS", "{}"))
    return {
        "PYTHONPATH": os.pathsep.join([str(HERE), *(others or [str(HERE.parents[1])])]),
        "LEEWAY_TEST_CONSTANTS": json.dumps({**known, **values}),
    }
