"""Which knobs are turned, and to what: one at a time around the demo's own value."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
SAMPLES_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
"""Of the demo."""

Overrides = tuple[str, ...]
EVERY_RUN: Overrides = ("--tracking.wandb", "disabled", "--actors.cpus", "0.25")
"""Of every run. What Ray reserves limits nothing; with the default, two cores have no room for a third actor."""


@dataclass(frozen=True)
class Sweep:
    """One knob."""

    key: str
    values: tuple[int, ...]
    default: int
    """Its value in examples/demo.toml, or the default of the config."""

    @property
    def name(self) -> str:
        """Of its files."""
        return self.key.rpartition(".")[2]

    def overrides(self, value: int) -> Overrides:
        """Arguments of `leeway train`, none for the default."""
        if value == self.default:
            return ()
        found: Overrides = (f"--{self.key}", str(value))
        if self.key == "actors.group_size":  # equal samples per step
            found += ("--learner.groups_per_step", str(SAMPLES_PER_STEP // value))
        return found


SWEEPS = (
    Sweep("weight_sync.max_lag", (0, 1, 2, 4, 8), default=4),
    Sweep("actors.num_actors", (1, 2, 3), default=2),
    Sweep("actors.group_size", (4, 8, 16), default=GROUP_SIZE),
    Sweep("weight_sync.publish_every", (1, 2, 4), default=1),
)


def runs_of(sweeps: tuple[Sweep, ...]) -> list[Overrides]:
    """Every different run, in order; the default stands once, though every sweep has it."""
    return list(dict.fromkeys(sweep.overrides(value) for sweep in sweeps for value in sweep.values))
