"""WeightClient: blocking client of the weight service, for downloads and uploads. Every wait is bounded."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from leeway.common.rpc.auth import ClientKeys, is_loopback
from leeway.common.rpc.client import Answer, Ask, RpcClient, RpcErrors, Timeouts
from leeway.common.rpc.messages import ClientIdentity, Done, Message, Role
from leeway.common.run import RunContext
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync import protocol as p
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.manifest import Manifest, Part, TransferFailed, WeightsCorrupt, decode, delta_name, encode
from leeway.weight_sync.store import Buffers, WeightStore, read_manifest, store_id_of

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
"""Size of a chunk of weights: it takes milliseconds on a slow network, and is cheap to resend."""
UPDATE_TIMEOUT_S = 600.0
"""Timeout for an actor to read a version, and for its engine to apply it; the error names the actor. A model of 140 GB
takes 6 minutes at 400 MB/s."""
PUBLISH_TIMEOUT_S = 1800.0
"""Seconds for which a failed write of weights, for example on a full disk, is retried before the learner fails.
During the retries, training continues as far as the staleness bound allows."""
_WINDOW = 4
"""Maximum number of chunks in flight: enough to hide the latency, few enough to resend little after a failure."""
_RESEND_S = 2.0
_HEARTBEAT_S = 20.0
"""Heartbeat timeout of a connection; long, because a heartbeat queues behind chunks."""

Kind = TypeVar("Kind", bound=Message)


class WeightClient:
    """Client of a run's weight service. Thread-safe. Learner stages write to the client as to a `WeightStore`."""

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
        resend_s: float = _RESEND_S,
        keys: ClientKeys | None = None,
    ) -> None:
        """Connect to the service; `name` appears in logs and errors, `role` decides which requests are allowed.

        A request is resent after `resend_s` and fails after `timeout_s`, which leaves time to restart the service. Up
        to `window` chunks of `chunk_bytes` (default: `CHUNK_BYTES`) are in flight.
        """
        self.address = self.place = address
        self.name = name
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._window = window
        self._rpc = RpcClient(
            p.PROTOCOL,
            address,
            run_id,
            identity=ClientIdentity(name, role, secrets.token_hex(16)),
            timeouts=Timeouts(resend_s=min(resend_s, timeout_s), request_s=timeout_s, heartbeat_s=_HEARTBEAT_S),
            errors=RpcErrors(p.error_of, lambda text: TransferFailed(text + loopback_hint(address))),
            keys=keys,
        )

    def store(self) -> p.StoreFacts:
        """Return the identity of the store; raise TransferFailed on a timeout, or if the run or release differs."""
        return self._ask(p.StoreRequest(self.name), p.StoreFacts)[0]

    def newest(self) -> PolicyVersion | None:
        text = self._ask(p.NewestRequest(), p.Newest)[0].version
        return p.version_of(text) if text else None

    def manifest(self, version: PolicyVersion) -> tuple[Manifest, bytes]:
        """Return the verified manifest of a version, and its bytes. The service protects the version from removal.

        Raises:
            WeightsGone: the version does not exist or was removed.
            WeightsCorrupt: the manifest is of another version or was changed.
            TransferFailed: the service did not reply in time.
        """
        document = bytes(self._document(p.ManifestRequest(version.key)))
        return read_manifest(document, version, f"the manifest from {self.address}"), document

    def newest_manifest(self) -> Manifest | None:
        document = self._document(p.ManifestRequest(""))
        return decode(document, Manifest, f"the newest manifest from {self.address}") if document else None

    def read(
        self, version: PolicyVersion, file: str, total_bytes: int, start: int, write: Callable[[memoryview], None]
    ) -> None:
        """Fetch a file of `total_bytes` from `start` to its end; call `write` with each verified chunk, in order.

        Raises:
            WeightsGone: the version was removed during the download.
            WeightsCorrupt: the service's file differs from the manifest, or a chunk was damaged repeatedly.
            TransferFailed: the service did not reply in time.
        """
        asks = (
            Ask(p.ReadRequest(version.key, file, offset, min(self._chunk_bytes, total_bytes - offset)))
            for offset in range(start, total_bytes, self._chunk_bytes)
        )
        for (asked, _), answer in self._rpc.stream(asks, window=self._window):
            chunk = _expect(asked, answer, p.Chunk)
            if chunk.total_bytes != total_bytes or len(answer.body) != getattr(asked, "size", None):
                raise WeightsCorrupt(
                    f"{self.address}: the reply to {asked} has {len(answer.body)} bytes of a file of "
                    f"{chunk.total_bytes}, but the manifest says {total_bytes}"
                )
            write(answer.body)

    def write(self, version: PolicyVersion, file: str, buffers: Buffers) -> None:
        """Upload a file, resuming an earlier upload; raise the errors of `write_part`."""
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
                    break  # the service rejects bytes behind a gap: chunks were reordered, or the service lost some
            if have <= began_at and window == 1:
                raise TransferFailed(
                    f"the weight service at {self.address} stored only {have} of {total} bytes of {file} "
                    f"(version {version}) and accepts no more"
                )
            window = 1

    def part_done(self, document: bytes) -> None:
        """Finish a part whose files are uploaded.

        Raises:
            WholeFilesNeeded: the deltas cannot be applied.
            WeightsCorrupt: a file arrived damaged; upload it again.
        """
        self._ask(p.PartDone(), Done, document)

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        document = self._document(p.PartRequest(version.key, rank))
        return decode(document, Part, f"part {rank} of version {version} from {self.address}") if document else None

    def wants_deltas(self) -> bool:
        return True

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Upload the files of a part, then its document. The service rebuilds whole files from deltas.

        A retry does not resend bytes that were uploaded before a failure.

        Raises:
            OSError: the service's disk is full or not writable (see `errno`).
            TransferFailed: no reply in time, or the service received a changed file; retry.
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
                log.info("uploading whole files, not deltas, of version %s: %s", version, error)
                self._upload(version, files, files.keys())
                self.part_done(document)
        except (WeightsCorrupt, p.WholeFilesNeeded) as error:
            # a retry can succeed: the service has removed the changed file, so it is uploaded again
            raise TransferFailed(f"part {part.rank} of version {version} must be uploaded again: {error}") from error

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Commit a version whose parts are all written; raise the errors of `WeightStore.commit` and `write_part`."""
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
    """Return a slice of concatenated buffers; copies only if it spans several of them."""
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
        raise WeightsCorrupt(f"the weight service replied to {message} with {answer.reply}")
    return answer.reply


def loopback_hint(address: str) -> str:
    """Return advice about an unreachable service that listens on loopback; '' for other addresses."""
    host = address.removeprefix("tcp://").rsplit(":", 1)[0]
    if not is_loopback(host):
        return ""
    return (
        f". {host} is only reachable on this machine: if the service runs on another machine, set launch.host to "
        "0.0.0.0 or to an address of that machine that is reachable from here, such as its private address"
    )


@dataclass(frozen=True)
class StoreAccess:
    """Access of a process to the weight store of its run, through the folder or the service."""

    config: WeightSyncConfig
    folder: Path
    address: str
    """Address of the weight service; '' if there is none."""
    run_id: str
    keys: ClientKeys | None = None

    @classmethod
    def of(cls, config: WeightSyncConfig, context: RunContext[Any]) -> StoreAccess:
        return cls(config, context.weights_folder, context.weights_address, context.facts.run_id, context.keys)

    def client(self, name: str, role: Role) -> WeightClient:
        return WeightClient(self.address, self.run_id, name, role=role, keys=self.keys)

    def uses_folder(self, name: str, role: Role) -> bool:
        """Return whether this process accesses the store through its folder, not through the service.

        `transport` decides; 'auto' uses the folder if it holds the store of the service.

        Raises:
            TransferFailed: no service runs, the request timed out, or the service belongs to another run.
        """
        if self.config.transport == "network" and not self.address:
            raise TransferFailed(f"{name}: [weight_sync] transport = 'network', but no weight service runs")
        if self.config.transport in ("folder", "network") or not self.address:
            return self.config.transport != "network"
        with contextlib.closing(self.client(name, role)) as client:
            served = client.store()
        try:
            is_same = store_id_of(self.folder) == served.store_id
        except OSError as error:
            log.warning("%s: cannot read %s (%s); reading weights from %s", name, self.folder, error, self.address)
            return False
        if not is_same:
            log.info("%s: %s is not mounted here; reading weights from %s", name, served.folder, self.address)
        return is_same

    def open_sink(self, name: str) -> WeightStore | WeightClient:
        return WeightStore(self.folder) if self.uses_folder(name, "learner") else self.client(name, "learner")
