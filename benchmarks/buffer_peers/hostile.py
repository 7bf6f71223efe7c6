"""Training beside a hostile client: draws and pushes of honest clients while another floods the service.

The honest ones go through the cycle of a run (lease, push, draw, finish, publish, checkpoint) as fast as they can, one
after the other, at the default durability. The hostile one is a process of its own that sends, in equal parts, bytes
that are no message, requests of somebody who was never greeted, and requests that are not for its role. It is stopped
and continued by turns, and the ratio is of neighbouring windows. It shares the cores with everybody else, so its own
work is in the ratio too.
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
from buffer import protocol as p
from buffer.client import BufferClient
from common.rpc.messages import Asker

MESSAGES_PER_S = 5000
GROUPS_PER_STEP = 16
WORKLOAD_TRAJECTORIES = 4096
WINDOW_S = 1.0
NUM_PAIRS = {True: 6, False: 20}
SETTLE_S = 0.2
BURST_S = 0.01
INSIDER = Asker("insider", "actor", "hostile")


def measure(quick: bool, folder: Path) -> Figures:
    """The rate of honest trajectories, pushed and drawn, with the flood over without it."""
    work = Workload.make(WORKLOAD_TRAJECTORIES)
    with Service(folder / "store", facts_for(GROUPS_PER_STEP), config_for()) as service:
        learner, actor = service.begin(), service.client("actor-0")
        training = _Training(learner, actor, work)
        told = {"address": service.address, "per_s": MESSAGES_PER_S}
        flood = subprocess.Popen(command_of(f"{__name__}:flood", told), stdout=subprocess.DEVNULL)
        try:
            rates = _rates(training, flood, NUM_PAIRS[quick])
        finally:
            flood.kill()
            flood.wait(PATIENCE_S)
            training.end()
        refused = sum(each.count for each in actor.status().result(PATIENCE_S).nonsense.values())
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
    """Send hostile messages at a steady rate, and throw the answers away, for ever."""
    stranger = Asker("nobody", "learner", "guess")
    said = [
        b"\x00" * 200,
        p.encode(1, p.BeginIncarnation("x", 0, 0), run_id=RUN_ID, asker=stranger),
        p.encode(2, p.Drain(), run_id=RUN_ID, asker=INSIDER),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        hostile.connect(address)
        hostile.send(p.encode(0, p.Hello(INSIDER.role, INSIDER.name, INSIDER.session), run_id=RUN_ID, asker=INSIDER))
        number, due = 0, time.monotonic()
        while True:
            for _ in range(round(per_s * BURST_S)):
                hostile.send(said[number % len(said)])
                number += 1
            while hostile.poll(0):
                hostile.recv_multipart()
            due = max(due, time.monotonic() - 10 * BURST_S) + BURST_S  # what it slept through is not made up for
            time.sleep(max(0.0, due - time.monotonic()))


class _Training:
    """The cycle of a run, in a thread."""

    def __init__(self, learner: BufferClient, actor: BufferClient, work: Workload) -> None:
        self._learner, self._actor, self._work = learner, actor, work
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.num_trained = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Stop after the step at hand.

        Raises:
            RuntimeError: a step failed.
        """
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._error is not None:
            raise RuntimeError("training beside the hostile client failed") from self._error

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
        for told in (
            self._learner.step_finished(step, step),
            self._learner.published(0, step),
            self._learner.checkpoint_durable(step),
        ):
            told.result(PATIENCE_S)
        self.num_trained += len(rows)


def _rates(training: _Training, flood: subprocess.Popen[bytes], num_pairs: int) -> list[tuple[float, float]]:
    """Pairs of rates: without and with the flood."""
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
