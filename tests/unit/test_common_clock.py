"""Changes of the system time do not affect the clock of a run in any process."""

import ast
import runpy
import time
from pathlib import Path

import pytest

from leeway.common import process
from leeway.common.process import wall_time

ROOT = Path(process.__file__).parents[1]
PACKAGES = ("actors", "algorithms", "buffer", "common", "launch", "learner", "planning", "weight_sync")
TIMES_OF_DAY = ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow")
READERS_OF_SYSTEM_TIME = {
    "actors/tasks/reward_models.py": "a date in an HTTP header",
    "common/process.py": "the start of the clock",
    "launch/host.py": "modification times of files",
    "launch/observe/status.py": "modification times of files",
    "planning/profiling.py": "a date for readers",
    "launch/resume.py": "a date for readers",
    "weight_sync/publisher.py": "a date for readers",
    "weight_sync/store.py": "modification times of files",
}


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_setting_the_system_time_does_not_change_the_clock(monkeypatch, set_by_s):
    before_s, time_of_day = wall_time(), time.time
    monkeypatch.setattr(time, "time", lambda: time_of_day() + set_by_s)
    assert 0.0 <= wall_time() - before_s < 60.0


def test_a_process_started_after_a_change_of_the_system_time_has_the_same_clock(monkeypatch):
    time_of_day, before_s = time.time, wall_time()
    monkeypatch.setattr(time, "time", lambda: time_of_day() - 7200.0)
    other_wall_time = runpy.run_path(process.__file__)["wall_time"]
    assert before_s <= other_wall_time() <= wall_time()


def test_only_listed_files_read_the_system_time():
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in TIMES_OF_DAY:
                found.add(str(path.relative_to(ROOT)))
    assert found == set(READERS_OF_SYSTEM_TIME)
