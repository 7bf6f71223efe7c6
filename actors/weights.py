"""WeightFollower: keeps an engine's policy fresh while requests run, and decides when a request may start."""

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
"""Seconds between polls for a newer version: one small read of a file, or one small message."""
_RETRY_S = (1.0, 10.0)
"""First and longest pause in seconds before a rejected version is retried: each retry reads the whole version."""
_MAX_UPDATES = 4096
"""Maximum number of updates between reports; the oldest are dropped beyond it."""


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
    """None: the newest version could not be queried."""
    reason: str
    retry_at_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{'the newest version' if self.version is None else f'version {self.version}'}: {self.reason}"


class WeightFollower:
    """Polls for newer weights, stages and verifies them while requests run, and applies them between engine steps.

    The states of an engine, and the requests that may start in each:

        serving     training requests, if the version is new enough for them
        applying    none: new requests wait and start under the new version
        held        evaluation only: no update and no new training request until it ends
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
        """A fetch that timed out."""
        self._refusal: _Refusal | None = None
        self._updates: deque[WeightUpdate] = deque(maxlen=_MAX_UPDATES)

    @property
    def waits_for(self) -> PolicyVersion | None:
        """Return the version that training requests wait for; None if the engine is fresh enough."""
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
        """Follow the store until cancelled; raise PolicyTimeout as `update` does."""
        while True:
            self._poll_now.clear()
            await self.update()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poll_now.wait()

    async def update(self) -> None:
        """Update the engine to the newest version in the store; raise PolicyTimeout if that is not applied in time.

        If a version is unavailable (corrupt, removed, of another model, no answer from the weight service), log it and
        retry later; the engine keeps its version. A request that waits for the version times out in `admit`, which
        ends the actor.
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

        Raises TransferFailed if the call times out, or an earlier call that timed out is still running.
        """
        timeout_s = UPDATE_TIMEOUT_S
        if self._request is not None and not self._request.done():
            raise TransferFailed("an earlier request is still running")
        request = self._threads.submit(call, *args, **kwargs)
        self._request = request
        try:
            async with asyncio.timeout(timeout_s):
                # shielded: the puller's own future must not be cancelled, since a late result is still used
                return await asyncio.shield(asyncio.wrap_future(request))
        except TimeoutError as error:
            raise TransferFailed(
                f"not read and verified within {timeout_s:g} s; check the load of this "
                "machine, its weights folder and the weight service"
            ) from error

    def _late_arrival(self) -> StagedVersion | None:
        """Return the version of a fetch that ended after its timeout, or None. A slow machine needs it to catch up."""
        late, self._late = self._late, None
        if late is None or late.exception() is not None:
            return None
        return late.result()

    async def _put(self, staged: StagedVersion) -> None:
        version = staged.version
        try:
            await self._engine.prepare(staged, timeout_s=UPDATE_TIMEOUT_S)
            # acquired outside the timeout: an evaluation may hold it, and has its own timeout
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
        """Return whether this version was rejected and its retry is not due; None stands for a failed query."""
        refusal = self._refusal
        return refusal is not None and refusal.version == version and self._clock() < refusal.retry_at_s

    def _keep_old(self, version: PolicyVersion | None, error: Exception) -> None:
        before = self._refusal if self._refusal is not None and self._refusal.version == version else None
        pause_s = _RETRY_S[0]
        if before is not None and not isinstance(error, TransferFailed):
            # a version that was read completely and rejected is rarely better the next time
            pause_s = min(2 * before.pause_s, _RETRY_S[1])
        self._refusal = _Refusal(version, str(error), self._clock() + pause_s, pause_s)
        if before is None or before.reason != self._refusal.reason:
            _log.warning("%s keeps policy %s and will retry: %s", self._name, self.version, self._refusal)

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    async def catch_up(self, at_least: PolicyVersion) -> None:
        """Wait until the engine serves `at_least` or newer, whether or not `run` is running.

        Raises PolicyTimeout if that takes longer than `UPDATE_TIMEOUT_S`, not counting evaluations.
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

        It may start once the engine serves at least that version, lags the newest one by at most `max_actor_lag`, and
        neither an update nor an evaluation is in progress. Raises PolicyTimeout as `catch_up` does.
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
        """Return whether the timeout has passed since `since_s`, and since training requests may start again."""
        return self._open and self._clock() > max(since_s, self._opened_at_s) + UPDATE_TIMEOUT_S

    def _timeout_error(self, awaited: str) -> PolicyTimeout:
        refused = f"; last rejected: {self.refused}" if self.refused else ""
        return PolicyTimeout(
            f"{self._name} waited {UPDATE_TIMEOUT_S:g} s for policy "
            f"{awaited} from the learner: the engine serves {self.version}, the newest known is {self._newest}"
            f"{refused}. Check the learner's log, and that this machine can read its weights folder or weight service"
        )
