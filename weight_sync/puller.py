"""The actor's side: take a version from the store and keep it from removal.

Files of a folder are mapped in place, and the engine reads them against their checksums before it pauses. Versions from
the weight service are checked as they come, once for all actors of a machine.
"""

from __future__ import annotations

import logging
from pathlib import Path

from common.staleness import PolicyVersion
from weight_sync.client import UPDATE_TIMEOUT_S, StoreAccess
from weight_sync.host_folder import folder_for
from weight_sync.manifest import Manifest, TransferFailed, WeightsCorrupt
from weight_sync.staging import HostStaging
from weight_sync.store import StagedVersion, WeightStore

log = logging.getLogger(__name__)

_STAGED_AT_ONCE = 4
"""Versions of which a machine may hold the files at one time: two kept, one being read and one being fetched."""

_PATIENCE = 0.25
"""Share of the update timeout after which an actor that fetches for its machine, but is stopped, is replaced."""


class Puller:
    """Looks for newer versions and stages them. Used by one thread at a time."""

    def __init__(self, source: WeightStore | _NetworkSource, dtype: str) -> None:
        self._source = source
        self._dtype = dtype
        self._newest: PolicyVersion | None = None
        self._fetched: Manifest | None = None

    @classmethod
    def of_folder(cls, folder: Path, dtype: str, *, who: str = "this process") -> Puller:
        """Read a store whose folder, which may be empty, is seen; TransferFailed names `who` cannot read it."""
        try:
            store = WeightStore(folder)
            list(folder.iterdir())
        except OSError as error:
            raise TransferFailed(
                f"{who} cannot read the weight store's folder {folder} ({error}). Make it "
                "readable, or set [weight_sync] transport = 'network'"
            ) from error
        return cls(store, dtype)

    def newest(self) -> PolicyVersion | None:
        """Return the newest committed version, or None before the first. Cheap enough to poll.

        Raises:
            WeightsCorrupt: it is older than the newest before it.
            TransferFailed: the store cannot be reached.
        """
        newest = self._source.newest()
        if self._newest is not None and (newest is None or newest < self._newest):
            raise WeightsCorrupt(
                f"{self._source.place} gives out version {newest} as the newest, but {self._newest} was before: "
                "versions only grow. Was the folder of an older run put in its place?"
            )
        self._newest = newest
        return newest

    def fetch(self, version: PolicyVersion) -> StagedVersion:
        """Have a version on this machine and keep it from removal; blocks.

        Raises:
            WeightsGone: the version does not exist, or no longer: ask for `newest` again.
            WeightsCorrupt: it is not as published, older than the last one, or of another architecture; keep serving
                the version you have.
            TransferFailed: timeout; try again, what came is not lost.
        """
        last = self._fetched
        if last is not None and version < last.policy:
            raise WeightsCorrupt(
                f"version {version} is older than {last.policy}, which was fetched from {self._source.place} before; "
                "a version that was replaced is never served again"
            )
        staged = self._source.take(version, self._dtype)
        if last is not None and staged.manifest.fingerprint != last.fingerprint:
            staged.close()
            raise WeightsCorrupt(
                f"version {version} in {self._source.place} is of another architecture than {last.policy}: "
                "names, dtypes or shapes of its tensors differ"
            )
        self._fetched = staged.manifest
        return staged

    def distrust(self, staged: StagedVersion) -> None:
        """Have the next `fetch` read a version, which an engine refused by its checksums, anew."""
        self._source.distrust(staged.version, staged.dtype)

    def close(self) -> None:
        self._source.close()


def open_puller(access: StoreAccess, name: str, dtype: str) -> Puller:
    """Take versions in `dtype` from the store's folder where it is seen, else from the service; as `sees_folder`."""
    if access.sees_folder(name, "actor"):
        return Puller.of_folder(access.folder, dtype, who=name)
    return Puller(_NetworkSource(access, name), dtype)


class _NetworkSource:
    """The weight service, and the folder in which this machine keeps what came from it."""

    def __init__(self, access: StoreAccess, name: str) -> None:
        self.place = f"the weight service at {access.address}"
        self._run_id = access.run_id
        self._name = name
        self._client = access.client(name, "actor")
        self._staging: HostStaging | None = None
        try:
            self._store_id = self._client.store().store_id
        except BaseException:
            self._client.close()
            raise

    def newest(self) -> PolicyVersion | None:
        return self._client.newest()

    def take(self, version: PolicyVersion, dtype: str) -> StagedVersion:
        manifest, document = self._client.manifest(version)
        manifest.files_of(dtype)
        if self._staging is not None and not self._staging.is_there():
            log.warning("%s was removed by somebody else; it is made anew", self._staging.store.folder)
            self._staging.close()
            self._staging = None
        if self._staging is None:
            needed = _STAGED_AT_ONCE * manifest.whole_bytes(dtype)
            folder = folder_for(self._run_id, self._store_id, needed)
            self._staging = HostStaging(folder, who=self._name, patience_s=UPDATE_TIMEOUT_S * _PATIENCE)
        lock = self._staging.stage(self._client, manifest, document, dtype)
        return StagedVersion(self._staging.store.folder, manifest, dtype, lock)

    def distrust(self, version: PolicyVersion, dtype: str) -> None:
        if self._staging is not None:
            self._staging.distrust(version, dtype)

    def close(self) -> None:
        self._client.close()
        if self._staging is not None:
            self._staging.close()
