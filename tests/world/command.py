"""A command of ours in the process of the test, which has imported what it needs."""

import pytest


def leeway_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Status, output and errors of `leeway ...`."""
    from launch.cli import main

    status = main([*map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err
