"""The buffer service under a memory limit from its first allocation on, and the first to be killed for it.

`python -m tests.faults.limited_service CGROUP_PROCS ...`, then the arguments of `python -m buffer`.
"""

import sys
from pathlib import Path

from tests.faults import cgroups

if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text("0")  # 0 is the process that writes
    cgroups.is_killed_first()
    from buffer.__main__ import main

    sys.exit(main())
