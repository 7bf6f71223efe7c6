"""Choose between the short and the full test session.

`make test` skips tests marked `full`: runs of about a minute whose parts other tests cover, and the positive controls
of the fault matrix. `make full` and `make faults` run these as well, with the full count of every fault test and
property.
"""

import os

FULL = os.environ.get("LEEWAY_FAULTS") == "all"


def pick(short: int, full: int) -> int:
    """Return the full count in `make full` and `make faults`, and the short count otherwise."""
    return full if FULL else short
