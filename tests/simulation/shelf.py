"""The weight protocol, reduced to its order: versions are committed one by one, each newer than the previous one."""

from __future__ import annotations

from random import Random

from leeway.common.staleness import PolicyVersion

FIRST = PolicyVersion(0, 0)
"""Version that an engine serves before its first pull."""


class Shelf:
    """The committed versions, as in `WeightStore`."""

    def __init__(self) -> None:
        self.versions: list[PolicyVersion] = []

    def commit(self, version: PolicyVersion) -> bool:
        """Commit a version; return False for an old version, which only a replaced learner commits."""
        if self.versions and version <= self.versions[-1]:
            return False
        self.versions.append(version)
        return True

    @property
    def newest(self) -> PolicyVersion | None:
        """Return the newest version; None before the first commit."""
        return self.versions[-1] if self.versions else None

    def any(self, random: Random) -> PolicyVersion | None:
        """Return a random version, as a late or repeated transfer delivers it."""
        return random.choice(self.versions) if self.versions else None
