"""A version in a folder that many processes of a machine map is read against its checksums once for all of them.

The first verifies and leaves a marker; it holds for this boot of this machine, and for files of this size and time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from pathlib import Path
from typing import IO

from common.files import write_whole
from weight_sync.errors import TransferFailed
from weight_sync.fetch import files_of
from weight_sync.locks import lock_within
from weight_sync.manifest import Manifest
from weight_sync.store import WeightStore

log = logging.getLogger(__name__)

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOLCK)


def verify_once(store: WeightStore, manifest: Manifest, dtype: str, *, who: str, patience_s: float) -> None:
    """Read every tensor of a variant against its checksum, unless another process of this machine has.

    Args:
        store: where the version lies; the caller holds its read lock.
        manifest: of the version.
        dtype: of the variant.
        who: a name for this process, for those that wait for it.
        patience_s: how long to wait for another process that verifies, before this one does too.

    Raises:
        WeightsCorrupt: names the file and the tensor that is not as published.
    """
    folder = store.version_folder(manifest.policy)
    marker = folder / f".verified.{_machine()}.{dtype}"
    facts = _facts(folder, manifest, dtype)
    if _is_marked(marker, facts):
        return
    with _lock(marker, who, patience_s) or contextlib.nullcontext():
        if not _is_marked(marker, facts):
            store.verify(manifest, dtype)
            _mark(marker, facts)


def _facts(folder: Path, manifest: Manifest, dtype: str) -> bytes:
    """What changes with the files, without reading them."""
    lines = [manifest.checksum]
    for name in files_of(manifest, dtype):
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            return b""  # never equal to a marker; verifying will name the file
        lines.append(f"{name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}")
    return "\n".join(lines).encode()


def _is_marked(marker: Path, facts: bytes) -> bool:
    try:
        return bool(facts) and marker.read_bytes() == facts
    except OSError:
        return False


def _mark(marker: Path, facts: bytes) -> None:
    try:
        write_whole(marker, [facts])
    except OSError as error:
        log.info("%s: that the version was verified cannot be noted: %s", marker, error)


def _lock(marker: Path, who: str, patience_s: float) -> IO[bytes] | None:
    """The lock of those that verify; None in a folder that cannot be written, and where its holder does not get on."""
    try:
        return lock_within(
            marker.with_name(f"{marker.name}.lock"), patience_s, who=who, what=f"verifying {marker.parent}"
        )
    except TransferFailed as error:
        log.warning("%s. Verifying without it, which only reads", error)
        return None
    except OSError as error:
        if error.errno in _READ_ONLY:
            return None
        raise


def _machine() -> str:
    """This boot of this machine: what a power cut spoiled is not trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
