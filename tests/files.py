"""What tests read while another process still writes it."""

from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """Its lines; without the last, where that is not written to its end: a read can see half of another's write."""
    return path.read_text().rpartition("\n")[0].splitlines()
