"""Which shard of a buffer owns what and where it lies, and how many groups of a step each one gives.

A prompt belongs to one shard for ever, by its hash. Leases, groups and records carry their shard in their
id (`RunFacts.global_id`), so that whatever concerns them finds its way without being looked up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from buffer.errors import StoreError
from buffer.protocol import PlanReply
from buffer.samplers import systematic_shares
from buffer.store import DATA, Store
from common.run import RunFacts
from common.staleness import held_back

_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, fill the line from 0 to 1 evenly, however many are taken."""


def shard_of(prompt_id: int, num_shards: int) -> int:
    return int(xxhash.xxh3_64_intdigest(prompt_id.to_bytes(8, "little"))) % num_shards


def owned_prompts(facts: RunFacts) -> npt.NDArray[np.int64]:
    return np.flatnonzero(_owners(facts.num_prompts, facts.num_shards) == facts.shard)


def admission_shares(num_prompts: int, num_shards: int, capacity: int) -> list[int]:
    """How many groups of each shard may be outstanding, in proportion to the prompts that it owns.

    Raises:
        ValueError: some shard would get nothing, so that its prompts would never be trained on.
    """
    owned = np.bincount(_owners(num_prompts, num_shards), minlength=num_shards).tolist()
    num_owners = sum(1 for count in owned if count)
    if capacity < num_owners:
        raise ValueError(
            f"buffer.shards = {num_shards}, but the staleness bound lets only {capacity} groups be outstanding, so "
            "some shards could never lease one: use fewer shards, or raise max_lag or groups_per_step"
        )
    return apportion(capacity, owned, given=[int(count > 0) for count in owned])


def apportion(
    total: int, weights: Sequence[int], *, limits: Sequence[int] | None = None, given: Sequence[int] | None = None
) -> list[int]:
    """Divide `total` whole things in proportion to weights, as Webster's method does: the sum is exact.

    Args:
        total: what is divided; less where the limits allow no more.
        weights: who weighs nothing gets nothing.
        limits: the most that each may get.
        given: what each has already, as a part of `total`.
    """
    shares = list(given) if given is not None else [0] * len(weights)
    while sum(shares) < total:
        open_to = [i for i, weight in enumerate(weights) if weight and (limits is None or shares[i] < limits[i])]
        if not open_to:
            break
        if len(open_to) == 1:
            rest = total - sum(shares)
            shares[open_to[0]] += rest if limits is None else min(rest, limits[open_to[0]] - shares[open_to[0]])
            break
        shares[max(open_to, key=lambda i: (weights[i] / (2 * shares[i] + 1), -i))] += 1
    return shares


def divide_step(num_groups: int, supplies: Mapping[int, PlanReply], *, in_order: bool, step: int = 0) -> dict[int, int]:
    """How many groups of a step each shard gives; nothing where there are too few.

    In proportion to what is eligible in each, on the mean of many steps: what is rounded up differs by step, for under
    replay the same numbers come again and again. But as many groups as the later steps could not use any
    more in time are taken first, so that a shard which was down for a while does not lose its old ones.
    With `in_order` the groups that are due first are taken, whatever shard has them.
    """
    shards = sorted(supplies)
    eligible = [supplies[shard].num_eligible for shard in shards]
    limits = [min(supplies[shard].num_eligible, supplies[shard].capacity) for shard in shards]
    if sum(limits) < num_groups:
        return {}
    given = [0] * len(shards)
    for last in sorted({due for supply in supplies.values() for due in supply.due}):
        due = [sum(num for at, num in supplies[shard].due.items() if at <= last) for shard in shards]
        must = num_groups if in_order else sum(due) - last * num_groups
        most = [min(pair) for pair in zip(limits, due, strict=True)]
        given = apportion(min(must, num_groups), due, limits=most, given=given)
    left = [num - taken for num, taken in zip(eligible, given, strict=True)]
    while rest := num_groups - sum(given):  # again where a shard can give less than its part
        counts = {i: left[i] for i in range(len(shards)) if given[i] < limits[i]}
        for i, share in systematic_shares(counts, rest, step * _GOLDEN % 1.0).items():
            share = min(share, limits[i] - given[i])
            given[i], left[i] = given[i] + share, left[i] - share
    return {shard: num for shard, num in zip(shards, given, strict=True) if num}


def must_wait(plan: Mapping[int, int], num_groups: int, supplies: Mapping[int, PlanReply]) -> bool:
    """Must a step wait for groups that are not complete (on_stale = "wait")? Decided over all shards' groups."""
    drawn: list[int] = []
    left: list[int] = []
    still_open: list[int] = []
    for shard, supply in supplies.items():
        ready = list(_expanded(supply.due))
        drawn += ready[: plan.get(shard, 0)]
        left += ready[plan.get(shard, 0) :]
        still_open += _expanded(supply.open_due)
    return bool(held_back(drawn, left, still_open, num_groups))


def buffer_folder(path: Path) -> Path:
    """The buffer's folder, from the folder of its run or its own.

    Raises:
        StoreError: there is no buffer.
    """
    for folder in (path, path / "buffer"):
        if any((shard / DATA).exists() for shard in store_folders(folder)):
            return folder
    raise StoreError(
        f"there is no buffer in {path}: neither {DATA} nor buffer/{DATA} is there. Give the folder of a run, "
        "as in runs/NAME"
    )


def store_folders(folder: Path) -> list[Path]:
    """The folders of a buffer's stores: its shards in order, or the folder itself."""
    shards = [shard for shard in folder.glob("shard-*") if re.fullmatch(r"shard-\d+", shard.name)]
    return sorted(shards, key=lambda shard: int(shard.name.rpartition("-")[2])) or [folder]


def new_folders(folder: Path, num_shards: int) -> list[Path]:
    """Where the stores of a buffer are to lie, shard by shard: the folder itself where there is only one.

    Raises:
        StoreError: the folder has a buffer of another number of shards, as far as its entries tell. What they
            do not tell, each store says when it is opened.
    """
    there = [shard for shard in store_folders(folder) if (shard / DATA).exists()]
    wanted = [folder] if num_shards == 1 else [folder / f"shard-{shard}" for shard in range(num_shards)]
    if any(shard not in wanted for shard in there):
        raise StoreError(
            f"the buffer in {folder} has {len(there)} shards and [buffer] shards = {num_shards}: the number is fixed "
            f"when a buffer is made. Set shards = {len(there)}, or use a new run folder"
        )
    return wanted


def refuse_gaps(folder: Path, stores: Sequence[Store]) -> None:
    """Refuse a buffer that lacks a shard: a listing of it would look whole. A shard's own folder may be read alone.

    Raises:
        StoreError: one is missing; names it.
    """
    first = stores[0]
    missing = set(range(first.facts.num_shards)) - {store.facts.shard for store in stores}
    if first.folder != folder and missing:
        raise StoreError(
            f"the buffer in {folder} has {first.facts.num_shards} shards, and shard-{min(missing)} is missing: restore "
            f"it from a copy. Those that are there can be looked at one by one, as {first.folder}"
        )


@lru_cache(maxsize=2)
def _owners(num_prompts: int, num_shards: int) -> npt.NDArray[np.int64]:
    if num_shards == 1:
        return np.zeros(num_prompts, np.int64)
    return np.fromiter((shard_of(prompt, num_shards) for prompt in range(num_prompts)), np.int64, num_prompts)


def _expanded(counts: Mapping[int, int]) -> Iterator[int]:
    return Counter(dict(sorted(counts.items()))).elements()
