"""Throughput of honest clients while a hostile client floods the buffer service.

The honest clients run the cycle of a training run (lease, push, draw, finish, publish, checkpoint) sequentially and as
fast as possible, at the default durability. The hostile client is a separate process that sends, in equal parts,
malformed bytes, requests of an unauthenticated client, and requests that its role does not permit. The hostile client
is alternately stopped and continued, and each ratio compares the rates of two adjacent windows. All processes share the
cores, so the ratio includes the CPU use of the hostile client.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path

import zmq
from benchmarks.buffer_peers.leeway import open_batch, push_all
from benchmarks.buffer_peers.service import RUN_ID, Service, config_for, facts_for, lease_all
from benchmarks.buffer_peers.workload import GROUP_SIZE, PATIENCE_S, Figures, Workload
from benchmarks.lib.processes import command_of

from leeway.buffer import protocol as p
from leeway.buffer.client import BufferClient
from leeway.common.rpc.messages import ClientIdentity

MESSAGES_PER_S = 5000
GROUPS_PER_STEP = 16
WORKLOAD_TRAJECTORIES = 4096
WINDOW_S = 1.0
NUM_PAIRS = {True: 6, False: 20}
SETTLE_S = 0.2
BURST_S = 0.01
INSIDER = ClientIdentity("insider", "actor", "hostile")


def measure(quick: bool, folder: Path) -> Figures:
    """Measure how fast honest clients push and draw trajectories, with and without the flood of hostile messages."""
    work = Workload.make(WORKLOAD_TRAJECTORIES)
    with Service(folder / "store", facts_for(GROUPS_PER_STEP), config_for()) as service:
        learner, actor = service.begin(), service.client("actor-0")
        training = _Training(learner, actor, work)
        arguments = {"address": service.address, "per_s": MESSAGES_PER_S}
        flood = subprocess.Popen(command_of(f"{__name__}:flood", arguments), stdout=subprocess.DEVNULL)
        try:
            rates = _rates(training, flood, NUM_PAIRS[quick])
        finally:
            flood.kill()
            flood.wait(PATIENCE_S)
            training.end()
        refused = sum(each.count for each in actor.status().result(PATIENCE_S).invalid_messages.values())
        actor.close()
        learner.close()
    seconds = NUM_PAIRS[quick] * (WINDOW_S + SETTLE_S)
    return {
        "hostile_over_quiet": statistics.median(hostile / quiet for quiet, hostile in rates),
        "quiet_per_s": statistics.median(quiet for quiet, _ in rates),
        "hostile_per_s": statistics.median(hostile for _, hostile in rates),
        "refused_per_s": refused / seconds,
    }


def flood(address: str, per_s: int) -> None:
    """Send hostile messages at a constant rate until killed, and discard the replies."""
    stranger = ClientIdentity("stranger", "learner", "guess")
    messages = [
        b"\x00" * 200,
        p.encode(1, p.BeginIncarnation("x", 0, 0), run_id=RUN_ID, client=stranger),
        p.encode(2, p.Drain(), run_id=RUN_ID, client=INSIDER),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        hostile.connect(address)
        hostile.send(p.encode(0, p.Hello(INSIDER.role, INSIDER.name, INSIDER.session), run_id=RUN_ID, client=INSIDER))
        number, due = 0, time.monotonic()
        while True:
            for _ in range(round(per_s * BURST_S)):
                hostile.send(messages[number % len(messages)])
                number += 1
            while hostile.poll(0):
                hostile.recv_multipart()
            due = max(due, time.monotonic() - 10 * BURST_S) + BURST_S  # after a stop, do not send the missed bursts
            time.sleep(max(0.0, due - time.monotonic()))


class _Training:
    """Thread that runs the cycle of a training run."""

    def __init__(self, learner: BufferClient, actor: BufferClient, work: Workload) -> None:
        self._learner, self._actor, self._work = learner, actor, work
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.num_trained = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Stop after the current step.

        Raises:
            RuntimeError: a step failed.
        """
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._error is not None:
            raise RuntimeError("training during the hostile flood failed") from self._error

    def _run(self) -> None:
        try:
            step = 0
            while not self._stop.is_set():
                step += 1
                self._train(step)
        except BaseException as error:
            self._error = error

    def _train(self, step: int) -> None:
        leases = lease_all(self._actor, GROUPS_PER_STEP)
        samples = [(lease, index) for lease in leases for index in lease.sample_indices]
        first = (step - 1) * len(samples)
        rows = [self._work.trajectory((first + i) % len(self._work), *each) for i, each in enumerate(samples)]
        push_all(self._actor, rows)
        draw = self._learner.draw(step, step - 1, 0, GROUPS_PER_STEP, PATIENCE_S).result(PATIENCE_S)
        if not draw.ready or open_batch(draw.body) != GROUPS_PER_STEP * GROUP_SIZE:
            raise RuntimeError(f"step {step} cannot be drawn: {draw.waiting_for}")
        for future in (
            self._learner.step_finished(step, step),
            self._learner.published(0, step),
            self._learner.checkpoint_durable(step),
        ):
            future.result(PATIENCE_S)
        self.num_trained += len(rows)


def _rates(training: _Training, flood: subprocess.Popen[bytes], num_pairs: int) -> list[tuple[float, float]]:
    """Return pairs of rates: the first without the flood, the second with the flood."""
    rates = []
    for _ in range(num_pairs):
        pair = []
        for number in (signal.SIGSTOP, signal.SIGCONT):
            flood.send_signal(number)
            time.sleep(SETTLE_S)
            before, began = training.num_trained, time.monotonic()
            time.sleep(WINDOW_S)
            pair.append((training.num_trained - before) / (time.monotonic() - began))
        rates.append((pair[0], pair[1]))
    return rates
