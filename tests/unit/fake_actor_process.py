"""Fake actor process for tests of actor pools: its handle never replies, and the test sets its placement."""

from pathlib import Path
from types import SimpleNamespace

from leeway.launch.processes.actor_pools import ActorProcess
from leeway.launch.processes.role_process import Restarts


class Room:
    """Fake placement of an actor."""

    is_placed = True
    missing_s = 0.0
    released = False

    def shortage(self) -> str:
        return "no host has room"

    def reservation(self, number: int) -> None:
        return None

    def release(self) -> None:
        self.released = True


class Handle:
    """Fake handle of an actor's process; its calls stay pending."""

    def __init__(self) -> None:
        self.report = SimpleNamespace(remote=lambda: "a pending call")
        self.location = SimpleNamespace(remote=lambda: "a pending call")
        self.start = self.run = self.stop = SimpleNamespace(remote=lambda *_: "a call")


def worker(number: int, folder: Path, **calls: object) -> ActorProcess:
    return ActorProcess(
        "actor", number, Handle(), folder / "log", Restarts(3), placement=Room(), pool="actors", **calls
    )
