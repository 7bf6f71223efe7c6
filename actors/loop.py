"""ActorLoop: runs one actor, which leases prompts, generates and scores samples, and pushes them to the buffer.

    starting -> running -> draining -> stopped
                   `-------------------^  (stop, or an error that ends the actor)

Each sample runs in its own task and is pushed when it is complete. Further tasks lease prompts while slots are free,
renew held leases, pull newer weights, and save partial rollouts. The first task that fails ends the loop with an error;
a failed sample is only reported to the buffer. When the loop ends, unfinished samples are requeued with their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from leeway.actors.config import ActorSections
from leeway.actors.engine import Engine
from leeway.actors.report import ActorReport, EvalRequest, EvalResult, actor_name
from leeway.actors.rewards import SHOWN_CHARACTERS, Scorer, ScorerLimits
from leeway.actors.sample import (
    SHUTDOWN_GRACE_S,
    Completed,
    HeldLease,
    PartialRollouts,
    SampleFailed,
    SampleMaker,
    await_future,
)
from leeway.actors.tasks import Task, load_encoded
from leeway.actors.tasks.chat import PromptCodec
from leeway.actors.weights import ActorError, WeightFollower
from leeway.buffer.client import BufferClient
from leeway.buffer.protocol import Lease, RowResult
from leeway.buffer.schema import REQUEUED, Prefix, Trajectory
from leeway.common.process import DaemonThreads, wall_time
from leeway.common.run import RunContext
from leeway.common.serving_model import prepare_serving_model
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.client import StoreAccess
from leeway.weight_sync.puller import Puller, open_puller

_log = logging.getLogger(__name__)

_LEASE_POLL_S = (0.01, 0.05)
"""First and longest pause in seconds between lease requests while the buffer's admission is closed."""
_CREDIT_POLL_S = 0.02
_AHEAD_SHARE = 0.25
"""Weight of the newest lease in the running mean `_num_ahead`."""
_CLOSE_S = 3.0
"""Timeout in seconds for closing the connections."""


class ActorFenced(ActorError):
    """Another process registered under this actor's name, so the buffer rejects this process's messages."""


@dataclass(slots=True)
class ActorComponents:
    """The started components of an actor."""

    task: Task
    decoder: PromptCodec
    scorer: Scorer
    engine: Engine
    puller: Puller
    client: BufferClient


async def assemble(context: RunContext[ActorSections], number: int) -> ActorComponents:
    """Start an actor's components, cheap and error-prone ones first. On failure, stop the components started before."""
    facts, config, name = context.facts, context.config, actor_name(number)
    threads = DaemonThreads(f"{name}-start", max_threads=2)
    task, codec = await threads.run(load_encoded, config.task, context.model_path, config.actors.max_prompt_tokens)
    async with contextlib.AsyncExitStack() as undo:
        limits = ScorerLimits(
            config.actors.reward_processes, config.actors.reward_timeout_s, start_timeout_s=context.startup_timeout_s
        )
        scorer = Scorer(task.rewards, limits)
        undo.push_async_callback(scorer.close)
        await scorer.start()
        access = StoreAccess.of(config.weight_sync, context)
        puller = await threads.run(open_puller, access, name, config.actors.dtype)
        undo.push_async_callback(threads.run, puller.close)
        client = BufferClient(context.buffer_address, run_id=facts.run_id, role="actor", name=name, keys=context.keys)
        undo.push_async_callback(threads.run, client.close)
        served = await threads.run(prepare_serving_model, context.model_path, context.folder / "serving_models")
        first, seed = PolicyVersion(0, 0), facts.seed + number
        engine = await Engine.start(served, config.actors, version=first, seed=seed, codec=codec)
        undo.push_async_callback(engine.stop)
        # Connect last: after the connection, the buffer rejects messages of an older process with this name.
        await threads.run(client.connect)
        undo.pop_all()
    return ActorComponents(task, codec, scorer, engine, puller, client)


class ActorLoop:
    """One actor. Call `start`, then `run`, which returns when the buffer drains or after `stop` is called."""

    def __init__(
        self,
        context: RunContext[ActorSections],
        number: int,
        pool: str,
        assemble: Callable[[RunContext[ActorSections], int], Awaitable[ActorComponents]] = assemble,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create actor `number` of a pool without starting it; its name and seed are derived from the number."""
        self._context = context
        self._config = context.config.actors
        self._number = number
        self._name = actor_name(number)
        self._pool = pool
        self._assemble = assemble
        self._parts: ActorComponents | None = None
        self._held: dict[int, HeldLease] = {}
        self._room_changed = asyncio.Event()
        self._leased = asyncio.Event()
        self._clock = clock
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._pushing = asyncio.Lock()
        self._samples: set[asyncio.Task[None]] = set()
        self._failure: ActorError | Exception | None = None
        self._evaluating = 0
        self._num_departed = 0
        """Samples that left the engine since the last lease was granted."""
        self._num_ahead = 0.0
        """Running mean of the samples that leave the engine before their replacements arrive."""
        self._requeue_at = 0
        """Number of tokens at which a sample is requeued to a faster pool, set by the buffer; 0 disables this."""
        self._waiting = "starting"
        self.drain_result = 0, 0
        """Number of samples that `run` requeued at its end, and number of tokens that were lost."""

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the task, start the engine, connect to the buffer, and pull newer weights if the store has any.

        Raises the errors of the components (TaskError, ModelFolderError, EngineDead, BufferError, TransferFailed,
        OSError), and PolicyTimeout if the newest weights are not applied in time.
        """
        parts = await self._assemble(self._context, self._number)
        facts, sections, config = self._context.facts, self._context.config, self._config
        self._parts, self._client, self._engine, self._task = parts, parts.client, parts.engine, parts.task
        self._fingerprint = parts.task.facts(self._context.teacher_of_prompt).fingerprint
        self._follower = WeightFollower(
            self._name, parts.engine, parts.puller, sections.weight_sync, facts.contract, clock=self._clock
        )
        self._maker = SampleMaker(
            facts.seed, config, sections.task, parts.engine, self._follower, parts.scorer, parts.decoder
        )
        self._partial_rollouts = PartialRollouts(self._name, self._maker, parts.client)
        await self._follower.update()
        self._waiting = "not running yet"

    @property
    def _started(self) -> ActorComponents:
        assert self._parts is not None, "call start() first"
        return self._parts

    async def run(self) -> None:
        """Generate samples until the buffer is drained or `stop` is called.

        Raises EngineDead if the engine has died, BufferError if the buffer is unreachable, and ActorError if a policy
        version does not arrive or another process registers under this actor's name.
        """
        assert self._parts is not None, "call start() first"
        held = self._held.values()
        jobs: list[Coroutine[Any, Any, object]] = [
            self._lease_groups(),
            self._stopping.wait(),
            self._follower.run(),
            self._renew_leases(),
            self._partial_rollouts.save_periodically(held),
        ]
        tasks = [asyncio.create_task(job) for job in jobs]
        self._ended.clear()
        try:
            # the first two jobs may return; the other jobs end only with an error
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            for task in tasks:
                task.cancel()
            # requeue before the jobs end: a follower that is applying an update ends only after the update
            self.drain_result = await self._partial_rollouts.requeue_all(held)
            await self._cancel_samples(self._held.values())
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._waiting = "stopped"
            self._ended.set()
        failures = [one for one in results if isinstance(one, Exception)]
        if self._failure is not None or failures:
            raise self._failure or failures[0]

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Return held-out accuracy at one version. Weight updates and new training requests wait until its end.

        Raises:
            ValueError: the request does not fit the task.
            PolicyTimeout: the requested version did not arrive in time.
        """
        heldout = self._started.task.heldout
        self._evaluating += 1
        try:
            return await self._maker.evaluate(request, heldout)
        finally:
            self._evaluating -= 1

    async def stop(self) -> None:
        """End `run`, which requeues unfinished samples, and stop the engine. Idempotent."""
        self._stopping.set()
        parts, self._parts = self._parts, None
        if parts is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * SHUTDOWN_GRACE_S):
                await self._ended.wait()
                if self._samples:  # these samples are being pushed: wait for the pushes
                    await asyncio.wait(self._samples)
        self._held.clear()
        await parts.scorer.close()
        # close both concurrently: an unresponsive buffer must not delay the release of this machine's staged weights
        closer = DaemonThreads(f"{self._name}-close", max_threads=2)
        closing = [closer.submit(parts.client.close), closer.submit(parts.puller.close)]
        await asyncio.wait([asyncio.wrap_future(each) for each in closing], timeout=_CLOSE_S)
        await parts.engine.stop()

    def report(self) -> ActorReport:
        parts, counts = self._started, self._maker.counts
        waiting, waiting_s = self._waiting_for()
        newest = list(self._maker.newest)
        return ActorReport(
            name=self._name,
            pool=self._pool,
            version=(self._follower.version.incarnation, self._follower.version.version),
            task_fingerprint=self._fingerprint,
            num_samples=counts.num_samples,
            num_tokens=counts.num_tokens,
            num_outcomes=dict(counts.outcomes),
            failing=parts.scorer.failing,
            num_tokens_lost=counts.num_tokens_lost,
            settled_s=counts.settled_s,
            num_running=self._maker.busy.num_running,
            num_slots=self._maker.admission.at_once(),
            running_s=self._maker.busy.running_s(),
            busy_intervals=self._maker.busy.take(),
            refused=self._follower.refused,
            updates=self._follower.take_updates(),
            requeue_at=self._requeue_at,
            waiting=waiting,
            waiting_s=waiting_s,
            engine=parts.engine.stats.report(),
            rewards=dict(Counter(reward for reward, *_ in newest)),
            num_cut=sum(is_cut for _, is_cut, *_ in newest),
            answers=[_shown(reward, prompt, text) for reward, _, prompt, text in newest[-3:]],
        )

    def _waiting_for(self) -> tuple[str, float]:
        """Return what the actor waits for, and how many seconds it has waited; 0.0 if that time is unknown."""
        reward, open_s = self._started.scorer.waits_for or ("", 0.0)
        slow = f"reward {reward}" if reward else ""
        if self._evaluating:
            evaluating = f"evaluating policy {self._follower.version}"
            return (f"{evaluating}, waiting for {slow}" if slow else evaluating), open_s
        if self._held and self._follower.waits_for is not None:
            return f"waiting for policy {self._follower.waits_for}", 0.0
        return (f"waiting for {slow}", open_s) if slow else (self._waiting, 0.0)

    # --- leases -----------------------------------------------------------------------------------

    def _room(self) -> int:
        held = self._held.values()
        num_to_generate = sum(len(each.to_generate) for each in held)
        num_open = sum(len(each.open) for each in held)
        return self._config.room(num_to_generate, num_open, self._num_ahead, self._maker.admission.at_once())

    async def _lease_groups(self) -> None:
        """Lease groups whenever slots are free, until the buffer drains."""
        pause_s, since_s = _LEASE_POLL_S[0], self._clock()
        while True:
            self._room_changed.clear()
            if (room := self._room()) < 1:
                self._waiting = ""
                await self._room_changed.wait()
                continue
            requested_s = self._clock()
            wants_lengths = self._maker.admission.needs_lengths
            request = self._client.lease(room, self._pool, self._engine.stats.step_s, wants_lengths=wants_lengths)
            grant = await self._partial_rollouts.granted(request)
            self._follower.observe_version(PolicyVersion(*grant.newest))
            self._requeue_at = grant.requeue_at
            prefixes = grant.prefixes()
            for lease in grant.leases:
                self._take(lease, {i: prefixes[lease.lease_id, i] for i in lease.prefixes})
            if grant.leases:
                now_s = self._clock()
                # double the number: a sample that ends just after a lease request is replaced by the next request
                num_ahead = 2 * self._num_departed * (now_s - requested_s) / max(1e-9, now_s - since_s)
                num_ahead = self._num_ahead + (num_ahead - self._num_ahead) * _AHEAD_SHARE
                self._num_ahead = 0.0 if grant.is_near_bound else num_ahead
                since_s, self._num_departed = now_s, 0
                pause_s = _LEASE_POLL_S[0]
                continue
            if grant.draining and not self._held:
                return
            self._waiting = "draining" if grant.draining else "waiting for a lease: admission closed"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LEASE_POLL_S[1])

    def _take(self, lease: Lease, prefixes: dict[int, Prefix]) -> None:
        problem, indices = self._task.prompt(lease.prompt_id), lease.sample_indices
        renew_at_s = self._clock() + lease.timeout_s / 3
        held = HeldLease(lease, problem, set(indices), set(indices), renew_at_s, prefixes)
        self._held[lease.lease_id] = held
        self._leased.set()
        for index in indices:
            held.tasks[index] = self._begin(self._make_sample(held, index), held, index)

    def _begin(self, work: Coroutine[Any, Any, None], held: HeldLease, index: int) -> asyncio.Task[None]:
        """Start a task whose failure ends the loop."""
        task = asyncio.create_task(work)
        self._samples.add(task)
        task.add_done_callback(partial(self._on_sample_done, held, index))
        return task

    async def _renew_leases(self) -> None:
        """Renew each lease after a third of its timeout; cancel the samples of leases that the buffer has revoked."""
        while True:
            next_s = min((held.renew_at_s for held in self._held.values()), default=None)
            self._leased.clear()
            with contextlib.suppress(TimeoutError):
                # a lease that is granted during the wait may need renewal sooner
                async with asyncio.timeout(None if next_s is None else next_s - self._clock()):
                    await self._leased.wait()
            now_s = self._clock()
            due = {key: held for key, held in self._held.items() if held.renew_at_s <= now_s}
            if not due:
                continue
            for held in due.values():
                held.renew_at_s = now_s + held.lease.timeout_s / 3
            reply = await await_future(self._client.renew(list(due)))
            lost = [self._held.pop(lease_id) for lease_id in reply.lost if lease_id in self._held]
            self._partial_rollouts.count_lost(lost)
            await self._cancel_samples(lost)
            self._room_changed.set()

    async def _cancel_samples(self, leases: Iterable[HeldLease]) -> None:
        """Cancel generation and scoring for these leases; let pushes finish."""
        tasks = [task for held in leases for task in held.tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=SHUTDOWN_GRACE_S)

    # --- samples ----------------------------------------------------------------------------------

    async def _make_sample(self, held: HeldLease, index: int) -> None:
        try:
            try:
                held.completed[index] = completed = await self._generate(held, index)
                if completed.generation.finish_reason == REQUEUED:
                    self._requeue_group(held, index)
                if index in held.requeued:
                    return
                trajectory = await self._maker.score(held.lease, held.problem, index, completed)
            finally:
                del held.tasks[index]
            del held.completed[index]
            held.pushing.add(index)
            self._account(await self._push(trajectory), held.lease, index)
            self._maker.counts.settled_s += wall_time() - trajectory.finished_s
        except SampleFailed as failure:
            await await_future(self._client.report_failed(held.lease, [index], str(failure)))
        held.open.discard(index)
        self._release_if_done(held)

    async def _generate(self, held: HeldLease, index: int) -> Completed:
        try:
            prefix = held.prefixes.get(index)
            return await self._maker.generate(held.lease, held.problem, index, prefix, lambda: self._requeue_at)
        finally:
            held.to_generate.discard(index)
            self._num_departed += 1
            self._room_changed.set()

    def _requeue_group(self, held: HeldLease, index: int) -> None:
        """Requeue a sample that is too long for this pool, with all samples of its group that are not generated yet."""
        if index not in held.requeued:
            indices = held.to_generate | {index}
            held.requeued |= indices
            self._begin(self._requeue(held, indices), held, index)

    async def _requeue(self, held: HeldLease, indices: set[int]) -> None:
        await self._partial_rollouts.requeue(held, indices)
        self._release_if_done(held)

    async def _push(self, trajectory: Trajectory) -> RowResult:
        """Push a trajectory once the client has credit; a push without credit would block this event loop.

        Acknowledged pushes free credit. A push without an acknowledgement fails after the timeout and ends the loop.
        """
        async with self._pushing:
            while not self._client.has_room(trajectory):
                await asyncio.sleep(_CREDIT_POLL_S)
            pushed = self._client.push(trajectory)
        return await await_future(pushed)

    def _account(self, result: RowResult, lease: Lease, index: int) -> None:
        if result.outcome == "fenced":
            raise ActorFenced(
                f"{self._name}: the buffer rejects this process because another process registered as {self._name}. "
                "This actor was presumed dead and restarted, or two actors share a name"
            )
        if result.outcome == "quarantined":
            _log.error("the buffer quarantined group %d, sample %d: %s", lease.group_id, index, result.reason)
        self._maker.counts.outcomes[result.outcome] += 1

    def _release_if_done(self, held: HeldLease) -> None:
        if not held.open:
            self._held.pop(held.lease.lease_id, None)
        self._room_changed.set()

    def _on_sample_done(self, held: HeldLease, index: int, task: asyncio.Task[None]) -> None:
        self._samples.discard(task)
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self._stopping.is_set() or index in held.requeued or self._held.get(held.lease.lease_id) is not held:
            return
        else:  # cancelled from outside: without an error, its lease would be renewed forever
            error = ActorError(
                f"{self._name}: sample {index} of group {held.lease.group_id} ended before it was pushed or reported "
                "as failed: an awaited call was cancelled. Check whether the engine or task cancels its own calls"
            )
        if error is not None:
            # Failures of a single sample are reported to the buffer; this error affects all samples.
            assert isinstance(error, Exception)
            self._failure = self._failure or error
            self._stopping.set()


def _shown(reward: float | None, prompt: str, completion: str) -> str:
    return f"prompt {prompt[:SHOWN_CHARACTERS]!r}, completion {completion[:SHOWN_CHARACTERS]!r}, reward {reward}"
