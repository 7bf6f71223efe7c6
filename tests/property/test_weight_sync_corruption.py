"""If a byte of a version is damaged, an actor gets the published tensors or an error."""

import functools
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.published import publisher_of, pull, same, v

from leeway.weight_sync.delta import rebuild_file
from leeway.weight_sync.manifest import MANIFEST_NAME, WeightsCorrupt, delta_name, file_name
from leeway.weight_sync.store import WeightStore

DTYPES = ("float32", "bfloat16")
PARENT, VERSION = v(0), v(1)
BEFORE = {"a": torch.linspace(-1, 1, 3000).reshape(20, 150), "b": torch.ones(3), "c": torch.full((40,), 0.5)}
TENSORS = BEFORE | {"a": BEFORE["a"] * 1.0001, "b": torch.tensor([1.0, 2.0, 3.0])}


@functools.cache
def published() -> dict[str, bytes]:
    """Return the files of two published versions, the second also as deltas from the first."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        WeightStore(folder).note_remote_reader()
        publisher = publisher_of(folder, dtypes=DTYPES, full_every=2)
        publisher.publish(PARENT, BEFORE)
        publisher.publish(VERSION, TENSORS)
        publisher.close()
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def spoil(path: Path, position: float, value: int, *, cut: bool) -> None:
    data = bytearray(path.read_bytes())
    at = int(position * len(data))
    if cut:
        del data[at:]
    else:
        data[at] = value
    path.write_bytes(data)


@settings(max_examples=300)
@given(
    name=st.sampled_from([*(file_name(0, dtype) for dtype in DTYPES), MANIFEST_NAME]),
    dtype=st.sampled_from(DTYPES),
    position=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    cut=st.booleans(),
)
def test_a_changed_byte_never_becomes_a_changed_weight(
    name: str, dtype: str, position: float, value: int, *, cut: bool
):
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_files(folder, published())
        spoil(folder / VERSION.key / name, position, value, cut=cut)
        try:
            pulled = pull(folder, VERSION, dtype)
        except WeightsCorrupt:
            return
        assert same(pulled, {key: tensor.to(getattr(torch, dtype)) for key, tensor in TENSORS.items()})


@settings(max_examples=300)
@given(
    in_parent=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    position=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
    cut=st.booleans(),
)
def test_a_changed_delta_or_parent_gives_the_published_file_or_an_error(
    dtype: str, position: float, value: int, *, in_parent: bool, cut: bool
):
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_files(folder, published())
        file = file_name(0, dtype)
        entries = WeightStore(folder).manifest(VERSION).variant(dtype)
        parent, delta = folder / PARENT.key / file, folder / VERSION.key / delta_name(file)
        spoil(parent if in_parent else delta, position, value, cut=cut)
        try:
            rebuild_file(entries, delta, parent, folder / "out")
        except WeightsCorrupt as error:
            assert str(parent) in str(error)  # noqa: PT017 -- either outcome is right
            assert list(folder.glob("*out*")) == []
            return
        assert (folder / "out").read_bytes() == published()[f"{VERSION.key}/{file}"]
