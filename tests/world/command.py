"""Run a `leeway` command in the test process, where its imports are already loaded."""

import pytest


def leeway_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of `leeway ...`."""
    from leeway.launch.cli import main

    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err
