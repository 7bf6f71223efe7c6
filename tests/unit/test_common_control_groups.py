"""CPU and memory limits of control groups (versions 1 and 2, nested and in namespaces), file locks, private files."""

import errno
import os

import pytest

from leeway.common import files, process
from leeway.common.files import NoLocks, try_lock


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return `machine(mounts, groups, figures)`, which writes control groups below the mounts as the kernel does."""
    monkeypatch.setattr(process, "_PROC", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(48)))

    def lay_out(mounts: list[tuple[str, str, str]], groups: list[str], figures: dict[str, str]) -> None:
        lines = ["24 30 0:22 / /proc rw shared:2 - proc proc rw"]
        lines += [
            f"3{i} 23 0:2{i} {root} {tmp_path}/fs/{name} rw shared:{i} - {kind} {kind} rw,{name}"
            for i, (kind, name, root) in enumerate(mounts)
        ]
        (tmp_path / "mountinfo").write_text("\n".join(lines))
        (tmp_path / "cgroup").write_text("\n".join(groups))
        for name, text in figures.items():
            file = tmp_path / "fs" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return lay_out


def test_the_smallest_limit_up_to_the_root_applies(machine):
    machine(
        [("cgroup2", "all", "/")],
        ["0::/jobs/mine"],
        {
            "all/jobs/mine/cpu.max": "max 100000",
            "all/jobs/cpu.max": "250000 100000",
            "all/jobs/mine/memory.max": "max",
            "all/jobs/mine/memory.current": "5000",
            "all/jobs/memory.max": "9000",
            "all/jobs/memory.current": "6000",
            "all/jobs/memory.stat": "anon 1\nactive_file 300\ninactive_file 200",
        },
    )
    assert process.usable_cpus() == 3, "a limit of 2.5 CPUs is rounded up"
    assert process.memory_left() == 3500


def test_limits_of_version_1_are_read_from_the_folder_of_each_controller(machine):
    machine(
        [("cgroup", "cpu,cpuacct", "/"), ("cgroup", "memory", "/"), ("cgroup", "pids", "/")],
        ["3:cpu,cpuacct:/a/b", "2:memory:/c", "1:pids:/", "0::/a/b"],
        {
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            "memory/c/memory.limit_in_bytes": "4096",
            "memory/c/memory.usage_in_bytes": "4000",
            "memory/c/memory.stat": "inactive_file 7\ntotal_inactive_file 1000\ntotal_active_file 0",
            "memory/memory.limit_in_bytes": str(2**63 - 4096),
            "memory/memory.usage_in_bytes": "9999999",
            "memory/memory.stat": "",
            "pids/pids.max": "max",
        },
    )
    assert process.usable_cpus() == 1, "a limit of half a CPU is rounded up"
    assert process.memory_left() == 1096
    assert list(process.cgroup_values("pids", ("pids.max",))) == []


@pytest.mark.parametrize(("root", "group"), [("/docker/4711", "/docker/4711"), ("/", "/../../4711"), ("/x", "/y")])
def test_in_a_container_the_group_is_the_mounted_root(machine, root, group):
    machine([("cgroup2", "all", root)], [f"0::{group}"], {"all/cpu.max": "400000 100000", "cpu.max": "1 1"})
    assert process.usable_cpus() == 4


def test_without_control_groups_the_cpu_affinity_applies(machine, tmp_path, monkeypatch):
    machine([], [], {})
    assert (process.usable_cpus(), process.memory_left()) == (48, 2**62)
    (tmp_path / "cgroup").unlink()
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert process.usable_cpus() == 2


# --- locks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_with_the_fix(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with (tmp_path / "file").open("w+b") as file:
        for locked in (file, file.fileno()):
            with pytest.raises(NoLocks, match=f"the file system of {tmp_path} does not support .*--run.dir FOLDER"):
                try_lock(locked)


def test_other_lock_errors_are_raised_unchanged(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="broken") as raised:
        try_lock(file)
    assert not isinstance(raised.value, NoLocks)


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"), files.private_file(pipe) as file:
        file.write(b"x")
    assert pipe.is_fifo()
