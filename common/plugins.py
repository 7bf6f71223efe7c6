"""Load what is optional by its dotted name, `package.module:name`, when a key or a verb asks for it.

The names stand in one table beside the key or the verb, so that a process imports nothing that its config does not use.
"""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str) -> Any:  # noqa: ANN401 -- the table says what it is
    """Import the module of `package.module:name` and return the name.

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such name.
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
