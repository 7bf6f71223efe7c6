"""GroupIndex: in-memory indexes of the groups, derived from their rows.

The indexes are not stored. If a transaction is not committed, its changes to the index are undone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leeway.buffer.config import BufferConfig
from leeway.buffer.tables import Group, StoreState
from leeway.buffer.transaction import Transaction

LOG_WEIGHT_LIMIT = 1e12
"""Bound to which log-weights are clamped, so that their differences stay finite."""
CLOSED, ELIGIBLE = 0, 1
"""Eviction order: closed groups first; then, under replay, groups that could be drawn again."""

Weight = Callable[[Group, int], float]
"""Log-weight of a complete group, up to a constant, given its row and the effective version of its oldest token. The
log-weight stays fixed while the group is ready."""


class ReadyGroup(NamedTuple):
    oldest: int
    """Effective version of the group's oldest token."""
    group_id: int


class Evictable(NamedTuple):
    """A complete group that no recorded draw needs."""

    kind: int
    rank: tuple[float, float]
    """Incarnation and version of the group's oldest token."""
    group_id: int


class Place(NamedTuple):
    """The index keys of a group."""

    is_open: bool = False
    lease_id: int = 0
    evictable: Evictable | None = None
    ready: ReadyGroup | None = None
    prompt_id: int = 0
    """Prompt of the group; this field and all fields below are set only for ready groups."""
    uses: int = 0
    log_weight: float = 0.0
    is_uninformative: bool = False
    """True if all rewards are equal and `refill_uninformative` sets such groups aside."""


class GroupIndex:
    """Indexes of a store's groups; samplers choose among the ready groups."""

    def __init__(self, config: BufferConfig, weight: Weight | None) -> None:
        """Start empty; `load` fills the index. `weight` is the sampler's weight function, if it has one."""
        self._replays = config.replays
        self._sets_aside = config.refill_uninformative > 0
        self.max_uses = float("inf") if config.max_uses == "unlimited" else float(config.max_uses)
        self._weight = weight
        self._is_loaded = False
        self._places: dict[int, Place] = {}
        self._eviction: list[Evictable] = []
        """A heap of evictable groups; `next_evictable` skips stale entries."""
        self.open: list[int] = []
        """Ids of groups that are not complete, ascending."""
        self.unleased: list[int] = []
        """Ids of open groups without a lease, whose missing samples are to be issued again."""
        self.leases: dict[int, int] = {}
        """Open leases: lease -> group."""
        self.ready: list[ReadyGroup] = []
        """Groups that may be drawn, oldest first."""
        self.uninformative: list[ReadyGroup] = []
        """Ready groups of equal rewards, oldest first; empty if `refill_uninformative` is 0."""
        self.num_unused = 0
        """Number of ready groups that no step has used."""
        self._by_prompt: defaultdict[int, list[int]] = defaultdict(list)
        """Ready groups of each prompt, in lease order."""
        self._weights = Weights()

    def load(self, tx: Transaction) -> None:
        """Build the index from the rows, once; call this before the first change of a transaction."""
        if not self._is_loaded:
            for _, group in tx.groups.all_items():
                self._move(group.group_id, None, self._place_of(group, tx.state))
            self._is_loaded = True

    def update(self, tx: Transaction, group: Group) -> None:
        """Update the index after a change of the group or of its effective version."""
        old, new = self._places.get(group.group_id), self._place_of(group, tx.state)
        if new != old:
            self._move(group.group_id, old, new)
            tx.undo.append(partial(self._move, group.group_id, new, old))

    def put(self, group_id: int, place: Place | None) -> None:
        """Set or remove the index keys of a group that has no row, as in a simulation."""
        self._move(group_id, self._places.get(group_id), place)

    @property
    def next_evictable(self) -> Evictable | None:
        """The next group to evict; None if no group is evictable."""
        while self._eviction:
            place = self._places.get(self._eviction[0].group_id)
            if place is not None and place.evictable == self._eviction[0]:
                return self._eviction[0]
            heapq.heappop(self._eviction)
        return None

    # --- for samplers -----------------------------------------------------------------------------

    def by_weight(self, num: int, random: np.random.Generator, taken: AbstractSet[int]) -> list[int]:
        return self._weights.choose(num, random, taken)

    def same_prompt(self, group_id: int) -> Iterator[int]:
        """Return the ready groups of a ready group's prompt, most recently leased first."""
        return reversed(self._by_prompt[self._places[group_id].prompt_id])

    # --- parts ------------------------------------------------------------------------------------

    def _place_of(self, group: Group, state: StoreState) -> Place | None:
        """Return the index keys of a group; None if it is closed and not stored."""
        if group.phase == "open":
            return Place(is_open=True, lease_id=group.lease_id)
        is_closed = group.phase == "closed"
        if is_closed and not group.is_stored:
            return None
        evictable = None
        if group.is_stored and not group.held and (is_closed or (group.phase == "ready" and self._replays)):
            evictable = Evictable(CLOSED if is_closed else ELIGIBLE, group.oldest or (0, 0), group.group_id)
        if group.phase != "ready":
            return Place(evictable=evictable)
        oldest = group.oldest_effective(state)
        return Place(
            evictable=evictable,
            ready=ReadyGroup(oldest, group.group_id),
            prompt_id=group.prompt_id,
            uses=group.uses,
            log_weight=0.0 if self._weight is None else self._weight(group, oldest),
            is_uninformative=self._sets_aside and group.is_uninformative,
        )

    def _move(self, group_id: int, old: Place | None, new: Place | None) -> None:
        if old is not None:
            self._enter(group_id, old, _take_out, -1)
            self.leases.pop(old.lease_id, None)
        if new is None:
            del self._places[group_id]
            return
        self._enter(group_id, new, insort, 1)
        if new.lease_id:
            self.leases[new.lease_id] = group_id
        self._places[group_id] = new
        if new.evictable is not None and (old is None or old.evictable != new.evictable):
            heapq.heappush(self._eviction, new.evictable)
            if len(self._eviction) > 2 * len(self._places) + 64:
                self._eviction = [each.evictable for each in self._places.values() if each.evictable is not None]
                heapq.heapify(self._eviction)

    def _enter(self, group_id: int, place: Place, change: Callable[[list[Any], Any], None], sign: int) -> None:
        if place.is_open:
            change(self.open, group_id)
            if not place.lease_id:
                change(self.unleased, group_id)
        if place.ready is not None:
            change(self.ready, place.ready)
            if place.is_uninformative:
                change(self.uninformative, place.ready)
            self.num_unused += sign * (not place.uses)
            if self._weight is not None:
                # Draw groups of weight zero last; if never drawn, such groups would accumulate and close admission.
                log_weight = max(place.log_weight, -LOG_WEIGHT_LIMIT)
                self._weights.put(group_id, log_weight if sign > 0 else -np.inf)
            same_prompt = self._by_prompt[place.prompt_id]
            change(same_prompt, group_id)
            if not same_prompt:
                del self._by_prompt[place.prompt_id]


class Weights:
    """Log-weights of items for random draws; as plain weights, a softmax of rewards would exceed the float64 range.

    Weights are stored in blocks of neighbouring ids. A draw depends on items and generator, not on insertion order.
    """

    BLOCK = 1024

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.float64]] = {}

    def put(self, item: int, log_weight: float) -> None:
        """Set the log-weight of an item; -inf removes it."""
        number, slot = divmod(item, self.BLOCK)
        if number not in self._blocks:
            self._blocks[number] = np.full(self.BLOCK, -np.inf)
        bounded = min(max(log_weight, -LOG_WEIGHT_LIMIT), LOG_WEIGHT_LIMIT)
        self._blocks[number][slot] = bounded if log_weight > -np.inf else -np.inf
        if self._blocks[number].max() == -np.inf:
            del self._blocks[number]

    def choose(self, num: int, random: np.random.Generator, taken: AbstractSet[int] = frozenset()) -> list[int]:
        """Draw up to `num` items by weight, without replacement, excluding items in `taken`.

        The draw consists of the items with the largest sums of log-weight and Gumbel noise, in descending order (Kool
        et al. 2019, "Stochastic beams and where to find them").
        """
        if not self._blocks:
            return []
        numbers = np.array(sorted(self._blocks))
        keys = np.concatenate([self._blocks[number] for number in numbers])
        items = np.flatnonzero(keys > -np.inf)
        keys, items = keys[items], numbers[items // self.BLOCK] * self.BLOCK + items % self.BLOCK
        keys += random.gumbel(size=len(keys))
        num_first = min(num + len(taken), len(keys))
        first = np.argpartition(-keys, num_first - 1)[:num_first]
        in_order = items[first[np.argsort(-keys[first])]].tolist()
        return [item for item in in_order if item not in taken][:num]


def _take_out(keys: list[Any], key: object) -> None:
    del keys[bisect_left(keys, key)]
