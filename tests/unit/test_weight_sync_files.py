"""Files that are there whole or not at all, and what others may read of them."""

import errno
import os

import pytest

from common.files import private_file, write_durably


def test_a_private_file_is_its_owners_from_the_first_byte_and_has_its_name_once_it_is_whole(tmp_path):
    path = tmp_path / "page.html"
    with private_file(path) as file:
        file.write(b"all of it")
        file.flush()
        (part,) = tmp_path.iterdir()
        assert part.name != path.name
        assert part.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_bytes() == b"all of it"
    assert path.stat().st_mode & 0o777 == 0o600


def _write_until_full(file):
    file.write(b"half")
    raise OSError("the disk is full")


def test_where_writing_fails_the_file_of_before_stays_and_nothing_beside_it(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(b"of before")
    with pytest.raises(OSError, match="full"), private_file(path) as file:
        _write_until_full(file)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_bytes() == b"of before"


def test_a_file_that_is_durable_is_synced_before_it_has_its_name_and_its_name_after_that(tmp_path, monkeypatch):
    path, done, sync = tmp_path / "PORT", [], os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(path.exists()) or sync(descriptor))
    write_durably(path, b"all of it")
    assert path.read_bytes() == b"all of it"
    assert done == [False, True]


def test_where_a_durable_file_cannot_be_written_the_one_of_before_stays_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "PORT"
    write_durably(path, b"of before")

    def full(_):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="full"):
        write_durably(path, b"of now")
    assert [each.name for each in tmp_path.iterdir()] == ["PORT"]
    assert path.read_bytes() == b"of before"
