"""How long who sleeps where a scorer has its own place: the learner binds, and its stages wait for nothing else."""

from __future__ import annotations

from benchmarks.fleet_parts.setting import FleetSetting
from benchmarks.lib.lengths import lognormal
from planning.costs import TokenTime

LAYER_S = 0.06
"""Of a layer, for a micro-batch on its way out; some three times what the tiny model takes to compute it besides."""
ENGINES = FleetSetting({"actors": TokenTime(0.002)}, lognormal(48, 0.3, 120, 0.5), step_s=0.0)
"""Faster than any step."""
