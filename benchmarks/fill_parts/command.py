"""`leeway train` with the previous lease rule of actors: `python -m benchmarks.fill_parts.command train ...`."""

from __future__ import annotations

import os
import sys

from leeway.launch.cli import RAY_ENVIRONMENT, main

if __name__ == "__main__":
    os.environ.update(RAY_ENVIRONMENT)  # before the imports below, because Ray reads these variables at import
    from benchmarks.fill_parts.roles import RoundedDownActorRole

    from leeway.launch.processes import actor_pools

    actor_pools.ActorRole = RoundedDownActorRole  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
