"""Single answers to prompts: samples to train on, and answers to held-out problems, outside the ledger.

SampleMaker  generates and scores them
HeldLease    a lease and its samples
HandingOn    requeues unfinished samples with their tokens, or has the buffer keep what there is of them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np

from actors.config import ActorsConfig, KvSample, admission_of
from actors.engine import Engine, EngineDead, RequestKey
from actors.engine_output import Generation
from actors.report import BusyClock, Counts, EvalCounts, EvalRequest, EvalResult
from actors.rewards import RewardFailed, Scorer
from actors.tasks import Problem
from actors.tasks.task import PromptCodec
from actors.weights import ActorError, WeightFollower
from buffer.client import BufferClient, Granted
from buffer.ledger import GENERATION_FAILED
from buffer.protocol import Lease
from buffer.schema import HANDED_ON, Prefix, Trajectory
from common.process import wall_time

_log = logging.getLogger(__name__)

R = TypeVar("R")

GENERATE_TIMEOUT_S = 3600.0
"""A sample that takes longer counts as failed: 32,000 tokens at 9 a second take less. An answer of an evaluation may
take twice that, for it may wait for samples."""
SAMPLED_TEMPERATURE = 1.0
KEEP_EVERY_S = 300.0
"""Seconds between two saves of partial rollouts in the buffer; bounds what a killed actor loses."""
GOODBYE_S = 5.0
"""Bound of letting go of all that is held."""
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
        self.engine = engine
        self._follower = follower
        self._scorer = scorer
        self._decoder = decoder
        self.admission = admission_of(config, engine.stats.cache, lambda: engine.stats.num_steps)
        # its own, for samples hold theirs while an evaluation keeps them waiting
        self._evaluation_slots = asyncio.Semaphore(self.admission.num_sure)
        self._started_s: dict[RequestKey, float] = {}
        self.busy = BusyClock()
        self.counts = Counts()

    async def generate(
        self, lease: Lease, problem: Problem, sample_index: int, prefix: Prefix | None, hand_on_at: Callable[[], int]
    ) -> Completed:
        """Generate one sample of a lease, once there is a slot for it: all of it, or what follows its first tokens.

        One that begins here is interrupted at `hand_on_at` tokens, if that says any. SampleFailed if it could not be
        generated, EngineDead if the engine is gone, PolicyTimeout if a policy version never came.
        """
        if prefix is not None and (why := self.engine.ended(prefix)) is not None:
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
    ) -> tuple[RequestKey, KvSample]:
        """Return a sample's key in the engine, and what it may come to hold of the engine's cache."""
        longest, there = self._config.max_new_tokens, 0 if prefix is None else len(prefix.token_ids)
        limit = longest if prefix is not None else min(longest, hand_on_at or longest)
        return (lease.lease_id, sample_index), KvSample(
            lease.group_id, len(problem.token_ids), limit, there, lease.usual_tokens
        )

    def _free(self, key: RequestKey, sample: KvSample, generation: Generation | None) -> None:
        """Free its slot; an interrupted sample says nothing of lengths."""
        num_tokens = 0 if generation is None else len(generation.token_ids)
        is_cut = generation is not None and num_tokens >= sample.limit
        is_over = generation is not None and (generation.finish_reason == "stop" or is_cut)
        self.admission.end(key, num_tokens if is_over else None, is_cut=is_cut)

    def so_far(self, lease: Lease, sample_index: int) -> Completed | None:
        """Return what there is of a sample in the engine, or when that died; None if there is nothing."""
        key = lease.lease_id, sample_index
        generation = self.engine.so_far(key)
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
                made = await self.engine.generate(
                    problem.token_ids, max_new_tokens=limit, seed=seed, prefix=prefix, key=key
                )
                if made.finish_reason != "length" or len(made.token_ids) == longest:
                    return made
                if hand_on_at():
                    return replace(made, finish_reason=HANDED_ON)
                # whoever was to go on with it is gone; with the same seed the same chance would come again
                prefix = Prefix(made.token_ids, made.logprobs, made.spans, self._started_s[key])
                seed = sample_seed(self._run_seed, lease.group_id, sample_index, -lease.attempt)
                return await self.engine.generate(problem.token_ids, seed=seed, prefix=prefix, key=key)
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
                completion = await self.engine.generate(problem.token_ids, temperature=temperature, seed=seed)
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


# --- what an actor holds, and hands on ------------------------------------------------------------


@dataclass(slots=True, eq=False)
class HeldLease:
    """Samples are known by their index in the group."""

    lease: Lease
    problem: Problem
    open: set[int]
    """Neither acknowledged nor failed nor handed on."""
    to_generate: set[int]
    """Of those, the ones that the engine has not completed."""
    renew_at_s: float
    prefixes: dict[int, Prefix]
    """The tokens that samples continue from."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Of samples that generate or score; once a sample is being pushed nothing cancels it."""
    completed: dict[int, Completed] = field(default_factory=dict)
    """Samples that have left the engine and are not pushed yet."""
    left: set[int] = field(default_factory=set)
    pushing: set[int] = field(default_factory=set)

    @property
    def unfinished(self) -> set[int]:
        return self.open - self.pushing


class HandingOn:
    """Hands on the samples of one actor."""

    def __init__(self, name: str, maker: SampleMaker, client: BufferClient) -> None:
        self._name, self._maker, self._client = name, maker, client
        self._asked: Future[Granted] | None = None

    async def granted(self, asked: Future[Granted]) -> Granted:
        """Wait for leases. If cancelled, `leave_all` hands on those that are granted later."""
        self._asked = asked
        grant = await settled(asked)
        self._asked = None
        return grant

    async def keep(self, leases: Collection[HeldLease]) -> None:
        """Report the tokens of running samples to the buffer now and then; `leases` may change."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            told = [
                self._client.hand_on(held.lease, [row.sample_index for row in there], there, goes_on=True)
                for held in leases
                if (there := self._there(held, held.to_generate - held.left))
            ]
            for each in told:
                await settled(each)

    async def leave_all(self, leases: Collection[HeldLease]) -> tuple[int, int]:
        """Hand on all that is held, or granted only now, within `GOODBYE_S`; return samples handed on, and tokens lost.

        Leases that the buffer gets no message about expire.
        """
        leases, counts = list(leases), self._maker.counts
        before = counts.num_handed_on, counts.num_tokens_lost
        results: list[object] = [TimeoutError(f"no answer within {GOODBYE_S:g} s")]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                leaving = [self.leave(held, held.unfinished) for held in leases]
                leaving += [self._leave_granted(self._asked)] if self._asked is not None else []
                results = list(await asyncio.gather(*leaving, return_exceptions=True))
        errors = [each for each in results if isinstance(each, Exception)]
        if errors and (remaining := [held for held in leases if held.unfinished]):
            _log.warning(
                "%s could not hand on what it had of %d groups, and other actors make it anew: %s",
                self._name, len(remaining), errors[0],
            )  # fmt: skip
            self.count_lost(remaining)
        return counts.num_handed_on - before[0], counts.num_tokens_lost - before[1]

    async def leave(self, held: HeldLease, indices: set[int]) -> None:
        """Hand samples of a lease on, with the tokens that they have."""
        held.left |= indices
        tasks = {index: held.tasks[index] for index in indices if index in held.tasks}
        engine, lease_id = self._maker.engine, held.lease.lease_id
        running = {index for index in tasks if engine.runs((lease_id, index))}
        for index in tasks.keys() - running:  # it waits for a slot or a policy version, or is scored
            tasks[index].cancel()
        with contextlib.suppress(EngineDead):
            await engine.interrupt([(lease_id, index) for index in running])
        if tasks:
            # within a goodbye the buffer is to be told too
            await asyncio.wait(tasks.values(), timeout=GOODBYE_S / 2)
        indices &= held.open
        await settled(self._client.hand_on(held.lease, sorted(indices), self._there(held, indices)))
        self._maker.counts.num_handed_on += len(indices & held.open)
        held.open -= indices

    async def _leave_granted(self, asked: Future[Granted]) -> None:
        """Hand on what was not begun; what the buffer has of it stays there."""
        leases = (await settled(asked)).leases
        for left in [self._client.hand_on(lease, lease.sample_indices, []) for lease in leases]:
            await settled(left)
        self._maker.counts.num_handed_on += sum(len(lease.sample_indices) for lease in leases)

    def count_lost(self, leases: Iterable[HeldLease]) -> None:
        for held in leases:
            for row in self._there(held, held.unfinished):
                prefix = held.prefixes.get(row.sample_index)
                before = 0 if prefix is None else len(prefix.token_ids)
                self._maker.counts.num_tokens_lost += row.num_completion_tokens - before

    def _there(self, held: HeldLease, indices: Iterable[int]) -> list[Trajectory]:
        lease, maker = held.lease, self._maker
        found = {index: held.completed.get(index) or maker.so_far(lease, index) for index in sorted(indices)}
        return [
            maker.unfinished(lease, held.problem, index, completed)
            for index, completed in found.items()
            if completed is not None and len(completed.generation.token_ids)
        ]


async def settled(future: Future[R]) -> R:
    """Wait for the buffer, within the client's own bound. Cancelling the wait leaves the request alone: the client owns
    its futures and must be able to complete them.
    """
    return await asyncio.shield(asyncio.wrap_future(future))
