"""Structure check of an LMDB file without LMDB: its meta pages, its trees, and the use of every page.

LMDB does not validate its file. A zeroed page crashes the process, and a flipped bit in a transaction number silently
restores the previous state. If a bit in the length of a long value is flipped, deleting this value frees pages of other
values. So the file is checked once before LMDB maps it. Values have separate checksums (`Table`).

Every page is in use exactly once: as a branch or leaf of a tree, as part of a long value, or on the free list.
Layout: LMDB 0.9, little-endian, data version 1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leeway.buffer.errors import StoreError

_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIGDATA, _SUBDATA = 1, 2
_HEADER = 16
_NODE = 8
_NONE = 2**64 - 1
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_FREE_FLAGS, _PLAIN_FLAGS = 8, 0
_META_FORMAT = struct.Struct("<IIQQ48s48sQQ")
_PAGE_FORMAT = struct.Struct("<QHHHH")
_TREE_FORMAT = struct.Struct("<IHHQQQQQ")

Pages = npt.NDArray[np.int64]


class _Tree(NamedTuple):
    page_size: int
    flags: int
    depth: int
    num_branches: int
    num_leaves: int
    num_overflow: int
    num_entries: int
    root: int


class _Meta(NamedTuple):
    transaction: int
    free: _Tree
    main: _Tree
    num_pages: int


class _Nodes(NamedTuple):
    """Nodes of many pages of one level, in order: one row per node."""

    at: Pages
    """Byte offset of each node in the file."""
    low: Pages
    """First 32 bits of each node: the length of its value, or the low part of its child's page number."""
    flags: Pages
    key_size: Pages


def check(data: Path, *, deep: bool = False) -> int:
    """Check the file and return its number of pages. No process may write to the file during the check.

    `deep` also follows long values and checks that every page is used or free. Without `deep`, only branches, leaves
    and the free list are read, which is fast enough for every start of the service.

    Raises:
        StoreError: the file is truncated or damaged; the message names the page.
    """
    return _Walk(data, deep).check()


class _Walk:
    def __init__(self, data: Path, deep: bool) -> None:
        self._data = data
        self._deep = deep

    def check(self) -> int:
        older, newest = self._metas()
        # LMDB never writes pages that the same transaction allocates and frees, so the file may lack the last pages.
        num_pages = newest.num_pages
        self._num_written = min(num_pages, self._data.stat().st_size // self._page_size)
        self._words: npt.NDArray[np.uint16] = np.memmap(
            self._data, np.uint16, "r", shape=(self._num_written * self._page_size // 2,)
        )
        for meta in (older, newest):
            self._uses = np.zeros(num_pages, np.uint8)
            self._check_number(meta)
        self._uses = np.zeros(num_pages, np.uint8)
        self._uses[:2] = 1
        freed = list(self._walk(newest.free, "free list", _FREE_FLAGS))
        for at, size in self._walk(newest.main, "list of tables", _PLAIN_FLAGS, subtrees=True):
            if size != _TREE_FORMAT.size:
                raise self._damaged(f"has a table entry of {size} bytes")
            tree = _Tree._make(_TREE_FORMAT.unpack(self._bytes(at, size)))
            for _ in self._walk(tree, f"table at byte {at}", _PLAIN_FLAGS):
                pass
        self._account(freed)
        return num_pages

    def _metas(self) -> tuple[_Meta, _Meta]:
        """Return the two meta pages, the newest last; raise StoreError if their transactions are not consecutive."""
        with self._data.open("rb") as file:
            first = file.read(_HEADER + _META_FORMAT.size)
            if len(first) < _HEADER + _META_FORMAT.size:
                raise self._damaged(f"is truncated: it has {len(first)} bytes")
            self._page_size = struct.unpack_from("<I", first, _HEADER + 24)[0]
            if self._page_size not in {2**power for power in range(9, 17)}:
                raise self._damaged(f"has an invalid page size of {self._page_size} in its first page")
            file.seek(self._page_size)
            second = file.read(len(first))
        metas = []
        for number, page in enumerate((first, second)):
            if len(page) < len(first):
                raise self._damaged("is truncated: it ends within its second page")
            _, _, flags, _, _ = _PAGE_FORMAT.unpack_from(page)
            magic, version, _, map_size, free, main, last_page, transaction = _META_FORMAT.unpack_from(page, _HEADER)
            if flags != _META or magic != _MAGIC or version != _VERSION:
                raise self._damaged(f"has an invalid meta page {number}")
            if not 1 <= last_page < map_size // self._page_size:
                raise self._damaged(f"claims to have {last_page + 1} pages in a map of {map_size} bytes")
            trees = [_Tree._make(_TREE_FORMAT.unpack(tree)) for tree in (free, main)]
            metas.append(_Meta(transaction, trees[0], trees[1], last_page + 1))
        even, odd = metas[0].transaction, metas[1].transaction
        if (even, odd) != (0, 0) and (even % 2 or not odd % 2 or abs(even - odd) != 1):
            raise self._damaged(f"has meta pages of transactions {even} and {odd}, which are not consecutive")
        older, newest = sorted(metas)
        return older, newest

    def _check_number(self, meta: _Meta) -> None:
        """Check that the last key of the free list, which lists the newest freed pages, is the transaction's number."""
        tree, name = meta.free, "free list"
        if tree.root == _NONE:
            if meta.transaction > 1:
                raise self._damaged(f"has a transaction {meta.transaction} without freed pages")
            return
        pages = self._page(tree.root)
        for _ in range(tree.depth - 1):
            nodes = self._nodes(pages, _BRANCH, name)
            pages = (nodes.low | nodes.flags << 32)[-1:]
        nodes = self._nodes(pages, _LEAF, name)
        number = int(self._unaligned(nodes.at[-1:] + _NODE)[0])
        if number != meta.transaction:
            raise self._damaged(f"has a meta page of transaction {meta.transaction} with the free list of {number}")

    @staticmethod
    def _page(number: int) -> Pages:
        """Return a page number as an array; a number too large for int64 becomes a page beyond any file."""
        return np.array([min(number, 2**62)], np.int64)

    def _walk(self, tree: _Tree, name: str, flags: int, *, subtrees: bool = False) -> Iterator[tuple[int, int]]:
        """Check one tree level by level; yield offset and size of the values that are trees or free lists."""
        if tree.flags != flags:
            raise self._damaged(f"has a {name} with flags {tree.flags}")
        if tree.root == _NONE:
            if any(tree[2:7]):
                raise self._damaged(f"has a {name} that claims {tree.num_entries} entries but has no root")
            return
        pages = self._page(tree.root)
        num_branches = 0
        for _ in range(tree.depth - 1):
            num_branches += len(pages)
            nodes = self._nodes(pages, _BRANCH, name)
            pages = nodes.low | nodes.flags << 32
        nodes = self._nodes(pages, _LEAF, name)
        firsts, needs = self._long_pages(nodes, name)
        num_overflow = tree.num_overflow
        if self._deep or flags == _FREE_FLAGS:
            num_overflow = self._long_values(firsts, needs, name)
        found = [num_branches, len(pages), num_overflow, len(nodes.at)]
        if found != list(tree[3:7]):
            claimed = list(tree[3:7])
            raise self._damaged(f"has a {name} of [branches, leaves, long pages, entries] = {found}, not {claimed}")
        if subtrees or flags == _FREE_FLAGS:
            yield from self._values(nodes)

    def _nodes(self, pages: Pages, kind: int, name: str) -> _Nodes:
        """Validate the headers of these pages and return their nodes."""
        self._use(pages, name)
        start = pages * (self._page_size // 2)
        number = self._wide(start)
        low, high = self._word(start + 6), self._word(start + 7)
        wrong = (number != pages) | (self._word(start + 5) != kind) | (low % 2 != 0) | (low <= _HEADER)
        wrong |= (low > high) | (high > self._page_size)
        self._refuse(pages, wrong, f"is not a {'branch' if kind == _BRANCH else 'leaf'} of a {name}")
        counts = (low - _HEADER) // 2
        owner = np.repeat(np.arange(len(pages)), counts)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = self._word(start[owner] + _HEADER // 2 + index)
        wrong = (offset % 2 != 0) | (offset < high[owner]) | (offset > self._page_size - _NODE)
        self._refuse(pages[owner], wrong, f"has an entry outside of the page, in a {name}")
        at = start[owner] + offset // 2
        nodes = _Nodes(at * 2, self._double(at), self._word(at + 2), self._word(at + 3))
        inside = np.where(nodes.flags & _BIGDATA != 0, 8, nodes.low) if kind == _LEAF else 0
        wrong = offset + _NODE + nodes.key_size + inside > self._page_size
        if kind == _LEAF:
            wrong |= nodes.flags & ~(_BIGDATA | _SUBDATA) != 0
        self._refuse(pages[owner], wrong, f"has an entry that extends beyond the page, in a {name}")
        return nodes

    def _long_pages(self, nodes: _Nodes, name: str) -> tuple[Pages, Pages]:
        """Return first page and page count of each long value of these leaves; check that the file has these pages."""
        big = np.flatnonzero(nodes.flags & _BIGDATA)
        firsts = self._unaligned(nodes.at[big] + _NODE + nodes.key_size[big])
        needs = (nodes.low[big] + _HEADER - 1) // self._page_size + 1
        self._refuse(firsts, (firsts < 2) | (firsts >= len(self._uses)), f"cannot be part of a {name}")
        self._within_file(firsts + needs - 1, name)
        return firsts, needs

    def _long_values(self, firsts: Pages, needs: Pages, name: str) -> int:
        """Check the first page of each long value and mark its pages as used; return the number of pages."""
        self._use(firsts, name)
        start = firsts * (self._page_size // 2)
        counts = self._double(start + 6)
        # A long value that is overwritten by a shorter one keeps its pages.
        wrong = (counts < needs) | (counts > self._num_written - firsts)
        wrong |= (self._wide(start) != firsts) | (self._word(start + 5) != _OVERFLOW)
        self._refuse(firsts, wrong, f"is not the first page of a long value of a {name}")
        rest = counts - 1
        total = int(rest.sum())
        self._use(np.repeat(firsts + 1, rest) + np.arange(total) - np.repeat(np.cumsum(rest) - rest, rest), name)
        return total + len(firsts)

    def _values(self, nodes: _Nodes) -> Iterator[tuple[int, int]]:
        for at, size, flags, key_size in zip(*(part.tolist() for part in nodes), strict=True):
            value = at + _NODE + key_size
            if flags & _BIGDATA:
                value = int(self._unaligned(np.array([value]))[0]) * self._page_size + _HEADER
            yield value, size

    def _account(self, freed: list[tuple[int, int]]) -> None:
        """Check that every page is either in use or free."""
        for at, size in freed:
            pages = np.frombuffer(self._bytes(at, size), np.int64)
            if not len(pages) or len(pages) <= pages[0] or pages[0] < 0:
                raise self._damaged(f"has an invalid free list at byte {at}")
            listed = pages[1 : pages[0] + 1]
            self._use(listed, "free list", written=False)
        if self._deep and (lost := int((self._uses == 0).sum())):
            first = int(np.flatnonzero(self._uses == 0)[0])
            raise self._damaged(f"has {lost} pages that are neither in use nor free, the first is page {first}")

    def _use(self, pages: Pages, name: str, *, written: bool = True) -> None:
        if written:
            self._within_file(pages, name)
        self._refuse(pages, (pages < 2) | (pages >= len(self._uses)), f"cannot be part of a {name}")
        np.add.at(self._uses, pages, 1)
        self._refuse(pages, self._uses[pages] > 1, f"is used twice, once by a {name}")

    def _within_file(self, pages: Pages, name: str) -> None:
        if (pages >= self._num_written).any():
            page = int(pages.max())
            raise self._damaged(f"is truncated or damaged: page {page} of a {name} is missing")

    def _word(self, at: Pages) -> Pages:
        return self._words[at].astype(np.int64)

    def _double(self, at: Pages) -> Pages:
        return self._word(at) | self._word(at + 1) << 16

    def _wide(self, at: Pages) -> Pages:
        return self._double(at) | self._double(at + 2) << 32

    def _unaligned(self, at_bytes: Pages) -> Pages:
        octets = self._words.view(np.uint8)
        parts = (octets[at_bytes + i].astype(np.int64) << 8 * i for i in range(8))
        return sum(parts, np.zeros(len(at_bytes), np.int64))

    def _bytes(self, at: int, size: int) -> bytes:
        return self._words.view(np.uint8)[at : at + size].tobytes()

    def _refuse(self, pages: Pages, wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            raise self._damaged(f"is damaged: page {int(pages[np.flatnonzero(wrong)[0]])} {what}")

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._data} {what}. Restore the file from a copy, or start a new run folder")
