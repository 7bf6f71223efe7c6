"""Remove from a CUDA library the device code that a Hopper card does not run: `python -m benchmarks.gpu.prune FILE`.

A CUDA library has one container of images ("fatbin") per source file, with one image per architecture. The images of
sm_90 and sm_90a are kept. A container without these images is emptied, although the driver could compile its PTX at
first use; its kernels then fail with "no kernel image". An empty container is invalid, so it gets the smallest image of
the file. All offsets stay the same: removed bytes become zeros, which compress to almost nothing.

`--drop` also empties containers in which the mangled name of every kernel matches one of the patterns.
"""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
"""First four bytes of a container."""
CUBIN = 2
"""Kind number of an image with machine code; images with PTX have kind 1."""
ARCH = 90
FATBIN = ".nv_fatbin"
MIB = 2**20


class Image(NamedTuple):
    """Device code of one architecture."""

    kind: int
    arch: int
    content: bytes


class Container(NamedTuple):
    """Images of one source file."""

    offset: int
    head_bytes: int
    images: list[Image]


class Pruned(NamedTuple):
    """Result of pruning: number of containers, and kept and removed bytes of device code."""

    num_containers: int
    kept_bytes: int
    removed_bytes: int


def find_section(data: bytes | bytearray, section: str) -> tuple[int, int]:
    """Return offset and size of a section of a 64-bit ELF file, or (0, 0) if the file has no such section."""
    (table,) = struct.unpack_from("<Q", data, 40)
    width, count, names = struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQ", data, table + i * width) for i in range(count)]
    for name, _, _, _, offset, size in heads:
        start = heads[names][4] + name
        if data[start : data.index(b"\0", start)].decode() == section:
            return offset, size
    return 0, 0


def containers(data: bytes | bytearray) -> Iterator[Container]:
    """Yield the containers of a library in file order."""
    offset, size = find_section(data, FATBIN)
    end, here = offset + size, offset
    while here + 16 <= end:
        magic, _, head, body = struct.unpack_from("<IHHQ", data, here)
        if magic != MAGIC:
            here += 8
            continue
        images, at, stop = [], here + head, here + head + body
        while at < stop:
            kind, _, image_head, image_size = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            images.append(Image(kind, arch, bytes(data[at : at + image_head + image_size])))
            at += image_head + image_size
        yield Container(here, head, images)
        here = stop + -stop % 8


def prune(data: bytearray, drop: re.Pattern[bytes] | None = None) -> Pruned:
    """Remove in place all images except those of sm_90, and containers in which every kernel matches `drop`."""
    found = list(containers(data))
    smallest = min((image.content for each in found for image in each.images), key=len, default=b"")
    kept_bytes = removed_bytes = 0
    for container in found:
        chosen = [image.content for image in container.images if (image.kind, image.arch) == (CUBIN, ARCH)]
        kernels = set(re.findall(rb"\.text\.(\w+)", b"".join(chosen)))
        if drop is not None and kernels and all(drop.search(kernel) for kernel in kernels):
            chosen = []
        body_bytes = sum(len(image.content) for image in container.images)
        content = b"".join(chosen) or smallest
        start = container.offset + container.head_bytes
        struct.pack_into("<Q", data, container.offset + 8, len(content))
        data[start : start + body_bytes] = content + bytes(body_bytes - len(content))
        kept_bytes += len(content)
        removed_bytes += body_bytes - len(content)
    return Pruned(len(found), kept_bytes, removed_bytes)


def main() -> None:
    """Prune a library in place, and print the kept and removed sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--drop", nargs="*", default=[], metavar="REGEX")
    parsed = parser.parse_args()
    data = bytearray(parsed.file.read_bytes())
    pruned = prune(data, re.compile("|".join(parsed.drop).encode()) if parsed.drop else None)
    parsed.file.write_bytes(data)
    sizes = f"{pruned.kept_bytes / MIB:.1f} MiB kept, {pruned.removed_bytes / MIB:.1f} MiB removed"
    print(f"{parsed.file.name}: {pruned.num_containers} containers, {sizes}")


if __name__ == "__main__":
    main()
