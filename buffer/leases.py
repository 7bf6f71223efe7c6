"""Track leases: which actor holds which prompt, and when the lease expires.

A lease is permission to generate the missing samples of one group; the group's row stores the lease durably. The
deadlines of leases restart when the service restarts. Requests that got no lease are remembered only in memory. After a
restart, a duplicate of an unsuccessful request may get a lease, which then expires.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from math import inf

from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, InvalidRequest
from leeway.buffer.groups import MAX_CANDIDATES, Groups
from leeway.buffer.tables import Actor, Group
from leeway.buffer.transaction import Transaction
from leeway.common.rpc.messages import ClientIdentity
from leeway.common.run import RunFacts

LEASE_TIMEOUT_S = 60.0
"""Seconds until an unfinished lease expires if it is not renewed; actors renew after a third of this time."""
MAX_NAME_BYTES = 128
NEAR_BOUND_S, NEAR_BOUND_STEPS = 60.0, 20.0
"""After a grant of too few groups, admission counts as near its bound for the longer of these durations (s, steps)."""
_NUM_REPLACED = 8
"""Number of replaced sessions remembered per client name; a delayed Hello from a remembered session is refused."""


class Leases:
    """Granting, renewal, expiry and fencing of leases."""

    def __init__(self, config: BufferConfig, facts: RunFacts, groups: Groups, clock: Callable[[], float]) -> None:
        self._config, self._facts, self._contract = config, facts, facts.contract
        self._groups = groups
        self._clock = clock
        self._deadlines: dict[int, float] = {}
        """Lease -> its deadline, in order of expiry. A closed lease is removed once it is the first entry."""
        self._granted_none: dict[str, tuple[int, int]] = {}
        """Actor -> epoch and number of its last lease request that got no group."""
        self._closed_at_s = -inf
        """Time when a request was last granted fewer groups than requested."""
        self.allowed_lag: int | None = None
        """Lag bound that the learner's last draw requested; if None, `max_lag` applies."""

    def restart(self, tx: Transaction) -> None:
        """Restart the deadline of every open lease, after a start of the service."""
        self._groups.index.load(tx)
        for lease_id in self._groups.index.leases:
            self._extend(lease_id)

    def hello(self, tx: Transaction, message: p.Hello) -> Actor:
        """Open an epoch for a client and fence its older epochs, whose leases end immediately.

        Raises:
            BufferRefused: the name is invalid, belongs to another role, or a newer process of that name sent Hello.
        """
        if not is_name(message.name):
            raise BufferRefused(f"expected a client name of 1 to {MAX_NAME_BYTES} bytes, got {message.name[:40]!r}")
        actor = tx.actors.get(message.name)
        if actor is None:
            actor = Actor(message.name, message.role, message.session)
        elif actor.role != message.role:
            raise BufferRefused(
                f"'{message.name}' is a client of role {actor.role} in this run: use another name for a {message.role}"
            )
        elif actor.session == message.session:
            return actor
        elif message.session in actor.replaced:
            # The message duplicates an earlier Hello; accepting the duplicate would fence the newer process.
            raise BufferRefused(f"'{message.name}' was replaced by a newer process (epoch {actor.epoch})")
        else:
            for group_id in sorted(self._groups.index.leases.values()):
                group = tx.groups.require(group_id)
                if group.actor == message.name:
                    self._groups.lose_lease(tx, group, "fenced")
            tx.seen.delete_texts(message.name)
            replaced = [*actor.replaced, actor.session][-_NUM_REPLACED:]
            epoch = actor.epoch + 1
            actor = Actor(message.name, message.role, message.session, epoch=epoch, replaced=replaced)
        tx.actors.put(actor, actor.name)
        return actor

    def authorize(self, tx: Transaction, client: ClientIdentity, message: p.Request) -> None:
        """Check that the newest process of a known client sent the request, and that it names no other client.

        Requests of actors contain an epoch; the handler of each request checks the epoch.

        Raises:
            BufferRefused: a newer process of the client's name sent Hello.
            InvalidRequest: the client never sent Hello, or the request names another client.
        """
        name, kind = client.name, type(message).__name__
        if isinstance(message, p.Hello):
            if (message.name, message.role, message.session) != (name, client.role, client.session):
                raise InvalidRequest(f"'{name[:MAX_NAME_BYTES]}' sent Hello as '{message.name[:MAX_NAME_BYTES]}'")
            return
        actor = tx.actors.get(name) if is_name(name) else None
        if actor is None or client.session not in (actor.session, *actor.replaced) or client.role != actor.role:
            raise InvalidRequest(
                f"{kind} from '{name[:MAX_NAME_BYTES]}', which is unknown to this service: send Hello first"
            )
        if isinstance(message, p.LeaseRequest | p.Push | p.GiveUp | p.HandOn | p.Renew):
            if message.actor != name:
                raise InvalidRequest(
                    f"'{name}' sent {kind} for '{message.actor[:MAX_NAME_BYTES]}': send requests in your own name"
                )
        elif client.session != actor.session:
            raise BufferRefused(f"'{name}' was replaced by a newer process (epoch {actor.epoch})")

    def current(self, tx: Transaction, name: str, epoch: int) -> Actor:
        """Return the client's row; raise BufferRefused if it never sent Hello or a newer process replaced it."""
        actor = tx.actors.get(name) if is_name(name) else None
        if actor is None or epoch > actor.epoch:
            raise BufferRefused(
                f"'{name[:MAX_NAME_BYTES]}' (epoch {epoch}) is unknown to this service: send Hello first"
            )
        if epoch < actor.epoch:
            raise BufferRefused(f"'{name}' (epoch {epoch}) was replaced by a newer process (epoch {actor.epoch})")
        return actor

    def grant(self, tx: Transaction, request: p.LeaseRequest) -> p.LeaseGrant:
        """Lease groups while admission is open: unleased groups first, then returned prompts, then new prompts."""
        actor = self.current(tx, request.actor, request.epoch)
        state, requeue_at = tx.state, self._groups.prompts.requeue_at(request)
        if request.request_number == actor.last_request:
            return self._granted(tx, actor.last_leases, requeue_at)
        if (actor.epoch, request.request_number) <= self._granted_none.get(actor.name, (0, -1)):
            # The request duplicates an answered request; no client waits for a grant.
            return p.LeaseGrant([], state.newest, state.draining)
        if request.wants_lengths:
            tx.undo.append(partial(setattr, self._groups, "prompts", self._groups.prompts))
            self._groups.prompts = self._groups.prompts.predicting(tx)
        leases: list[p.Lease] = []
        while request.request_number > actor.last_request and len(leases) < request.max_groups:
            group = self._next_group(tx, request)
            if group is None:
                self._closed_at_s = self._clock()
                break
            leases.append(self._issue(tx, group, actor, request.wants_lengths))
        if leases:
            actor.last_request, actor.last_leases = request.request_number, leases
            tx.actors.put(actor, actor.name)
        else:
            self._granted_none[actor.name] = actor.epoch, request.request_number
        return self._granted(tx, leases, requeue_at)

    def renew(self, tx: Transaction, request: p.Renew) -> p.RenewReply:
        """Extend the deadlines of leases that the actor still holds; return the other leases."""
        lost = []
        for lease_id in request.lease_ids:
            group_id = self._groups.index.leases.get(lease_id)
            group = None if group_id is None else tx.groups.require(group_id)
            if group is None or (group.actor, group.epoch) != (request.actor, request.epoch):
                lost.append(lease_id)
            else:
                self._extend(lease_id)
                self._groups.prompts.renewed(request.actor)
        return p.RenewReply(lost)

    def give_up(self, tx: Transaction, request: p.GiveUp) -> None:
        """Fail samples of a lease. Samples that are not in flight are ignored, so the method is idempotent."""
        group = self.held_by(tx, request)
        if group is not None:
            requested = set(request.sample_indices)
            given_up = [index for index in group.in_flight() if index in requested]
            self._groups.fail(tx, group, given_up, request.reason or "given up")
            self._groups.advance(tx, group)

    def held_by(self, tx: Transaction, request: p.GiveUp | p.HandOn) -> Group | None:
        """Return the group of a lease; None if the actor no longer holds the lease."""
        group_id = self._groups.index.leases.get(request.lease_id)
        group = None if group_id is None else tx.groups.require(group_id)
        holder = request.actor, request.epoch, request.attempt
        return group if group is not None and (group.actor, group.epoch, group.attempt) == holder else None

    def expire_due(self, tx: Transaction) -> None:
        self._groups.prepare(tx)
        now = self._clock()
        for lease_id in list(takewhile(lambda each: self._deadlines[each] <= now, self._deadlines)):
            group_id = self._groups.index.leases.get(lease_id)
            if group_id is None:
                # The lease is closed. If the turn fails, `restart` sets a new deadline for every open lease.
                del self._deadlines[lease_id]
                continue
            self._groups.lose_lease(tx, tx.groups.require(group_id), "lease expired")

    def due_in_s(self) -> float | None:
        """Return the seconds until the next lease expires; None without leases."""
        for closed in list(takewhile(lambda each: each not in self._groups.index.leases, self._deadlines)):
            del self._deadlines[closed]
        next_at = next(iter(self._deadlines.values()), None)
        return None if next_at is None else max(0.0, next_at - self._clock())

    def outstanding(self, tx: Transaction) -> int:
        """Return the number of groups in flight, waiting for their first use, or held by unfinished steps.

        Under replay without an age bound, waiting groups do not count, because eviction bounds the store.
        """
        is_unbounded = self._config.replays and self._contract.bound() is None
        waiting = 0 if is_unbounded else self._groups.index.num_unused
        return len(self._groups.index.open) + waiting + sum(tx.state.pending_draws.values())

    def closed_because(self, tx: Transaction) -> str:
        """Return why no new group may be leased now; '' if admission is open."""
        state = tx.state
        if state.draining:
            return "the run is draining"
        if state.incarnation < 0:
            return "no learner has started"
        if state.published is None:
            return "the learner has not published weights"
        if self._config.source is not None:
            return "the run trains on recorded samples (buffer.source)"
        num_live = len(self._groups.index.open) + len(self._groups.index.ready)
        if num_live >= self._config.max_live_groups(self._facts.groups_per_step):
            return f"{num_live} groups are open or ready, which reaches the limit of buffer.replay_steps"
        return self._contract.admit(
            self.outstanding(tx),
            version=state.version,
            published=state.effective(state.published),
            allowed=self.allowed_lag,
        )

    def _granted(self, tx: Transaction, leases: list[p.Lease], requeue_at: int) -> p.LeaseGrant:
        near_s = max(NEAR_BOUND_S, NEAR_BOUND_STEPS * self._groups.prompts.pace.step_s)
        is_near_bound = self._clock() - self._closed_at_s < near_s
        return p.LeaseGrant(leases, tx.state.newest, tx.state.draining, requeue_at, is_near_bound)

    def _next_group(self, tx: Transaction, request: p.LeaseRequest) -> Group | None:
        state, prompts = tx.state, self._groups.prompts
        if state.draining or state.published is None:
            return None
        for group_id in self._groups.index.unleased[:MAX_CANDIDATES]:
            group = tx.groups.require(group_id)
            if group.oldest is not None and not self._contract.usable(state.effective(group.oldest), state.version):
                self._drop_open(tx, group)
            elif prompts.may_resume(group, request):
                self._forget_stale(tx, group)
                return group
        if self.closed_because(tx):
            return None
        prompt = prompts.next(tx, request)
        size, longest = self._facts.group_size, round(prompt.longest)
        group = Group.new(state.next_group, prompt.prompt_id, size, prompt.failures, longest)
        state.next_group += 1
        return group

    def _forget_stale(self, tx: Transaction, group: Group) -> None:
        """Delete partial rollouts that exceed the staleness bound; their samples start from the prompt."""
        for index, each in list(group.partials.items()):
            if not self._contract.usable(tx.state.effective(each.oldest), tx.state.version):
                self._groups.forget_partial(tx, group, index)

    def _drop_open(self, tx: Transaction, group: Group) -> None:
        """Drop a group without a lease; its missing samples were counted as failed or requeued when the lease ended."""
        for index in group.missing():
            group.sample_states[index] = "failed"
        self._groups.prompts.observe(tx, group)
        self._groups.close(tx, group, "dropped_stale")
        self._groups.return_prompt(tx, group, failures=group.failures)

    def _issue(self, tx: Transaction, group: Group, actor: Actor, wants_lengths: bool) -> p.Lease:
        state = tx.state
        missing = group.missing()
        group.lease_id = state.next_lease
        group.attempt += 1
        group.actor, group.epoch = actor.name, actor.epoch
        group.min_version = self._contract.min_version(state.effective(state.newest))
        group.issued += len(missing)
        state.next_lease += 1
        state.ledger.issue(len(missing))
        self._groups.save(tx, group)
        self._extend(group.lease_id)
        return p.Lease(
            lease_id=group.lease_id,
            attempt=group.attempt,
            group_id=group.group_id,
            prompt_id=group.prompt_id,
            sample_indices=missing,
            min_version=group.min_version,
            timeout_s=LEASE_TIMEOUT_S,
            prefixes=sorted(group.partials),
            usual_tokens=self._groups.prompts.usual_tokens(tx, group.prompt_id) if wants_lengths else 0.0,
        )

    def _extend(self, lease_id: int) -> None:
        self._deadlines.pop(lease_id, None)
        self._deadlines[lease_id] = self._clock() + LEASE_TIMEOUT_S


def is_name(text: str) -> bool:
    """Return whether a client name is valid; names are part of keys in the store, and the size of keys is limited."""
    return 0 < len(text.encode()) <= MAX_NAME_BYTES and "\0" not in text
