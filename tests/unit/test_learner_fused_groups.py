"""Messages of fused passes: on NCCL one group takes them in the order in which they were asked for.

The groups here only have a name; messages between real processes are tested with gloo, which knows no such order.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from learner.config import stage_of
from learner.mesh import MeshPlace
from planning import fused
from planning.fused import NUM_NETWORKS, Work, find_order

M = 8
WORK = (Work(1.0, 2.0), Work(0.75, 1.5))


class Recorded:
    """What a rank asks of its groups, in order."""

    def __init__(self, monkeypatch, num_stages):
        self.asked = []
        self.made = Counter()
        monkeypatch.setattr(fused.dist, "new_group", self._group)
        monkeypatch.setattr(fused.dist, "irecv", lambda tensor, source, group: self._ask("receive", source, group))
        monkeypatch.setattr(fused.dist, "isend", lambda tensor, target, group: self._ask("send", target, group))
        for name, what in (("send", "send"), ("recv", "receive")):
            monkeypatch.setattr(
                fused.dist, name, lambda tensor, other, group, what=what: self._connect(what, other, group)
            )
        self.num_stages = num_stages

    def _group(self, ranks, timeout=None):
        self.made[tuple(ranks)] += 1
        return (*ranks, self.made[tuple(ranks)])

    def _ask(self, what, other, group):
        self.asked.append((what, other, group))
        return SimpleNamespace(wait=lambda: self.asked.append(("wait", what, group)))

    def _connect(self, what, other, group):
        self.connected.append((what, other, group))

    def of(self, rank):
        """The messages of a training pass of one rank; what was said before it is in `connected`."""
        self.asked, self.connected = [], []
        self.made.clear()
        stage = rank % self.num_stages
        place = MeshPlace(rank, num_stages=self.num_stages, num_replicas=2)
        passes = fused.FusedPasses(SimpleNamespace(place=place), WORK, 2 * self.num_stages)
        order = find_order(self.num_stages, M, WORK, 2 * self.num_stages)
        batch = SimpleNamespace(packed=SimpleNamespace(width=2, num_micro_batches=M), tokens_ML=torch.zeros(M, 2))
        lines = []
        for network in range(NUM_NETWORKS):
            at = stage_of(network, stage, self.num_stages)
            share = SimpleNamespace(is_first=at == 0, is_last=at == self.num_stages - 1)
            module = Module(share)
            lines.append(fused._Line(module, batch, passes._groups[network], rank, 1 - 2 * network, trains=True))
        for network, is_backward, micro_batch in order.ranks[stage]:
            if is_backward:
                lines[network].backward(micro_batch, lambda _, outputs: torch.ones_like(outputs))
            else:
                lines[network].forward(micro_batch)
        return self.asked


class Module:
    """A stage that computes next to nothing."""

    hidden_size, states_dtype, device = 1, torch.float32, torch.device("cpu")

    def __init__(self, share):
        self.share = share

    def __call__(self, states, _):
        states = torch.zeros(1, 2, 1, requires_grad=True) if self.share.is_first else states
        return states * 1.0


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_a_send_never_waits_behind_what_is_awaited_from_elsewhere(monkeypatch, num_stages):
    recorded = Recorded(monkeypatch, num_stages)
    asked = {rank: recorded.of(rank) for rank in range(2 * num_stages)}
    for rank, messages in asked.items():
        kinds = {}
        for what, other, group in messages:
            if what != "wait":
                kinds.setdefault(group, set()).add((what, other))
                assert rank in group[:2]
                assert other // num_stages == rank // num_stages, "a message to another replica"
        assert all(len(each) == 1 for each in kinds.values()), f"rank {rank}: {kinds}"
    stages = {rank: messages for rank, messages in asked.items() if rank < num_stages}
    assert ends(stages), "every message that is awaited is one that its sender comes to"


def ends(asked):
    """Do all ranks come to their end where a send, too, waits until it is received (a rendezvous)?

    Of one group a rank's messages run in the order in which it asked for them; a rank goes on unless it waits for one.
    """
    at, queues, over = dict.fromkeys(asked, 0), {}, Counter()
    moved = True
    while moved:
        moved = False
        for rank, messages in asked.items():
            while at[rank] < len(messages):
                what, other, group = messages[at[rank]]
                if what == "wait":
                    # what a rank waits for is the oldest message of its kind in the group
                    if over[rank, group, "waited"] >= over[rank, group, "done"]:
                        break
                    over[rank, group, "waited"] += 1
                else:
                    queues.setdefault((rank, group), []).append((what, other))
                at[rank] += 1
                moved = True
        for (rank, group), queue in queues.items():
            if queue:
                what, other = queue[0]
                theirs = queues.get((other, group), [])
                if theirs and theirs[0] == ("receive" if what == "send" else "send", rank):
                    for one, its in ((rank, queue), (other, theirs)):
                        its.pop(0)
                        over[one, group, "done"] += 1
                    moved = True
    return all(at[rank] == len(messages) for rank, messages in asked.items())


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_every_group_is_connected_before_a_pass_and_in_no_circle(monkeypatch, num_stages):
    recorded = Recorded(monkeypatch, num_stages)
    first, later = {}, {}
    for rank in range(2 * num_stages):
        later[rank] = [message for message in recorded.of(rank) if message[0] != "wait"]
        first[rank] = recorded.connected
        ways = {(what, group) for what, _, group in first[rank]}
        assert ways == {(what, group) for what, _, group in later[rank]}, "a group is used in one direction alone"
    assert meet(first)
    assert meet({rank: first[rank] + later[rank] for rank in first})
    assert not meet(later), "in the pass itself ranks would wait for each other's first message"


def meet(asked):
    """Do all ranks come to their end where the first message in a group waits for that of the other rank?"""
    at, known = dict.fromkeys(asked, 0), set()
    moved = True
    while moved:
        moved = False
        for rank, messages in asked.items():
            if at[rank] == len(messages):
                continue
            _, other, group = messages[at[rank]]
            theirs = asked[other][at[other]] if at[other] < len(asked[other]) else (None, None, None)
            if group not in known and theirs[2] == group:
                known.add(group)
            if group in known:
                at[rank] += 1
                moved = True
    return all(at[rank] == len(messages) for rank, messages in asked.items())
