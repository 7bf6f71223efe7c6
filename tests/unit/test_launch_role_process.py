"""Calls of the supervisor to a role's process: late replies and unresponsive processes."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import ray
from ray.exceptions import RayActorError, RaySystemError, RayTaskError

from leeway.actors.tasks import TaskError
from leeway.common.hf_folder import ModelFolderError
from leeway.common.user_input import UserFileError
from leeway.launch.processes import role_process
from leeway.launch.processes.placement import Reservation, spawn
from leeway.launch.processes.role_process import Restarts, RoleProcess, RunFailed, WrongInput, reason, results

SILENCE_S = 30.0


class Clock:
    """Fake Ray and clock; a call to the process completes once `answer` is set."""

    def __init__(self, monkeypatch) -> None:
        self.now_s, self.answer, self.events = 100.0, None, []
        self.handle = MagicMock()
        self.process = RoleProcess("actor", 1, self.handle, Path("logs/actor.1.log"), Restarts(3))
        monkeypatch.setattr("leeway.launch.processes.role_process.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(ray, "wait", lambda calls, timeout, **_: (calls, []) if self.answer else ([], calls))
        monkeypatch.setattr("leeway.launch.processes.role_process.SILENCE_S", SILENCE_S)
        monkeypatch.setattr(ray, "get", self._get)

    def _get(self, call):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def ask_at(self, now_s: float):
        self.now_s = now_s
        return self.process.ask("report", 0.1, lambda kind, text: self.events.append((kind, text)))

    @property
    def num_calls(self) -> int:
        return self.handle.report.remote.call_count


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_an_unresponsive_process_is_reported_once_per_silence_limit(clock):
    for second in (100, 129, 130):
        assert clock.ask_at(second) is None
    assert clock.events == []
    clock.ask_at(131)
    assert clock.events == [("silent", "actor.1 has not responded for 31 s; see logs/actor.1.log")]
    clock.ask_at(160)
    assert len(clock.events) == 1, "a silence is reported once per limit, not once per poll"
    clock.ask_at(162)
    assert len(clock.events) == 2


def test_a_pending_call_is_not_repeated(clock):
    assert clock.ask_at(100) is None
    assert clock.ask_at(110) is None
    clock.answer = "report 1"
    assert clock.ask_at(120) == "report 1"
    assert clock.num_calls == 1
    clock.answer = None
    clock.ask_at(140)
    assert clock.num_calls == 2
    clock.ask_at(165)
    assert clock.events == [], "silence is measured from the start of the pending call"


@pytest.mark.parametrize("answer", ["report", RayActorError()])
def test_a_process_that_replies_or_dies_is_not_reported_as_silent(clock, answer):
    clock.ask_at(100)
    clock.answer = answer
    assert clock.ask_at(200) == (answer if answer == "report" else None)
    assert clock.events == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (TaskError("3 prompts are too long"), "actor.1: 3 prompts are too long"),
        (ModelFolderError("no tensor x"), "actor.1: no tensor x"),
        (ValueError("another"), "actor.1 failed: ValueError: another; see logs/actor.1.log"),
        (UserFileError("there is no file x.py on host b"), "actor.1: there is no file x.py on host b"),
        (RaySystemError(UserFileError("no file x.py"), "a page of text"), "actor.1: no file x.py"),
        (
            RaySystemError("store lost"),
            "actor.1 failed: RaySystemError: System error: store lost; see logs/actor.1.log",
        ),
    ],
)
def test_errors_of_task_and_model_are_distinguished_from_failures(clock, raised, expected):
    clock.answer = RayTaskError("start", "a page of text", raised)
    with pytest.raises(RunFailed) as caught:
        results([(clock.process, "call")], "to be ready", clock.now_s + 10.0)
    assert str(caught.value) == expected
    assert isinstance(caught.value, WrongInput) is not expected.endswith(".log")


def test_an_error_of_user_code_is_one_line_without_the_name_of_our_class():
    raised = RayTaskError(
        "run", "a page of text", UserFileError("'mine.py:MINE', line 3 raised ValueError: two\nlines")
    )
    assert reason(raised) == "'mine.py:MINE', line 3 raised ValueError: two lines"


def test_a_role_gets_its_variables_and_sees_only_reserved_gpus(monkeypatch):
    options = []
    remote = SimpleNamespace(options=lambda **given: options.append(given) or MagicMock())
    monkeypatch.setattr(ray, "remote", lambda _: remote)
    variables = {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "0"}
    for bundle in ({"CPU": 3.5}, {"GPU": 0.5}):
        spawn(object, Path("log"), on=Reservation(bundle), concurrency=1, variables=variables)
    plain, on_gpu = (each["runtime_env"]["env_vars"] for each in options)
    assert plain.items() >= {**variables, "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": ""}.items()
    assert on_gpu.keys() == plain.keys() - {"CUDA_VISIBLE_DEVICES"}


def test_a_log_is_bounded_and_its_writers_continue_in_the_same_file(tmp_path, monkeypatch):
    log, aside = tmp_path / "actor.0.log", tmp_path / "actor.0.log.1"
    role = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    engine = os.dup(role)  # a child process of the role inherits the file
    monkeypatch.setattr(role_process, "LOG_BYTES", 1000)
    lines, found = iter([b"a" * 999, b"b" * 2, b"c" * 5, b"d" * 2000, b""]), []

    def sleep(_):
        found.append((log.read_bytes()[:6], aside.read_bytes()[-6:] if aside.exists() else b""))
        os.write(engine, next(lines))

    monkeypatch.setattr(role_process.time, "sleep", sleep)
    with pytest.raises(StopIteration):
        role_process._rotate(log)
    assert found[2:] == [(b"", b"aaaabb"), (b"ccccc", b"aaaabb"), (b"", b"dddddd"), (b"", b"dddddd")]
    assert Path(os.readlink(f"/proc/self/fd/{role}")) == log
    for descriptor in (role, engine):
        os.close(descriptor)


def test_a_log_on_a_full_disk_is_retried(tmp_path, monkeypatch):
    log, polls = tmp_path / "actor.0.log", iter(range(3))
    log.write_bytes(b"x" * 2000)
    monkeypatch.setattr(role_process, "LOG_BYTES", 1000)
    monkeypatch.setattr(role_process.time, "sleep", lambda _: next(polls))
    monkeypatch.setattr(role_process.shutil, "copyfile", MagicMock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StopIteration):
        role_process._rotate(log)
    assert log.stat().st_size == 2000


KV = (
    "(EngineCore pid=18879) ERROR 11-29 01:26:54 [core.py:1510]     raise ValueError(\n"
    "(EngineCore pid=18879) ERROR 11-29 01:26:54 [core.py:1510] ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine.\n"
    "Process EngineCore:\nTraceback (most recent call last):\n    raise ValueError(\n"
    "ValueError: No available memory for the cache blocks.\n"
    "2026-11-29 01:27:02,282 WARNING launch.processes.actor_role: actor-0 received SIGTERM and shuts down\n"
)
"""A part of the log of an actor whose actors.kv_cache_gib was too small."""
WORKER = (
    "(Worker_TP0 pid=12) ERROR 01-01 00:00:00 [w.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"
    "(EngineCore pid=11) ERROR 01-01 00:00:01 [core.py:2] RuntimeError: Worker failed; see above for the root cause\n"
    "(EngineCore pid=11) ERROR 01-01 00:00:01 [core.py:2] vllm.v1.engine.exceptions.EngineDeadError: EngineCore died\n"
)
CHILD = (
    'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n    import x\n'
    "ImportError: libcudart.so.13: cannot open shared object file\nRuntimeError: Engine core initialization failed.\n"
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (KV, "ValueError: No available memory for the cache blocks. Try increasing"),
        (WORKER, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        (CHILD, "ImportError: libcudart.so.13: cannot open shared object file"),
        ("Fatal Python error: Bus error\n\nCurrent thread\n", "Fatal Python error: Bus error"),
        ("a reward printed\nTraceback (most recent call last):\nKeyError: 'x'\n", ""),
        (KV + "this process has started\nall is well\n", ""),
        ("", ""),
    ],
)
def test_the_log_line_with_the_cause_of_a_failure_is_quoted(tmp_path, log, cause):
    path = tmp_path / "actor.0.log"
    path.write_text(log)
    hint = RoleProcess("actor", 0, None, path, Restarts(1)).log_hint
    assert hint.endswith(f"see {path}")
    assert (f"cause in log: '{cause}" in hint) == bool(cause)
    assert (
        RoleProcess("actor", 0, None, tmp_path / "elsewhere", Restarts(1)).log_hint == f"see {tmp_path / 'elsewhere'}"
    )
