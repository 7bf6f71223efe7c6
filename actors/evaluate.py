"""Evaluation: held-out accuracy, greedy and sampled, at one policy version and outside the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.engine import EngineDead
from actors.rewards import RewardFailed, Scorer
from actors.sample import sample_seed
from actors.tasks import Problem
from actors.tasks.task import PromptCodec
from actors.weights import ActorError, WeightFollower
from common.staleness import PolicyVersion

if TYPE_CHECKING:
    from actors.config import ActorsConfig
    from actors.engine import Engine

_log = logging.getLogger(__name__)

SAMPLED_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Evaluate every `num_shards`-th of the first `num_problems` held-out problems, from `shard` on."""

    num_problems: int
    shard: int = 0
    num_shards: int = 1
    min_version: PolicyVersion | None = None
    """Wait for this version or a newer one; None takes what the engine serves."""


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """One answer per problem. Shards add up, field by field."""

    num_correct: int = 0
    num_scored: int = 0
    num_failed: int = 0
    """Generation or a reward function failed, or none applied: neither right nor wrong."""

    def __add__(self, other: EvalCounts) -> EvalCounts:
        return EvalCounts(
            self.num_correct + other.num_correct,
            self.num_scored + other.num_scored,
            self.num_failed + other.num_failed,
        )

    @property
    def accuracy(self) -> float | None:
        """Share of correct among scored answers; None where none was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What one actor found for its shard."""

    version: PolicyVersion
    num_problems: int
    greedy: EvalCounts
    sampled: EvalCounts
    """One answer per problem at temperature 1."""


class Evaluator:
    """Answers held-out problems with the engine that also trains, while its weights are held."""

    def __init__(
        self,
        run_seed: int,
        config: ActorsConfig,
        correct_at: float,
        engine: Engine,
        follower: WeightFollower,
        scorer: Scorer,
        decoder: PromptCodec,
    ) -> None:
        """Wire the parts.

        The seed, of the sampled answers, is the same at every evaluation of a run; `correct_at` is the least reward of
        a correct answer.
        """
        self._run_seed = run_seed
        self._config = config
        self._correct_at = correct_at
        self._engine = engine
        self._follower = follower
        self._scorer = scorer
        self._decoder = decoder
        self._slots = asyncio.Semaphore(config.max_running_samples)

    async def evaluate(self, request: EvalRequest, heldout: Sequence[Problem]) -> EvalResult:
        """Answer one shard of the held-out problems.

        Raises:
            ValueError: the request names more problems than there are, or a shard that does not exist.
            PolicyTimeout: `min_version` did not arrive in time.
        """
        if not 1 <= request.num_problems <= len(heldout):
            raise ValueError(
                f"an evaluation of {request.num_problems} problems: the task holds {len(heldout)} out; "
                "lower actors.eval_problems or raise task.num_heldout"
            )
        if not 0 <= request.shard < request.num_shards:
            raise ValueError(f"evaluation shard {request.shard} does not exist: there are {request.num_shards}")
        if request.min_version is not None:
            await self._follower.catch_up(request.min_version)
        indices = range(request.shard, request.num_problems, request.num_shards)
        async with self._follower.held() as version:
            answers = [self._answer(heldout[index], index, temperature) for temperature in (0.0, SAMPLED_TEMPERATURE)
                       for index in indices]  # fmt: skip
            counts = await asyncio.gather(*answers)
        greedy = sum(counts[: len(indices)], EvalCounts())
        sampled = sum(counts[len(indices) :], EvalCounts())
        return EvalResult(version, len(indices), greedy, sampled)

    async def _answer(self, problem: Problem, index: int, temperature: float) -> EvalCounts:
        try:
            async with self._slots, asyncio.timeout(self._config.generate_timeout_s):
                seed = sample_seed(self._run_seed, -1, index, 0) if temperature else None
                completion = await self._engine.generate(problem.token_ids, temperature=temperature, seed=seed)
            scored = await self._scorer.score(problem, self._decoder.decode(completion.token_ids.tolist()))
        except (ActorError, EngineDead):
            raise
        except RewardFailed:  # logged where it failed
            return EvalCounts(num_failed=1)
        except Exception as error:  # one problem that the engine refuses must not lose the others
            _log.error("evaluation of held-out problem %d failed: %s: %s", index, type(error).__name__, error)
            return EvalCounts(num_failed=1)
        if scored.reward is None:
            return EvalCounts(num_failed=1)
        return EvalCounts(int(scored.reward >= self._correct_at), 1)
