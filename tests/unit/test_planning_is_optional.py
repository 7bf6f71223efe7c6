"""No process of a run imports `planning` unless a key or a verb asks for it."""

import re
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from launch.cli import LAZY_VERBS, main
from tests.house import PACKAGES, ROOT, graph, modules

ROLES = {
    "command": "launch.train",
    "actor": "launch.processes.actor_role, actors.loop, actors.engine, actors.sample",
    "stage": "launch.processes.learner_group, learner.stage",
    "buffer service": "launch.processes.services, buffer.service",
    "weight service": "weight_sync.service",
    "commands that look": "launch.cli, launch.buffer_cli, launch.report.page, launch.doctor",
}
"""Role -> the modules that its process imports."""


def printed(code):
    """The lines that a Python process prints."""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_each_object_that_is_loaded_by_its_dotted_name_is_there():
    dotted = re.compile(rf'"((?:{"|".join(PACKAGES)})\.[\w.]+:\w+)"')
    names = {name for module in modules().values() for name in dotted.findall(module.path.read_text())}
    assert len([name for name in names if name.startswith("planning.")]) >= 7
    for name in names:
        assert resolve_name(name) is not None, name


@pytest.mark.process
def test_the_processes_of_a_run_import_nothing_of_planning():
    modules = ", ".join(ROLES.values())
    shown = f"import {modules}, sys; print([name for name in sys.modules if name.partition('.')[0] == 'planning'])"
    assert printed(shown) == ["[]"]


def test_no_package_below_imports_planning_at_the_top_of_a_module_or_later():
    below = {name: imported for name, imported in graph().items() if name.partition(".")[0] != "planning"}
    assert {name for name, found in below.items() if any(each.startswith("planning") for each in found)} == set()


def test_the_help_names_the_verbs_of_planning_and_says_all_of_the_one_that_is_asked_for(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for verb, (_, text) in LAZY_VERBS.items():
        assert f"{verb} " in listed
        assert text in listed
        assert main([verb, "--help"]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.process
def test_an_actor_whose_key_says_slots_loads_nothing_of_planning():
    shown = """
import sys
from actors.config import admission_of
from actors.config import ActorsConfig
for name in ("slots", "cache"):
    admission_of(ActorsConfig(admission=name), None, lambda: 0.0)
    print([name for name in sys.modules if name.startswith("planning.")])
"""
    assert printed(shown) == ["[]", "['planning.kv_gate']"]


@pytest.mark.process
def test_a_buffer_loads_what_predicts_lengths_once_an_actor_asks_for_them(tmp_path):
    shown = f"""
import sys
from pathlib import Path
from buffer import protocol as p
from tests.world.buffer import Actor, InProcessBuffer, facts
buffer = InProcessBuffer(Path({str(tmp_path)!r}) / "store", facts())
actor = Actor(buffer)
buffer.begin()
for number, wants in enumerate((False, True), 1):
    buffer.ask(p.LeaseRequest(actor.name, 1, number, 1, wants_lengths=wants), p.LeaseGrant)
    print(sorted(name for name in sys.modules if name.startswith("planning.")))
"""
    assert printed(shown) == ["[]", "['planning.dispatch', 'planning.lengths', 'planning.prompts']"]
