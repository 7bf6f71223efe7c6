"""ReferenceScorer: log-probabilities of the frozen reference, computed away from the learner, forward only.

It takes samples of ready groups from the buffer and writes scores back. Nobody waits for it: what it has taken and not
written is handed out again after a while, and what is unscored when its step begins the step scores.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from buffer.schema import read_stream
from buffer.sharding.client import open_client
from common.run import RunContext
from learner.config import LearnerSections
from learner.device import device_of, settle
from learner.mesh import Mesh, MeshPlace
from learner.reference import build_reference
from learner.stage import packing_rule

_POLL_S = 0.05
"""How long it waits before it asks again where nothing was to be scored."""


class ReferenceScorer:
    """One scorer; any number of them share the work."""

    def __init__(self, context: RunContext[LearnerSections], number: int) -> None:
        """Load the reference and meet the buffer service.

        Args:
            context: of the run; its `learner` section that of a rank alone.
            number: of this scorer, which no other has.

        Raises:
            BufferUnavailable: the service does not answer.
            BufferRefused: it serves another run.
        """
        config = context.config.learner
        device = device_of(config, 0)
        settle(config, device)
        # the pipeline's schedules want a process group; of one rank it needs no address
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self._reference = build_reference(context, Mesh.build(MeshPlace(0)), device)
        self._rule = packing_rule(context)
        self._client = open_client(
            context.buffer_addresses,
            run_id=context.facts.run_id,
            role="scorer",
            name=f"scorer-{number}",
            config=context.config.buffer,
            keys=context.keys,
        )
        self._client.connect()

    def run(self) -> None:
        """Score until its process ends, a micro-batch at a time.

        Raises:
            BufferUnavailable: the service did not answer for `buffer.give_up_after_s`.
        """
        try:
            while True:
                taken: Any = self._client.take_unscored(self._rule.token_budget).result()
                if not taken.record_ids:
                    time.sleep(_POLL_S)
                    continue
                scores = self._reference.score_ahead(read_stream(taken.body), self._rule)
                self._client.write_scores(taken.record_ids, scores).result()
        finally:
            self._client.close(1.0)
            dist.destroy_process_group()
