"""`leeway train` with sleeping engines and a sleeping learner: `python -m benchmarks.fleet_parts.command train ...`.

All else is the real run: the actors' loop, the buffer, the ledger, staleness, weights, Ray, the supervisor.
"""

from __future__ import annotations

import os
import sys

from launch.cli import RAY_ENVIRONMENT, main

if __name__ == "__main__":
    os.environ.update(RAY_ENVIRONMENT)  # Ray reads it when it is imported, which is next
    from benchmarks.fleet_parts.roles import SleepingActorRole, SleepingStageRole
    from launch.processes import actor_pools, learner_group

    actor_pools.ActorRole = SleepingActorRole  # type: ignore[attr-defined]
    learner_group.StageRole = SleepingStageRole  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
