"""Files that are there whole or not at all, whenever the machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(temporary: Path, path: Path) -> None:
    """Sync a temporary file or folder and give it its name, durably.

    Args:
        temporary: beside `path`, completely written; of a folder only its list of names is synced.
        path: the name; a file of that name is replaced at once.
    """
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    replace_durably(temporary, path)
