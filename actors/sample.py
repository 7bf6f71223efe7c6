"""Single answers to prompts: samples to train on, and answers to held-out problems, outside the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from actors.admission import KvSample, SampleKey, admission_of
from actors.config import ActorsConfig
from actors.engine import Engine, EngineDead
from actors.engine_output import Generation
from actors.report import BusyClock, Counts
from actors.rewards import RewardFailed, Scorer
from actors.tasks import Problem
from actors.tasks.task import PromptCodec
from actors.weights import ActorError, WeightFollower
from buffer.ledger import GENERATION_FAILED
from buffer.protocol import Lease
from buffer.schema import HANDED_ON, Prefix, Trajectory
from common.process import wall_time
from common.staleness import PolicyVersion

_log = logging.getLogger(__name__)

GENERATE_TIMEOUT_S = 3600.0
"""A sample that takes longer counts as failed: 32,000 tokens at 9 a second take less. An answer of an evaluation may
take twice that, for it may wait for samples."""
SAMPLED_TEMPERATURE = 1.0
MOST_COLUMN_BYTES = 64 * 2**10
"""Of a row as JSON, which each of its samples carries: unit tests may be megabytes."""


def kept_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that its samples are stored with: without the largest if all are too much."""
    sizes = {name: len(msgspec.json.encode(value)) for name, value in columns.items()}
    kept = dict(columns)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes[each] for each in kept) <= MOST_COLUMN_BYTES:
            break
        del kept[name]
        _say_left_out(name)
    return kept


@cache
def _say_left_out(name: str) -> None:
    _log.warning("column '%s' of some rows is too large to be stored with every sample, and is left out there", name)


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
        """Share of correct among scored answers; None if none was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of one actor for its shard."""

    version: PolicyVersion
    num_problems: int
    greedy: EvalCounts
    sampled: EvalCounts


@dataclass(frozen=True, slots=True)
class Completed:
    """A sample that has left the engine and has no reward yet; or the first tokens of an interrupted one."""

    generation: Generation
    started_s: float
    finished_s: float


class SampleFailed(Exception):
    """This sample failed. The text is the reason that the ledger counts by."""


def sample_seed(run_seed: int, group_id: int, sample_index: int, attempt: int) -> int:
    """Return the seed of one request, 63 bits: the same for the same sample of a run, different for every other."""
    key = f"{run_seed}/{group_id}/{sample_index}/{attempt}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


class SampleMaker:
    """Generates and scores single answers, as many of a kind at once as the engine has slots and room for."""

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
        """`config` bounds number and time, `correct_at` is the least reward of a correct answer."""
        self._run_seed = run_seed
        self._config = config
        self._correct_at = correct_at
        self._engine = engine
        self._follower = follower
        self._scorer = scorer
        self._decoder = decoder
        self.admission = admission_of(config, engine.cache, lambda: engine.num_steps)
        # its own, for samples hold theirs while an evaluation keeps them waiting
        self._evaluation_slots = asyncio.Semaphore(self.admission.num_sure)
        self._started_s: dict[SampleKey, float] = {}
        self.busy = BusyClock()
        self.counts = Counts()

    async def generate(
        self, lease: Lease, problem: Problem, sample_index: int, prefix: Prefix | None, hand_on_at: Callable[[], int]
    ) -> Completed:
        """Generate one sample of a lease, once there is a slot for it: all of it, or what follows its first tokens.

        One that begins here is interrupted at `hand_on_at` tokens, if that says any. SampleFailed if it could not be
        generated, EngineDead if the engine is gone, PolicyTimeout if a policy version never came.
        """
        if prefix is not None and (why := self._engine.ended(prefix)) is not None:
            whole = Generation(prefix.token_ids, prefix.logprobs, prefix.spans, why)
            return Completed(whole, prefix.started_s, wall_time())
        key, sample = self._to_run(lease, problem, sample_index, prefix, hand_on_at())
        generation: Generation | None = None
        await self.admission.admit(key, sample)
        try:
            if prefix is not None:  # no token is of an older version than the one before it
                await self._follower.catch_up(prefix.newest)
            await self._follower.admit(lease.min_version)
            _, sample = self._to_run(lease, problem, sample_index, prefix, hand_on_at())
            self.admission.begin(key, sample)
            started_s = wall_time() if prefix is None else prefix.started_s
            self._started_s[key] = started_s
            self.busy.enter()
            try:
                generation = await self._generate(lease, problem, sample_index, prefix, sample.limit, hand_on_at)
            except EngineDead:
                raise  # what there is of it can still be handed on
            except BaseException:
                del self._started_s[key]
                raise
            finally:
                self.busy.leave()
        finally:
            self._free(key, sample, generation)
        del self._started_s[key]
        self.counts.num_samples += generation.finish_reason != HANDED_ON
        self.counts.num_tokens += len(generation.token_ids) - sample.there
        return Completed(generation, started_s, wall_time())

    def _to_run(
        self, lease: Lease, problem: Problem, sample_index: int, prefix: Prefix | None, hand_on_at: int
    ) -> tuple[SampleKey, KvSample]:
        """Return a sample's key in the engine, and what it may come to hold of the engine's cache."""
        longest, there = self._config.max_new_tokens, 0 if prefix is None else len(prefix.token_ids)
        limit = longest if prefix is not None else min(longest, hand_on_at or longest)
        return (lease.lease_id, sample_index), KvSample(
            lease.group_id, len(problem.token_ids), limit, there, lease.usual_tokens
        )

    def _free(self, key: SampleKey, sample: KvSample, generation: Generation | None) -> None:
        """Free its slot; an interrupted sample says nothing of lengths."""
        num_tokens = 0 if generation is None else len(generation.token_ids)
        is_cut = generation is not None and num_tokens >= sample.limit
        is_over = generation is not None and (generation.finish_reason == "stop" or is_cut)
        self.admission.end(key, num_tokens if is_over else None, is_cut=is_cut)

    def is_in_engine(self, lease: Lease, sample_index: int) -> bool:
        return self._engine.runs((lease.lease_id, sample_index))

    async def interrupt(self, lease: Lease, sample_indices: Iterable[int]) -> None:
        """End samples that are in the engine with their tokens so far; EngineDead if it is gone."""
        await self._engine.interrupt([(lease.lease_id, index) for index in sample_indices])

    def so_far(self, lease: Lease, sample_index: int) -> Completed | None:
        """Return what there is of a sample in the engine, or when that died; None if there is nothing."""
        key = lease.lease_id, sample_index
        generation = self._engine.so_far(key)
        return None if generation is None else Completed(generation, self._started_s[key], wall_time())

    async def score(self, lease: Lease, problem: Problem, sample_index: int, completed: Completed) -> Trajectory:
        """Return the sample with its reward; SampleFailed if a reward function failed."""
        generation = completed.generation
        text = self._decoder.decode(generation.token_ids.tolist())
        try:
            scored = await self._scorer.score(problem, text)
        except RewardFailed as failure:
            raise SampleFailed(str(failure)) from failure
        return replace(
            self.unfinished(lease, problem, sample_index, completed),
            reward=scored.reward,
            finish_reason=generation.finish_reason,
            reward_parts=scored.parts,
            columns=kept_columns(problem.columns),
        )

    def unfinished(self, lease: Lease, problem: Problem, sample_index: int, completed: Completed) -> Trajectory:
        """Return the sample without a reward, to be handed on."""
        generation, prompt = completed.generation, np.array(problem.token_ids, dtype=np.int32)
        return Trajectory(
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            group_id=lease.group_id,
            sample_index=sample_index,
            prompt_id=lease.prompt_id,
            token_ids=np.concatenate((prompt, generation.token_ids)),
            prompt_length=len(prompt),
            logprobs=generation.logprobs,
            spans=generation.spans,
            reward=None,
            finish_reason=HANDED_ON,
            started_s=completed.started_s,
            finished_s=completed.finished_s,
        )

    async def _generate(
        self,
        lease: Lease,
        problem: Problem,
        sample_index: int,
        prefix: Prefix | None,
        limit: int,
        hand_on_at: Callable[[], int],
    ) -> Generation:
        seed = sample_seed(self._run_seed, lease.group_id, sample_index, lease.attempt)
        deadline = asyncio.timeout(GENERATE_TIMEOUT_S)
        try:
            async with deadline:
                key, longest = (lease.lease_id, sample_index), self._config.max_new_tokens
                made = await self._engine.generate(
                    problem.token_ids, max_new_tokens=limit, seed=seed, prefix=prefix, key=key
                )
                if made.finish_reason != "length" or len(made.token_ids) == longest:
                    return made
                if hand_on_at():
                    return replace(made, finish_reason=HANDED_ON)
                # whoever was to go on with it is gone; with the same seed the same chance would come again
                prefix = Prefix(made.token_ids, made.logprobs, made.spans, self._started_s[key])
                seed = sample_seed(self._run_seed, lease.group_id, sample_index, -lease.attempt)
                return await self._engine.generate(problem.token_ids, seed=seed, prefix=prefix, key=key)
        except (ActorError, EngineDead):
            raise
        except Exception as error:  # whatever the engine refuses is this sample's failure, counted by its type
            why = "took too long" if deadline.expired() else type(error).__name__
            _log.error(
                "generation failed: prompt %d, group %d, sample %d: %s (%s)",
                lease.prompt_id, lease.group_id, sample_index, why, error,
            )  # fmt: skip
            raise SampleFailed(f"{GENERATION_FAILED}: {why}") from error

    async def evaluate(self, request: EvalRequest, heldout: Sequence[Problem]) -> EvalResult:
        """Answer one shard of the held-out problems while the weights are held, with the same seeds at every
        evaluation.

        ValueError if the task has fewer problems or no such shard, PolicyTimeout if `min_version` did not arrive in
        time.
        """
        if not 1 <= request.num_problems <= len(heldout):
            raise ValueError(
                f"an evaluation of {request.num_problems} problems: the task holds {len(heldout)} out; "
                "raise task.num_heldout"
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
            # twice: at first samples have the engine's seats, for as long as each of them may take
            async with self._evaluation_slots, asyncio.timeout(2 * GENERATE_TIMEOUT_S):
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
