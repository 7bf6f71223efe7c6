"""A weight service, a puller and a stage as processes that can be killed, and a proxy that changes what passes.

As a program: `python -m tests.faults.weight_processes serve FOLDER`, `... pull ADDRESS STAGING VERSION NAME` or
`... publish ADDRESS INCARNATION`, each with small chunks, so that a transfer takes many.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import zmq

from common.staleness import PolicyVersion
from tests.faults.proxy import Proxy
from tests.weights_by_hand import RUN, assert_holds, publish
from weight_sync import client, host_folder, puller
from weight_sync.client import WeightClient
from weight_sync.config import WeightSyncConfig
from weight_sync.puller import open_puller
from weight_sync.service import WeightService

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 2**14
WINDOW = 4
UPDATE_TIMEOUT_S = 12.0
SIZE = {"num_tensors": 4, "num_values": 200_000}
"""A version of 3.2 MB in float32: about 200 chunks."""


def config(staging_dir: Path | str) -> WeightSyncConfig:
    """Of the run. Also makes the chunks of this process small, and its time for an update short."""
    client.CHUNK_BYTES = CHUNK_BYTES
    puller.UPDATE_TIMEOUT_S = UPDATE_TIMEOUT_S
    host_folder._SHM = Path(staging_dir)
    host_folder._SHM.mkdir(parents=True, exist_ok=True)
    return WeightSyncConfig(transport="network")


class Process:
    """One of the scripts. A context manager: its process ends with it."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self.start()

    def start(self) -> None:
        """Start it (anew) and wait for its first line."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.weight_processes", *self._arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        killer = threading.Timer(60, self.process.kill)
        killer.start()
        self.said = self.process.stdout.readline().strip()
        killer.cancel()
        assert self.said, "the process said nothing"

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, now."""
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.kill()


class Wire(Proxy):
    """Passes messages on, a little delayed; counts the bytes that the service sent, and flips some."""

    def __init__(self, service_address: str, *, seed: int = 0, max_delay_s: float = 0.004, flips: float = 0.0) -> None:
        """Args:
        service_address: where to.
        seed: of everything that happens by chance.
        max_delay_s: as in `Proxy`.
        flips: in this share of messages, one bit.
        """
        super().__init__(service_address, seed=seed, max_delay_s=max_delay_s, duplicates=0.0)
        self._flips = flips
        self.num_flipped = 0
        self.sent_bytes = 0
        """Of bodies that the service sent."""

    def _delay(self, target: zmq.Socket, frames: list[bytes]) -> None:
        head = 2 if target is self._front else 1  # identity and header, or header
        if target is self._front:
            self.sent_bytes += sum(map(len, frames[head:]))
        if self._chance.random() < self._flips:
            self.num_flipped += 1
            # the last frame: a body where there is one
            data = bytearray(frames[-1])
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
            frames = [*frames[:-1], bytes(data)]
        super()._delay(target, frames)


def _serve(folder: str) -> None:
    service = WeightService(RUN, Path(folder))
    print(service.bind(), flush=True)
    service.serve(threading.Event())


def _pull(address: str, staging_dir: str, version: str, name: str) -> None:
    access = client.StoreAccess(config(staging_dir), Path("/does/not/exist"), address, RUN)
    puller = open_puller(access, name, "float32")
    print("connected", flush=True)
    wanted = PolicyVersion.parse(version)
    with puller.fetch(wanted) as staged:
        assert_holds(staged, wanted.version, **SIZE)
    print("staged", flush=True)


def _publish(address: str, incarnation: str) -> None:
    # a long silence: on a crowded machine nothing is sent twice because it was slow
    sink = WeightClient(address, RUN, "stage-0", role="learner", chunk_bytes=CHUNK_BYTES, silence_s=30.0)
    print("connected", flush=True)
    publish(sink, 0, incarnation=int(incarnation), **SIZE)


if __name__ == "__main__":
    {"serve": _serve, "pull": _pull, "publish": _publish}[sys.argv[1]](*sys.argv[2:])
