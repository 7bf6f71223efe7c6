"""What tests read while another process still writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[str]:
    """Its lines, none while there is no such file.

    The last is left out where it is not written to its end: a read can see half of another process's write.
    """
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def json_rows(path: Path) -> list[dict[str, Any]]:
    """What the lines of a JSONL file say."""
    return [json.loads(line) for line in whole_lines(path)]
