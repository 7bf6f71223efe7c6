"""What is asked of a living run through files: answered once, refused with a sentence, never waited for without end."""

import json
import threading
import time

import pytest

from launch.errors import ConfigError
from launch.run_folder import Control, NoAnswer, ask


@pytest.fixture
def answering(tmp_path):
    """`answering(verbs)`: a run that answers until the test ends."""
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


def scale(question) -> str:
    if question["count"] < 0:
        raise ValueError("keep 1")
    return f"{question['pool']} is to have {question['count']}"


def test_a_question_is_answered_and_leaves_no_file(answering, tmp_path):
    answering({"scale": scale})
    assert ask(tmp_path / "control", {"verb": "scale", "pool": "big", "count": 4}, 15) == "big is to have 4"
    assert list((tmp_path / "control").iterdir()) == []


def test_what_cannot_be_done_or_is_not_understood_is_refused_with_a_sentence(answering, tmp_path):
    answering({"scale": scale})
    with pytest.raises(ConfigError, match=r"^keep 1$"):
        ask(tmp_path / "control", {"verb": "scale", "pool": "big", "count": -1}, 15)
    for question in ({"verb": "melt"}, {"verb": "scale"}, {"verb": "scale", "pool": "a", "count": "two"}):
        with pytest.raises(ConfigError, match="invalid question"):
            ask(tmp_path / "control", question, 15)


def test_a_run_that_is_gone_is_not_waited_for_longer_than_said(tmp_path):
    Control(tmp_path / "control")
    began_s = time.monotonic()
    with pytest.raises(NoAnswer, match=r"did not answer for 0.2 s: it answers while it trains"):
        ask(tmp_path / "control", {"verb": "scale"}, 0.2)
    assert time.monotonic() - began_s < 60
    assert list((tmp_path / "control").iterdir()) == []
    with pytest.raises(NoAnswer, match="cannot be written"):
        ask(tmp_path / "nowhere", {"verb": "scale"}, 0.2)


def test_what_an_earlier_command_was_asked_is_not_done_by_the_next(tmp_path):
    control = tmp_path / "control"
    Control(control)
    (control / "0.ask").write_text(json.dumps({"verb": "scale", "pool": "big", "count": 9}))
    asked = []
    Control(control).answer({"scale": lambda question: asked.append(question) or ""})
    assert asked == []


def test_what_is_no_question_is_answered_and_harms_nothing(tmp_path):
    control = Control(tmp_path)
    (tmp_path / "0.ask").write_bytes(b"\xff\x00 no json")
    (tmp_path / "1.ask").write_text("[1, 2]")
    control.answer({"scale": scale})
    answers = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.answer"))]
    assert [answer["ok"] for answer in answers] == [False, False]
