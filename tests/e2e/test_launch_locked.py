"""One real run with locked sockets, ended by Ctrl-C.

Who may read its files, what it listens on, what a stranger gets from it, and how it ends.
"""

import contextlib
import os
import signal
import stat
import tempfile
from pathlib import Path

import psutil
import pytest
import zmq

from buffer import protocol as p
from buffer.store import PORT
from tests.e2e.real_run import assert_ended_in_order, descendants, start, wait_for_end, wait_for_steps

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, what its processes listened on, whether a stranger was answered, its engines' sockets."""
    folder = tmp_path_factory.mktemp("locked")
    endless = ("--learner.num_steps", "100000", "--learner.checkpoint_every", "100000")
    process = start(folder, "--launch.encryption", "on", "--weight_sync.transport", "network", *endless)
    wait_for_steps(process, folder, 2, timeout_s=280)
    family = [psutil.Process(process.pid), *descendants(process)]
    listening = sorted({address for each in family for address in listening_on(each)})
    sockets = folders_for_sockets(family)
    port = (folder / "run" / "buffer" / PORT).read_text()
    is_answered = stranger_is_answered(f"tcp://127.0.0.1:{port}")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: every process gets the signal
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert wait_for_end(family, timeout_s=10) == []
    return folder / "run", listening, is_answered, sockets


def folders_for_sockets(processes: list[psutil.Process]) -> list[Path]:
    """Those that vLLM's sockets in these processes lie in."""
    numbers = {str(process.pid) for process in processes}
    places = {Path(tempfile.gettempdir()), Path("/tmp")}
    found = (path for place in places for path in place.glob("leeway-*-vllm-*"))
    return [path for path in found if path.name.split("-")[3] in numbers]


def listening_on(process: psutil.Process) -> list[str]:
    try:
        return [each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []  # it has just ended


def stranger_is_answered(address: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(address)
        with contextlib.suppress(zmq.Again):  # it was refused already, and has no line any more
            stranger.send(p.encode(1, p.StatusRequest()), zmq.NOBLOCK)
        return bool(stranger.poll(2000))


def test_one_interrupt_ends_a_run_with_a_checkpoint(finished):
    assert_ended_in_order(finished[0])


def test_files_and_folders_of_a_run_are_its_owners_alone(finished):
    run, *_ = finished
    everything = [run, *run.rglob("*")]
    assert len(everything) > 50
    assert not [
        f"{stat.S_IMODE(path.lstat().st_mode):o} {path}"
        for path in everything
        if not path.is_symlink() and stat.S_IMODE(path.lstat().st_mode) & 0o077
    ]


def test_a_run_on_one_machine_listens_on_loopback_alone(finished):
    _, listening, *_ = finished
    assert listening, "it listened on nothing: the test shows nothing"
    assert not [ip for ip in listening if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")]


def test_a_stranger_is_not_answered_and_the_service_says_so(finished):
    run, _, is_answered, _ = finished
    assert not is_answered
    assert "refused strangers" in (run / "logs" / "buffer.0.log").read_text()


def test_the_engines_leave_no_sockets_behind(finished):
    *_, sockets = finished
    assert sockets, "there was none while the run lived: the test shows nothing"
    assert [path for path in sockets if path.exists()] == []
