"""Requests to a running job through files: answered once, refused with a sentence, bounded by a timeout."""

import json
import threading
import time

import pytest

from leeway.launch.errors import ConfigError
from leeway.launch.run_folder import Control, NoAnswer, send_request


@pytest.fixture
def answering(tmp_path):
    """`answering(verbs)` starts a thread that answers the requests `verbs` until the test ends."""
    stop = threading.Event()
    threads = []

    def start(verbs) -> None:
        control = Control(tmp_path / "control")

        def serve() -> None:
            while not stop.wait(0.01):
                control.answer(verbs)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def scale(request) -> str:
    if request["count"] < 0:
        raise ValueError("keep 1")
    return f"{request['pool']} has {request['count']}"


def test_a_request_is_answered_and_leaves_no_file(answering, tmp_path):
    answering({"scale": scale})
    assert send_request(tmp_path / "control", {"verb": "scale", "pool": "big", "count": 4}, 15) == "big has 4"
    assert list((tmp_path / "control").iterdir()) == []


def test_a_failed_or_invalid_request_is_refused_with_a_sentence(answering, tmp_path):
    answering({"scale": scale})
    with pytest.raises(ConfigError, match=r"^keep 1$"):
        send_request(tmp_path / "control", {"verb": "scale", "pool": "big", "count": -1}, 15)
    for request in ({"verb": "melt"}, {"verb": "scale"}, {"verb": "scale", "pool": "a", "count": "two"}):
        with pytest.raises(ConfigError, match="invalid request"):
            send_request(tmp_path / "control", request, 15)


def test_a_request_to_a_dead_run_times_out(tmp_path):
    Control(tmp_path / "control")
    began_s = time.monotonic()
    with pytest.raises(NoAnswer, match=r"did not answer within 0.2 s: launchers answer only during training"):
        send_request(tmp_path / "control", {"verb": "scale"}, 0.2)
    assert time.monotonic() - began_s < 60
    assert list((tmp_path / "control").iterdir()) == []
    with pytest.raises(NoAnswer, match="cannot be written"):
        send_request(tmp_path / "nowhere", {"verb": "scale"}, 0.2)


def test_a_request_to_an_earlier_launcher_is_not_executed(tmp_path):
    control = tmp_path / "control"
    Control(control)
    (control / "0.ask").write_text(json.dumps({"verb": "scale", "pool": "big", "count": 9}))
    executed = []
    Control(control).answer({"scale": lambda request: executed.append(request) or ""})
    assert executed == []


def test_a_malformed_request_is_answered_with_an_error(tmp_path):
    control = Control(tmp_path)
    (tmp_path / "0.ask").write_bytes(b"\xff\x00 no json")
    (tmp_path / "1.ask").write_text("[1, 2]")
    control.answer({"scale": scale})
    answers = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.answer"))]
    assert [answer["ok"] for answer in answers] == [False, False]
