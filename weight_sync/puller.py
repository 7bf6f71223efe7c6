"""The actor's side of weight transfer: fetches a version from the store and protects it from removal.

Files in the store's folder are memory-mapped there, and the engine verifies their checksums before it pauses. Versions
from the weight service are verified as they arrive, once for all actors of a machine.
"""

from __future__ import annotations

import logging
from pathlib import Path

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.client import UPDATE_TIMEOUT_S, StoreAccess
from leeway.weight_sync.host_folder import folder_for
from leeway.weight_sync.manifest import Manifest, TransferFailed, WeightsCorrupt
from leeway.weight_sync.staging import HostStaging
from leeway.weight_sync.store import StagedVersion, WeightStore

log = logging.getLogger(__name__)

_STAGED_AT_ONCE = 4
"""Maximum number of versions with files on a machine: two kept, one being read and one being fetched."""

_STALL_SHARE = 0.25
"""Fraction of the update timeout after which another actor replaces a stalled actor that fetches for the machine."""


class Puller:
    """Polls for newer versions and stages them. Not thread-safe."""

    def __init__(self, source: WeightStore | _NetworkSource, dtype: str) -> None:
        self._source = source
        self._dtype = dtype
        self._newest: PolicyVersion | None = None
        self._fetched: Manifest | None = None

    @classmethod
    def of_folder(cls, folder: Path, dtype: str, *, name: str = "this process") -> Puller:
        """Open a store through its folder, which may be empty; raise TransferFailed, naming `name`, on failure."""
        try:
            store = WeightStore(folder)
            list(folder.iterdir())
        except OSError as error:
            raise TransferFailed(
                f"{name} cannot read the weight store's folder {folder} ({error}). Make it "
                "readable, or set [weight_sync] transport = 'network'"
            ) from error
        return cls(store, dtype)

    def newest(self) -> PolicyVersion | None:
        """Return the newest committed version, or None before the first. The call is cheap enough to poll.

        Raises:
            WeightsCorrupt: the newest version is older than at an earlier call.
            TransferFailed: the store cannot be reached.
        """
        newest = self._source.newest()
        if self._newest is not None and (newest is None or newest < self._newest):
            raise WeightsCorrupt(
                f"{self._source.place} reports {newest} as the newest version after {self._newest}: "
                "versions must increase. Check that the folder was not replaced by that of an older run"
            )
        self._newest = newest
        return newest

    def fetch(self, version: PolicyVersion) -> StagedVersion:
        """Block until a version is on this machine, protected from removal.

        Raises:
            WeightsGone: the version does not exist or was removed; call `newest` again.
            WeightsCorrupt: the version differs from the published version, is older than the last fetched version, or
            has another architecture; keep serving the current version.
            TransferFailed: timeout; a retry resumes the download.
        """
        last = self._fetched
        if last is not None and version < last.policy:
            raise WeightsCorrupt(
                f"version {version} is older than {last.policy}, which was already fetched from {self._source.place}; "
                "older versions are never served again"
            )
        staged = self._source.take(version, self._dtype)
        if last is not None and staged.manifest.fingerprint != last.fingerprint:
            staged.close()
            raise WeightsCorrupt(
                f"version {version} in {self._source.place} has another architecture than {last.policy}: "
                "names, dtypes or shapes of its tensors differ"
            )
        self._fetched = staged.manifest
        return staged

    def invalidate(self, staged: StagedVersion) -> None:
        """Make the next `fetch` read a version again, after an engine found a wrong checksum in it."""
        self._source.invalidate(staged.version, staged.dtype)

    def close(self) -> None:
        self._source.close()


def open_puller(access: StoreAccess, name: str, dtype: str) -> Puller:
    """Return a puller of versions in `dtype`, from the folder or the service; raise the errors of `uses_folder`."""
    if access.uses_folder(name, "actor"):
        return Puller.of_folder(access.folder, dtype, name=name)
    return Puller(_NetworkSource(access, name), dtype)


class _NetworkSource:
    """The weight service, and the folder in which this machine stages its versions."""

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
            log.warning("%s was removed by another program; creating it again", self._staging.store.folder)
            self._staging.close()
            self._staging = None
        if self._staging is None:
            needed = _STAGED_AT_ONCE * manifest.whole_bytes(dtype)
            folder = folder_for(self._run_id, self._store_id, needed)
            self._staging = HostStaging(folder, owner=self._name, stall_timeout_s=UPDATE_TIMEOUT_S * _STALL_SHARE)
        lock = self._staging.stage(self._client, manifest, document, dtype)
        return StagedVersion(self._staging.store.folder, manifest, dtype, lock)

    def invalidate(self, version: PolicyVersion, dtype: str) -> None:
        if self._staging is not None:
            self._staging.invalidate(version, dtype)

    def close(self) -> None:
        self._client.close()
        if self._staging is not None:
            self._staging.close()
