"""Fused passes have no deadlock on NCCL, which executes the messages of a group in the order in which they are issued.

The groups of these tests are only names. Tests with real processes use gloo, which imposes no order on messages.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from leeway.learner.config import stage_of
from leeway.learner.mesh import MeshPlace
from leeway.planning import fused
from leeway.planning.fused import NUM_NETWORKS, StageCost, find_schedule

M = 8
WORK = (StageCost(1.0, 2.0), StageCost(0.75, 1.5))


class Recorded:
    """Recorder of the messages that a rank issues to its groups, in order."""

    def __init__(self, monkeypatch, num_stages):
        self.issued = []
        self.num_created = Counter()
        monkeypatch.setattr(fused.dist, "new_group", self._group)
        monkeypatch.setattr(fused.dist, "irecv", lambda tensor, source, group: self._issue("receive", source, group))
        monkeypatch.setattr(fused.dist, "isend", lambda tensor, target, group: self._issue("send", target, group))
        for name, kind in (("send", "send"), ("recv", "receive")):
            monkeypatch.setattr(
                fused.dist, name, lambda tensor, other, group, kind=kind: self._connect(kind, other, group)
            )
        self.num_stages = num_stages

    def _group(self, ranks, timeout=None):
        self.num_created[tuple(ranks)] += 1
        return (*ranks, self.num_created[tuple(ranks)])

    def _issue(self, kind, other, group):
        self.issued.append((kind, other, group))
        return SimpleNamespace(wait=lambda: self.issued.append(("wait", kind, group)))

    def _connect(self, kind, other, group):
        self.connected.append((kind, other, group))

    def of(self, rank):
        """Return the messages of one rank's training pass; messages sent before the pass are in `connected`."""
        self.issued, self.connected = [], []
        self.num_created.clear()
        stage = rank % self.num_stages
        place = MeshPlace(rank, num_stages=self.num_stages, num_replicas=2)
        passes = fused.FusedPasses(SimpleNamespace(place=place), WORK, 2 * self.num_stages)
        order = find_schedule(self.num_stages, M, WORK, 2 * self.num_stages)
        batch = SimpleNamespace(packed=SimpleNamespace(width=2, num_micro_batches=M), tokens_ML=torch.zeros(M, 2))
        lines = []
        for network in range(NUM_NETWORKS):
            at = stage_of(network, stage, self.num_stages)
            share = SimpleNamespace(is_first=at == 0, is_last=at == self.num_stages - 1)
            module = Module(share)
            lines.append(fused._NetworkPass(module, batch, passes._groups[network], rank, 1 - 2 * network, trains=True))
        for network, is_backward, micro_batch in order.ranks[stage]:
            if is_backward:
                lines[network].backward(micro_batch, lambda _, outputs: torch.ones_like(outputs))
            else:
                lines[network].forward(micro_batch)
        return self.issued


class Module:
    """A stage with almost no computation."""

    hidden_size, states_dtype, device = 1, torch.float32, torch.device("cpu")

    def __init__(self, share):
        self.share = share

    def __call__(self, states, _):
        states = torch.zeros(1, 2, 1, requires_grad=True) if self.share.is_first else states
        return states * 1.0


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_a_send_never_queues_behind_a_receive_from_another_rank(monkeypatch, num_stages):
    recorded = Recorded(monkeypatch, num_stages)
    issued = {rank: recorded.of(rank) for rank in range(2 * num_stages)}
    for rank, messages in issued.items():
        kinds = {}
        for kind, other, group in messages:
            if kind != "wait":
                kinds.setdefault(group, set()).add((kind, other))
                assert rank in group[:2]
                assert other // num_stages == rank // num_stages, "a message leaves its replica"
        assert all(len(each) == 1 for each in kinds.values()), f"rank {rank}: {kinds}"
    stages = {rank: messages for rank, messages in issued.items() if rank < num_stages}
    assert completes(stages), "every rank receives the messages that it waits for"


def completes(issued):
    """Return whether all ranks complete if a send ends only when its message is received (a rendezvous).

    A group executes the messages of a rank in the order in which they are issued; a rank blocks only in a wait.
    """
    at, queues, finished = dict.fromkeys(issued, 0), {}, Counter()
    moved = True
    while moved:
        moved = False
        for rank, messages in issued.items():
            while at[rank] < len(messages):
                kind, other, group = messages[at[rank]]
                if kind == "wait":
                    # a rank waits for its oldest pending message in the group
                    if finished[rank, group, "waited"] >= finished[rank, group, "done"]:
                        break
                    finished[rank, group, "waited"] += 1
                else:
                    queues.setdefault((rank, group), []).append((kind, other))
                at[rank] += 1
                moved = True
        for (rank, group), queue in queues.items():
            if queue:
                kind, other = queue[0]
                theirs = queues.get((other, group), [])
                if theirs and theirs[0] == ("receive" if kind == "send" else "send", rank):
                    for one, its in ((rank, queue), (other, theirs)):
                        its.pop(0)
                        finished[one, group, "done"] += 1
                    moved = True
    return all(at[rank] == len(messages) for rank, messages in issued.items())


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_every_group_is_connected_before_a_pass_without_a_deadlock(monkeypatch, num_stages):
    recorded = Recorded(monkeypatch, num_stages)
    first, later = {}, {}
    for rank in range(2 * num_stages):
        later[rank] = [message for message in recorded.of(rank) if message[0] != "wait"]
        first[rank] = recorded.connected
        directions = {(kind, group) for kind, _, group in first[rank]}
        assert directions == {(kind, group) for kind, _, group in later[rank]}, "a group has one direction"
    assert connects(first)
    assert connects({rank: first[rank] + later[rank] for rank in first})
    assert not connects(later), "without connecting first, the first messages of a pass deadlock"


def connects(issued):
    """Return whether all ranks complete if the first message of a group waits for the first one of the other rank."""
    at, connected = dict.fromkeys(issued, 0), set()
    moved = True
    while moved:
        moved = False
        for rank, messages in issued.items():
            if at[rank] == len(messages):
                continue
            _, other, group = messages[at[rank]]
            theirs = issued[other][at[other]] if at[other] < len(issued[other]) else (None, None, None)
            if group not in connected and theirs[2] == group:
                connected.add(group)
            if group in connected:
                at[rank] += 1
                moved = True
    return all(at[rank] == len(messages) for rank, messages in issued.items())
