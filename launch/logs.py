"""One form of log line for every process of a run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def configure_logging(file: Path | None = None) -> None:
    """Send this process's log records to a file, or to its standard error."""
    # a log that cannot be written, as on a full disk, is not worth a page on the terminal for each line
    logging.raiseExceptions = False
    handler = logging.FileHandler(file) if file is not None else logging.StreamHandler(sys.stderr)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[handler],
        force=True,
    )
