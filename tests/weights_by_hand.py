"""Weight versions built without torch, a weight service in a thread, and pullers that use only the network."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np

from leeway.common.rpc.server import Rejected
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.client import StoreAccess, WeightClient
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.delta import encode_delta
from leeway.weight_sync.manifest import (
    ITEM_BYTES,
    DeltaEntry,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    build_manifest,
    checksum_of,
    delta_name,
    file_name,
    header_of,
)
from leeway.weight_sync.protocol import Chunk, ReadRequest, WriteRequest
from leeway.weight_sync.puller import Puller, open_puller
from leeway.weight_sync.service import WeightService
from leeway.weight_sync.store import StagedVersion, WeightStore

RUN = "test-run"
NUM_VALUES = 20_000
Weights = dict[str, np.ndarray]
"""Float32 values by tensor name."""


def v(version: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, version)


def weights(version: int, num_tensors: int = 3, num_values: int = NUM_VALUES) -> Weights:
    """Return the weights of a version, which differ from those of the previous version in few values."""
    found = {
        f"w{i}": np.random.default_rng(i).standard_normal(num_values).astype(np.float32) for i in range(num_tensors)
    }
    for tensor in found.values():
        tensor[version % 100 :: 100] += version
    return found


def as_dtype(tensor: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of a tensor. For 'bfloat16', values are truncated, which is accurate enough for tests."""
    return tensor.tobytes() if dtype == "float32" else (tensor.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def make_part(
    rank: int,
    version: PolicyVersion,
    new: Weights,
    dtypes: tuple[str, ...] = ("float32",),
    *,
    old: Weights | None = None,
    parent: PolicyVersion | None = None,
) -> tuple[Part, dict[str, list[bytes]]]:
    """Return the manifest part and the files of a stage. With `old`, the files include deltas from `old`."""
    entries, files = [], {}
    for dtype in dtypes:
        name = file_name(rank, dtype)
        whole = [header_of([(key, dtype, tensor.shape) for key, tensor in new.items()])]
        changes: list[bytes] = []
        for key, tensor in new.items():
            data = as_dtype(tensor, dtype)
            whole.append(data)
            delta = None
            if old is not None:
                encoding, blob = encode_delta(
                    memoryview(data), memoryview(as_dtype(old[key], dtype)), ITEM_BYTES[dtype]
                )
                delta = DeltaEntry(encoding, sum(map(len, changes)), len(blob))
                changes.append(bytes(blob))
            entries.append(TensorEntry(key, dtype, tensor.shape, name, checksum_of(data), delta))
        files[name] = whole
        if old is not None:
            files[delta_name(name)] = changes
    sizes = tuple(FileEntry(name, sum(map(len, buffers))) for name, buffers in files.items())
    return Part(rank, version.key, None if parent is None else parent.key, tuple(entries), sizes), files


def publish(
    sink: WeightStore | WeightClient | Path,
    version: int,
    dtypes: tuple[str, ...] = ("float32",),
    *,
    deltas: bool = False,
    keep_versions: int = 3,
    incarnation: int = 0,
    **size: int,
) -> Manifest:
    """Publish a version of a single stage. With `deltas`, also publish its deltas from the previous version."""
    sink = WeightStore(sink) if isinstance(sink, Path) else sink
    parent = sink.newest_manifest()
    old = weights(version - 1, **size) if deltas else None
    part, files = make_part(
        0,
        v(version, incarnation),
        weights(version, **size),
        dtypes,
        old=old,
        parent=parent.policy if parent is not None and deltas else None,
    )
    sink.write_part(part, files)
    manifest = build_manifest(v(version, incarnation), [part], parent, 0.0)
    sink.commit(manifest, keep_versions)
    return manifest


def assert_holds(staged: StagedVersion, version: int, dtype: str = "float32", **size: int) -> None:
    """Assert that the staged weights equal `weights(version)` bit for bit."""
    expected = {name: as_dtype(tensor, dtype) for name, tensor in weights(version, **size).items()}
    found = {entry.name: bytes(data) for entry, data in WeightStore(staged.folder).tensors(staged.manifest, dtype)}
    assert found == expected


class CountingService(WeightService):
    """A weight service that counts received messages by type, and sent bytes by version and file."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.requests: Counter[str] = Counter()
        self.sent: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def _take(self, arrival) -> None:
        if isinstance(arrival, Rejected):
            self.requests.update(["Damaged"] if arrival.unreadable else [])
        # an empty WriteRequest queries the progress
        elif type(arrival.message) is not WriteRequest or len(arrival.body):
            self.requests[type(arrival.message).__name__] += 1
        super()._take(arrival)

    def _answer(self, request):
        answer = super()._answer(request)
        if isinstance(read := request.message, ReadRequest) and isinstance(answer[0], Chunk):
            self.sent[read.version][read.file] += len(answer[1])
        return answer


class Machine:
    """A weight service in a thread, and clients that cannot read its folder. Close this object after the test."""

    def __init__(self, tmp_path: Path, *, host: str | None = None, **knobs: object) -> None:
        self.host = host
        self.folder = tmp_path / "weights"
        self.staging_dir = tmp_path / "staging"
        self.staging_dir.mkdir()
        self.config = WeightSyncConfig.model_validate({"transport": "network", **knobs})
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(mock.patch("leeway.weight_sync.host_folder._SHM", self.staging_dir))
        self._stack.enter_context(
            mock.patch("leeway.weight_sync.client.CHUNK_BYTES", 2**14)
        )  # small chunks, so that a transfer has several
        # the timeout is long, because resends on a busy machine would count requests twice
        self._stack.enter_context(mock.patch.dict(WeightClient.__init__.__kwdefaults__, resend_s=20.0))
        self._stop = threading.Event()
        self.start()

    def start(self, **options: object) -> None:
        """Start the service. A restarted service has the same address."""
        self.service = CountingService(RUN, self.folder, host=self.host, **options)
        self.address = self.service.bind()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.service.serve, args=(self._stop,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the service."""
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def client(self, name: str = "client", **options: object) -> WeightClient:
        options = {"role": "learner", "timeout_s": 20.0, "chunk_bytes": 2**14, **options}
        client = WeightClient(self.address, RUN, name, **options)
        self._stack.callback(client.close)
        return client

    def puller(self, name: str = "actor-0", dtype: str = "float32", config: WeightSyncConfig | None = None) -> Puller:
        access = StoreAccess(config or self.config, Path("/does/not/exist"), self.address, RUN)
        puller = open_puller(access, name, dtype)
        self._stack.callback(puller.close)
        return puller

    def keep(self, closing: object) -> None:
        """Close this object when the machine closes."""
        self._stack.callback(closing.close)

    def read_bytes(self) -> Mapping[str, Mapping[str, int]]:
        return self.service.sent

    def close(self) -> None:
        self._stack.close()
        self.end()


def upload_sink(machine: Machine, name: str = "stage-0") -> WeightClient:
    sink = StoreAccess(machine.config, machine.folder, machine.address, RUN).open_sink(name)
    assert isinstance(sink, WeightClient)
    machine.keep(sink)
    return sink


def damage(path: Path, position: int = -1) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
