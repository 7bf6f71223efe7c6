"""The clock of a run keeps its pace when the time of day is set, in all of its processes."""

import ast
import runpy
import time
from pathlib import Path

import pytest

from common import process
from common.process import wall_time

ROOT = Path(process.__file__).parents[1]
PACKAGES = ("actors", "algorithms", "buffer", "common", "launch", "learner", "planning", "weight_sync")
TIMES_OF_DAY = ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow")
COMPARED_WITH_THE_TIME_OF_DAY = {
    "actors/tasks/reward_models.py": "a date in a header of HTTP",
    "common/process.py": "the start of the clock",
    "launch/host.py": "modification times of files",
    "launch/observe/status.py": "modification times of files",
    "planning/profiling.py": "a date for people",
    "launch/resume.py": "a date for people",
    "weight_sync/publisher.py": "a date for people",
    "weight_sync/store.py": "modification times of files",
}


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_setting_the_time_of_day_does_not_move_it(monkeypatch, set_by_s):
    before_s, time_of_day = wall_time(), time.time
    monkeypatch.setattr(time, "time", lambda: time_of_day() + set_by_s)
    assert 0.0 <= wall_time() - before_s < 60.0


def test_a_process_that_is_started_after_the_time_of_day_was_set_has_the_same_time(monkeypatch):
    time_of_day, before_s = time.time, wall_time()
    monkeypatch.setattr(time, "time", lambda: time_of_day() - 7200.0)
    of_the_process = runpy.run_path(process.__file__)["wall_time"]
    assert before_s <= of_the_process() <= wall_time()


def test_no_duration_and_no_stamp_of_a_run_is_read_from_the_time_of_day():
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in TIMES_OF_DAY:
                found.add(str(path.relative_to(ROOT)))
    assert found == set(COMPARED_WITH_THE_TIME_OF_DAY)
