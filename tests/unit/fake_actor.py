"""Fakes of an actor's engine, buffer and store.

FakeEngine returns fixed tokens after a given time and serves the version that was applied last. FakeBuffer grants
leases and acknowledges requests immediately, in this process. FakeStore reports the newest version. Tasks, scoring, the
weight follower and the actor loop are the real ones.
"""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from leeway.actors.config import ActorsConfig
from leeway.actors.engine import UpdateRefused
from leeway.actors.engine_core import EngineDead, Generation
from leeway.actors.loop import ActorComponents, ActorLoop
from leeway.actors.report import EngineStats
from leeway.actors.rewards import Scorer, ScorerLimits
from leeway.actors.tasks import Problem, RewardFunction, Task
from leeway.buffer.client import Granted
from leeway.buffer.protocol import Lease, RenewReply, RowResult
from leeway.buffer.schema import REQUEUED, VersionSpan, encode
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.manifest import TransferFailed, WeightsCorrupt
from tests.world.reward_callers import TASK, InThisProcess
from tests.world.run_context import run_context, run_facts

K = 4


class FakeEngine:
    """Fake engine that generates four tokens per request. The first generated token is the first prompt token.

    A weight update waits while the event `may_apply` is cleared.
    """

    def __init__(self, seconds=0.0):
        self.version = PolicyVersion(0, 0)
        self.stats = EngineStats()
        self.seconds = seconds
        self.started_at = []
        self.seeds = []
        self.cancelled = 0
        self.running = 0
        self.max_running = 0
        self.error = None
        self.is_dead = False
        self.stopped = False
        self.limits = set()
        """Timeouts of the running requests."""
        self.requests = {}
        """Maps the key of each running request to its prompt, its prefix, and the event that ends the request early."""
        self.prefixes = []
        self.refuses = set()
        self.prepared = []
        self.kv_caches = []
        self.applying = asyncio.Event()
        self.may_apply = asyncio.Event()
        self.may_apply.set()

    async def generate(
        self, prompt_token_ids, *, temperature=None, max_new_tokens=None, seed=None, prefix=None, key=None
    ):
        if self.is_dead:
            raise self.error
        self.started_at.append(self.version)
        self.seeds.append(seed)
        self.prefixes.append(prefix)
        self.running += 1
        self.max_running = max(self.running, self.max_running)
        interrupted = asyncio.Event()
        if key is not None:
            self.requests[key] = prompt_token_ids, prefix, interrupted
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds) as limit:
                    self.limits.add(limit)
                    await interrupted.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.limits.remove(limit)
            partial = self.so_far(key)
            if not isinstance(self.error, EngineDead):
                self.requests.pop(key, None)
        if self.error is not None:
            self.is_dead = isinstance(self.error, EngineDead)
            raise self.error
        if interrupted.is_set():
            return partial
        completion = [prompt_token_ids[0], 1, 2, 3]
        tokens = np.array(completion[:max_new_tokens][0 if prefix is None else len(prefix.token_ids) :], np.int32)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        why = "stop" if tokens[-1] == 3 else "length"
        return Generation(tokens, logprobs, (VersionSpan(self.version, 0, len(tokens)),), why).after(prefix)

    def finish(self):
        """Complete all running requests; later requests take no time."""
        self.seconds = 0.0
        for limit in self.limits:
            limit.reschedule(0.0)

    def ended(self, prefix):
        return "stop" if prefix.token_ids[-1] == 3 else None

    def runs(self, key):
        return key in self.requests

    async def interrupt(self, keys):
        if self.is_dead:
            raise self.error
        for key in keys:
            self.requests[key][2].set()

    def so_far(self, key):
        """Return the tokens that a running request has generated: the first two of four."""
        if key not in self.requests:
            return None
        prompt, prefix, _ = self.requests[key]
        tokens = np.array([prompt[0], 1][0 if prefix is None else len(prefix.token_ids) :], np.int32)
        spans = (VersionSpan(self.version, 0, len(tokens)),) if len(tokens) else ()
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Generation(tokens, logprobs, spans, REQUEUED).after(prefix)

    async def prepare(self, staged, *, timeout_s):
        self.prepared.append(staged.version)
        if staged.version in self.refuses:
            raise UpdateRefused("of another model")

    async def apply(self, staged, kv_cache, *, timeout_s):
        self.kv_caches.append(kv_cache)
        self.applying.set()
        await self.may_apply.wait()
        await asyncio.sleep(0.01)
        self.version = staged.version
        return 0.01, 0.005

    async def stop(self):
        self.stopped = True


class FakeStore:
    """Fake puller of weights, whose newest version is set by the test.

    A fetch of a version in `corrupt` fails. If `silent` is true, `newest` raises TransferFailed.
    A fetch waits while the event `may_fetch` is cleared.
    """

    def __init__(self):
        self.version = PolicyVersion(0, 0)
        self.corrupt = set()
        self.silent = False
        self.may_fetch = threading.Event()
        self.may_fetch.set()
        self.num_polls = 0
        self.fetched = []
        self.invalidated = []
        self.closed = False

    def newest(self):
        self.num_polls += 1
        if self.silent:
            raise TransferFailed("tcp://fake did not answer")
        return self.version

    def fetch(self, version):
        self.fetched.append(version)
        assert self.may_fetch.wait(60), "the test never set may_fetch"
        if version in self.corrupt:
            raise WeightsCorrupt("a flipped byte")
        return FakeStaged(version)

    def invalidate(self, staged):
        self.invalidated.append(staged.version)

    def close(self):
        self.closed = True


class FakeStaged(contextlib.AbstractContextManager):
    def __init__(self, version):
        self.version = version

    def __exit__(self, *_):
        return None


class FakeBuffer:
    """Fake buffer that grants `num_groups` leases, then reports that it is draining. All calls are recorded.

    If `credit` is false, a push raises an AssertionError.
    """

    def __init__(self, num_groups, min_version=0, timeout_s=60.0):
        self.num_groups = num_groups
        self.min_version = min_version
        self.timeout_s = timeout_s
        self.newest = (0, 0)
        self.granted = 0
        self.requests = []
        """Lane and seconds per token of each lease request."""
        self.pushed = []
        self.failed = []
        self.requeued = []
        """Lease, samples, partial rollouts and `goes_on` (the actor keeps the samples) of each requeue request."""
        self.saved = []
        """Saved partial rollouts of the samples that are leased next."""
        self.requeue_at = 0
        self.renewals = 0
        self.lost = set()
        self.outcome = "committed"
        self.credit = True
        self.closed = False

    def lease(self, max_groups, lane="", token_s=0.0, *, wants_lengths=False):
        self.requests.append((lane, token_s))
        leases = []
        while self.granted < self.num_groups and len(leases) < max_groups:
            self.granted += 1
            prefixes = [row.sample_index for row in self.saved if row.group_id == 100 + self.granted]
            lease = Lease(self.granted, 1, 100 + self.granted, self.granted % 8, list(range(K)), self.min_version,
                          self.timeout_s, prefixes)  # fmt: skip
            leases.append(lease)
        body = encode([row for row in self.saved if row.group_id <= 100 + self.granted], "run") if self.saved else b""
        self.saved = []
        draining = self.granted == self.num_groups
        return done(Granted(leases, self.newest, draining=draining, requeue_at=self.requeue_at, body=body))

    def has_room(self, trajectory):
        return self.credit

    def push(self, trajectory):
        assert self.credit, "a push without credit blocks the event loop"
        self.pushed.append(trajectory)
        return done(RowResult(len(self.pushed), self.outcome))

    def report_failed(self, lease, sample_indices, reason):
        self.failed.append((lease.lease_id, sample_indices, reason))
        return done(None)

    def requeue(self, lease, sample_indices, partials, *, goes_on=False):
        self.requeued.append((lease.lease_id, sample_indices, partials, goes_on))
        return done(None)

    def renew(self, lease_ids):
        self.renewals += 1
        return done(RenewReply([lease_id for lease_id in lease_ids if lease_id in self.lost]))

    def close(self):
        self.closed = True


class TextDecoder:
    """Decodes token ids to decimal numbers, separated by spaces."""

    def completion(self, prompt_ids, token_ids, *, prefill, special=False):
        return " ".join(map(str, token_ids))


def done(result):
    future = Future()
    future.set_result(result)
    return future


def half(problems, completions):
    return [0.5 for _ in completions]


def make_actor(
    buffer, engine=None, store=None, reward=half, config=None, weight_sync=None, clock=time.monotonic, rewards=None,
    task_config=None, **changes,
):  # fmt: skip
    """Return an actor whose run context has the given changes.

    `reward` runs in this process. `rewards` run in reward processes.
    """

    async def load(function, timeout_s):
        return InThisProcess(reward)

    problems = [Problem(f"q{i}", f"q{i}", {"question": f"q{i}"}, i, [10 + i, 20]) for i in range(8)]
    task = Task(problems, problems[:6], (RewardFunction("half", TASK, ("question",)),))
    knobs = WeightSyncConfig(**(weight_sync or {}))
    context = run_context(
        Path("run"),
        run_facts(run_id="run", seed=7, group_size=K, staleness=knobs.staleness()),
        actors=ActorsConfig(**{"group_size": K, "max_running_samples": 16, **(config or {})}),
        task=task_config or TASK,
        weight_sync=knobs,
        **changes,
    )

    async def assemble(*_):
        section = context.config.actors
        limits = ScorerLimits(section.reward_processes, section.reward_timeout_s, start_timeout_s=60.0)
        start = {} if rewards else {"start": load}
        scorer = Scorer(rewards or task.rewards, limits, clock=clock, **start)
        return ActorComponents(task, TextDecoder(), scorer, engine or FakeEngine(), store or FakeStore(), buffer)

    return ActorLoop(context, 0, "actors", assemble, clock=clock)


async def until(condition, timeout_s=60):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def jump(monkeypatch, seconds):
    """Advance the event loop's clock by `seconds`, so that all timeouts up to this length expire."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + seconds)


def wait_clock(monkeypatch):
    """Replace the event loop's clock by one that counts only the time that the loop waits for events."""
    events = asyncio.get_running_loop()
    select, clock = events._selector.select, Clock()

    def wait(timeout):
        started_s = time.monotonic()
        found = select(timeout)
        clock.now_s += min(time.monotonic() - started_s, timeout or 0.0)
        return found

    clock.now_s = events.time()
    monkeypatch.setattr(events._selector, "select", wait)
    monkeypatch.setattr(events, "time", clock)
    return clock


async def run_to_end(actor, timeout_s=60):
    await actor.start()
    try:
        async with asyncio.timeout(timeout_s):
            await actor.run()
        return actor.report()
    finally:
        await actor.stop()


class Clock:
    """Fake clock whose time is set by the test."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s
