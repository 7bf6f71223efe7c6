"""The buffer service with other constants than a run has: a test needs them small, or out of the way.

`python -m tests.tuned_service MODULE.NAME=NUMBER ...`, then the arguments of `python -m buffer`.
"""

import importlib
import sys


def tune(arguments):
    """Take the constants off the front of the arguments, and set them."""
    while "=" in arguments[0]:
        where, _, number = arguments.pop(0).partition("=")
        module, _, name = where.rpartition(".")
        owner = importlib.import_module(module)
        assert hasattr(owner, name), f"{where} is no constant"
        setattr(owner, name, type(getattr(owner, name))(float(number)))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    tune(arguments)
    sys.argv[1:] = arguments
    from buffer.__main__ import main

    sys.exit(main())
