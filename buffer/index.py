"""GroupIndex: where groups are looked up, derived from their rows when a store is opened and kept in memory since.

None of it is stored, so none of it can contradict the store. What a transaction changes here is put back where it is
not committed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from buffer.config import BufferConfig
from buffer.lengths import bucket_of
from buffer.tables import Group, StoreState
from buffer.transaction import Transaction

LOG_WEIGHT_LIMIT = 1e12
"""Log-weights are clamped to this, so that their differences stay finite."""
CLOSED, ELIGIBLE = 0, 1
"""Classes in the order of eviction: closed groups go first, and under replay then those that could be drawn again."""

Weight = Callable[[Group, int], float]
"""The logarithm of a complete group's weight in a draw by chance, up to a constant, from its row and the version that
its oldest token counts with; fixed for as long as the group waits."""


class ReadyGroup(NamedTuple):
    """A group that may be drawn."""

    oldest: int
    """Version that its oldest token counts with."""
    group_id: int


class Evictable(NamedTuple):
    """A complete group that no recorded draw needs."""

    kind: int
    rank: tuple[float, float]
    """Its place within the class: version and incarnation of its oldest token."""
    group_id: int


class Place(NamedTuple):
    """All that a group is looked up by."""

    is_open: bool = False
    lease_id: int = 0
    evictable: Evictable | None = None
    ready: ReadyGroup | None = None
    prompt_id: int = 0
    """From here on: of ready groups alone."""
    uses: int = 0
    bucket: int = 0
    log_weight: float = 0.0
    is_scored: bool = False
    is_uninformative: bool = False
    """Where such groups are set aside: its rewards are all equal."""


class GroupIndex:
    """The groups of a store by what the rules ask for; samplers choose among those that are ready."""

    def __init__(self, config: BufferConfig, weight: Weight | None) -> None:
        """Be empty until `load`; `weight` is the sampler's, None where it draws without chance."""
        self._replays = config.replays
        self._sets_aside = config.refill_uninformative > 0
        self.max_uses = float("inf") if config.max_uses == "unlimited" else float(config.max_uses)
        self._weight = weight
        self._is_loaded = False
        self._places: dict[int, Place] = {}
        self._eviction: list[Evictable] = []
        """A heap; may hold entries that are over, which are passed over when they come up."""
        self.open: list[int] = []
        """Groups that are not complete, ascending."""
        self.unleased: list[int] = []
        """Those of them whose missing samples are to be issued again."""
        self.leases: dict[int, int] = {}
        """Open leases: lease -> group."""
        self.ready: list[ReadyGroup] = []
        """Those that may be drawn, in the order of age."""
        self.unscored: list[ReadyGroup] = []
        """Those of them that lack log-probabilities of the reference, in the order of age."""
        self.uninformative: list[ReadyGroup] = []
        """Those of them whose rewards are all equal, in the order of age; none where such groups are not set aside."""
        self.num_unused = 0
        """How many of them no step has used."""
        self.strata: defaultdict[int, list[ReadyGroup]] = defaultdict(list)
        """Those of each length bucket, in the order of age."""
        self._by_prompt: defaultdict[int, list[int]] = defaultdict(list)
        """Those of each prompt, those leased first first."""
        self._weights = Weights()

    def load(self, tx: Transaction) -> None:
        """Derive it from the rows, where that was not done; belongs before the first change of a transaction."""
        if not self._is_loaded:
            for _, group in tx.groups.all_items():
                self._move(group.group_id, None, self._place_of(group, tx.state))
            self._is_loaded = True

    def update(self, tx: Transaction, group: Group) -> None:
        """Follow a change of the group, or of the version that it counts with."""
        old, new = self._places.get(group.group_id), self._place_of(group, tx.state)
        if new != old:
            self._move(group.group_id, old, new)
            tx.undo.append(partial(self._move, group.group_id, new, old))

    def put(self, group_id: int, place: Place | None) -> None:
        """Enter a group that has no row, as a simulation has it, or what became of it."""
        self._move(group_id, self._places.get(group_id), place)

    @property
    def first_to_go(self) -> Evictable | None:
        """The group that eviction takes next; None where none may go."""
        while self._eviction:
            place = self._places.get(self._eviction[0].group_id)
            if place is not None and place.evictable == self._eviction[0]:
                return self._eviction[0]
            heapq.heappop(self._eviction)
        return None

    # --- what samplers ask ------------------------------------------------------------------------

    def picker(self) -> Picker:
        return self._weights.picker()

    def bucket(self, group_id: int) -> int:
        """The length bucket of a ready group."""
        return self._places[group_id].bucket

    def same_prompt(self, group_id: int) -> Iterator[int]:
        """The ready groups of a ready group's prompt, those leased last first."""
        return reversed(self._by_prompt[self._places[group_id].prompt_id])

    # --- parts ------------------------------------------------------------------------------------

    def _place_of(self, group: Group, state: StoreState) -> Place | None:
        """None where nothing of the group is left."""
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
            bucket=bucket_of(group.mean_completion),
            log_weight=0.0 if self._weight is None else self._weight(group, oldest),
            is_scored=group.is_scored,
            is_uninformative=self._sets_aside and group.is_uninformative,
        )

    def _move(self, group_id: int, old: Place | None, new: Place | None) -> None:
        if old is not None:
            self._enter(group_id, old, _take_out, -1)
            self.leases.pop(old.lease_id, None)
        if new is not None:
            self._enter(group_id, new, insort, 1)
            if new.lease_id:
                self.leases[new.lease_id] = group_id
        if new is None:
            del self._places[group_id]
            return
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
            if not place.is_scored:
                change(self.unscored, place.ready)
            if place.is_uninformative:
                change(self.uninformative, place.ready)
            self.num_unused += sign * (not place.uses)
            if self._weight is not None:
                # one that weighs nothing is drawn last: were it never drawn, enough of them would stop every lease
                log_weight = max(place.log_weight, -LOG_WEIGHT_LIMIT)
                self._weights.put(group_id, log_weight if sign > 0 else -np.inf)
            for lists, key, entry in (
                (self.strata, place.bucket, place.ready),
                (self._by_prompt, place.prompt_id, group_id),
            ):
                change(lists[key], entry)
                if not lists[key]:
                    del lists[key]


def _take_out(keys: list[Any], key: object) -> None:
    del keys[bisect_left(keys, key)]


Floats = npt.NDArray[np.float64]
"""Of weights, the logarithms, -inf where there is no item: a softmax of rewards spans more than a float64 holds."""


class Weights:
    """Items with weights, in blocks of neighbouring ids, so that a draw looks at a block and at the sums of the others.

    What is drawn depends on the items and the chance alone, not on the order in which they came.
    """

    BLOCK = 1024

    def __init__(self) -> None:
        self._blocks: dict[int, Floats] = {}
        """The logarithms, of the blocks that have an item."""
        self._sums: dict[int, float] = {}
        """The logarithm of the sum of a block, of those that have not changed since."""
        self._chances: dict[int, Floats] = {}
        """What `_chances_of` makes of a block, of those that were drawn from and have not changed since."""

    def put(self, item: int, log_weight: float) -> None:
        """Give an item a weight, or take it out with -inf."""
        number, slot = divmod(item, self.BLOCK)
        if number not in self._blocks:
            self._blocks[number] = np.full(self.BLOCK, -np.inf)
        bounded = min(max(log_weight, -LOG_WEIGHT_LIMIT), LOG_WEIGHT_LIMIT)
        self._blocks[number][slot] = bounded if log_weight > -np.inf else -np.inf
        self._sums.pop(number, None)
        self._chances.pop(number, None)

    def picker(self) -> Picker:
        for number in self._blocks.keys() - self._sums.keys():
            self._sums[number] = _log_sum(self._blocks[number])
            if self._sums[number] == -np.inf:
                del self._blocks[number], self._sums[number]
        numbers = sorted(self._blocks)
        return Picker(numbers, [self._sums[number] for number in numbers], self._blocks, self._chances)


class Picker:
    """One draw: picks items with chances in proportion to their weights."""

    def __init__(
        self, numbers: Sequence[int], sums: Sequence[float], blocks: Mapping[int, Floats], chances: dict[int, Floats]
    ) -> None:
        """Pick from these blocks, which are not changed; with the logarithms of their sums and the chances known."""
        self._numbers = numbers
        self._sums: Floats = np.array(sums)
        self._blocks = dict(blocks)
        self._known = chances
        self._own: dict[int, Floats] = {}
        """The chances within blocks of which an item was taken out."""
        self._among: Floats | None = None
        """The chances among the blocks; None: not known."""

    def pick(self, random: np.random.Generator) -> int | None:
        """An item; None where none is left."""
        if self._among is None:
            if self._sums.max(initial=-np.inf) == -np.inf:
                return None
            self._among = _chances_of(self._sums)
        number = self._numbers[_draw(self._among, random)]
        chances = self._own.get(number, self._known.get(number))
        if chances is None:
            chances = self._known[number] = _chances_of(self._blocks[number])
        return number * Weights.BLOCK + _draw(chances, random)

    def take_out(self, item: int) -> None:
        number, slot = divmod(item, Weights.BLOCK)
        if number not in self._blocks:
            return
        self._blocks[number] = self._blocks[number].copy()
        self._blocks[number][slot] = -np.inf
        left = self._sums[bisect_left(self._numbers, number)] = _log_sum(self._blocks[number])
        if left > -np.inf:
            self._own[number] = _chances_of(self._blocks[number])
        self._among = None


def _log_sum(logs: Floats) -> float:
    top = logs.max()
    return float(top + np.log(np.exp(logs - top).sum())) if top > -np.inf else -np.inf


def _chances_of(logs: Floats) -> Floats:
    """The sums of the weights up to each place, relative to the largest; at least one place has a weight."""
    chances: Floats = np.exp(logs - logs.max()).cumsum()
    return chances


def _draw(chances: Floats, random: np.random.Generator) -> int:
    place = int(chances.searchsorted(random.random() * chances[-1], side="right"))
    # The product was rounded up to the sum: the last place that has a weight.
    return place if place < len(chances) else int(chances.searchsorted(chances[-1]))
