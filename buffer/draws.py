"""Which groups train at which step: recorded, so that the same step asked again gets the same groups.

The generator is seeded by run, step and incarnation. What becomes of recorded draws is in `buffer.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from buffer.errors import BufferRefused, CorruptRecord
from buffer.groups import Groups
from buffer.index import ReadyGroup
from buffer.leases import Leases
from buffer.protocol import DrawRequest
from buffer.steps import Steps
from buffer.tables import DrawRecord, StoreState
from buffer.transaction import Transaction
from common.run import RunFacts

MAX_NAMED = 4
"""How many groups or actors a message names before it says 'and others'."""


class Draws:
    """Draws by the sampler, and records what it drew."""

    def __init__(self, facts: RunFacts, groups: Groups, leases: Leases, steps: Steps) -> None:
        self._facts, self._contract = facts, facts.contract
        self._groups = groups
        self._leases = leases
        self._steps = steps
        self._waits = self._contract.config.on_stale == "wait"

    def draw(self, tx: Transaction, request: DrawRequest) -> DrawRecord | None:
        """Return the groups of a step; None: it must wait.

        Raises:
            BufferRefused: the learner was replaced, or the request contradicts what is known.
        """
        state = tx.state
        self._check(tx, request)
        draw = tx.draws.get(request.step)
        is_over = request.step not in state.pending_draws
        if draw is not None and draw.incarnation == state.incarnation and (is_over or draw.version == request.version):
            return draw
        self._check_version(state, request.step, request.version)
        if draw is not None and self._adopt(tx, draw, request):
            return draw
        if draw is None and request.step <= state.step:
            raise BufferRefused(f"step {request.step} is over: the learner has finished step {state.step}")
        self._steps.release_from(tx, request.step)
        self._drop_stale(tx, request.version)
        chosen = self._choose_sound(tx, request)
        self._refuse_what_never_comes(tx, request)
        if len(chosen) < request.num_groups or self._held_back_by(tx, chosen, request.version):
            return None
        return self._record(tx, request, chosen)

    def waiting_for(self, tx: Transaction, request: DrawRequest) -> str:
        """What the step still lacks, and who owes it."""
        ready = len(self._groups.index.ready)
        text = f"step {request.step} has {min(ready, request.num_groups)} of {request.num_groups} groups"
        chosen = self._choose(tx, request) if self._waits else []
        held = [] if len(chosen) < request.num_groups else self._held_back_by(tx, chosen, request.version)
        if held:
            text += (
                f" and waits for older ones (on_stale = 'wait'): "
                f"{_some([f'group {group_id}' for group_id in held], len(held))}"
            )
        if tx.state.num_set_aside:
            text += f" ({tx.state.num_set_aside} of equal rewards were set aside for it)"
        return f"{text}; {self._owed(tx)}"

    # --- parts ------------------------------------------------------------------------------------

    def _refuse_what_never_comes(self, tx: Transaction, request: DrawRequest) -> None:
        """Of recorded samples no more are made; those of a step that is not over may be used again after it."""
        num_ready = len(self._groups.index.ready)
        if self._groups.config.source is None or num_ready >= request.num_groups or tx.state.pending_draws:
            return
        ledger = tx.state.ledger
        raise BufferRefused(
            f"step {request.step} has {num_ready} of {request.num_groups} groups, and buffer.source has no more for "
            f"it: {ledger.filtered} are filtered, as by steps that were skipped, {ledger.uninformative} set aside, and "
            f"{ledger.evicted_unused} evicted unused, as damaged ones are. Resume with learner.num_steps = "
            f"{request.step - 1} to end the run here"
        )

    def _owed(self, tx: Transaction) -> str:
        """Who owes groups, and whether more may be leased."""
        owed = []
        still_open = self._groups.index.open
        for group_id in still_open[:MAX_NAMED]:
            group = tx.groups.require(group_id)
            owner = f"{group.actor} (lease {group.lease_id})" if group.lease_id else "nobody: it waits for an actor"
            owed.append(f"group {group_id}, samples {group.missing()} from {owner}")
        text = f"owed: {_some(owed, len(still_open))}; " if owed else ""
        closed = self._leases.closed_because(tx)
        return text + (f"no new leases: {closed}" if closed else "new leases wait for an actor to ask")

    def _check(self, tx: Transaction, request: DrawRequest) -> None:
        self._steps.check_incarnation(tx.state, request.incarnation)
        resumed = tx.state.incarnations[-1].step
        if request.step <= resumed:
            raise BufferRefused(
                f"step {request.step} was done before this incarnation, which began after step {resumed}; "
                f"its first step is {resumed + 1} (steps are counted from 1)"
            )
        if request.num_groups != self._facts.groups_per_step:
            raise BufferRefused(
                f"step {request.step} asks for {request.num_groups} groups, but admission counts on "
                f"{self._facts.groups_per_step} per step: make [learner] groups_per_step agree with the run's facts"
            )

    def _check_version(self, state: StoreState, step: int, version: int) -> None:
        """Refuse a version that the learner cannot be at by the time of the step."""
        # A late copy of a request may still count on a step that was skipped since.
        ahead = min(len(state.pending_draws), max(0, step - 1 - state.step))
        if not state.version <= version <= self._contract.latest_version(state.version, ahead):
            raise BufferRefused(
                f"step {step} cannot train at version {version}: the learner finished steps up to "
                f"version {state.version} and {len(state.pending_draws)} more are drawn"
            )

    def _adopt(self, tx: Transaction, draw: DrawRecord, request: DrawRequest) -> bool:
        """Make a recorded draw one of this incarnation at this version, if it can still be trained on."""
        if not self._steps.all_usable(tx, draw, request.version):
            return False
        if draw.incarnation != request.incarnation and self._is_unfit(tx, draw):
            return False
        draw.incarnation, draw.version = request.incarnation, request.version
        tx.draws.put(draw, draw.step)
        return True

    def _is_unfit(self, tx: Transaction, draw: DrawRecord) -> bool:
        too_long = any(length > self._facts.longest_drawn for length in draw.lengths)
        return too_long or self._is_damaged(tx, draw.record_ids)

    def _choose_sound(self, tx: Transaction, request: DrawRequest) -> list[int]:
        """Return the sampler's choice; what is too long or damaged leaves, and it chooses again.

        Groups of equal rewards leave first, also those whose other samples were too long.
        """
        while True:
            self._groups.set_aside_uninformative(tx)
            chosen = self._choose(tx, request)
            groups = [tx.groups.require(group_id) for group_id in sorted(set(chosen))]
            left_out = [self._groups.leave_out_long(tx, group, self._facts.longest_drawn) for group in groups]
            if any(left_out):
                continue
            damaged = [each for each in groups if self._is_damaged(tx, [each.records[i] for i in each.usable()])]
            if not damaged:
                return chosen
            for group in damaged:
                self._groups.drop_ready(tx, group, "evicted_unused")

    def _choose(self, tx: Transaction, request: DrawRequest) -> list[int]:
        """What the sampler takes for the step; fewer groups than asked for where not enough are ready."""
        num = request.num_groups
        if len(self._groups.index.ready) < num:
            return []
        seeds = [self._facts.seed & 0xFFFFFFFF, request.step, request.incarnation]
        random = np.random.default_rng(seeds)
        return self._groups.sampler.choose(self._groups.index, num, random)

    def _record(self, tx: Transaction, request: DrawRequest, chosen: list[int]) -> DrawRecord:
        record_ids, lengths = [], []
        for group_id in chosen:
            group = tx.groups.require(group_id)
            for index in group.usable():
                record_ids.append(group.records[index])
                lengths.append(group.lengths[index])
        step, version, incarnation = request.step, request.version, request.incarnation
        draw = DrawRecord(step, version, incarnation, chosen, record_ids, lengths)
        self._steps.record(tx, draw)
        return draw

    def _drop_stale(self, tx: Transaction, version: int) -> None:
        """Drop the ready groups that are past the bound at this version; they come first."""
        for group_id in list(self._contract.evict(self._groups.index.ready, version)):
            self._groups.drop_ready(tx, tx.groups.require(group_id), "dropped_stale")

    def _held_back_by(self, tx: Transaction, chosen: Sequence[int], version: int) -> list[int]:
        """Return open groups that this step must wait for (on_stale = "wait")."""
        if not self._waits:
            return []
        drawn = set(chosen)
        ready = self._groups.index.ready
        still_open = list(self._open(tx))
        held_back = self._contract.held_back(
            self._left([key for key in ready if key.group_id in drawn], version),
            self._left([key for key in ready if key.group_id not in drawn], version),
            self._left(still_open, version),
        )
        return [still_open[i].group_id for i in held_back]

    def _open(self, tx: Transaction) -> Iterator[ReadyGroup]:
        for group_id in self._groups.index.open:
            yield ReadyGroup(tx.groups.require(group_id).oldest_effective(tx.state), group_id)

    def _left(self, groups: Iterable[ReadyGroup], version: int) -> list[int]:
        """How many steps after the one at `version` could still use each of the groups; [] without a bound."""
        left = (self._contract.steps_left(group.oldest, version) for group in groups)
        return [num_steps for num_steps in left if num_steps is not None]

    def _is_damaged(self, tx: Transaction, records: Sequence[int]) -> bool:
        try:
            tx.blocks_of(records)
        except CorruptRecord:
            return True
        return False


def _some(names: list[str], num: int) -> str:
    named = "; ".join(names[:MAX_NAMED])
    return named if num <= MAX_NAMED else f"{named}; and {num - MAX_NAMED} others"
