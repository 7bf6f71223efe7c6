"""WeightClient: asks the weight service for versions, and hands it parts. Blocks; every wait is bounded."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.rpc.auth import ClientKeys, is_loopback
from common.rpc.client import Answer, Ask, Patience, RpcClient, RpcErrors
from common.rpc.messages import Asker, Done, Message, Role
from common.run import RunContext
from common.staleness import PolicyVersion
from weight_sync import protocol as p
from weight_sync.config import WeightSyncConfig
from weight_sync.manifest import Manifest, Part, TransferFailed, WeightsCorrupt, decode, delta_name, encode
from weight_sync.store import Buffers, WeightStore, read_manifest, store_id_of

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
"""Of a message of weights: milliseconds on a slow network, and cheap to send again."""
UPDATE_TIMEOUT_S = 600.0
"""A version that an actor has not read, or an engine not applied, within this time is an error that names the actor; a
model of 140 GB takes 6 minutes at 400 MB/s."""
PUBLISH_TIMEOUT_S = 1800.0
"""Seconds after which weights that cannot be written, as on a full disk, end the learner; until then it retries, and
trains as far as the bound allows."""
_WINDOW = 4
"""Chunks in flight: enough to hide the latency, few enough to lose little."""
_SILENCE_S = 2.0
_HEARTBEAT_S = 20.0
"""Of a connection: a heartbeat waits behind chunks."""

Kind = TypeVar("Kind", bound=Message)


class WeightClient:
    """Talks to the weight service of a run. For any thread. Stages write to it as to a `WeightStore`."""

    def __init__(
        self,
        address: str,
        run_id: str,
        name: str,
        *,
        role: Role,
        timeout_s: float = 30.0,
        chunk_bytes: int | None = None,
        window: int = _WINDOW,
        silence_s: float = _SILENCE_S,
        keys: ClientKeys | None = None,
    ) -> None:
        """Connect to the service; log and errors say `name`, and `role` says what it may ask.

        A question is asked again after `silence_s`, and fails after `timeout_s`, in which a service can be started
        again. `window` chunks of `chunk_bytes` (None: `CHUNK_BYTES`) are in flight at once.
        """
        self.address = self.place = address
        self.name = name
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._window = window
        self._rpc = RpcClient(
            p.PROTOCOL,
            address,
            run_id,
            asker=Asker(name, role, secrets.token_hex(16)),
            patience=Patience(resend_s=min(silence_s, timeout_s), give_up_s=timeout_s, heartbeat_s=_HEARTBEAT_S),
            errors=RpcErrors(p.error_of, lambda text: TransferFailed(text + loopback_hint(address))),
            keys=keys,
        )

    def store(self) -> p.StoreFacts:
        """Return which store is served there; TransferFailed if it does not answer, or is of another run or release."""
        return self._ask(p.StoreRequest(self.name), p.StoreFacts)[0]

    def newest(self) -> PolicyVersion | None:
        text = self._ask(p.NewestRequest(), p.Newest)[0].version
        return p.version_of(text) if text else None

    def manifest(self, version: PolicyVersion) -> tuple[Manifest, bytes]:
        """Return the manifest of a version, checked, and as it was written. The service keeps the version from now on.

        Raises:
            WeightsGone: the version does not exist, or no longer.
            WeightsCorrupt: it is another version's, or was changed.
            TransferFailed: the service does not answer.
        """
        document = bytes(self._document(p.ManifestRequest(version.key)))
        return read_manifest(document, version, f"the manifest from {self.address}"), document

    def newest_manifest(self) -> Manifest | None:
        document = self._document(p.ManifestRequest(""))
        return decode(document, Manifest, f"the newest manifest from {self.address}") if document else None

    def read(
        self, version: PolicyVersion, file: str, total_bytes: int, start: int, write: Callable[[memoryview], None]
    ) -> None:
        """Fetch a file of `total_bytes` from `start` to its end; `write` is called with each checked piece, in order.

        Raises:
            WeightsGone: the version was removed meanwhile.
            WeightsCorrupt: the service's file is not that of the manifest, or a piece came damaged repeatedly.
            TransferFailed: the service does not answer.
        """
        asks = (
            Ask(p.ReadRequest(version.key, file, offset, min(self._chunk_bytes, total_bytes - offset)))
            for offset in range(start, total_bytes, self._chunk_bytes)
        )
        for (asked, _), answer in self._rpc.stream(asks, window=self._window):
            chunk = _expect(asked, answer, p.Chunk)
            if chunk.total_bytes != total_bytes or len(answer.body) != getattr(asked, "size", None):
                raise WeightsCorrupt(
                    f"{self.address}: {asked} was answered with {len(answer.body)} bytes of {chunk.total_bytes}; "
                    f"the manifest says {total_bytes}"
                )
            write(answer.body)

    def write(self, version: PolicyVersion, file: str, buffers: Buffers) -> None:
        """Upload a file, from where an earlier upload of it ended; errors as `write_part`."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        total = sum(len(view) for view in views)
        status = self._ask(p.WriteRequest(version.key, file, 0, total), p.WriteStatus)[0]
        have, window = status.num_bytes, self._window
        while have < total:
            began_at, size = have, self._chunk_bytes
            pieces = (
                Ask(p.WriteRequest(version.key, file, offset, total), _slice(views, offset, min(size, total - offset)))
                for offset in range(have, total, size)
            )
            for (asked, body), answer in self._rpc.stream(pieces, window=window):
                have = _expect(asked, answer, p.WriteStatus).num_bytes
                if have < getattr(asked, "offset", 0) + len(body):
                    break  # the service takes nothing behind a gap: one was overtaken, or it has lost some
            if have <= began_at and window == 1:
                raise TransferFailed(
                    f"the weight service at {self.address} has {have} of {total} bytes of {file} of version "
                    f"{version} and takes no more"
                )
            window = 1

    def part_done(self, document: bytes) -> None:
        """Finish a part whose files are uploaded.

        Raises:
            WholeFilesNeeded: the deltas do not serve.
            WeightsCorrupt: a file came damaged and has to be sent again.
        """
        self._ask(p.PartDone(), Done, document)

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        document = self._document(p.PartRequest(version.key, rank))
        return decode(document, Part, f"part {rank} of version {version} from {self.address}") if document else None

    def wants_deltas(self) -> bool:
        return True

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Upload the files of a part, then its document. The service makes whole files of deltas.

        What was uploaded before a failure is not sent again.

        Raises:
            OSError: the service's disk has no space, or is not writable (`errno` says which).
            TransferFailed: the service does not answer, or has found a file changed: try again.
            PublishFailed: the version is older than the newest.
        """
        document = encode(part)
        version = PolicyVersion.parse(part.version)
        wholes = {entry.file for entry in part.tensors}
        smaller = {delta_name(name) if delta_name(name) in files else name for name in wholes}
        try:
            self._upload(version, files, smaller)
            try:
                self.part_done(document)
            except p.WholeFilesNeeded as error:
                log.info("version %s is uploaded whole: %s", version, error)
                self._upload(version, files, files.keys())
                self.part_done(document)
        except (WeightsCorrupt, p.WholeFilesNeeded) as error:
            # the service has removed what it found changed
            raise TransferFailed(f"part {part.rank} of version {version} has to be uploaded again: {error}") from error

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Make a version whose parts are all written exist; as `WeightStore.commit`, and `write_part`."""
        try:
            self._ask(p.CommitRequest(keep_versions), Done, encode(manifest))
        except WeightsCorrupt as error:
            raise TransferFailed(f"version {manifest.policy} cannot be committed yet: {error}") from error

    def close(self) -> None:
        self._rpc.close(0.0)

    def _ask(self, message: Message, kind: type[Kind], body: bytes = b"") -> tuple[Kind, memoryview]:
        answer = self._rpc.ask(message, body)
        return _expect(message, answer, kind), answer.body

    def _document(self, message: p.ManifestRequest | p.PartRequest) -> memoryview:
        return self._ask(message, p.Document)[1]

    def _upload(self, version: PolicyVersion, files: Mapping[str, Buffers], names: Collection[str]) -> None:
        for name, buffers in files.items():
            if name in names:
                self.write(version, name, buffers)


def _slice(views: Sequence[memoryview], offset: int, size: int) -> bytes | memoryview:
    """Bytes of buffers that follow one another; copied only where they lie in several."""
    found: list[memoryview] = []
    for view in views:
        if offset < len(view):
            found.append(view[offset : offset + size])
            size -= len(found[-1])
        if size == 0:
            break
        offset = max(0, offset - len(view))
    return found[0] if len(found) == 1 else b"".join(found)


def _expect(message: Message, answer: Answer, kind: type[Kind]) -> Kind:
    if not isinstance(answer.reply, kind):
        raise WeightsCorrupt(f"the weight service answered {message} with {answer.reply}")
    return answer.reply


def loopback_hint(address: str) -> str:
    """What to try where a service that cannot be reached listens on loopback; '' where it does not."""
    host = address.removeprefix("tcp://").rsplit(":", 1)[0]
    if not is_loopback(host):
        return ""
    return (
        f". {host} is this machine alone: does the service run on another one, [weight_sync] host has to be an "
        "interface of that one which this machine reaches, for instance 0.0.0.0 or its private address"
    )


@dataclass(frozen=True)
class StoreAccess:
    """How a process of a run finds its weight store."""

    config: WeightSyncConfig
    folder: Path
    address: str
    """Of the weight service; '' if there is none."""
    run_id: str
    keys: ClientKeys | None = None

    @classmethod
    def of(cls, config: WeightSyncConfig, context: RunContext[Any]) -> StoreAccess:
        return cls(config, context.weights_folder, context.weights_address, context.facts.run_id, context.keys)

    def client(self, name: str, role: Role) -> WeightClient:
        return WeightClient(self.address, self.run_id, name, role=role, keys=self.keys)

    def sees_folder(self, name: str, role: Role) -> bool:
        """Return whether this process takes weights through the store's folder, else through the service.

        `transport` decides; 'auto' takes the folder if it holds the store that the service has.

        Raises:
            TransferFailed: there is no service to ask, it does not answer, or it is another run's.
        """
        if self.config.transport == "network" and not self.address:
            raise TransferFailed(f"{name}: [weight_sync] transport = 'network', but no weight service runs")
        if self.config.transport in ("folder", "network") or not self.address:
            return self.config.transport != "network"
        client = self.client(name, role)
        try:
            served = client.store()
        finally:
            client.close()
        try:
            is_same = store_id_of(self.folder) == served.store_id
        except OSError as error:
            log.warning("%s: %s cannot be read (%s); weights are taken from %s", name, self.folder, error, self.address)
            return False
        if not is_same:
            log.info("%s: %s is not before us; weights are taken from %s", name, served.folder, self.address)
        return is_same

    def open_sink(self, name: str) -> WeightStore | WeightClient:
        return WeightStore(self.folder) if self.sees_folder(name, "learner") else self.client(name, "learner")
