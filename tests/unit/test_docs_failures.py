"""docs/failures.md refers to existing tests."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def test_every_test_named_in_docs_failures_exists():
    named = NAMED.findall((ROOT / "docs" / "failures.md").read_text())
    assert len(named) > 20
    for file, test in named:
        source = (ROOT / file).read_text()
        assert not test or re.search(rf"^(?:async )?def {test}\(", source, re.MULTILINE), (file, test)


def test_every_row_of_docs_failures_names_a_test():
    page = (ROOT / "docs" / "failures.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| what users")]
    assert len(rows) >= 20
    assert all("`tests/" in row for row in rows)
