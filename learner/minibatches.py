"""Which sequences each update of a step trains."""

from __future__ import annotations

import numpy as np

from learner.packing import IntArray


def minibatches(unit_B: IntArray, num_minibatches: int, num_epochs: int, seed: tuple[int, ...]) -> list[IntArray]:
    """Divide a draw into minibatches of whole units, anew in every epoch.

    Units come in random order, and each goes to the minibatch with the fewest sequences so far: minibatches
    are as equal as whole units allow, and none is empty while there are units enough.

    Args:
        unit_B: the group (or prompt) of each sequence: what may not be divided.
        num_minibatches: into how many parts; fewer where there are fewer units.
        num_epochs: how often to go over the draw.
        seed: of the order. The same numbers give the same division on every rank and after a restart.

    Returns:
        Per update the indices of its sequences, ascending: epoch after epoch.
    """
    units, unit_of_B, sizes = np.unique(unit_B, return_inverse=True, return_counts=True)
    num_parts = min(num_minibatches, len(units))
    updates: list[IntArray] = []
    for epoch in range(num_epochs):
        random = np.random.default_rng([*seed, epoch])
        part_of = np.zeros(len(units), np.int64)
        filled = np.zeros(num_parts, np.int64)
        for unit in random.permutation(len(units)):
            part_of[unit] = filled.argmin()
            filled[part_of[unit]] += sizes[unit]
        updates += [np.flatnonzero(part_of[unit_of_B] == part) for part in range(num_parts)]
    return updates
