"""Structure check of an LMDB file: accepts every file that LMDB writes and rejects damaged ones."""

import random
import shutil

import lmdb
import pytest

from leeway.buffer import pages
from leeway.buffer.errors import StoreError

PAGE = 4096


@pytest.fixture
def write(tmp_path):
    """Return `write(seed, num_commits)`, which yields the file after each of `num_commits` random commits."""

    def commits(seed, num_commits):
        rng = random.Random(seed)
        folder = tmp_path / f"store-{seed}"
        with lmdb.open(str(folder), map_size=2**28, max_dbs=3, sync=False) as environment:
            tables = [environment.open_db(b"%d" % number) for number in range(3)]
            for _ in range(num_commits):
                with environment.begin(write=True) as txn:
                    for _ in range(rng.choice([1, 5, 50, 300])):
                        key, table = rng.randrange(300).to_bytes(8, "big"), rng.choice(tables)
                        if rng.random() < 0.45:
                            txn.delete(key, db=table)
                        else:
                            size = rng.choice([0, 20, 20, 300, 3000, 9000, 40_000])
                            txn.put(key, rng.randbytes(size), db=table)
                yield folder / "data.mdb"

    return commits


def test_every_file_written_by_lmdb_passes(write):
    for seed in range(3):
        for data in write(seed, 60):
            assert pages.check(data) == pages.check(data, deep=True)


def test_a_file_without_its_free_last_pages_passes(tmp_path):
    data = tmp_path / "data.mdb"
    with lmdb.open(str(tmp_path), map_size=2**24, max_dbs=1) as environment:
        table = environment.open_db(b"table")
        for sizes in ((40_000,), (40_000, 4000), (3000, 80_000, None)):
            with environment.begin(write=True) as txn:
                for size in sizes:
                    if size is None:
                        txn.delete(b"%d" % len(sizes), db=table)
                    else:
                        txn.put(b"%d" % len(sizes), bytes(size), db=table)
        last = environment.info()["last_pgno"]
    assert data.stat().st_size < (last + 1) * PAGE
    assert pages.check(data, deep=True) == last + 1


def test_a_new_empty_store_passes(tmp_path):
    lmdb.open(str(tmp_path)).close()
    assert pages.check(tmp_path / "data.mdb") == 2


def in_use(data) -> list[int]:
    """Return the branch and leaf pages. If one of these pages is zeroed, LMDB reads different data."""
    whole = data.read_bytes()
    found = []
    for page in range(len(whole) // PAGE):
        header = whole[page * PAGE : (page + 1) * PAGE]
        if header[10:12] in (b"\1\0", b"\2\0") and int.from_bytes(header[:8], "little") == page:
            found.append(page)
    return found


def read_all(folder) -> bytes:
    """Return everything that LMDB finds in a store."""
    with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3) as environment, environment.begin() as txn:
        tables = [environment.open_db(bytes(name), txn=txn, create=False) for name, _ in txn.cursor()]
        return b"".join(key + value for table in tables for key, value in txn.cursor(db=table))


def test_a_zeroed_page_is_rejected_unless_it_was_free(write, tmp_path):
    *_, data = write(7, 30)
    num_rejected = 0
    for page in in_use(data):
        copied = shutil.copytree(data.parent, tmp_path / "copy", dirs_exist_ok=True)
        with (copied / "data.mdb").open("r+b") as file:
            file.seek(page * PAGE)
            file.write(bytes(PAGE))
        try:
            pages.check(copied / "data.mdb", deep=True)
        except StoreError:
            num_rejected += 1
        else:
            assert read_all(copied) == read_all(data.parent)
    assert num_rejected > 3


def test_a_truncated_file_is_rejected(write):
    *_, data = write(8, 30)
    whole = data.read_bytes()
    for size in (0, 1, PAGE, PAGE + 1, 2 * PAGE, len(whole) // 2):
        data.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"truncated|damaged"):
            pages.check(data)


@pytest.mark.parametrize("num_commits", [5, 6])
def test_a_flipped_transaction_number_does_not_restore_the_previous_commit(num_commits, write):
    *_, data = write(9, num_commits)
    whole, values = data.read_bytes(), read_all(data.parent)
    pages.check(data)
    num_restored = 0
    for page in (0, 1):
        for bit in range(64):
            # The transaction number is the last field of a meta page: it follows the header and 128 bytes.
            damaged = bytearray(whole)
            damaged[page * PAGE + 16 + 128 + bit // 8] ^= 1 << bit % 8
            data.write_bytes(damaged)
            with pytest.raises(StoreError, match="transaction"):
                pages.check(data)
            num_restored += read_all(data.parent) != values
    assert num_restored > 0, "LMDB does not detect the changed transaction number, so the check must"


@pytest.mark.parametrize("compact", [False, True])
def test_a_copy_passes_before_and_after_writes(compact, write, tmp_path):
    *_, data = write(3, 20)
    copied = tmp_path / "copied"
    copied.mkdir()
    with lmdb.open(str(data.parent), max_dbs=3) as environment:
        environment.copy(str(copied), compact=compact)
    pages.check(copied / "data.mdb", deep=True)
    with lmdb.open(str(copied), max_dbs=3, map_size=2**28) as environment:
        for number in range(3):
            with environment.begin(write=True) as txn:
                txn.put(b"%d" % number, bytes(5000), db=environment.open_db(b"0", txn=txn))
            pages.check(copied / "data.mdb", deep=True)


def test_a_wrong_length_of_a_long_value_is_detected_before_it_frees_other_pages(tmp_path):
    with lmdb.open(str(tmp_path), map_size=2**24, max_dbs=1) as environment:
        table = environment.open_db(b"table")
        with environment.begin(write=True) as txn:
            txn.put(b"first", bytes(3 * PAGE), db=table)
            txn.put(b"second", bytes(3 * PAGE), db=table)
    data = tmp_path / "data.mdb"
    whole = bytearray(data.read_bytes())
    begin = next(page for page in range(2, len(whole) // PAGE) if whole[page * PAGE + 10] == 4)
    pages.check(data, deep=True)
    whole[begin * PAGE + 12] ^= 8
    data.write_bytes(whole)
    pages.check(data)
    with pytest.raises(StoreError, match=r"long value|used twice"):
        pages.check(data, deep=True)
