"""The distribution of lags as bars, one row for each lag, with the bound marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

POOL_STYLES = ("cyan", "magenta", "green", "blue", "yellow")
"""Of the pools, in their order; they begin anew after the last."""
BLOCK, ASCII_BLOCK = "█", "#"
MARK, ASCII_MARK = "◂ bound", "< bound"
_HEAD = 17
"""Columns before a bar: the lag and its share."""
MAX_ROWS = 12
"""More lags than this share rows, however much room there is."""


def style_of(pools: Sequence[str], pool: str) -> str:
    """The colour of a pool."""
    return POOL_STYLES[pools.index(pool) % len(POOL_STYLES)] if pool in pools else "white"


def lag_rows(
    lags: Mapping[str, Mapping[int, int]],
    max_lag: int | str,
    width: int,
    *,
    max_rows: int = MAX_ROWS,
    ascii_only: bool = False,
) -> list[Text]:
    """One row for each lag up to the greatest, or to the bound where there is one; shares are of all trained tokens.

    Args:
        lags: pool -> lag -> tokens.
        max_lag: the bound, in versions, or 'unbounded'.
        width: columns of a row.
        max_rows: where there are more lags, some share a row.
        ascii_only: for terminals that show nothing else.
    """
    total = sum(sum(counts.values()) for counts in lags.values())
    if not total or max_rows < 1:
        return []
    bound = max_lag if isinstance(max_lag, int) else None
    greatest = max(lag for counts in lags.values() for lag in counts)
    step = -(-(max(greatest, bound or 0) + 1) // max_rows)
    room = max(1, width - _HEAD - len(MARK))
    pools = sorted(lags)
    sums = [
        {pool: sum(lags[pool].get(lag, 0) for lag in range(first, first + step)) for pool in pools}
        for first in range(0, max(greatest, bound or 0) + 1, step)
    ]
    longest = max(sum(each.values()) for each in sums)
    rows = []
    for number, counts in enumerate(sums):
        first, last = number * step, number * step + step - 1
        name = str(first) if step == 1 else f"{first}-{last}"
        row = Text(f"{name:>7} {sum(counts.values()) / total:>6.1%}  ")
        for pool in pools:
            cells = round(counts[pool] / longest * room)
            row.append((ASCII_BLOCK if ascii_only else BLOCK) * cells, style=style_of(pools, pool))
        if bound is not None and first <= bound <= last:
            row.append(f" {ASCII_MARK if ascii_only else MARK}", style="bold")
        rows.append(row)
    return rows
