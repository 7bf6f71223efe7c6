"""Several buffer services, each a process: one is killed or stopped, the others go on, and nothing is lost."""

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buffer.errors import BufferUnavailable
from buffer.sharding.client import PATIENCE_S, open_client
from common.staleness import PolicyVersion, StalenessConfig, effective_version
from tests.faults.service_process import CONFIG, FACTS, Kept, Service, sample, sample_tokens
from tests.trajectories import decode
from tests.world.waiting import bound, wait_until

RUN = FACTS.model_copy(update={"staleness": StalenessConfig(max_lag=4)})
DOWN_S = 5.0


class ShardedRun:
    """Services, two actors in threads, and a learner that the test drives step by step."""

    def __init__(self, folder: Path, num_shards: int = 3) -> None:
        self.services = [
            Service(
                folder / f"shard-{shard}",
                RUN.model_copy(update={"shard": shard, "num_shards": num_shards}),
                CONFIG.model_copy(update={"shards": num_shards}),
            )
            for shard in range(num_shards)
        ]
        self.clients = []
        self.outcomes = []
        self.errors = []
        self.steps = {}
        """Step -> (group ids, record ids)."""
        self.gap = 0
        self._stop = threading.Event()
        self._actors = [
            threading.Thread(target=self._act, args=(self.client("actor", f"actor-{number}"),)) for number in range(2)
        ]
        self.learner = None

    def client(self, role, name):
        addresses = [service.address for service in self.services]
        client = open_client(addresses, run_id="killed", role=role, name=name, config=CONFIG)
        self.clients.append(client)
        client.connect()
        return client

    def start(self) -> "ShardedRun":
        for actor in self._actors:
            actor.start()
        return self

    def begin(self, step: int = 0) -> None:
        """Begin with a new learner that has finished so many steps."""
        self.learner = self.client("learner", "learner")
        reply = self.learner.begin_incarnation(step, step).result(60)
        self.incarnation, self.resumed_at = reply.incarnation, reply.resumed_at
        self.step = step
        self.learner.published(self.incarnation, step).result(60)

    def train(self, num_steps: int = 1, timeout_s: float = 40.0) -> float:
        """Seconds that so many steps took."""
        began = time.monotonic()
        for _ in range(num_steps):
            batch = self.draw(timeout_s)
            self.step += 1
            self.steps[self.step] = batch.group_ids, batch.record_ids
            self.learner.step_finished(self.step, self.step).result(60)
            self.learner.published(self.incarnation, self.step).result(60)
        return time.monotonic() - began

    def draw(self, timeout_s: float = 40.0):
        deadline = time.monotonic() + timeout_s
        while True:
            batch = self.learner.draw(self.step + 1, self.step, self.incarnation, RUN.groups_per_step, 0.5).result(60)
            self.gap = max(self.gap, batch.ledger["gap"])
            if batch.ready:
                break
            if self.errors:
                raise self.errors[0]
            assert time.monotonic() < deadline, batch.waiting_for
        for row in decode(batch.body):
            key = row.group_id, row.sample_index
            assert np.array_equal(row.token_ids, sample_tokens(key, len(row.token_ids)))
            assert self.step - effective_version(row.spans[0].version, self.resumed_at) <= 4
        return batch

    def shards_of(self, step: int) -> set[int]:
        return {group % len(self.services) for group in self.steps[step][0]}

    def end(self) -> None:
        """Stop the actors and the services, and check everything that was promised."""
        self._stop.set()
        for actor in self._actors:
            actor.join(60)
        if self.errors:
            raise self.errors[0]
        self.train_is_told()
        status = self.learner.status().result(60)
        assert status.silent_shards == []
        assert max(self.gap, status.ledger["gap"]) == 0
        trained = [group for groups, _ in self.steps.values() for group in groups]
        assert len(trained) == len(set(trained)), "a group is in two steps"
        self.close()
        acknowledged = {key for key, outcome in self.outcomes if outcome in ("committed", "duplicate")}
        committed = 0
        for shard, service in enumerate(self.services):
            kept = Kept.read(service.folder)
            kept.check({key for key in acknowledged if key[0] % len(self.services) == shard})
            committed += kept.report["ledger"]["committed"]
        assert committed == status.ledger["committed"]
        assert status.ledger["trained"] >= sum(len(records) for _, records in self.steps.values())

    def train_is_told(self) -> None:
        """Every shard knows of every step."""
        wait_until(lambda: not any(shard.untold for shard in self.learner._shards), "hearing of all steps")

    def close(self) -> None:
        self._stop.set()
        for client in self.clients:
            client.close(0.5)
        for actor in self._actors:
            if actor.ident is not None:
                actor.join(60)
        for service in self.services:
            service.close()

    def _act(self, client) -> None:
        """Like an actor's loop: what one shard has not answered holds up no sample of another."""
        pushed = []
        try:
            while not self._stop.is_set():
                grant = client.lease(4).result(60)
                for lease in grant.leases:
                    version = PolicyVersion(grant.newest[0], lease.min_version)
                    rows = [sample(lease, index) for index in lease.sample_indices]
                    rows = [replace(row, spans=(replace(row.spans[0], version=version),)) for row in rows]
                    pushed += [((row.group_id, row.sample_index), client.push(row)) for row in rows]
                time.sleep(0.002 if grant.leases else 0.01)
            self.outcomes += [(key, future.result(60).outcome) for key, future in pushed]
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture
def run(tmp_path):
    made = []

    def start(**arguments):
        made.append(ShardedRun(tmp_path / "buffer", **arguments))
        made[-1].begin()
        return made[-1].start()

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            signal.SIGKILL, marks=pytest.mark.fault(1, "kill -9 of one of three shards, which stays down 5 s")
        ),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.fault(13, "one of three shards stopped for 5 s", full=True)),
    ],
)
def test_while_one_shard_is_down_the_others_train_on_and_it_comes_back_with_all_it_had(run, number, show):
    run = run()
    run.train(4)
    assert any(1 in run.shards_of(step) for step in run.steps), "shard 1 never had a part"
    service = run.services[1]
    service.signal(number)
    if number == signal.SIGKILL:
        service.wait()
    down_at = time.monotonic()
    first = run.step + 1
    # The first step notices; a group of it may have to be generated elsewhere.
    assert run.train(1) < bound(PATIENCE_S + 2.0)
    while time.monotonic() < down_at + DOWN_S or run.step <= first + 5:
        run.train(1)
    assert time.monotonic() < down_at + bound(DOWN_S + 1.0), "training stood still"
    assert all(1 not in run.shards_of(step) for step in range(first, run.step + 1))
    wait_until(lambda: run.learner.status().result(60).silent_shards == [1], "shard 1 alone to be silent")
    show(f"{run.step - first + 1} steps of the others meanwhile")
    if number == signal.SIGKILL:
        service.start()
    else:
        service.signal(signal.SIGCONT)
    back_at = run.step
    while all(1 not in run.shards_of(step) for step in range(back_at + 1, run.step + 1)):
        run.train(1)
        assert run.step < back_at + 400, "shard 1 did not come back"
    run.train(2)
    run.end()


@pytest.mark.fault(13, "steps wait for a shard that is down", control=True)
def test_where_a_shard_that_is_down_is_not_left_out_training_stands_still(run, show):
    run = run()
    run.train(2)
    for shard in run.learner._shards:
        shard._patience_s = 1e9
    run.services[1].signal(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            run.learner.draw(run.step + 1, run.step, run.incarnation, RUN.groups_per_step, 0.5).result(DOWN_S)
    finally:
        run.services[1].signal(signal.SIGCONT)
    show("no step in 5 s")


@pytest.mark.fault(1, "kill -9 of three shards in turn, 12x under load", full=True)
def test_shards_that_are_killed_in_turn_and_started_again_lose_nothing(run, show):
    run = run()
    over = threading.Event()
    failed = []

    def train() -> None:
        try:
            while not over.is_set():
                run.train(1)
        except BaseException as error:
            failed.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for kill in range(12):
            time.sleep(0.7)
            service = run.services[kill % 3]
            service.kill()
            service.start()  # here, for a service ends with the thread that started it
            assert not failed, failed
    finally:
        over.set()
        trainer.join(60)
    assert not failed
    assert run.step >= 10
    run.train(1)
    run.end()
    show(f"{run.step} steps, {len(run.outcomes)} samples acknowledged, 0 lost, 0 twice")


@pytest.mark.fault(15, "kill -9 of the learner between the draws of two shards")
def test_a_learner_killed_between_two_shards_is_followed_by_one_that_draws_the_same(run, show):
    run = run(num_shards=2)
    script = Path(__file__).with_name("shard_learner_process.py")
    addresses = [service.address for service in run.services]
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, script, *addresses, "3"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        cwd=root,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL
    first, second, part = map(json.loads, killed.stdout.splitlines())
    run.begin()
    run.train(3)
    assert run.incarnation == 2
    assert [run.steps[1][1], run.steps[2][1]] == [first, second]
    redone = run.steps[3][1]
    assert [record for record in redone if record % 2 == 0] == part
    assert len(redone) == RUN.groups_per_step * RUN.group_size
    run.train(3)
    run.end()
    show("three steps redone as they were recorded")


def test_a_shard_that_stays_down_ends_the_wait_with_its_name(run):
    run = run()
    for shard in [client._shards[2] for client in run.clients]:
        shard._patience_s, transport = 0.5, shard.client._transport
        transport._patience = replace(transport._patience, give_up_s=4.0)
    run.train(2)
    run.services[2].kill()
    began = time.monotonic()
    with pytest.raises(BufferUnavailable, match=f"shard 2: the buffer service at {run.services[2].address}"):
        run.train(100_000)
    assert 3.0 < time.monotonic() - began < bound(12.0)
    assert run.step > 2, "the others did not go on meanwhile"
