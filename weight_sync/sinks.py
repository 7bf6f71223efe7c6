"""Where a publisher puts its part of a version.

FolderSink   the store's folder, where it is seen
UploadSink   the weight service of another machine, over ZeroMQ; changes alone where they serve
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from common.files import write_whole
from common.rpc.auth import ClientKeys
from common.staleness import PolicyVersion
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import TransferFailed, WeightsCorrupt
from weight_sync.manifest import Manifest, Part, decode, delta_name, encode, part_name
from weight_sync.protocol import WholeFilesNeeded
from weight_sync.store import WeightStore
from weight_sync.transports import client_of, is_folder_of

log = logging.getLogger(__name__)

Buffers = Sequence[bytes | memoryview]


class PartSink(Protocol):
    """Takes parts and commits versions. Used by one thread; every call is bounded."""

    place: str
    """For people: the folder or the address."""

    def newest(self) -> Manifest | None:
        """The manifest of the newest version, which becomes the parent of the next; None before the first."""
        ...

    def wants_deltas(self) -> bool:
        """Does anybody fetch over a network, so that a delta would save something?"""
        ...

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Write the files of a part, then its document.

        Args:
            part: describes them.
            files: name -> the buffers of its content, in order.

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


class FolderSink:
    """Writes directly into the store's folder."""

    def __init__(self, folder: Path) -> None:
        """Write into the folder of a weight store."""
        self._store = WeightStore(folder)
        self.place = str(folder)

    def newest(self) -> Manifest | None:
        """As in `PartSink`."""
        newest = self._store.newest()
        return None if newest is None else self._store.manifest(newest)

    def wants_deltas(self) -> bool:
        """As in `PartSink`."""
        return self._store.has_remote_reader()

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """As in `PartSink`."""
        folder = self._store.begin(PolicyVersion.parse(part.version))
        for name, buffers in files.items():
            write_whole(folder / name, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        write_whole(folder / part_name(part.rank), [encode(part)])

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """As in `PartSink`."""
        return self._store.part(version, rank)

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """As in `PartSink`."""
        self._store.commit(manifest, keep_versions)

    def close(self) -> None:
        """Nothing is open."""


class UploadSink:
    """Uploads to the weight service. What was uploaded before a failure is not sent again."""

    def __init__(
        self, address: str, run_id: str, name: str, config: WeightSyncConfig, keys: ClientKeys | None = None
    ) -> None:
        """Connect to the weight service; `name` is the stage's, for the service's log."""
        self.place = address
        self._client = client_of(address, run_id, name, at_most_s=config.publish_timeout_s, keys=keys)

    def newest(self) -> Manifest | None:
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
    """Where a stage puts its parts: the folder where it is seen, else the service.

    Args:
        config: of the run; `transport` decides.
        folder: of the weight store, as the learner's machine would see it.
        address: of the weight service; "" where none runs.
        run_id: of the run.
        name: of the stage.
        keys: of the run's clients; None where the service takes everybody.

    Raises:
        TransferFailed: the service does not answer, or is another run's.
    """
    if is_folder_of(config, folder=folder, address=address, run_id=run_id, name=name, keys=keys):
        return FolderSink(folder)
    return UploadSink(address, run_id, name, config, keys)
