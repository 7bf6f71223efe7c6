"""WeightFollower: updates an engine's weights while requests run, and decides when a request may start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from leeway.actors.engine import Engine, UpdateRefused
from leeway.actors.report import WeightUpdate
from leeway.common.process import DaemonThreads, wall_time
from leeway.common.staleness import PolicyVersion, StalenessContract
from leeway.weight_sync.client import UPDATE_TIMEOUT_S
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.manifest import TransferFailed, WeightsError
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import StagedVersion

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 0.05
"""Seconds between polls for a newer version. A poll reads one small file or sends one small message."""
_RETRY_S = (1.0, 10.0)
"""First and longest pause in seconds before a rejected version is retried: each retry reads the whole version."""
_MAX_UPDATES = 4096
"""Maximum number of updates that are kept between two reports; older updates are dropped."""


class ActorError(RuntimeError):
    """An error that ends an actor; its supervisor restarts it.

    ActorError
      PolicyTimeout   this module
      ActorFenced     actors.loop: another process registered under this actor's name

    `leeway.actors.engine.EngineDead` and `leeway.buffer.errors.BufferError` end an actor too.
    """


class PolicyTimeout(ActorError):
    """A policy version did not arrive, or was not applied, within `UPDATE_TIMEOUT_S`."""


@dataclass(frozen=True)
class _Refusal:
    version: PolicyVersion | None
    """The rejected version; None if the store could not be queried for the newest version."""
    reason: str
    retry_at_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{'the newest version' if self.version is None else f'version {self.version}'}: {self.reason}"


class WeightFollower:
    """Polls for newer weights, stages and verifies them while requests run, and applies them between engine steps.

    The states of an engine, and the requests that may start in each state:

        serving     training requests, if the engine's version is new enough for them
        applying    no requests: new requests wait and start under the new version
        held        evaluation requests: updates and new training requests wait for the end of the evaluation
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        puller: Puller,
        config: WeightSyncConfig,
        contract: StalenessContract,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._engine = engine
        self._puller = puller
        self._config = config
        self._contract = contract
        self._clock = clock
        self._threads = DaemonThreads(f"{name}-weights", max_threads=4)
        self._polling = asyncio.Lock()
        self._applying = asyncio.Lock()
        self._open = True
        self._opened_at_s = clock()
        self._newest = engine.version
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._request: Future[Any] | None = None
        self._late: Future[StagedVersion] | None = None
        """A fetch that timed out; its result is used if the fetch completes later."""
        self._refusal: _Refusal | None = None
        self._updates: deque[WeightUpdate] = deque(maxlen=_MAX_UPDATES)

    @property
    def waits_for(self) -> PolicyVersion | None:
        """Return the version that training requests wait for; None if the engine's version is new enough."""
        return self._newest if self._contract.is_behind(self.version, self._newest) else None

    @property
    def refused(self) -> str:
        """Return the last rejected version and the reason; '' once the engine serves the newest version."""
        return "" if self._refusal is None else str(self._refusal)

    def observe_version(self, newest: PolicyVersion) -> None:
        """Record that this version is published, and poll now instead of after `POLL_S`."""
        if newest > self._newest:
            self._newest = newest
            self._poll_now.set()

    def take_updates(self) -> list[WeightUpdate]:
        updates = list(self._updates)
        self._updates.clear()
        return updates

    async def run(self) -> None:
        """Update the engine regularly until cancelled; raise PolicyTimeout under the conditions of `update`."""
        while True:
            self._poll_now.clear()
            await self.update()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poll_now.wait()

    async def update(self) -> None:
        """Update the engine to the store's newest version; raise PolicyTimeout if it is not applied in time.

        If a version is unavailable (corrupt, removed, of another model, no answer from the weight service), log the
        error and retry later; the engine keeps its version. A request that waits for the version times out in `admit`.
        The timeout ends the actor.
        """
        async with self._polling:
            newest = None
            try:
                if self._in_backoff(None):
                    return
                newest = await self._call_puller(self._puller.newest)
                if newest is None or newest <= self._engine.version:
                    self._refusal = None
                    return
                self._newest = max(self._newest, newest)
                staged = self._late_arrival()
                if staged is None:
                    if self._in_backoff(newest):
                        return
                    try:
                        staged = await self._call_puller(self._puller.fetch, newest)
                    except TransferFailed:
                        self._late = self._request
                        raise
            except (WeightsError, OSError) as error:
                self._keep_old(newest, error)
                return
            with staged:
                await self._put(staged)

    async def _call_puller(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the puller in a thread, one call at a time.

        Raises TransferFailed if the call times out, or if an earlier call that timed out is still running.
        """
        timeout_s = UPDATE_TIMEOUT_S
        if self._request is not None and not self._request.done():
            raise TransferFailed("an earlier request for weights is still running")
        request = self._threads.submit(call, *args, **kwargs)
        self._request = request
        try:
            async with asyncio.timeout(timeout_s):
                # shield the puller's own future from cancellation, because a late result is still used
                return await asyncio.shield(asyncio.wrap_future(request))
        except TimeoutError as error:
            raise TransferFailed(
                f"the weights were not read and verified within {timeout_s:g} s; check the load of this "
                "machine, its weights folder and the weight service"
            ) from error

    def _late_arrival(self) -> StagedVersion | None:
        """Return the version of a fetch that ended after its timeout, or None. Slow machines need late versions."""
        late, self._late = self._late, None
        if late is None or late.exception() is not None:
            return None
        return late.result()

    async def _put(self, staged: StagedVersion) -> None:
        version = staged.version
        try:
            await self._engine.prepare(staged, timeout_s=UPDATE_TIMEOUT_S)
            # acquire the lock outside the timeout: an evaluation may hold the lock, and has its own timeout
            async with self._applying:
                if version <= self._engine.version:
                    return
                self._open = False
                try:
                    pause_s, load_s = await self._apply_whole(staged)
                finally:
                    self._open_again()
        except TimeoutError as error:
            raise PolicyTimeout(
                f"{self._name}: policy {version} was not applied within {UPDATE_TIMEOUT_S:g} s (the engine serves "
                f"{self.version}). Check the load of this machine and the speed of the weights folder"
            ) from error
        except UpdateRefused as error:
            self._puller.invalidate(staged)
            self._keep_old(version, error)
            return
        self._refusal = None
        end_s = wall_time()
        served = (version.incarnation, version.version)
        self._updates.append(WeightUpdate(end_s - pause_s, end_s, load_s, served))

    async def _apply_whole(self, staged: StagedVersion) -> tuple[float, float]:
        """Complete the update even if the follower is cancelled: a partial update leaves the engine paused."""
        kv_cache = self._config.kv_cache
        applying = asyncio.create_task(self._engine.apply(staged, kv_cache, timeout_s=UPDATE_TIMEOUT_S))
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                return await asyncio.shield(applying)
        except asyncio.CancelledError:
            await asyncio.wait({applying}, timeout=UPDATE_TIMEOUT_S)
            raise

    def _in_backoff(self, version: PolicyVersion | None) -> bool:
        """Return whether this version was rejected and its retry is not due; version None means a failed query."""
        refusal = self._refusal
        return refusal is not None and refusal.version == version and self._clock() < refusal.retry_at_s

    def _keep_old(self, version: PolicyVersion | None, error: Exception) -> None:
        before = self._refusal if self._refusal is not None and self._refusal.version == version else None
        pause_s = _RETRY_S[0]
        if before is not None and not isinstance(error, TransferFailed):
            # if a version was read completely and rejected, a retry rarely succeeds: wait longer
            pause_s = min(2 * before.pause_s, _RETRY_S[1])
        self._refusal = _Refusal(version, str(error), self._clock() + pause_s, pause_s)
        if before is None or before.reason != self._refusal.reason:
            _log.warning("%s keeps policy %s and will retry: %s", self._name, self.version, self._refusal)

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    async def catch_up(self, at_least: PolicyVersion) -> None:
        """Wait until the engine serves version `at_least` or newer; update the engine even if `run` is not running.

        Raises PolicyTimeout if the wait, without the time of evaluations, exceeds `UPDATE_TIMEOUT_S`.
        """
        since_s = self._clock()
        while self.version < at_least:
            await self.update()
            if self.version < at_least:
                if self._has_timed_out(since_s):
                    raise self._timeout_error(str(at_least))
                await asyncio.sleep(POLL_S)

    async def admit(self, min_version: int) -> None:
        """Wait until a training request of a lease with this `min_version` may start.

        The request may start if the engine serves version `min_version` or newer, lags the newest version by at most
        `max_actor_lag`, and runs neither an update nor an evaluation. Raises PolicyTimeout if the wait is too long.
        """
        since_s = self._clock()
        while not (self._open and self._contract.may_start(self.version, self._newest, min_version)):
            if self._has_timed_out(since_s):
                raise self._timeout_error(str(self.waits_for or f"version {min_version}"))
            self._poll_now.set()
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, UPDATE_TIMEOUT_S)):
                    await changed.wait()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[PolicyVersion]:
        """Keep the engine at one version, without new training requests, for the duration of a block."""
        async with self._applying:
            self._open = False
            try:
                yield self._engine.version
            finally:
                self._open_again()

    def _open_again(self) -> None:
        self._open, self._opened_at_s = True, self._clock()
        self._changed.set()
        self._changed = asyncio.Event()

    def _has_timed_out(self, since_s: float) -> bool:
        """Return whether the timeout has passed since `since_s` and since the last update or evaluation ended."""
        return self._open and self._clock() > max(since_s, self._opened_at_s) + UPDATE_TIMEOUT_S

    def _timeout_error(self, awaited: str) -> PolicyTimeout:
        refused = f"; last rejected: {self.refused}" if self.refused else ""
        return PolicyTimeout(
            f"{self._name} waited {UPDATE_TIMEOUT_S:g} s for policy "
            f"{awaited} from the learner: the engine serves {self.version}, the newest known policy is {self._newest}"
            f"{refused}. Check the learner's log, and that this machine can read its weights folder or weight service"
        )
