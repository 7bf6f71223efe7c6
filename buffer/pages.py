"""Checks the structure of an LMDB file without LMDB: its meta pages, trees, and the account of its pages.

LMDB believes what it reads: a zeroed page ends the process, a flipped bit in the number of a transaction silently
brings back the state before it, and one in the length of a long value lets its removal free pages of others. So the
file is walked once before LMDB maps it. Values have checksums of their own (`Table`).

Every page is in use exactly once: a tree's branch or leaf, part of a long value, or on the free list.
Layout: LMDB 0.9, little-endian, data version 1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from buffer.errors import StoreError

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
    """The nodes of many pages of one level, in order: one row per node."""

    at: Pages
    """Where each begins, in bytes of the file."""
    low: Pages
    """The first 32 bits: length of the value, or the low part of a child's number."""
    flags: Pages
    key_size: Pages


def check(data: Path, *, deep: bool = False) -> int:
    """Walk the file, which nothing may write to meanwhile, and return its number of pages.

    `deep` follows long values too, and accounts for every page. Else only branches, leaves and the free list are read,
    which is fast enough for every start.

    Raises:
        StoreError: the file is cut off or damaged; names the page.
    """
    return _Walk(data, deep).check()


class _Walk:
    def __init__(self, data: Path, deep: bool) -> None:
        self._data = data
        self._deep = deep

    def check(self) -> int:
        older, newest = self._metas()
        # LMDB never writes pages that it took and gave back in one transaction, so those at the end may be missing.
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
                raise self._damaged(f"has a table's entry of {size} bytes")
            tree = _Tree._make(_TREE_FORMAT.unpack(self._bytes(at, size)))
            for _ in self._walk(tree, f"table at byte {at}", _PLAIN_FLAGS):
                pass
        self._account(freed)
        return num_pages

    def _metas(self) -> tuple[_Meta, _Meta]:
        """The two meta pages, the newest last; they must be of neighbouring transactions."""
        with self._data.open("rb") as file:
            first = file.read(_HEADER + _META_FORMAT.size)
            if len(first) < _HEADER + _META_FORMAT.size:
                raise self._damaged(f"is {len(first)} bytes long: it was cut off")
            self._page_size = struct.unpack_from("<I", first, _HEADER + 24)[0]
            if self._page_size not in {2**power for power in range(9, 17)}:
                raise self._damaged(f"has a first page that names a page size of {self._page_size}")
            file.seek(self._page_size)
            second = file.read(len(first))
        metas = []
        for number, page in enumerate((first, second)):
            if len(page) < len(first):
                raise self._damaged("ends within its second page: it was cut off")
            _, _, flags, _, _ = _PAGE_FORMAT.unpack_from(page)
            magic, version, _, map_size, free, main, last_page, transaction = _META_FORMAT.unpack_from(page, _HEADER)
            if flags != _META or magic != _MAGIC or version != _VERSION:
                raise self._damaged(f"has a meta page {number} that is none")
            if not 1 <= last_page < map_size // self._page_size:
                raise self._damaged(f"claims {last_page + 1} pages in a map of {map_size} bytes")
            trees = [_Tree._make(_TREE_FORMAT.unpack(tree)) for tree in (free, main)]
            metas.append(_Meta(transaction, trees[0], trees[1], last_page + 1))
        even, odd = metas[0].transaction, metas[1].transaction
        if (even, odd) != (0, 0) and (even % 2 or not odd % 2 or abs(even - odd) != 1):
            raise self._damaged(f"has meta pages of the transactions {even} and {odd}, which do not follow each other")
        older, newest = sorted(metas)
        return older, newest

    def _check_number(self, meta: _Meta) -> None:
        """Every transaction lists the pages that it freed under its own number, which is the highest of its list."""
        tree, name = meta.free, "free list"
        if tree.root == _NONE:
            if meta.transaction > 1:
                raise self._damaged(f"has a transaction {meta.transaction} that freed no page")
            return
        pages = self._page(tree.root)
        for _ in range(tree.depth - 1):
            nodes = self._nodes(pages, _BRANCH, name)
            pages = (nodes.low | nodes.flags << 32)[-1:]
        nodes = self._nodes(pages, _LEAF, name)
        number = int(self._unaligned(nodes.at[-1:] + _NODE)[0])
        if number != meta.transaction:
            raise self._damaged(f"has a meta page of transaction {meta.transaction} whose free list is of {number}")

    @staticmethod
    def _page(number: int) -> Pages:
        """One page; a number beyond all files where it does not fit."""
        return np.array([min(number, 2**62)], np.int64)

    def _walk(self, tree: _Tree, name: str, flags: int, *, subtrees: bool = False) -> Iterator[tuple[int, int]]:
        """Check one tree level by level; yields where the values that are trees or free lists lie, and their sizes."""
        if tree.flags != flags:
            raise self._damaged(f"has a {name} with flags {tree.flags}")
        if tree.root == _NONE:
            if any(tree[2:7]):
                raise self._damaged(f"has a {name} without a root that claims {tree.num_entries} entries")
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
        """The nodes of these pages, once their headers are in order."""
        self._use(pages, name)
        start = pages * (self._page_size // 2)
        number = self._wide(start)
        low, high = self._word(start + 6), self._word(start + 7)
        wrong = (number != pages) | (self._word(start + 5) != kind) | (low % 2 != 0) | (low <= _HEADER)
        wrong |= (low > high) | (high > self._page_size)
        self._refuse(pages, wrong, f"is no {'branch' if kind == _BRANCH else 'leaf'} of a {name}")
        counts = (low - _HEADER) // 2
        owner = np.repeat(np.arange(len(pages)), counts)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = self._word(start[owner] + _HEADER // 2 + index)
        wrong = (offset % 2 != 0) | (offset < high[owner]) | (offset > self._page_size - _NODE)
        self._refuse(pages[owner], wrong, f"has an entry outside of itself, in a {name}")
        at = start[owner] + offset // 2
        nodes = _Nodes(at * 2, self._double(at), self._word(at + 2), self._word(at + 3))
        inside = np.where(nodes.flags & _BIGDATA != 0, 8, nodes.low) if kind == _LEAF else 0
        wrong = offset + _NODE + nodes.key_size + inside > self._page_size
        if kind == _LEAF:
            wrong |= nodes.flags & ~(_BIGDATA | _SUBDATA) != 0
        self._refuse(pages[owner], wrong, f"has an entry that leaves it, in a {name}")
        return nodes

    def _long_pages(self, nodes: _Nodes, name: str) -> tuple[Pages, Pages]:
        """The first page of every long value of these leaves, and how many pages it needs: all are in the file."""
        big = np.flatnonzero(nodes.flags & _BIGDATA)
        firsts = self._unaligned(nodes.at[big] + _NODE + nodes.key_size[big])
        needs = (nodes.low[big] + _HEADER - 1) // self._page_size + 1
        self._refuse(firsts, (firsts < 2) | (firsts >= len(self._uses)), f"cannot be part of a {name}")
        self._within_file(firsts + needs - 1, name)
        return firsts, needs

    def _long_values(self, firsts: Pages, needs: Pages, name: str) -> int:
        """Check where long values begin, and account for their pages; returns how many those are."""
        self._use(firsts, name)
        start = firsts * (self._page_size // 2)
        counts = self._double(start + 6)
        # A value that was overwritten by a shorter one keeps its pages.
        wrong = (counts < needs) | (counts > self._num_written - firsts)
        wrong |= (self._wide(start) != firsts) | (self._word(start + 5) != _OVERFLOW)
        self._refuse(firsts, wrong, f"is not the beginning of a long value of a {name}")
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
        """Every page is in use or free, and none is both."""
        for at, size in freed:
            pages = np.frombuffer(self._bytes(at, size), np.int64)
            if not len(pages) or len(pages) <= pages[0] or pages[0] < 0:
                raise self._damaged(f"has a free list at byte {at} that is none")
            listed = pages[1 : pages[0] + 1]
            self._use(listed, "free list", written=False)
        if self._deep and (lost := int((self._uses == 0).sum())):
            first = int(np.flatnonzero(self._uses == 0)[0])
            raise self._damaged(f"has {lost} pages that are neither in use nor free, the first of them {first}")

    def _use(self, pages: Pages, name: str, *, written: bool = True) -> None:
        if written:
            self._within_file(pages, name)
        self._refuse(pages, (pages < 2) | (pages >= len(self._uses)), f"cannot be part of a {name}")
        np.add.at(self._uses, pages, 1)
        self._refuse(pages, self._uses[pages] > 1, f"is used twice, once by a {name}")

    def _within_file(self, pages: Pages, name: str) -> None:
        if (pages >= self._num_written).any():
            page = int(pages.max())
            raise self._damaged(f"was cut off, or is damaged: its page {page} is missing, which a {name} needs")

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
            raise self._damaged(f"is damaged: its page {int(pages[np.flatnonzero(wrong)[0]])} {what}")

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._data} {what}. Restore it from a copy, or start a new run folder")
