"""Channel: how the lead stage hands each batch to the others, as the raw bytes it drew.

A message is a header of two integers (kind, length) and `length` bytes, both broadcast by the lead.
While the lead waits for a batch it sends a heartbeat every second, so a dead lead is noticed soon
although a batch may take long.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from learner.mesh import Place

HEARTBEAT_S = 1.0

_SIGNS_OF_LOSS = ("gloo", "pair closure", "Connection closed by peer", "NCCL")
"""In what the communication library says when another rank is gone or silent."""
_SIGNS_OF_MISUSE = ("Duplicate GPU detected", "invalid usage", "ncclInvalidUsage", "ncclInvalidArgument")
"""In what NCCL says of ranks that it cannot serve as they are placed: started again, they would hear it again."""


class Kind(IntEnum):
    """What the lead says."""

    WAITING = 0
    BATCH = 1
    STOP = 2
    FAILED = 3
    PUBLISH = 4
    """Publish the version that you have: it was left out before, for earlier ones were still being written."""


class LeadFailed(RuntimeError):
    """The lead gave up; the text is its error."""


class StageLost(RuntimeError):
    """Another rank died or did not answer in time."""


def tells_of_loss(error: RuntimeError) -> bool:
    """Does an error say that another rank is gone or silent, so that a new start may help?"""
    text = str(error)
    if any(sign in text for sign in _SIGNS_OF_MISUSE):
        return False
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS_OF_LOSS)


class Channel:
    """One direction: `send` on the lead, `receive` on every other stage, in the same order."""

    def __init__(self, place: Place) -> None:
        """Speak over the default process group; its timeout bounds every wait."""
        self._lead = place.lead
        self._is_lead = place.is_lead
        self._alone = place.num_ranks == 1

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Say something to all other stages."""
        assert self._is_lead, "only the lead stage speaks"
        if self._alone:
            return
        dist.broadcast(torch.tensor([int(kind), len(payload)]), src=self._lead)
        if payload:
            # a copy, for torch warns of a tensor over read-only memory
            dist.broadcast(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()), src=self._lead)

    def receive(self) -> tuple[Kind, bytes]:
        """The lead's next batch, its word to stop or to publish; heartbeats are passed over.

        Raises:
            LeadFailed: the lead gave up, for example because no batch came in time.
        """
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, src=self._lead)
            kind, length = Kind(int(header[0])), int(header[1])
            payload = torch.zeros(length, dtype=torch.uint8)
            if length:
                dist.broadcast(payload, src=self._lead)
            if kind is Kind.FAILED:
                raise LeadFailed(f"the lead, rank {self._lead}, gave up: {payload.numpy().tobytes().decode()}")
            if kind is not Kind.WAITING:
                return kind, payload.numpy().tobytes()
