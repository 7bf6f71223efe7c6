"""No process of a run imports `planning` unless a key or a verb asks for it."""

import subprocess
import sys

import pytest

from launch.cli import PLUGIN_VERBS, parse
from tests.house import ROOT, graph

ROLES = {
    "command": "launch.train",
    "actor": "launch.processes.actor_role, actors.loop, actors.engine, actors.sample",
    "stage": "launch.processes.learner_group, learner.stage",
    "buffer service": "launch.processes.services, buffer.service",
    "weight service": "weight_sync.service",
    "scorer": "launch.processes.helpers, learner.reference",
    "commands that look": "launch.cli, launch.looking, launch.buffer_cli, launch.report.page, launch.doctor.checkup",
}
"""Role -> the modules that its process imports."""


@pytest.mark.process
def test_the_processes_of_a_run_import_nothing_of_planning():
    modules = ", ".join(ROLES.values())
    shown = f"import {modules}, sys; print([name for name in sys.modules if name.partition('.')[0] == 'planning'])"
    ended = subprocess.run([sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_no_package_below_imports_planning_at_the_top_of_a_module_or_later():
    below = {name: imported for name, imported in graph().items() if name.partition(".")[0] != "planning"}
    assert {name for name, found in below.items() if any(each.startswith("planning") for each in found)} == set()


def test_the_help_names_the_verbs_of_planning_and_says_all_of_the_one_that_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    listed = capsys.readouterr().out
    for verb, (_, text) in PLUGIN_VERBS.items():
        assert verb in listed
        assert text[:30] in " ".join(listed.split())
        with pytest.raises(SystemExit):
            parse([verb, "--help"])
        assert "--out" in capsys.readouterr().out


@pytest.mark.process
def test_an_actor_whose_key_says_slots_loads_nothing_of_planning():
    shown = """
import sys
from actors.admission import admission_of
from actors.config import ActorsConfig
for name in ("slots", "cache"):
    admission_of(ActorsConfig(admission=name), None, lambda: 0.0)
    print([name for name in sys.modules if name.startswith("planning.")])
"""
    ended = subprocess.run([sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["[]", "['planning.kv_gate']"]
