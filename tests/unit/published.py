"""Small weight versions on disk, for the tests of weight_sync."""

from pathlib import Path

import torch

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import WeightStore
from leeway.weight_sync.tensors import read_tensors

DTYPE = "float32"
PART = "part-0.float32.safetensors"


def v(version: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, version)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return three tensors of odd sizes. The tensor `scale` has a single value."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 3, generator=generator),
        "norm": torch.randn(3, generator=generator),
        "scale": torch.tensor(float(seed)),
    }


def publisher_of(folder: Path, rank: int = 0, num_stages: int = 1, dtypes=(DTYPE,), **arguments) -> Publisher:
    return Publisher(
        WeightStore(folder), rank, num_stages, dtypes, **{"keep_versions": 3, "full_every": 1, **arguments}
    )


def publish(folder: Path, *versions: PolicyVersion, **arguments) -> None:
    """Publish the given versions; the tensors of version N are `weights(N)`."""
    publisher = publisher_of(folder, **arguments)
    for version in versions:
        publisher.publish(version, weights(version.version))
    publisher.close()


def read(folder: Path, version: PolicyVersion, dtype: str = DTYPE) -> dict[str, torch.Tensor]:
    """Return the tensors of a version after verifying each checksum."""
    store = WeightStore(folder)
    return read_tensors(store, store.manifest(version), dtype)


def pull(folder: Path, version: PolicyVersion, dtype: str = DTYPE) -> dict[str, torch.Tensor]:
    """Return the tensors that an engine on this machine reads from a verified and locked version."""
    with Puller.of_folder(folder, dtype).fetch(version) as staged:
        return read(staged.folder, version, dtype)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of tensors have equal names, dtypes and values."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)
