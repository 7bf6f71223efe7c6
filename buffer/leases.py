"""Track leases: which actor holds which prompt, and when the lease expires.

A lease is permission to generate the missing samples of one group. The rows are durable. Deadlines start anew when the
service restarts. Which requests were granted nothing is kept in memory: a late copy of one may then get a lease, which
expires.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from math import inf

from buffer.config import BufferConfig
from buffer.errors import BufferRefused, NotBelieved
from buffer.groups import MOST_LOOKED_AT, Groups
from buffer.protocol import GiveUp, HandOn, Hello, Lease, LeaseGrant, LeaseRequest, Push, Renew, RenewReply, Request
from buffer.tables import Actor, Group
from buffer.transaction import Transaction
from common.rpc.messages import Asker
from common.run import RunFacts

LEASE_TIMEOUT_S = 60.0
"""Seconds until a lease that is neither completed nor renewed is issued again; actors renew after a third."""
MAX_NAME_BYTES = 128
NEAR_BOUND_S, NEAR_BOUND_STEPS = 60.0, 20.0
"""After a request got too little, admission counts as near its bound for the longer of the two."""
_NUM_REPLACED = 8
"""Remembered sessions of a name: a Hello is on its way for seconds, a process lives longer."""


class Leases:
    """Grants, renews, expires and fences leases."""

    def __init__(self, config: BufferConfig, facts: RunFacts, groups: Groups, clock: Callable[[], float]) -> None:
        self._config, self._facts, self._contract = config, facts, facts.contract
        self._groups = groups
        self._clock = clock
        self._deadlines: dict[int, float] = {}
        """Lease -> when it expires, in that order. One that is closed goes when it comes first."""
        self._granted_none: dict[str, tuple[int, int]] = {}
        """Actor -> the epoch and number of its last request that was granted nothing."""
        self._closed_at_s = -inf
        """When a request was last granted less than it asked for."""
        self.allowed_lag: int | None = None
        """As the learner said with its last draw; None: it has not, or asks for no less than `max_lag`."""

    def restart(self, tx: Transaction) -> None:
        """After the service started: every open lease gets its full time again."""
        self._groups.index.load(tx)
        for lease_id in self._groups.index.leases:
            self._extend(lease_id)

    def hello(self, tx: Transaction, message: Hello) -> Actor:
        """Open an epoch for a client, which fences its older ones: their leases are lost at once.

        Raises:
            BufferRefused: the name is unusable, of another role, or a newer process of its name said hello.
        """
        if not is_name(message.name):
            raise BufferRefused(f"a client's name has 1 to {MAX_NAME_BYTES} bytes, got {message.name[:40]!r}")
        actor = tx.actors.get(message.name)
        if actor is None:
            actor = Actor(message.name, message.role, message.session)
        elif actor.role != message.role:
            raise BufferRefused(
                f"'{message.name}' is the {actor.role} of this run; a {message.role} needs its own name"
            )
        elif actor.session == message.session:
            return actor
        elif message.session in actor.replaced:
            # a late copy: what it would fence is alive
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

    def recognise(self, tx: Transaction, asker: Asker, message: Request) -> None:
        """Check that a request is of a greeted client, the newest of its name, and that it asks for itself.

        An actor's own requests have an epoch, which is checked where they are served.

        Raises:
            BufferRefused: a newer process of its name said hello.
            NotBelieved: it was never greeted, or speaks for another.
        """
        me, what = asker.name, type(message).__name__
        if isinstance(message, Hello):
            if (message.name, message.role, message.session) != (me, asker.role, asker.session):
                raise NotBelieved(f"'{me[:MAX_NAME_BYTES]}' said hello as '{message.name[:MAX_NAME_BYTES]}'")
            return
        actor = tx.actors.get(me) if is_name(me) else None
        if actor is None or asker.session not in (actor.session, *actor.replaced) or asker.role != actor.role:
            raise NotBelieved(
                f"{what} came from '{me[:MAX_NAME_BYTES]}', which is unknown to this service: send Hello first"
            )
        if isinstance(message, LeaseRequest | Push | GiveUp | HandOn | Renew):
            if message.actor != me:
                raise NotBelieved(
                    f"'{me}' sent {what} for '{message.actor[:MAX_NAME_BYTES]}': a client asks for itself"
                )
        elif asker.session != actor.session:
            raise BufferRefused(f"'{me}' was replaced by a newer process (epoch {actor.epoch})")

    def current(self, tx: Transaction, name: str, epoch: int) -> Actor:
        """Return the client's row; BufferRefused if it never said hello, or a newer process of its name did."""
        actor = tx.actors.get(name) if is_name(name) else None
        if actor is None or epoch > actor.epoch:
            raise BufferRefused(
                f"'{name[:MAX_NAME_BYTES]}' (epoch {epoch}) is unknown to this service: send Hello first"
            )
        if epoch < actor.epoch:
            raise BufferRefused(f"'{name}' (epoch {epoch}) was replaced by a newer process (epoch {actor.epoch})")
        return actor

    def grant(self, tx: Transaction, request: LeaseRequest) -> LeaseGrant:
        """Lease groups while admission is open: lost ones first, then returned prompts, then new ones."""
        actor = self.current(tx, request.actor, request.epoch)
        state, hand_on_at = tx.state, self._groups.prompts.hand_on_at(request)
        if request.request_number == actor.last_request:
            return self._granted(tx, actor.last_leases, hand_on_at)
        if (actor.epoch, request.request_number) <= self._granted_none.get(actor.name, (0, -1)):
            # A late copy of a request that was answered: no client waits for what it would be granted.
            return LeaseGrant([], state.newest, state.draining)
        if request.wants_lengths:
            tx.undo.append(partial(setattr, self._groups, "prompts", self._groups.prompts))
            self._groups.prompts = self._groups.prompts.predicting(tx)
        leases: list[Lease] = []
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
        return self._granted(tx, leases, hand_on_at)

    def renew(self, tx: Transaction, request: Renew) -> RenewReply:
        """Extend the deadlines of leases that are still the actor's; name the others."""
        lost = []
        for lease_id in request.lease_ids:
            group_id = self._groups.index.leases.get(lease_id)
            group = None if group_id is None else tx.groups.require(group_id)
            if group is None or (group.actor, group.epoch) != (request.actor, request.epoch):
                lost.append(lease_id)
            else:
                self._extend(lease_id)
                self._groups.prompts.renewed(request.actor)
        return RenewReply(lost)

    def give_up(self, tx: Transaction, request: GiveUp) -> None:
        """Samples of a lease will not come. What is no longer missing is left alone: it is safe to say twice."""
        group = self.held_by(tx, request)
        if group is not None:
            asked = set(request.sample_indices)
            given_up = [index for index in group.in_flight() if index in asked]
            self._groups.fail(tx, group, given_up, request.reason or "given up")
            self._groups.settle(tx, group)

    def held_by(self, tx: Transaction, request: GiveUp | HandOn) -> Group | None:
        """The group of a lease, where it is still open and the actor's."""
        group_id = self._groups.index.leases.get(request.lease_id)
        group = None if group_id is None else tx.groups.require(group_id)
        if group is None or (group.actor, group.epoch, group.attempt) != (
            request.actor,
            request.epoch,
            request.attempt,
        ):
            return None
        return group

    def expire_due(self, tx: Transaction) -> None:
        self._groups.prepare(tx)
        now = self._clock()
        for lease_id in list(takewhile(lambda each: self._deadlines[each] <= now, self._deadlines)):
            group_id = self._groups.index.leases.get(lease_id)
            if group_id is None:
                # Closed, perhaps in this very turn. Should that fail, `restart` gives every open lease a new deadline.
                del self._deadlines[lease_id]
                continue
            self._groups.lose_lease(tx, tx.groups.require(group_id), "lease expired")

    def due_in_s(self) -> float | None:
        """Seconds until the next lease is due; None without leases."""
        for closed in list(takewhile(lambda each: each not in self._groups.index.leases, self._deadlines)):
            del self._deadlines[closed]
        next_at = next(iter(self._deadlines.values()), None)
        return None if next_at is None else max(0.0, next_at - self._clock())

    def outstanding(self, tx: Transaction) -> int:
        """Return the groups in flight, waiting for their first use, or held by steps that are not finished.

        Under replay without an age bound waiting groups do not count: eviction bounds the store.
        """
        runs_free = self._config.replays and self._contract.bound() is None
        waiting = 0 if runs_free else self._groups.index.num_unused
        return len(self._groups.index.open) + waiting + sum(tx.state.pending_draws.values())

    def closed_because(self, tx: Transaction) -> str:
        """Why no new group may be leased now; '' where one may."""
        state = tx.state
        if state.draining:
            return "the run is draining"
        if state.incarnation < 0:
            return "no learner has started"
        if state.published is None:
            return "the learner has not published weights"
        if self._config.source is not None:
            return "the run trains on recorded samples (buffer.source)"
        num_alive = len(self._groups.index.open) + len(self._groups.index.ready)
        if num_alive >= self._config.most_alive(self._facts.groups_per_step):
            return f"{num_alive} groups are in flight or may be used again, which is what buffer.replay_steps allows"
        return self._contract.admit(
            self.outstanding(tx),
            version=state.version,
            published=state.effective(state.published),
            allowed=self.allowed_lag,
        )

    def _granted(self, tx: Transaction, leases: list[Lease], hand_on_at: int) -> LeaseGrant:
        return LeaseGrant(leases, tx.state.newest, tx.state.draining, hand_on_at, self._is_near_bound())

    def _is_near_bound(self) -> bool:
        return self._clock() - self._closed_at_s < max(
            NEAR_BOUND_S, NEAR_BOUND_STEPS * self._groups.prompts.pace.step_s
        )

    def _next_group(self, tx: Transaction, request: LeaseRequest) -> Group | None:
        if tx.state.draining or tx.state.published is None:
            return None
        prompts = self._groups.prompts
        for group_id in self._groups.index.unleased[:MOST_LOOKED_AT]:
            group = tx.groups.require(group_id)
            if self._is_doomed(tx, group):
                self._drop_open(tx, group)
            elif prompts.may_go_on(group, request):
                self._forget_stale(tx, group)
                return group
        if self.closed_because(tx):
            return None
        prompt = prompts.next(tx, request)
        size, longest = self._facts.group_size, round(prompt.longest)
        group = Group.new(tx.state.next_group, prompt.prompt_id, size, prompt.failures, longest)
        tx.state.next_group += 1
        return group

    def _is_doomed(self, tx: Transaction, group: Group) -> bool:
        ages = [] if group.oldest is None else [(tx.state.effective(group.oldest), group)]
        return any(self._contract.evict(ages, tx.state.version))

    def _forget_stale(self, tx: Transaction, group: Group) -> None:
        """Samples whose first tokens are past the bound begin anew."""
        for index, each in list(group.partials.items()):
            if not self._contract.usable(tx.state.effective(each.oldest), tx.state.version):
                self._groups.forget_partial(tx, group, index)

    def _drop_open(self, tx: Transaction, group: Group) -> None:
        """Drop a group that has no lease: its missing samples were counted when it ended, as failed or handed on."""
        for index in group.missing():
            group.sample_states[index] = "failed"
        self._groups.prompts.saw(tx, group)
        self._groups.close(tx, group, "dropped_stale")
        self._groups.return_prompt(tx, group, failures=group.failures)

    def _issue(self, tx: Transaction, group: Group, actor: Actor, wants_lengths: bool) -> Lease:
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
        return Lease(
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
    """May a client be called so? The store uses names within keys, which are short."""
    return 0 < len(text.encode()) <= MAX_NAME_BYTES and "\0" not in text
