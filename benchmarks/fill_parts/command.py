"""`leeway train` whose actors lease by the rule from before: `python -m benchmarks.fill_parts.command train ...`."""

from __future__ import annotations

import os
import sys

from launch.cli import RAY_ENVIRONMENT, main

if __name__ == "__main__":
    os.environ.update(RAY_ENVIRONMENT)  # Ray reads it when it is imported, which is next
    from benchmarks.fill_parts.roles import RoundedDownActorRole
    from launch.processes import actor_pools

    actor_pools.ActorRole = RoundedDownActorRole  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
