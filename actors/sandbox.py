"""Isolation by Linux namespaces: blocks a process's network access, and runs programs that a model wrote.

cut_network      blocks the network access of this process and of its future children
die_with_parent  makes the kernel kill this process when its parent exits
serve            entry point of a separate process: runs programs one at a time, within limits, and reports the results

The module imports only the standard library, so that it starts in milliseconds. If the kernel permits isolation, a
program has no network access, sees no other process, and can write only to a small folder in memory. Child processes of
a program are killed with the program. Without isolation, only the limits of time, memory and output apply.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OUTPUT_BYTES = 2**20
"""Maximum bytes of a program's output beyond the expected output."""
_FILE_BYTES = 16 * 2**20
_FOLDER_BYTES = 64 * 2**20
_ADDRESS_BYTES = 8 * 2**30
"""Address space in bytes beyond the memory limit of a program, for libraries, thread stacks and shared memory."""
_MAX_PROCESSES, _MAX_PROCESSES_OF_NOBODY = 64, 1024
"""Maximum processes of a program in its own namespace, and of user `nobody` on a host without namespaces."""
_NUM_FILES = 256
NOBODY = 65534
_PROBE_S = 20.0
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""By default `import numpy` starts a thread per core; the threads' buffers would exceed a program's memory limit."""
SCRATCH = "/dev/shm"
"""Mount point of the programs' folder. The path exists on every Linux; the mount hides files of other processes."""
REFUSED = 77
"""Exit status if the kernel refuses the requested isolation."""

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 1, 2, 4, 0x4000, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPSET, _CAP_VERSION = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine, -1), 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)

HINT = (
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), in a "
    "container also in its seccomp profile"
)
"""Remedy if the kernel refuses isolation, for the end of an error message."""


def cut_network() -> None:
    """Enter a new network namespace that has only a loopback interface. Call this before any thread starts.

    Open sockets stay open, and Unix sockets with a file stay reachable. Raises OSError if the kernel refuses.
    """
    try:
        _unshare(_NEWNET)  # needs a privilege; a user namespace would take rights from the process
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(_NEWUSER | _NEWNET)
        _map_ids((user, user), (group, group))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, name), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def cut_network_error() -> str:
    """Return the kernel's error for `cut_network`; '' if the kernel permits the isolation."""
    program = "import sys; sys.path.append(sys.argv[1]); from leeway.actors.sandbox import cut_network; cut_network()"
    command = [sys.executable, "-I", "-S", "-c", program, str(Path(__file__).parents[2])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_S:g} s"
    return "" if not done.returncode else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} ({what})")


def _map_ids(user: tuple[int, int], group: tuple[int, int]) -> None:
    """Map the user id and group id of a new user namespace; each pair is (id inside, id outside)."""
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user[0]} {user[1]} 1"),
        ("gid_map", f"{group[0]} {group[1]} 1"),
    ):
        Path(f"/proc/self/{file}").write_text(text)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it exits; no effect if that thread has exited."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, including those in other sessions."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- entry point of a separate process ------------------------------------------------------------------


def serve(parent: str) -> None:
    """Read a job from stdin, run its programs, write their results to stdout; both are JSON.

    A job has `as_nobody` and `isolated`, which select the isolation, `timeout_s` for all programs together,
    `memory_bytes`, `stop_at_failure`, and `programs`. Each program has a `source` and either `stdin` and `stdout`, a
    `test`, or a `call` and the accepted results, `wanted`. A result is true if the program printed `stdout`, passed the
    test or returned an accepted result. If the program cannot be judged, the result is a reason and its details.
    Any other result is false. Exits with REFUSED if the kernel refuses the isolation.
    """
    job = json.load(sys.stdin)
    try:
        if job["as_nobody"]:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that the process owns its files in /proc
        if job["isolated"]:
            user, group = os.geteuid(), os.getegid()
            _unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWNS | _NEWIPC)
            _map_ids((NOBODY, user), (NOBODY, group))
            # forbid nested namespaces, whose mounts could fill the memory; in a container, /proc/sys may be read-only
            with contextlib.suppress(OSError):
                Path("/proc/sys/user/max_user_namespaces").write_text("0")
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    die_with_parent()
    if os.getppid() != int(parent):
        return
    if not job["isolated"]:
        with tempfile.TemporaryDirectory(prefix="leeway-code-", ignore_cleanup_errors=True) as folder:
            print(json.dumps(_results(job, folder)), flush=True)
        return
    if child := os.fork():  # the first process of a namespace; the kernel kills all other processes at its exit
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    try:
        _mount_read_only()
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(REFUSED)
    print(json.dumps(_results(job, SCRATCH)), flush=True)
    os._exit(0)


def _mount_read_only() -> None:
    """Make all mounts read-only, except a new folder in memory at SCRATCH."""
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
    attributes = struct.pack("QQQQ", _ATTR_RDONLY, 0, 0, 0)
    changed = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    _checked(changed, "mount_setattr")
    options = f"size={_FOLDER_BYTES},nr_inodes=4096,mode=0700".encode()
    _checked(_libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options), "mount")
    _libc.mount(b"proc", b"/proc", b"proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)  # may fail in a container


# --- programs -------------------------------------------------------------------------------------------

_START = "import builtins, sys; exec(sys.argv.pop(), {'__builtins__': dict(vars(builtins))})"
"""Python program that runs `_TEST` with builtins that the tested program cannot change."""
_TEST = """
import builtins, json, os, sys, types, typing
from contextlib import suppress
task, dumps, report = json.load(sys.stdin), json.dumps, open(os.dup(1), "w")
for number in 0, 1:
    os.dup2(os.open(os.devnull, os.O_RDWR), number)
program, main = types.ModuleType("solution"), types.ModuleType("__main__")
sys.modules.update(solution=program, __main__=main)  # dataclasses look up their module
space, test, marks, imports = vars(program), vars(main), set(), {}
space["__builtins__"] = vars(builtins)
exec("from typing import *", space)  # LeetCode's programs use these names in annotations
groups, plain = (list, tuple, set, frozenset, dict), {int, float, str, bool, bytes, type(None)}
probes = object(), None, 0, 1, 2, 3, 10, 10**6, -1, "", "a", "b", "abc", ["l"], ("t",), {"d": 0}
class Names(dict):  # the builtins of a test, then the names of the program, looked up when used
    __missing__ = lambda self, name: space[name]
class NoVerdict(Exception): ...
unclear = NoVerdict("the row names no function to call", "the program defines several")
def ran(name=True):  # record an assertion, or the test's function of this name
    marks.add(name)
    for new in test.keys() - space.keys():
        space[new] = test[new]  # the program may use a class that the test defines
    return True
def honest(value, equal=0):  # fail if the value or an entry of it equals different values
    for one in [*value, *getattr(value, "values", list)()] if isinstance(value, groups) else ():
        honest(one)
    for probe in () if type(value) in plain else probes:
        with suppress(Exception):
            equal += bool(value == probe or value < -1e300)
    assert equal < 2
    return value
def restore():  # undo the program's changes to builtins and to modules that the test imports
    sys.modules.update(imports)
    vars(builtins).update(__builtins__)
    for owner, names in saved:
        for name, value in names.items():
            vars(owner).get(name) is value or setattr(owner, name, value)
def entry():
    name, solution = task["name"], space.get("Solution", object)
    if name is None:
        own = [key for key, one in space.items() if callable(one) and getattr(one, "__module__", "") == "solution"]
        name, *more = [k for k in own if not isinstance(space[k], type)] or [k for k in vars(solution) if k[0] != "_"]
        if more:
            raise unclear
    return space[name] if name in space or solution is object else getattr(solution(), name)
def call(function):
    code, name = function.__code__, function.__name__
    needed = code.co_varnames[hasattr(function, "__self__"):code.co_argcount - len(function.__defaults__ or ())]
    is_known = needed in ((), ("candidate",)) or name == "check" and len(needed) == 1
    if is_known and not hasattr(function, "pytestmark") and function(*[entry() for _ in needed]) is None:
        return
    if is_known or name not in marks:  # else the test itself calls it
        raise NoVerdict("the row's tests need pytest", f"to call {name}({', '.join(needed)})")
def run_case(unittest, case):
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result := unittest.TestResult())
    assert not (result.failures or result.errors or result.unexpectedSuccesses)
    if result.skipped:  # the test or the program skipped it
        raise NoVerdict("tests of the row are skipped", result.skipped[0][1])
def run_class(case):
    for key in [key for key in dir(case) if key.startswith("test")]:
        own = case()
        for step in ("setup_class", "setup_method", key):
            hasattr(own, step) and call(getattr(own, step))
def run_test():
    names, candidates = Names(__builtins__), [task["name"]] if task["name"] else task["names"]
    used = [name for name in candidates if callable(space.get(name)) and space[name] is not getattr(typing, name, 0)]
    if names.keys() >= set(used):  # the functions under test have names of builtins
        if used[1:]:
            raise unclear
        names.update({name: space[name] for name in used})
    names.update(leeway_ran=ran, leeway_honest=honest, globals=lambda: {**space, **test})
    test.update(__builtins__=names, __file__="test.py")
    restore()
    exec(compile(task["test"], "test.py", "exec"), test)
    for name, one in list(test.items()):
        restore()
        unittest = sys.modules.get("unittest")
        if not isinstance(one, (type, types.FunctionType)) or one.__module__ != "__main__":
            continue
        if isinstance(one, type) and unittest and issubclass(one, unittest.TestCase):
            run_case(unittest, one)
        elif name.startswith(("test", "Test")):
            run_class(one) if isinstance(one, type) else call(one)
    if "check" in test and "check" not in marks:
        call(test["check"])
    if True not in marks:
        raise NoVerdict("the row's tests execute no assertion", "")
for name in task.get("imports", ()):
    __import__(name)
    imports[name] = sys.modules[name]
owners = [one for module in imports.values() for one in (module, *vars(module).values())]
saved = [(one, dict(vars(one))) for one in owners if isinstance(one, (type, types.ModuleType))]
why = result = None
try:
    exec(compile(task["source"], "solution.py", "exec"), space)
    if "call" in task:
        arguments = f"(lambda *args, **keys: entry()(*args, **keys))({task['call']})"
        result = eval(arguments, {"entry": entry, "inf": float("inf"), "nan": float("nan")})
    else:
        run_test()
except NoVerdict as stop:
    why = stop.args
report.write(task["word"] + dumps([why, result], default=lambda value: value.tolist()))  # numpy
"""
"""Runs a test after a program, and reports only at the end, after a secret word, so that a program that exits early
does not pass. The test has its own names and builtins. `leeway.actors.tasks.code` adds a call of `leeway_ran` to each
assertion. For a `call`, the report contains the result; the program's process never receives the accepted results."""


def _results(job: dict[str, Any], folder: str) -> list[bool | list[str]]:
    deadline = time.monotonic() + job["timeout_s"]
    results: list[bool | list[str]] = []
    for program in job["programs"]:
        has_passed = _passes(program, job, folder, deadline)
        results.append(has_passed)
        _clear(folder)
        if time.monotonic() >= deadline or (job["stop_at_failure"] and not has_passed):
            break
    return results


def _clear(folder: str) -> None:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _passes(program: dict[str, Any], job: dict[str, Any], folder: str, deadline: float) -> bool | list[str]:
    path, is_script = os.path.join(folder, "solution.py"), "stdin" in program
    word, expected = os.urandom(16).hex(), program.get("stdout", "")
    if is_script:
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(program["source"])
    command = [sys.executable, "-I", "-B", *([path] if is_script else ["-c", _START, path, _TEST])]
    with tempfile.TemporaryFile(dir=folder) as stdin:
        task = program["stdin"] if is_script else json.dumps({**program, "wanted": None, "word": word})
        stdin.write(task.encode("utf-8", "replace"))
        stdin.seek(0)
        places = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder}
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**places, **_ONE_THREAD, "LANG": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=lambda: _limit(job),
        )
    try:
        output = _output_of(process, OUTPUT_BYTES + 4 * len(expected), deadline)
        status = process.wait(max(0.0, deadline - time.monotonic())) if output is not None else None
    except subprocess.TimeoutExpired:
        status = output = None
    finally:
        _end(process, job)
    if output is None or status != 0:
        return False
    if is_script:
        return _lines(output.decode("utf-8", "replace")) == _lines(expected)
    printed, has_word, report = output.decode("utf-8", "replace").partition(word)
    if printed or not has_word:  # the program itself wrote to the output
        return False
    with contextlib.suppress(ValueError, TypeError):  # the program may have changed the JSON encoder
        why, result = json.loads(report)
        if isinstance(why, list):
            return [*map(str, why), "", ""][:2]
        return why is None and ("call" not in program or any(_is_same(result, one) for one in program["wanted"]))
    return False


def _is_same(found: Any, expected: Any) -> bool:  # noqa: ANN401 -- any JSON
    """Compare two values as Python does, but with a tolerance for rounding errors of floats."""
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(_is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(found, float):
        is_close = math.isclose(found, expected, rel_tol=1e-9, abs_tol=0.0 if expected else 1e-12)
        return is_close or (math.isnan(found) and math.isnan(expected))
    return bool(found == expected)


def _lines(text: str) -> list[str]:
    """Return the lines of a text without white space around the text and at line ends."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _output_of(process: subprocess.Popen[bytes], max_bytes: int, deadline: float) -> bytes | None:
    """Return the output until the process exits or closes it; None if the output is too long or late."""
    assert process.stdout is not None
    output, descriptor, end = b"", process.stdout.fileno(), os.pidfd_open(process.pid)
    try:
        while len(output) <= max_bytes and (left_s := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([descriptor, end], [], [], left_s)
            more = os.read(descriptor, 65536) if descriptor in ready else b""
            if ready and not more:  # the process has exited; its children may keep the output open
                return output
            output += more
    finally:
        os.close(end)
    return None


def _end(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    """Kill the program and its descendants; in a namespace, kill all processes of the namespace."""
    with contextlib.suppress(ProcessLookupError):
        if job["isolated"]:
            os.kill(-1, signal.SIGKILL)  # kills all processes of the namespace except this one, the first
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # orphans become children of the first process
            pass


def _limit(job: dict[str, Any]) -> None:
    """Set the limits in the program's process, before it executes the program."""
    die_with_parent()
    seconds = int(job["timeout_s"]) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_DATA: job["memory_bytes"],
        resource.RLIMIT_AS: job["memory_bytes"] + _ADDRESS_BYTES,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _NUM_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if job["isolated"] or job["as_nobody"]:  # without, all processes of the run's user would count
        limits[resource.RLIMIT_NPROC] = _MAX_PROCESSES if job["isolated"] else _MAX_PROCESSES_OF_NOBODY
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["isolated"] and _CAPSET > 0:  # drop the capabilities of its namespace, which permit mounts
        _libc.syscall(_CAPSET, struct.pack("Ii", _CAP_VERSION, 0), struct.pack("6I", *([0] * 6)))
