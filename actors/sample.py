"""Generation of single completions: training samples of leased prompts, and answers to held-out problems.

SampleMaker  generates and scores completions
HeldLease    a lease and its samples
PartialRollouts    requeues unfinished samples with their tokens, and saves the tokens of running samples in the buffer
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np

from leeway.actors.config import ActorsConfig, KvSample, admission_of
from leeway.actors.engine import Engine, RequestKey
from leeway.actors.engine_core import EngineDead, Generation
from leeway.actors.report import BusyClock, Counts, EvalCounts, EvalRequest, EvalResult
from leeway.actors.rewards import RewardFailed, Scored, Scorer
from leeway.actors.tasks import Problem
from leeway.actors.tasks.chat import PromptCodec
from leeway.actors.tasks.config import TaskConfig
from leeway.actors.weights import ActorError, WeightFollower
from leeway.buffer.client import BufferClient, Granted
from leeway.buffer.ledger import GENERATION_FAILED
from leeway.buffer.protocol import Lease
from leeway.buffer.schema import REQUEUED, Prefix, Trajectory
from leeway.common.process import wall_time
from leeway.common.run import OVERLONG

_log = logging.getLogger(__name__)

R = TypeVar("R")

GENERATE_TIMEOUT_S = 3600.0
"""Timeout of one sample in seconds; a sample that exceeds the timeout fails. 32,000 tokens at 9 tokens/s take less.
An evaluation answer has twice this timeout, because the answer may first wait for running training samples."""
SAMPLED_TEMPERATURE = 1.0
PARTIAL_SAVE_INTERVAL_S = 300.0
"""Seconds between saves of partial rollouts in the buffer. A killed actor loses at most the tokens since a save."""
NUM_ANSWERS = 256
"""Number of newest answers whose rewards are reported."""
SHUTDOWN_GRACE_S = 5.0
"""Grace period in seconds for requeuing all held samples."""
MAX_COLUMN_BYTES = 64 * 2**10
"""Maximum bytes of JSON of a data row's columns that each sample stores; a column with unit tests may be larger."""


def kept_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns to store with a row's samples: drop the largest columns until the rest fits the limit."""
    sizes = {name: len(msgspec.json.encode(value)) for name, value in columns.items()}
    kept = dict(columns)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes[each] for each in kept) <= MAX_COLUMN_BYTES:
            break
        del kept[name]
        _warn_left_out(name)
    return kept


@cache
def _warn_left_out(name: str) -> None:
    _log.warning("column '%s' is too large in some rows: the samples of these rows are stored without it", name)


@dataclass(frozen=True, slots=True)
class Completed:
    """A generated sample without a reward, or the tokens that an interrupted sample has generated."""

    generation: Generation
    started_s: float
    finished_s: float


class SampleFailed(Exception):
    """Raised if one sample fails. The buffer's ledger counts failures by the message of the exception."""


@lru_cache(maxsize=4096)
def group_seed(run_seed: int, group_id: int, attempt: int) -> int:
    """Return the 62-bit seed of a group's sample 0, a hash; sample i has this seed plus i."""
    key = f"{run_seed}/{group_id}/{attempt}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 2


class SampleMaker:
    """Generates and scores single completions; the engine's slots and cache bound the number of running samples."""

    def __init__(
        self,
        run_seed: int,
        config: ActorsConfig,
        task: TaskConfig,
        engine: Engine,
        follower: WeightFollower,
        scorer: Scorer,
        decoder: PromptCodec,
    ) -> None:
        """`config` bounds concurrency and length; `task` defines what rewards see, and penalties."""
        self._run_seed = run_seed
        self._config = config
        self._task = task
        self.engine = engine
        self._follower = follower
        self._scorer = scorer
        self._decoder = decoder
        self.admission = admission_of(config, engine.stats.cache, lambda: engine.stats.num_steps)
        # separate slots avoid a deadlock: training samples may hold all their slots until an evaluation ends
        self._evaluation_slots = asyncio.Semaphore(self.admission.num_sure)
        self._started_s: dict[RequestKey, float] = {}
        self.busy = BusyClock()
        self.counts = Counts()
        self.newest: deque[tuple[float | None, bool, str, str]] = deque(maxlen=NUM_ANSWERS)
        """Rewards of the newest answers, whether they reached the length limit, their prompts, and their texts."""

    async def generate(
        self, lease: Lease, problem: Problem, sample_index: int, prefix: Prefix | None, requeue_at: Callable[[], int]
    ) -> Completed:
        """Generate one sample of a lease once a slot is free, either from the start or after a prefix.

        If `requeue_at()` is positive, a sample without a prefix is interrupted at that number of tokens. Raises
        SampleFailed if generation fails, EngineDead if the engine has died, PolicyTimeout if a version does not arrive.
        """
        if prefix is not None and (finish_reason := self.engine.ended(prefix)) is not None:
            whole = Generation(prefix.token_ids, prefix.logprobs, prefix.spans, finish_reason)
            return Completed(whole, prefix.started_s, wall_time())
        key, sample = self._to_run(lease, problem, sample_index, prefix, requeue_at())
        generation: Generation | None = None
        await self.admission.admit(key, sample)
        try:
            if prefix is not None:  # policy versions must not decrease from one token to the next
                await self._follower.catch_up(prefix.newest)
            await self._follower.admit(lease.min_version)
            _, sample = self._to_run(lease, problem, sample_index, prefix, requeue_at())
            self.admission.begin(key, sample)
            started_s = wall_time() if prefix is None else prefix.started_s
            self._started_s[key] = started_s
            self.busy.enter()
            try:
                generation = await self._generate(lease, problem, sample_index, prefix, sample.limit, requeue_at)
            except EngineDead:
                raise  # keep the start time: the sample's tokens can still be requeued
            except BaseException:
                del self._started_s[key]
                raise
            finally:
                self.busy.leave()
        finally:
            self._free(key, sample, generation)
        del self._started_s[key]
        self.counts.num_samples += generation.finish_reason != REQUEUED
        self.counts.num_tokens += len(generation.token_ids) - sample.num_prefix_tokens
        return Completed(generation, started_s, wall_time())

    def _to_run(
        self, lease: Lease, problem: Problem, sample_index: int, prefix: Prefix | None, requeue_at: int
    ) -> tuple[RequestKey, KvSample]:
        """Return a sample's key in the engine, and the sizes that bound its use of the engine's cache."""
        longest, num_prefix_tokens = self._config.max_new_tokens, 0 if prefix is None else len(prefix.token_ids)
        limit = longest if prefix is not None else min(longest, requeue_at or longest)
        return (lease.lease_id, sample_index), KvSample(
            lease.group_id, len(problem.token_ids), limit, num_prefix_tokens, lease.usual_tokens
        )

    def _free(self, key: RequestKey, sample: KvSample, generation: Generation | None) -> None:
        """Free the slot of a sample; the length of an interrupted sample is not counted."""
        num_tokens = 0 if generation is None else len(generation.token_ids)
        is_cut = generation is not None and num_tokens >= sample.limit
        is_over = generation is not None and (generation.finish_reason == "stop" or is_cut)
        self.admission.end(key, num_tokens if is_over else None, is_cut=is_cut)

    def so_far(self, lease: Lease, sample_index: int) -> Completed | None:
        """Return the tokens that a running sample has generated, also after the engine died; None without tokens."""
        key = lease.lease_id, sample_index
        generation = self.engine.so_far(key)
        return None if generation is None else Completed(generation, self._started_s[key], wall_time())

    async def score(self, lease: Lease, problem: Problem, sample_index: int, completed: Completed) -> Trajectory:
        """Return the sample with its reward; raise SampleFailed if a reward function fails."""
        generation = completed.generation
        try:
            scored = await self._scored(problem, generation)
        except RewardFailed as failure:
            raise SampleFailed(str(failure)) from failure
        penalty = self._task.length_penalty(len(generation.token_ids))
        if penalty is not None and scored.reward is not None:
            scored = Scored(scored.reward + penalty, {**scored.parts, OVERLONG: penalty})
        return replace(
            self.unfinished(lease, problem, sample_index, completed),
            reward=scored.reward,
            finish_reason=generation.finish_reason,
            reward_parts=scored.parts,
            columns=kept_columns(problem.columns),
        )

    async def _scored(self, problem: Problem, generation: Generation) -> Scored:
        ids, prefill = generation.token_ids.tolist(), self._task.prefill_in_completion
        write = partial(self._decoder.completion, problem.token_ids, ids, prefill=prefill)
        values = {"prompt_ids": problem.token_ids, "completion_ids": ids, "finish_reasons": generation.finish_reason}

        def sampled(name: str) -> object:
            return values[name] if name in values else write(special=True)

        scored = await self._scorer.score(problem, text := write(), sampled)
        self.newest.append((scored.reward, generation.finish_reason == "length", problem.text, text))
        return scored

    def unfinished(self, lease: Lease, problem: Problem, sample_index: int, completed: Completed) -> Trajectory:
        """Return the sample without a reward, for requeuing."""
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
            finish_reason=REQUEUED,
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
        requeue_at: Callable[[], int],
    ) -> Generation:
        seed = group_seed(self._run_seed, lease.group_id, lease.attempt) + sample_index
        deadline = asyncio.timeout(GENERATE_TIMEOUT_S)
        try:
            async with deadline:
                key, longest = (lease.lease_id, sample_index), self._config.max_new_tokens
                found = await self.engine.generate(
                    problem.token_ids, max_new_tokens=limit, seed=seed, prefix=prefix, key=key
                )
                if found.finish_reason != "length" or len(found.token_ids) == longest:
                    return found
                if requeue_at():
                    return replace(found, finish_reason=REQUEUED)
                # no pool can take the sample over now: resume it with a new seed (the old seed repeats its numbers)
                prefix = Prefix(found.token_ids, found.logprobs, found.spans, self._started_s[key])
                seed = group_seed(self._run_seed, lease.group_id, -lease.attempt) + sample_index
                return await self.engine.generate(problem.token_ids, seed=seed, prefix=prefix, key=key)
        except (ActorError, EngineDead):
            raise
        except Exception as error:  # other errors fail only this sample; the ledger counts them by type
            reason = "took too long" if deadline.expired() else type(error).__name__
            _log.error(
                "generation failed: prompt %d, group %d, sample %d: %s (%s)",
                lease.prompt_id, lease.group_id, sample_index, reason, error,
            )  # fmt: skip
            raise SampleFailed(f"{GENERATION_FAILED}: {reason}") from error

    async def evaluate(self, request: EvalRequest, heldout: Sequence[Problem]) -> EvalResult:
        """Answer one shard of the held-out problems with one policy version. Every evaluation uses equal seeds.

        Raises ValueError if the task has fewer problems than requested or the shard does not exist. Raises
        PolicyTimeout if `min_version` does not arrive in time.
        """
        if not 1 <= request.num_problems <= len(heldout):
            raise ValueError(
                f"cannot evaluate {request.num_problems} problems: the task has {len(heldout)} held-out problems; "
                "raise task.num_heldout"
            )
        if not 0 <= request.shard < request.num_shards:
            raise ValueError(f"evaluation shard {request.shard} does not exist: there are {request.num_shards} shards")
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
            # twice the timeout: training samples may occupy the engine for one timeout first
            async with self._evaluation_slots, asyncio.timeout(2 * GENERATE_TIMEOUT_S):
                seed = group_seed(self._run_seed, -1, 0) + index if temperature else None
                completion = await self.engine.generate(problem.token_ids, temperature=temperature, seed=seed)
            scored = await self._scored(problem, completion)
        except (ActorError, EngineDead):
            raise
        except RewardFailed:  # the scorer has logged the error
            return EvalCounts(num_failed=1)
        except Exception as error:  # an error of one problem must not fail the other problems
            _log.error("evaluation of held-out problem %d failed: %s: %s", index, type(error).__name__, error)
            return EvalCounts(num_failed=1)
        if scored.reward is None:
            return EvalCounts(num_failed=1)
        return EvalCounts(int(scored.reward >= self._task.correct_at), 1)


# --- held leases and partial rollouts --------------------------------------------------------------


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease and its samples, which are identified by their index in the group."""

    lease: Lease
    problem: Problem
    open: set[int]
    """Samples that are not yet acknowledged, failed or requeued."""
    to_generate: set[int]
    """Open samples that the engine has not completed."""
    renew_at_s: float
    prefixes: dict[int, Prefix]
    """Tokens that samples resume from, by the index of the sample."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Running tasks that generate or score a sample; a task that pushes a sample must not be cancelled."""
    completed: dict[int, Completed] = field(default_factory=dict)
    """Samples that have left the engine and are not pushed yet."""
    requeued: set[int] = field(default_factory=set)
    pushing: set[int] = field(default_factory=set)

    @property
    def unfinished(self) -> set[int]:
        return self.open - self.pushing


class PartialRollouts:
    """Requeues the unfinished samples of one actor, and saves their tokens in the buffer."""

    def __init__(self, name: str, maker: SampleMaker, client: BufferClient) -> None:
        self._name, self._maker, self._client = name, maker, client
        self._request: Future[Granted] | None = None

    async def granted(self, request: Future[Granted]) -> Granted:
        """Wait for leases. After a cancellation, `requeue_all` requeues the leases that are granted later."""
        self._request = request
        grant = await await_future(request)
        self._request = None
        return grant

    async def save_periodically(self, leases: Collection[HeldLease]) -> None:
        """Save the tokens of running samples in the buffer at regular intervals; `leases` may change between saves."""
        while True:
            await asyncio.sleep(PARTIAL_SAVE_INTERVAL_S)
            requests = [
                self._client.requeue(held.lease, [row.sample_index for row in rows], rows, goes_on=True)
                for held in leases
                if (rows := self._partial(held, held.to_generate - held.requeued))
            ]
            for each in requests:
                await await_future(each)

    async def requeue_all(self, leases: Collection[HeldLease]) -> tuple[int, int]:
        """Requeue all held and just-granted samples; return the numbers of requeued samples and of lost tokens.

        The call takes at most `SHUTDOWN_GRACE_S` seconds. A lease that could not be requeued expires in the buffer.
        """
        leases, counts = list(leases), self._maker.counts
        before = counts.num_requeued, counts.num_tokens_lost
        results: list[object] = [TimeoutError(f"the buffer did not reply within {SHUTDOWN_GRACE_S:g} s")]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                requeuing = [self.requeue(held, held.unfinished) for held in leases]
                requeuing += [self._requeue_granted(self._request)] if self._request is not None else []
                results = list(await asyncio.gather(*requeuing, return_exceptions=True))
        errors = [each for each in results if isinstance(each, Exception)]
        if errors and (remaining := [held for held in leases if held.unfinished]):
            _log.warning(
                "%s could not requeue its samples of %d groups; other actors generate the samples again: %s",
                self._name, len(remaining), errors[0],
            )  # fmt: skip
            self.count_lost(remaining)
        return counts.num_requeued - before[0], counts.num_tokens_lost - before[1]

    async def requeue(self, held: HeldLease, indices: set[int]) -> None:
        """Requeue samples of a lease with the tokens that they have generated."""
        held.requeued |= indices
        tasks = {index: held.tasks[index] for index in indices if index in held.tasks}
        engine, lease_id = self._maker.engine, held.lease.lease_id
        running = {index for index in tasks if engine.runs((lease_id, index))}
        for index in tasks.keys() - running:  # these samples wait for a slot or a version, or are scored
            tasks[index].cancel()
        with contextlib.suppress(EngineDead):
            await engine.interrupt([(lease_id, index) for index in running])
        if tasks:
            # wait for at most half of the grace period: the request to the buffer needs the other half
            await asyncio.wait(tasks.values(), timeout=SHUTDOWN_GRACE_S / 2)
        indices &= held.open
        await await_future(self._client.requeue(held.lease, sorted(indices), self._partial(held, indices)))
        self._maker.counts.num_requeued += len(indices & held.open)
        held.open -= indices

    async def _requeue_granted(self, request: Future[Granted]) -> None:
        """Requeue samples that were not started; the buffer keeps the tokens that it has stored for these samples."""
        leases = (await await_future(request)).leases
        for each in [self._client.requeue(lease, lease.sample_indices, []) for lease in leases]:
            await await_future(each)
        self._maker.counts.num_requeued += sum(len(lease.sample_indices) for lease in leases)

    def count_lost(self, leases: Iterable[HeldLease]) -> None:
        for held in leases:
            for row in self._partial(held, held.unfinished):
                prefix = held.prefixes.get(row.sample_index)
                before = 0 if prefix is None else len(prefix.token_ids)
                self._maker.counts.num_tokens_lost += row.num_completion_tokens - before

    def _partial(self, held: HeldLease, indices: Iterable[int]) -> list[Trajectory]:
        lease, maker = held.lease, self._maker
        found = {index: held.completed.get(index) or maker.so_far(lease, index) for index in sorted(indices)}
        return [
            maker.unfinished(lease, held.problem, index, completed)
            for index, completed in found.items()
            if completed is not None and len(completed.generation.token_ids)
        ]


async def await_future(future: Future[R]) -> R:
    """Await a reply of the buffer, within the client's own timeout. Cancelling the wait does not cancel the request,
    because the client must be able to complete its own futures.
    """
    return await asyncio.shield(asyncio.wrap_future(future))
