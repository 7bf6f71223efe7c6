"""Whatever happens to one byte of a version, an actor gets the published tensors or a refusal."""

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.manifest import WeightsCorrupt
from weight_sync.publisher import Publisher
from weight_sync.puller import Puller
from weight_sync.staleness import PolicyVersion
from weight_sync.store import MANIFEST_NAME, WeightStore

VERSION = PolicyVersion(0, 0)
TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(["part-0.safetensors", MANIFEST_NAME]),
    position=st.floats(0, 1, exclude_max=True),
    value=st.integers(0, 255),
)
def test_a_changed_byte_never_becomes_a_changed_weight(name: str, position: float, value: int):
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for file, data in _published().items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        path = folder / str(VERSION) / name
        data = bytearray(path.read_bytes())
        data[int(position * len(data))] = value
        path.write_bytes(data)
        try:
            staged = Puller(folder).fetch(VERSION)
        except WeightsCorrupt:
            return
        with staged:
            found = {entry.name: tensor for entry, tensor in WeightStore(folder).tensors(staged.manifest)}
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[key], TENSORS[key]) for key in TENSORS)


_files: dict[str, bytes] = {}


def _published() -> dict[str, bytes]:
    """The files of one published version, made once."""
    if not _files:
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name)
            publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=1)
            publisher.publish(VERSION, TENSORS)
            publisher.close()
            _files.update({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    return _files
