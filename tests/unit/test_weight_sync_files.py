"""Atomic file writes, and permissions of private files."""

import errno
import os

import pytest

from leeway.common.files import private_file, write_durably


def test_a_private_file_has_mode_0600_from_the_start_and_its_name_when_complete(tmp_path):
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


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="full"), private_file(path) as file:
        _write_until_full(file)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_bytes() == b"old"


def test_a_durable_file_is_synced_before_the_rename_and_its_folder_after_it(tmp_path, monkeypatch):
    path, done, sync = tmp_path / "PORT", [], os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: done.append(path.exists()) or sync(descriptor))
    write_durably(path, b"all of it")
    assert path.read_bytes() == b"all of it"
    assert done == [False, True]


def test_a_failed_durable_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "PORT"
    write_durably(path, b"old")

    def fail(_):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_durably(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["PORT"]
    assert path.read_bytes() == b"old"
