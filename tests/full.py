"""Which run of the tests this is.

`make test` runs everything but what is marked `full`: runs of a minute or so whose parts other tests hold, and the
positive controls of the fault matrix. `make full` and `make faults` run these as well, and give every fault test and
property its full count.
"""

import os

FULL = os.environ.get("LEEWAY_FAULTS") == "all"


def pick(short: int, full: int) -> int:
    """A count: the short one in `make test`, the full one in `make full` and `make faults`."""
    return full if FULL else short
