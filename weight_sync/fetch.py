"""Fetching the files of one version into a folder, whole or as changes of the parent's.

What came is not fetched twice: a fetch goes on where an earlier one, also of another process, ended. A file gets its
name once every tensor in it has passed its checksum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from weight_sync.client import WeightClient
from weight_sync.delta import rebuild_file
from weight_sync.errors import WeightsCorrupt
from weight_sync.manifest import Manifest, TensorEntry, delta_name
from weight_sync.store import checked
from weight_sync.tensor_file import TensorFile

log = logging.getLogger(__name__)

GetOn = Callable[[], None]
"""Called at every piece and every tensor: tells those that wait that this process gets on, or raises TransferFailed
where another one has taken over."""


def fetch_whole(client: WeightClient, manifest: Manifest, dtype: str, folder: Path, get_on: GetOn) -> None:
    """Fetch the files that are not in the folder yet. A file that fails its checksums is fetched once more.

    Args:
        client: of the weight service.
        manifest: of the version.
        dtype: of the variant.
        folder: of the version, on this machine.
        get_on: see `GetOn`.

    Raises:
        WeightsCorrupt: it failed again; nothing of it stays.
        WeightsGone, TransferFailed: what came stays.
        OSError: the disk is full.
    """
    for name, entries in manifest.files_of(dtype).items():
        get_on()
        if _is_whole(folder / name, entries, get_on):
            continue
        try:
            _fetch_checked(client, manifest, name, entries, folder, get_on)
        except WeightsCorrupt as error:
            log.warning("fetching %s of version %s once more: %s", name, manifest.policy, error)
            _fetch_checked(client, manifest, name, entries, folder, get_on)


def fetch_changes(
    client: WeightClient, manifest: Manifest, dtype: str, folder: Path, parent_folder: Path, get_on: GetOn
) -> None:
    """Fetch the deltas, and make whole files of them and the parent's.

    Args:
        client: as for `fetch_whole`, like all but the next.
        manifest: of the version.
        dtype: of the variant.
        folder: of the version.
        parent_folder: of its parent, on this machine.
        get_on: see `GetOn`.

    Raises:
        WeightsCorrupt: a delta does not lead from the parent's file to what was published; nothing of it stays.
        WeightsGone, TransferFailed: what came stays.
        OSError: the disk is full.
    """
    for name, entries in manifest.files_of(dtype).items():
        get_on()
        if _is_whole(folder / name, entries, get_on):
            continue
        delta = _fetch(client, manifest, delta_name(name), folder, get_on)
        get_on()
        try:
            rebuild_file(entries, delta, parent_folder / name, folder / name, get_on)
        except WeightsCorrupt:
            get_on()
            delta.unlink(missing_ok=True)
            raise
        get_on()
        delta.unlink(missing_ok=True)


def forget_partial(folder: Path) -> None:
    """Remove what came of files that will not be fetched any further."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def _fetch_checked(
    client: WeightClient,
    manifest: Manifest,
    name: str,
    entries: list[TensorEntry],
    folder: Path,
    get_on: GetOn,
) -> None:
    partial = _fetch(client, manifest, name, folder, get_on)
    try:
        _check(partial, entries, get_on)
    except WeightsCorrupt:
        get_on()
        partial.unlink(missing_ok=True)
        raise
    get_on()
    partial.replace(folder / name)


def _check(path: Path, entries: list[TensorEntry], get_on: GetOn) -> None:
    with TensorFile(path) as file:
        for entry in entries:
            get_on()
            checked(file, entry)


def _is_whole(path: Path, entries: list[TensorEntry], get_on: GetOn) -> bool:
    """Is the file there, and as published? One that is not is removed: its name alone proves nothing."""
    if not path.exists():
        return False
    try:
        _check(path, entries, get_on)
    except WeightsCorrupt as error:
        log.warning("%s. It is removed and fetched again", error)
        path.unlink(missing_ok=True)
        return False
    return True


def _fetch(client: WeightClient, manifest: Manifest, name: str, folder: Path, get_on: GetOn) -> Path:
    """Have all bytes of a file in the folder, unchecked, under a name that no reader looks for."""
    partial = folder / f".{name}.partial"
    total = manifest.size_of(name)
    with partial.open("ab", buffering=0) as file:
        if file.tell() > total:
            file.truncate(0)

        def append(data: memoryview) -> None:
            get_on()
            while len(data):
                data = data[file.write(data) :]

        start = file.seek(0, 2)
        if start:
            log.info("going on with %s of version %s behind %d of %d bytes", name, manifest.policy, start, total)
        client.read(manifest.policy, name, total, start, append)
    return partial
