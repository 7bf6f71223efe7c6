"""The weight protocol, as far as it is order: versions appear one by one, each newer than the last."""

from __future__ import annotations

from random import Random

from common.staleness import PolicyVersion

FIRST = PolicyVersion(0, 0)
"""What an engine serves before it has pulled anything."""


class Shelf:
    """The committed versions, as `WeightStore` has them."""

    def __init__(self) -> None:
        self.versions: list[PolicyVersion] = []

    def commit(self, version: PolicyVersion) -> bool:
        """Make a version exist; false where it is not newer than the newest (a learner that was replaced)."""
        if self.versions and version <= self.versions[-1]:
            return False
        self.versions.append(version)
        return True

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest one; None before the first."""
        return self.versions[-1] if self.versions else None

    def any(self, random: Random) -> PolicyVersion | None:
        """One of them, as a late or repeated transfer brings it."""
        return random.choice(self.versions) if self.versions else None
