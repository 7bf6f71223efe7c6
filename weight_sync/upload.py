"""UploadSink: a stage on another machine than the weight service uploads its parts; changes alone where they serve."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from common.rpc.auth import ClientKeys
from common.staleness import PolicyVersion
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import TransferFailed, WeightsCorrupt
from weight_sync.manifest import Manifest, Part, decode, delta_name, encode
from weight_sync.protocol import WholeFilesNeeded
from weight_sync.sinks import Buffers, FolderSink, PartSink
from weight_sync.transports import client_of, is_folder_of

log = logging.getLogger(__name__)


class UploadSink:
    """Uploads to the weight service. What was uploaded before a failure is not sent again."""

    def __init__(
        self, address: str, run_id: str, name: str, config: WeightSyncConfig, keys: ClientKeys | None = None
    ) -> None:
        """Args:
        address: of the weight service.
        run_id: of the run.
        name: of the stage, for the service's log.
        config: of the run.
        keys: of the run's clients; None where the service takes everybody.
        """
        self.place = address
        self._client = client_of(config, address, run_id, name, at_most_s=config.publish_timeout_s, keys=keys)

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
