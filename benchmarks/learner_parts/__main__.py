"""One process of a measurement: python -m learner_parts NAME WORLDS FOLDER OPTIONS NUMBER. Prints figures as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.learner_parts.processes import Spot, end_with_parent

if __name__ == "__main__":
    end_with_parent()
    name, worlds, folder, options, number = sys.argv[1:]
    with Spot(int(number), json.loads(worlds), Path(folder)) as spot:
        figures = importlib.import_module(f"benchmarks.learner_parts.{name}").measure(spot, **json.loads(options))
    print(json.dumps(figures))
