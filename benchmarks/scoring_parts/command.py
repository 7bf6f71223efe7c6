"""`leeway train` of sleeping engines and sleeping chunks: `python -m benchmarks.scoring_parts.command train ...`."""

from __future__ import annotations

import os
import sys

from launch.cli import RAY_ENVIRONMENT, main

if __name__ == "__main__":
    os.environ.update(RAY_ENVIRONMENT)  # Ray reads it when it is imported, which is next
    from benchmarks.fleet_parts.roles import SleepingActorRole
    from benchmarks.scoring_parts.roles import SleepingChunksRole, SleepingScorerRole
    from launch.processes import actor_pools, helpers, learner_group

    actor_pools.ActorRole = SleepingActorRole  # type: ignore[attr-defined]
    learner_group.StageRole = SleepingChunksRole  # type: ignore[misc]
    helpers.ScorerRole = SleepingScorerRole  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
