"""WeightFollower: keeps an engine's policy fresh while requests run, and says when one may start."""

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

from actors.engine import Engine, UpdateRefused
from actors.report import WeightUpdate
from common.process import DaemonThreads, wall_time
from common.staleness import PolicyVersion, StalenessContract
from weight_sync.client import UPDATE_TIMEOUT_S
from weight_sync.config import WeightSyncConfig
from weight_sync.manifest import TransferFailed, WeightsError
from weight_sync.puller import Puller
from weight_sync.store import StagedVersion

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 0.05
"""Seconds between looks for a newer version: one small read of a file, or one small message."""
_RETRY_S = (1.0, 10.0)
"""First and longest pause before a refused version is tried again: verifying one reads all of it."""
_MAX_UPDATES = 4096
"""If nothing takes them, the oldest are dropped beyond this number."""


class ActorError(RuntimeError):
    """Ends an actor, which its supervisor then starts again.

    ActorError
      PolicyTimeout   here
      ActorFenced     actors.loop: a newer process acts under this actor's name

    Beside it `actors.engine.EngineDead`, and `buffer.errors.BufferError` if the service is gone.
    """


class PolicyTimeout(ActorError):
    """A policy version did not arrive, or was not applied, within `UPDATE_TIMEOUT_S`."""


@dataclass(frozen=True)
class _Refusal:
    version: PolicyVersion | None
    """None: the newest could not even be asked for."""
    reason: str
    retry_at_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{'the newest version' if self.version is None else f'version {self.version}'}: {self.reason}"


class WeightFollower:
    """Looks for newer weights, stages and verifies them while requests run, applies them between two engine steps.

    The states of an engine, and what may start in each:

        serving     training requests, if the version is new enough for them
        applying    nothing: what is asked meanwhile waits and starts under the new version
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
        self._looking = asyncio.Lock()
        self._applying = asyncio.Lock()
        self._open = True
        self._opened_at_s = clock()
        self._newest = engine.version
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._asked: Future[Any] | None = None
        self._late: Future[StagedVersion] | None = None
        """A fetch that timed out."""
        self._refusal: _Refusal | None = None
        self._updates: deque[WeightUpdate] = deque(maxlen=_MAX_UPDATES)

    @property
    def waits_for(self) -> PolicyVersion | None:
        """Return the version without which no training request starts; None if the engine is fresh enough."""
        return self._newest if self._contract.is_behind(self.version, self._newest) else None

    @property
    def refused(self) -> str:
        """Return the version refused last and why; '' once the engine serves the newest."""
        return "" if self._refusal is None else str(self._refusal)

    def hear_of(self, newest: PolicyVersion) -> None:
        """Note that this version is published: look at once instead of at the next poll."""
        if newest > self._newest:
            self._newest = newest
            self._poll_now.set()

    def take_updates(self) -> list[WeightUpdate]:
        updates = list(self._updates)
        self._updates.clear()
        return updates

    async def run(self) -> None:
        """Follow the store until cancelled; PolicyTimeout as `update`."""
        while True:
            self._poll_now.clear()
            await self.update()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._poll_now.wait()

    async def update(self) -> None:
        """Bring the engine to the newest version in the store. PolicyTimeout if it did not verify or apply it in time.

        A version that cannot be had (corrupt, removed, of another model, no answer from the weight service) is logged
        and tried again later; the engine keeps what it has. A request that waits for it ends the waiting, and the
        actor, in `admit`.
        """
        async with self._looking:
            newest = None
            try:
                if self._must_wait(None):
                    return
                newest = await self._ask(self._puller.newest)
                if newest is None or newest <= self._engine.version:
                    self._refusal = None
                    return
                self._newest = max(self._newest, newest)
                staged = self._late_arrival()
                if staged is None:
                    if self._must_wait(newest):
                        return
                    try:
                        staged = await self._ask(self._puller.fetch, newest)
                    except TransferFailed:
                        self._late = self._asked
                        raise
            except (WeightsError, OSError) as error:
                self._keep_old(newest, error)
                return
            with staged:
                await self._put(staged)

    async def _ask(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the puller in a thread, one call at a time.

        TransferFailed if it took longer than the bound, or a call that did has not ended yet.
        """
        bound_s = UPDATE_TIMEOUT_S
        if self._asked is not None and not self._asked.done():
            raise TransferFailed("an earlier look has not ended")
        asked = self._threads.submit(call, *args, **kwargs)
        self._asked = asked
        try:
            async with asyncio.timeout(bound_s):
                # shielded: the puller's own future is not to be cancelled, for what it brings late is used all the same
                return await asyncio.shield(asyncio.wrap_future(asked))
        except TimeoutError as error:
            raise TransferFailed(
                f"not read and verified within {bound_s:g} s; look at the load of this "
                "machine, its weights folder and the weight service"
            ) from error

    def _late_arrival(self) -> StagedVersion | None:
        """Return what was fetched after `_ask` timed out: a slow machine would else never catch up."""
        late, self._late = self._late, None
        if late is None or late.exception() is not None:
            return None
        return late.result()

    async def _put(self, staged: StagedVersion) -> None:
        version = staged.version
        try:
            await self._engine.prepare(staged, timeout_s=UPDATE_TIMEOUT_S)
            # waited for outside the bound: an evaluation may hold it, and bounds itself
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
                f"{self.version}). Look at the load of this machine and the speed of the weights folder"
            ) from error
        except UpdateRefused as error:
            self._puller.distrust(staged)
            self._keep_old(version, error)
            return
        self._refusal = None
        end_s = wall_time()
        served = (version.incarnation, version.version)
        self._updates.append(WeightUpdate(end_s - pause_s, end_s, load_s, served))

    async def _apply_whole(self, staged: StagedVersion) -> tuple[float, float]:
        """Apply to the end even if the follower is cancelled: half an update leaves the engine paused."""
        kv_cache = self._config.kv_cache
        applying = asyncio.create_task(self._engine.apply(staged, kv_cache, timeout_s=UPDATE_TIMEOUT_S))
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                return await asyncio.shield(applying)
        except asyncio.CancelledError:
            await asyncio.wait({applying}, timeout=UPDATE_TIMEOUT_S)
            raise

    def _must_wait(self, version: PolicyVersion | None) -> bool:
        """Return whether this version was refused a moment ago. None: whether the newest could not be asked for."""
        refusal = self._refusal
        return refusal is not None and refusal.version == version and self._clock() < refusal.retry_at_s

    def _keep_old(self, version: PolicyVersion | None, error: Exception) -> None:
        before = self._refusal if self._refusal is not None and self._refusal.version == version else None
        pause_s = _RETRY_S[0]
        if before is not None and not isinstance(error, TransferFailed):
            # what was read to its end and refused is hardly ever better the next time
            pause_s = min(2 * before.pause_s, _RETRY_S[1])
        self._refusal = _Refusal(version, str(error), self._clock() + pause_s, pause_s)
        if before is None or before.reason != self._refusal.reason:
            _log.warning("%s keeps policy %s and will try again: %s", self._name, self.version, self._refusal)

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    async def catch_up(self, at_least: PolicyVersion) -> None:
        """Wait until the engine serves `at_least` or newer, whether or not `run` is running.

        PolicyTimeout if that version did not arrive within `UPDATE_TIMEOUT_S`; evaluations do not count.
        """
        since_s = self._clock()
        while self.version < at_least:
            await self.update()
            if self.version < at_least:
                if self._has_waited_enough(since_s):
                    raise self._never_came(str(at_least))
                await asyncio.sleep(POLL_S)

    async def admit(self, min_version: int) -> None:
        """Wait until a training request of a lease with this `min_version` may start.

        It may once the engine serves at least that version, is at most `max_actor_lag` behind the newest one, and
        neither an update nor an evaluation is going on. PolicyTimeout as `catch_up`.
        """
        since_s = self._clock()
        while not (self._open and self._contract.may_start(self.version, self._newest, min_version)):
            if self._has_waited_enough(since_s):
                raise self._never_came(str(self.waits_for or f"version {min_version}"))
            self._poll_now.set()
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, UPDATE_TIMEOUT_S)):
                    await changed.wait()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[PolicyVersion]:
        """Keep the engine at one version, and free of new training requests, during a block."""
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

    def _has_waited_enough(self, since_s: float) -> bool:
        """Return whether the bound is over since then, or since training requests may start again."""
        return self._open and self._clock() > max(since_s, self._opened_at_s) + UPDATE_TIMEOUT_S

    def _never_came(self, wanted: str) -> PolicyTimeout:
        refused = f"; refused last: {self.refused}" if self.refused else ""
        return PolicyTimeout(
            f"{self._name} waited {UPDATE_TIMEOUT_S:g} s for policy "
            f"{wanted} from the learner: the engine serves {self.version}, the newest heard of is {self._newest}"
            f"{refused}. Look at the learner's log, and whether this machine sees its weights folder or weight service"
        )
