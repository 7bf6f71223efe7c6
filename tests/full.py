"""Choose between the short and the full test session.

`make test` skips tests marked `full`. These are runs of about a minute whose parts other tests cover, and the positive
controls of the fault matrix. `make full` and `make faults` also run the marked tests, and repeat every fault test and
every property test the full number of times.
"""

import os

FULL = os.environ.get("LEEWAY_FAULTS") == "all"


def pick(short: int, full: int) -> int:
    """Return `full` under `make full` and `make faults`, and `short` under any other command."""
    return full if FULL else short
