"""Read files that another process is still writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file; empty while it does not exist.

    An unterminated last line is omitted: a read can return half of another process's write.
    """
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the decoded lines of a JSONL file."""
    return [json.loads(line) for line in whole_lines(path)]
