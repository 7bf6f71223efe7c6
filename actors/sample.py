"""SampleMaker: one sample from a prompt to a scored trajectory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from actors.config import ActorsConfig
from actors.engine import EngineDead
from actors.report import BusyClock, Counts
from actors.rewards import RewardFailed, Scorer
from actors.tasks import Problem
from actors.tasks.task import PromptCodec
from actors.weights import ActorError, WeightFollower
from buffer.protocol import Lease
from buffer.trajectory import Trajectory

if TYPE_CHECKING:
    from actors.engine import Engine, Generation

_log = logging.getLogger(__name__)


class SampleFailed(Exception):
    """This sample will not come. Its text is the reason that the ledger counts by."""


def sample_seed(run_seed: int, group_id: int, sample_index: int, attempt: int) -> int:
    """The seed of one request: the same for the same sample of a run, different for every other. 63 bits."""
    key = f"{run_seed}/{group_id}/{sample_index}/{attempt}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


class SampleMaker:
    """Generates and scores single samples, at most `max_running_samples` of them in the engine at once."""

    def __init__(
        self,
        run_seed: int,
        config: ActorsConfig,
        engine: Engine,
        follower: WeightFollower,
        scorer: Scorer,
        decoder: PromptCodec,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Wire the parts; `config` bounds number and time."""
        self._run_seed = run_seed
        self._config = config
        self._engine = engine
        self._follower = follower
        self._scorer = scorer
        self._decoder = decoder
        self._wall = wall
        self._slots = asyncio.Semaphore(config.max_running_samples)
        self.busy = BusyClock(wall)
        self.counts = Counts()

    async def make(self, lease: Lease, problem: Problem, sample_index: int) -> Trajectory:
        """Generate and score one sample of a lease.

        Raises:
            SampleFailed: generation or a reward function failed.
            EngineDead: the engine is gone.
            PolicyTimeout: a policy version never came.
        """
        async with self._slots:
            await self._follower.admit(lease.min_version)
            started_s = self._wall()
            self.busy.enter()
            try:
                completion = await self._generate(lease, problem, sample_index)
            finally:
                self.busy.leave()
        finished_s = self._wall()
        self.counts.num_samples += 1
        self.counts.num_tokens += len(completion.token_ids)
        text = self._decoder.decode(completion.token_ids.tolist())
        try:
            scored = await self._scorer.score(problem, text)
        except RewardFailed as failure:
            raise SampleFailed(str(failure)) from failure
        prompt = np.array(problem.token_ids, dtype=np.int32)
        return Trajectory(
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            group_id=lease.group_id,
            sample_index=sample_index,
            prompt_id=lease.prompt_id,
            token_ids=np.concatenate((prompt, completion.token_ids)),
            prompt_length=len(prompt),
            logprobs=completion.logprobs,
            spans=completion.spans,
            reward=scored.reward,
            finish_reason=completion.finish_reason,
            reward_parts=scored.parts,
            columns=problem.columns,
            started_s=started_s,
            finished_s=finished_s,
        )

    async def _generate(self, lease: Lease, problem: Problem, sample_index: int) -> Generation:
        seed = sample_seed(self._run_seed, lease.group_id, sample_index, lease.attempt)
        deadline = asyncio.timeout(self._config.generate_timeout_s)
        try:
            async with deadline:
                return await self._engine.generate(problem.token_ids, seed=seed)
        except (ActorError, EngineDead):
            raise
        except Exception as error:  # whatever the engine refuses is this sample's failure, counted by its type
            why = "took too long" if deadline.expired() else type(error).__name__
            _log.error(
                "generation failed: prompt %d, group %d, sample %d: %s (%s)",
                lease.prompt_id, lease.group_id, sample_index, why, error,
            )  # fmt: skip
            raise SampleFailed(f"generation failed: {why}") from error
