"""The buffer service under a memory limit from its first allocation on, and the first to be killed for it.

`python -m tests.faults.limited_service CGROUP_PROCS MODULE.NAME=NUMBER ...`, then the arguments of `python -m buffer`.
"""

import sys
from pathlib import Path

from tests.faults import cgroups
from tests.tuned_service import tune

if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text("0")  # 0 is the process that writes
    cgroups.is_killed_first()
    arguments = sys.argv[1:]
    tune(arguments)
    sys.argv[1:] = arguments
    from buffer.__main__ import main

    sys.exit(main())
