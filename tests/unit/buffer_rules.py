"""What the tests of the buffer's rules share: a small run, an actor, and a buffer under a virtual clock."""

from tests.in_process_buffer import make_trajectory
from tests.run_context import run_facts


def facts(**changes):
    return run_facts(**{"run_id": "r", "seed": 7, "num_prompts": 10, "group_size": 2, **changes})


class Actor:
    """Generates what it is told to, with sequence numbers of its own."""

    def __init__(self, buffer, name="actor-0", session="1"):
        self.buffer, self.name, self.seq = buffer, name, 0
        self.epoch = buffer.hello(name, session).epoch

    def lease(self, max_groups=100):
        return self.buffer.lease(self.name, max_groups, epoch=self.epoch)

    def rows(self, lease, indices=None, **fields):
        rows = []
        for index in lease.sample_indices if indices is None else indices:
            rows.append(make_trajectory(lease, index, seq=self.seq, actor=self.name, epoch=self.epoch, **fields))
            self.seq += 1
        return rows

    def work(self, lease, indices=None, **fields):
        return self.buffer.push(self.rows(lease, indices, **fields))


def run_steps(buffer, actor, steps):
    drawn = {}
    for step in steps:
        for lease in actor.lease():
            actor.work(lease)
        reply, _ = buffer.draw(step, step - 1)
        assert reply.ready
        drawn[step] = reply.record_ids
        buffer.finish(step, step)
        buffer.publish(step)
    return drawn


def generate(buffer, actor, num_groups, rewards=(1.0,), tokens=4, version=None):
    """Complete groups, each of these rewards (the last one repeated) and this length; their ids."""
    done = []
    while len(done) < num_groups:
        leases = actor.lease(num_groups - len(done))
        assert leases, "admission is closed"
        for lease in leases:
            for index in lease.sample_indices:
                reward = rewards[min(index, len(rewards) - 1)]
                actor.work(lease, [index], reward=reward, num_completion_tokens=tokens, version=version)
            done.append(lease.group_id)
    return done


def train(buffer, step, *, incarnation=0, publish=True):
    """One whole step at version step - 1; the reply to its draw."""
    reply, _ = buffer.draw(step, step - 1, incarnation=incarnation)
    assert reply.ready, reply.waiting_for
    buffer.finish(step, step, incarnation=incarnation)
    if publish:
        buffer.publish(step, incarnation)
    return reply
