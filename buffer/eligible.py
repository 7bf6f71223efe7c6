"""The groups that may be drawn, in the orders and with the weights that the sampler asks for.

All of it is index: `ready_groups` by age for every sampler, the sum tree only for a sampler that draws by
weight, strata only for one that balances lengths. Which of them a store has is written in its state
record; where the sampler or a knob of it changed since, they are built anew, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from buffer import catalogue, samplers
from buffer.config import BufferConfig
from buffer.lengths import bucket_of
from buffer.samplers import ReadyGroup
from buffer.sum_tree import Picker, SumTree
from buffer.tables import Group
from buffer.transaction import Table, Transaction

MAX_SAME_PROMPT = 64
"""How many of a prompt's groups are looked at for others of it: of single use, most that are stored are used up."""
_KNOBS = {
    "reward_softmax": {"reward_temperature"},
    "prioritised": {"priority_alpha", "age_tau"},
}
"""For each sampler that has any, the knobs that decide what it keeps in an index."""


class EligibleIndex:
    """Keeps the indexes of eligible groups."""

    def __init__(self, config: BufferConfig) -> None:
        self._config = config
        self.settings = settings(config)
        """What is written into the state record."""
        self.sampler = samplers.build(config)

    def add(self, tx: Transaction, group: Group) -> None:
        """A group may be drawn."""
        tx.ready_groups.put(b"", group.oldest_effective(tx.state), group.group_id)
        tx.state.num_reusable += bool(group.uses)
        self.weigh(tx, group)

    def weigh(self, tx: Transaction, group: Group) -> None:
        """Enter the group into the indexes of this sampler alone."""
        oldest = group.oldest_effective(tx.state)
        if self.sampler.weight is not None:
            SumTree.of(tx).set(group.group_id, self.sampler.weight.log_weight(group, oldest))
        if self.sampler.needs_strata:
            bucket = bucket_of(group.mean_completion)
            tx.strata.put(b"", bucket, oldest, group.group_id)
            tx.state.strata[bucket] = tx.state.strata.get(bucket, 0) + 1

    def remove(self, tx: Transaction, group: Group) -> None:
        """A group may no longer be drawn: it was, or it leaves."""
        oldest = group.oldest_effective(tx.state)
        tx.ready_groups.delete(oldest, group.group_id)
        tx.state.num_reusable -= bool(group.uses)
        if self.sampler.weight is not None:
            SumTree.of(tx).discard(group.group_id)
        if self.sampler.needs_strata:
            bucket = bucket_of(group.mean_completion)
            tx.strata.delete(bucket, oldest, group.group_id)
            tx.state.strata[bucket] -= 1
            if not tx.state.strata[bucket]:
                del tx.state.strata[bucket]

    def clear(self, tx: Transaction) -> None:
        """Empty the indexes that are of one sampler alone."""
        SumTree.of(tx).clear()
        clear(tx.strata)
        tx.state.strata = {}

    def above(self, tx: Transaction, version: int) -> list[Group]:
        """The eligible groups whose oldest token is newer than this version."""
        return [tx.groups.require(group_id) for _, group_id in list(tx.ready_groups.all_keys(version + 1, 0))]


def settings(config: BufferConfig) -> str:
    """The knobs that decide what is in an index, as JSON that `BufferConfig` reads.

    The newest of 'on_policy_share' are found by age, which every sampler has: what counts is the sampler of the rest.
    """
    sampler = config.replay_sampler if config.sampler == "on_policy_share" else config.sampler
    effective = config.model_copy(update={"sampler": sampler})
    return effective.model_dump_json(include={"sampler", "max_uses", "eviction"} | _KNOBS.get(sampler, set()))


def clear(table: Table[bytes]) -> None:
    """Remove every row."""
    for key in list(table.all_keys()):
        table.delete(*key)


class Eligible:
    """The eligible groups of one transaction, as samplers see them."""

    def __init__(self, tx: Transaction, max_uses: float) -> None:
        self._tx = tx
        self._max_uses = max_uses
        """How often a group may be used; infinity where it is unlimited."""

    def in_order(self, *, newest_first: bool = False) -> Iterator[ReadyGroup]:
        """By the version of their oldest token."""
        return (ReadyGroup(*key) for key in self._tx.ready_groups.all_keys(reverse=newest_first))

    def picker(self) -> Picker:
        """To draw by the sampler's weights."""
        return SumTree.of(self._tx).picker()

    def strata(self) -> Mapping[int, int]:
        """How many there are in each length bucket."""
        return self._tx.state.strata

    def stratum(self, bucket: int) -> Iterator[int]:
        """The groups of one bucket, oldest first."""
        for found, _, group_id in self._tx.strata.all_keys(bucket, 0, 0):
            if found != bucket:
                return
            yield group_id

    def bucket(self, group_id: int) -> int:
        """The length bucket of a group."""
        return bucket_of(self._tx.groups.require(group_id).mean_completion)

    def uses_left(self, group_id: int) -> float:
        """How many more times the group may be used."""
        return self._max_uses - self._tx.groups.require(group_id).uses

    def of_same_prompt(self, group_id: int) -> Iterator[int]:
        """The other eligible groups of its prompt, those leased last first, of its last `MAX_SAME_PROMPT` groups."""
        prompt_id = self._tx.groups.require(group_id).prompt_id
        same = catalogue.find(self._tx, "prompt", prompt_id, prompt_id, newest_first=True)
        for each in islice(same, MAX_SAME_PROMPT):
            if each != group_id and self._tx.groups.require(each).phase == "ready":
                yield each
