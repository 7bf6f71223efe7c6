"""`leeway train` with engines and a learner that sleep: `python -m benchmarks.fleet_parts.command train ...`.

All other parts are real: the loop of the actors, buffer, ledger, staleness bound, weights, Ray and supervisor.
"""

from __future__ import annotations

import os
import sys

from leeway.launch.cli import RAY_ENVIRONMENT, main

if __name__ == "__main__":
    os.environ.update(RAY_ENVIRONMENT)  # before the imports below, because Ray reads these variables at import
    from benchmarks.fleet_parts.roles import SleepingActorRole, SleepingStageRole

    from leeway.launch.processes import actor_pools, learner_group

    actor_pools.ActorRole = SleepingActorRole  # type: ignore[attr-defined]
    learner_group.StageRole = SleepingStageRole  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
