"""WeightFollower: keeps an engine's policy fresh while requests run, and says when one may start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from actors.engine import UpdateRefused
from actors.errors import ActorError
from actors.threads import DaemonThreads
from weight_sync.config import WeightSyncConfig
from weight_sync.manifest import WeightsError
from weight_sync.staleness import PolicyVersion

if TYPE_CHECKING:
    from actors.engine import Engine, UpdateTiming
    from weight_sync.puller import Puller, StagedVersion

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Before a version that could not be fetched is tried again: verifying one reads all of it."""


class PolicyTimeout(ActorError):
    """A policy version did not arrive, or was not applied, within `weight_sync.update_timeout_s`."""


class WeightFollower:
    """Polls the store, verifies newer weights in a thread, applies them between two engine steps.

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
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow `puller` with `engine`.

        Args:
            name: the actor's, for error messages.
            engine: what serves the weights.
            puller: where newer ones are found.
            config: poll interval, bound of an update, and how far behind requests may start.
            clock: seconds, monotonic.
        """
        self._name = name
        self._engine = engine
        self._puller = puller
        self._config = config
        self._clock = clock
        self._threads = DaemonThreads(f"{name}-weights", max_threads=4)
        self._applying = asyncio.Lock()
        self._open = True
        self._newest = engine.version
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._failed_version: PolicyVersion | None = None
        self._retry_at_s = 0.0
        self.num_updates = 0
        self._pause_s: list[float] = []
        self._load_s: list[float] = []

    @property
    def waits_for(self) -> PolicyVersion | None:
        """The version without which no training request starts now; None where the engine is fresh enough."""
        return self._newest if self._behind() else None

    def hear_of(self, newest: PolicyVersion) -> None:
        """Somebody says that this version is published: look at once instead of at the next poll."""
        if newest > self._newest:
            self._newest = newest
            self._poll_now.set()

    def take_timings(self) -> tuple[list[float], list[float]]:
        """Seconds of pause and of load of each update since the last call."""
        timings = self._pause_s, self._load_s
        self._pause_s, self._load_s = [], []
        return timings

    async def run(self) -> None:
        """Follow the store until cancelled.

        Raises:
            PolicyTimeout: an update took longer than its bound.
        """
        while True:
            self._poll_now.clear()
            await self.update()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), self._config.poll_interval_s)

    async def update(self) -> None:
        """Bring the engine to the newest version in the store, if it is not there yet.

        A version that cannot be fetched (corrupt, or removed meanwhile) is logged and tried again
        later; the engine keeps what it has.

        Raises:
            PolicyTimeout: it took longer than its bound.
        """
        newest = None
        try:
            newest = self._puller.newest()
            if newest is None or newest <= self._engine.version:
                return
            self._newest = max(self._newest, newest)
            if newest == self._failed_version and self._clock() < self._retry_at_s:
                return
            async with asyncio.timeout(self._config.update_timeout_s):
                staged = await self._threads.run(self._puller.fetch, newest)
        except TimeoutError as error:
            raise self._too_long(newest, "read and verified") from error
        except (WeightsError, OSError) as error:
            self._keep_old(newest, error)
            return
        with staged:
            await self._apply(staged, newest)

    async def _apply(self, staged: StagedVersion, version: PolicyVersion) -> None:
        # The lock is waited for outside the bound: an evaluation may hold it, and bounds itself.
        async with self._applying:
            if version <= self._engine.version:
                return
            self._open = False
            try:
                timing = await self._apply_whole(staged)
            except TimeoutError as error:
                raise self._too_long(version, "applied") from error
            except UpdateRefused as error:
                self._keep_old(version, error)
                return
            finally:
                self._open = True
                self._notify()
        self.num_updates += 1
        self._pause_s.append(timing.pause_s)
        self._load_s.append(timing.load_s)

    async def _apply_whole(self, staged: StagedVersion) -> UpdateTiming:
        """Apply, to its end even if whoever follows is cancelled: half an update leaves the engine paused."""
        bound_s = self._config.update_timeout_s
        applying = asyncio.create_task(self._engine.apply(staged, self._config.kv_cache, timeout_s=bound_s))
        try:
            async with asyncio.timeout(bound_s):
                return await asyncio.shield(applying)
        except asyncio.CancelledError:
            await asyncio.wait({applying}, timeout=bound_s)
            raise

    def _keep_old(self, version: PolicyVersion | None, error: Exception) -> None:
        _log.warning("%s keeps policy %s and will try %s again: %s", self._name, self.version, version, error)
        self._failed_version, self._retry_at_s = version, self._clock() + _RETRY_S

    @property
    def version(self) -> PolicyVersion:
        """What the engine serves."""
        return self._engine.version

    async def catch_up(self, at_least: PolicyVersion) -> None:
        """Wait until the engine serves `at_least` or newer, whether or not `run` is running.

        Raises:
            PolicyTimeout: that version did not arrive within `update_timeout_s`.
        """
        give_up_at_s = self._clock() + self._config.update_timeout_s
        await self.update()
        while self.version < at_least:
            if self._clock() > give_up_at_s:
                raise self._never_came(str(at_least))
            await asyncio.sleep(self._config.poll_interval_s)
            await self.update()

    async def admit(self, min_version: int) -> None:
        """Return when a training request of a lease with this `min_version` may start.

        It may once the engine serves at least that version, is at most `max_actor_lag` behind the
        newest one heard of, and neither an update nor an evaluation is going on.

        Raises:
            PolicyTimeout: the version did not arrive within `update_timeout_s`; evaluations do not count.
        """
        give_up_at_s = self._clock() + self._config.update_timeout_s
        while not self._may_start(min_version):
            if not self._open:
                give_up_at_s = self._clock() + self._config.update_timeout_s
            elif self._clock() > give_up_at_s:
                raise self._never_came(str(self.waits_for or f"version {min_version}"))
            self._poll_now.set()
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(1.0, self._config.update_timeout_s))

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[PolicyVersion]:
        """Keep the engine at one version, and free of new training requests, for the length of a block."""
        async with self._applying:
            self._open = False
            try:
                yield self._engine.version
            finally:
                self._open = True
                self._notify()

    def close(self) -> None:
        """Let the fetching threads end."""
        self._threads.close()

    def _may_start(self, min_version: int) -> bool:
        return self._open and self.version.version >= min_version and not self._behind()

    def _behind(self) -> bool:
        served = self.version
        if served >= self._newest:
            return False
        # Versions of an abandoned incarnation are not steps behind: they are beside the way.
        return served.incarnation < self._newest.incarnation or (
            self._newest.version - served.version > self._config.actor_lag
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _too_long(self, version: PolicyVersion | None, what: str) -> PolicyTimeout:
        return PolicyTimeout(
            f"{self._name}: policy {version} was not {what} within weight_sync.update_timeout_s = "
            f"{self._config.update_timeout_s:g} s (the engine serves {self.version}). "
            "Look at the load of this machine and the speed of the weights folder, or raise the bound"
        )

    def _never_came(self, wanted: str) -> PolicyTimeout:
        return PolicyTimeout(
            f"{self._name} waited {self._config.update_timeout_s:g} s (weight_sync.update_timeout_s) for policy "
            f"{wanted} from the learner: the engine serves {self.version}, the newest in the store is "
            f"{self._puller.newest()}. Look at the learner's log, and whether this machine sees its weights folder"
        )
