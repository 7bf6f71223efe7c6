"""Where a publisher puts its part of a version: a `WeightStore`, whose folder it sees, or the weight service."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from common.rpc.auth import ClientKeys
from common.staleness import PolicyVersion
from weight_sync.client import WeightClient, sees_folder
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import TransferFailed, WeightsCorrupt
from weight_sync.manifest import Manifest, Part, decode, delta_name, encode
from weight_sync.protocol import WholeFilesNeeded
from weight_sync.store import Buffers, WeightStore

log = logging.getLogger(__name__)


class PartSink(Protocol):
    """Takes parts and commits versions. Used by one thread; every call is bounded."""

    place: str
    """For people: the folder or the address."""

    def newest_manifest(self) -> Manifest | None:
        """The manifest of the newest version, which becomes the parent of the next; None before the first."""
        ...

    def wants_deltas(self) -> bool:
        """Does anybody fetch over a network, so that a delta would save something?"""
        ...

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Write the files of a part, by name, then its document.

        Raises:
            OSError: no space, or not writable (`errno` says which): try again.
            TransferFailed: the service does not answer: try again.
        """
        ...

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """What another stage contributed; None until it has."""
        ...

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Make a version whose parts are all written exist; as `WeightStore.commit`."""
        ...

    def close(self) -> None:
        """Let go of files and sockets."""
        ...


class UploadSink:
    """Uploads over ZeroMQ, changes alone where they serve. What was uploaded before a failure is not sent again."""

    def __init__(
        self, address: str, run_id: str, name: str, config: WeightSyncConfig, keys: ClientKeys | None = None
    ) -> None:
        """Connect to the weight service; `name` is the stage's, for the service's log."""
        self.place = address
        self._client = WeightClient(address, run_id, name, timeout_s=config.publish_timeout_s, keys=keys)

    def newest_manifest(self) -> Manifest | None:
        """As in `PartSink`."""
        document = self._client.newest_document()
        return decode(document, Manifest, f"the newest manifest from {self.place}") if document else None

    def wants_deltas(self) -> bool:
        """Always: what is uploaded crosses the network too."""
        return True

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """As in `PartSink`. Of a file that has a delta, this alone is sent; the service makes it whole."""
        document = encode(part)
        version = PolicyVersion.parse(part.version)
        wholes = {entry.file for entry in part.tensors}
        smaller = {delta_name(name) if delta_name(name) in files else name for name in wholes}
        try:
            self._upload(version, files, smaller)
            try:
                self._client.part_done(document)
            except WholeFilesNeeded as error:
                log.info("version %s is uploaded whole: %s", version, error)
                self._upload(version, files, files.keys())
                self._client.part_done(document)
        except (WeightsCorrupt, WholeFilesNeeded) as error:
            # the service has removed what it found changed
            raise TransferFailed(f"part {part.rank} of version {version} has to be uploaded again: {error}") from error

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """As in `PartSink`."""
        document = self._client.part_document(version, rank)
        return decode(document, Part, f"part {rank} of version {version} from {self.place}") if document else None

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """As in `PartSink`."""
        try:
            self._client.commit(encode(manifest), keep_versions)
        except WeightsCorrupt as error:
            raise TransferFailed(f"version {manifest.policy} cannot be committed yet: {error}") from error

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _upload(self, version: PolicyVersion, files: Mapping[str, Buffers], names: Collection[str]) -> None:
        for name, buffers in files.items():
            if name in names:
                self._client.write(version, name, buffers)


def open_sink(
    config: WeightSyncConfig, *, folder: Path, address: str, run_id: str, name: str, keys: ClientKeys | None = None
) -> PartSink:
    """Where a stage puts its parts; as `sees_folder`."""
    if sees_folder(config, folder=folder, address=address, run_id=run_id, name=name, keys=keys):
        return WeightStore(folder)
    return UploadSink(address, run_id, name, config, keys)
