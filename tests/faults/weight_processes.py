"""A weight service, a puller and a stage as processes that can be killed, and a proxy that changes messages.

As a program: `python -m tests.faults.weight_processes serve FOLDER`, `... pull ADDRESS STAGING VERSION NAME` or
`... publish ADDRESS INCARNATION`. Each program uses small chunks, so that a transfer has many chunks.
"""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import zmq
from tests.faults.proxy import Proxy
from tests.weights_by_hand import RUN, assert_holds, publish

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync import client, host_folder, puller
from leeway.weight_sync.client import WeightClient
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.puller import open_puller
from leeway.weight_sync.service import WeightService

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 2**14
WINDOW = 4
UPDATE_TIMEOUT_S = 12.0
SIZE = {"num_tensors": 4, "num_values": 200_000}
"""A version of 3.2 MB in float32: about 200 chunks."""


def config(staging_dir: Path | str) -> WeightSyncConfig:
    """Return the config of the run. Also reduce the chunk size and the update timeout of this process."""
    client.CHUNK_BYTES = CHUNK_BYTES
    puller.UPDATE_TIMEOUT_S = UPDATE_TIMEOUT_S
    host_folder._SHM = Path(staging_dir)
    host_folder._SHM.mkdir(parents=True, exist_ok=True)
    return WeightSyncConfig(transport="network")


class Process:
    """Context manager of a process that runs one of these programs; it is killed on exit."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self.start()

    def start(self) -> None:
        """Start the process (again) and wait for its first line of output."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.weight_processes", *self._arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        killer = threading.Timer(60, self.process.kill)
        killer.start()
        self.printed = self.process.stdout.readline().strip()
        killer.cancel()
        assert self.printed, "the process printed nothing"

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
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
    """A proxy that delays messages slightly, counts the bytes that the service sends, and flips bits."""

    def __init__(self, service_address: str, *, seed: int = 0, max_delay_s: float = 0.004, flips: float = 0.0) -> None:
        """Args:
        service_address: address to which messages are forwarded.
        seed: seed of all random choices.
        max_delay_s: maximum delay of a message, as in `Proxy`.
        flips: share of the messages in which one bit is flipped.
        """
        super().__init__(service_address, seed=seed, max_delay_s=max_delay_s, duplicates=0.0)
        self._flips = flips
        self.num_flipped = 0
        self.sent_bytes = 0
        """Bytes of message bodies that the service sent."""

    def _delay(self, target: zmq.Socket, frames: list[bytes]) -> None:
        # number of frames before the body: identity and header to clients, only the header to the service
        head = 2 if target is self._front else 1
        if target is self._front:
            self.sent_bytes += sum(map(len, frames[head:]))
        if self._chance.random() < self._flips:
            self.num_flipped += 1
            # the last frame is the body, or the header of a message without a body
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
    desired = PolicyVersion.parse(version)
    with puller.fetch(desired) as staged:
        assert_holds(staged, desired.version, **SIZE)
    print("staged", flush=True)


def _publish(address: str, incarnation: str) -> None:
    # the timeout is long, so that a loaded machine does not cause requests to be sent again
    sink = WeightClient(address, RUN, "stage-0", role="learner", chunk_bytes=CHUNK_BYTES, resend_s=30.0)
    print("connected", flush=True)
    publish(sink, 0, incarnation=int(incarnation), **SIZE)


if __name__ == "__main__":
    {"serve": _serve, "pull": _pull, "publish": _publish}[sys.argv[1]](*sys.argv[2:])
