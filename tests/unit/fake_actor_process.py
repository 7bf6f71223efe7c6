"""An actor as the pools of actors see it, without a process: its handle answers nothing, and it has room or not."""

from pathlib import Path
from types import SimpleNamespace

from launch.processes.actor_pools import ActorProcess
from launch.processes.role_process import Restarts


class Room:
    """Stands for the place of an actor: there is one, or not."""

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
    """Stands for an actor's process; it never answers."""

    def __init__(self) -> None:
        self.report = SimpleNamespace(remote=lambda: "an answer that is owed")
        self.whereabouts = SimpleNamespace(remote=lambda: "an answer that is owed")
        self.start = self.run = self.stop = SimpleNamespace(remote=lambda *_: "a call")


def worker(number: int, folder: Path, **calls: object) -> ActorProcess:
    return ActorProcess(
        "actor", number, Handle(), folder / "log", Restarts(3), placement=Room(), pool="actors", **calls
    )
