"""Mesh: where a rank stands among the stages of a pipeline and the replicas of it, and with whom it speaks.

With P stages and R replicas there are R * P ranks, one process each: rank = replica * P + stage. The last stage of
replica 0 leads: it evaluates the loss and talks to the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """One rank's place; needs no process group."""

    rank: int
    num_stages: int = 1
    """P, processes of a pipeline."""
    num_replicas: int = 1
    """R, pipelines that train the same weights on shares of each batch."""

    @property
    def num_ranks(self) -> int:
        """R * P."""
        return self.num_replicas * self.num_stages

    @property
    def stage(self) -> int:
        """0..P-1."""
        return self.rank % self.num_stages

    @property
    def replica(self) -> int:
        """0..R-1."""
        return self.rank // self.num_stages

    @property
    def lead(self) -> int:
        """The rank that evaluates the loss, judges updates and talks to the buffer."""
        return self.num_stages - 1

    @property
    def is_lead(self) -> bool:
        """Is this the rank that leads?"""
        return self.rank == self.lead

    @property
    def is_last(self) -> bool:
        """Has this rank the heads of its pipeline?"""
        return self.stage == self.num_stages - 1

    @property
    def publishes(self) -> bool:
        """Replicas hold the same weights: the first one writes them."""
        return self.replica == 0

    @property
    def name(self) -> str:
        """For people."""
        return f"stage {self.stage}" + (f" of replica {self.replica}" if self.num_replicas > 1 else "")

    def check(self) -> None:
        """Refuse a rank that is not of the mesh.

        Raises:
            ValueError: it is not.
        """
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"rank {self.rank} is not one of 0..{self.num_ranks - 1} ({self.num_replicas} x {self.num_stages})"
            )


@dataclass(frozen=True)
class Mesh:
    """A place with the process groups that it takes part in."""

    place: Place
    pipeline: dist.ProcessGroup
    """The stages of this replica, in order."""
    replicas: dist.ProcessGroup
    """This stage in all replicas, in order."""
    ends: dist.ProcessGroup | None
    """First and last stage of this replica; None on the stages between, and where one stage is both."""

    @classmethod
    def build(cls, place: Place, timeout: timedelta | None = None) -> Mesh:
        """Make the groups, within the default group of all ranks; all ranks call it together.

        Args:
            place: of this rank.
            timeout: of their collectives, which do not have that of the default group by themselves.
        """
        num_stages, num_replicas = place.num_stages, place.num_replicas

        def group(replicas: Sequence[int], stages: Sequence[int]) -> dist.ProcessGroup:
            return dist.new_group([r * num_stages + p for r in replicas for p in stages], timeout=timeout)

        # every rank has to make every group, in the same order
        pipelines = [group([r], range(num_stages)) for r in range(num_replicas)]
        stages = [group(range(num_replicas), [p]) for p in range(num_stages)]
        ends = [group([r], [0, num_stages - 1]) for r in range(num_replicas)] if num_stages > 1 else []
        at_an_end = place.stage in (0, num_stages - 1)
        return cls(
            place, pipelines[place.replica], stages[place.stage], ends[place.replica] if ends and at_an_end else None
        )
