"""A process of a run imports `planning` only if a config key or a subcommand needs `planning`."""

import re
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from leeway.launch.cli import LAZY_VERBS, main
from tests.house import PACKAGES, ROOT, graph, modules

ROLES = {
    "command": "leeway.launch.train",
    "actor": "leeway.launch.processes.actor_role, leeway.actors.loop, leeway.actors.engine, leeway.actors.sample",
    "stage": "leeway.launch.processes.learner_group, leeway.learner.stage",
    "buffer service": "leeway.launch.processes.services, leeway.buffer.service",
    "weight service": "leeway.weight_sync.service",
    "read-only commands": "leeway.launch.cli, leeway.launch.buffer_cli, leeway.launch.report.page",
    "doctor": "leeway.launch.doctor",
}
"""Role -> modules that its process imports."""


def output_lines(code):
    """Return the lines that a Python process prints."""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_each_object_loaded_by_its_dotted_name_exists():
    pattern = re.compile(rf'"(leeway\.(?:{"|".join(PACKAGES)})\.[\w.]+:\w+)"')
    names = {name for module in modules().values() for name in pattern.findall(module.path.read_text())}
    assert len([name for name in names if name.startswith("leeway.planning.")]) >= 7
    for name in names:
        assert resolve_name(name) is not None, name


@pytest.mark.process
def test_processes_of_a_run_do_not_import_planning():
    modules = ", ".join(ROLES.values())
    code = f"import {modules}, sys; print([name for name in sys.modules if name.startswith('leeway.planning')])"
    assert output_lines(code) == ["[]"]


def test_no_other_package_imports_planning():
    below = {name: imported for name, imported in graph().items() if not name.startswith("leeway.planning")}
    assert {name for name, found in below.items() if any(each.startswith("leeway.planning") for each in found)} == set()


def test_help_lists_the_planning_subcommands_and_describes_each(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for verb, (_, text) in LAZY_VERBS.items():
        assert f"{verb} " in listed
        assert text in listed
        assert main([verb, "--help"]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.process
def test_an_actor_with_slot_admission_does_not_load_planning():
    code = """
import sys
from leeway.actors.config import admission_of
from leeway.actors.config import ActorsConfig
for name in ("slots", "cache"):
    admission_of(ActorsConfig(admission=name), None, lambda: 0.0)
    print([name for name in sys.modules if name.startswith("leeway.planning.")])
"""
    assert output_lines(code) == ["[]", "['leeway.planning.kv_gate']"]


@pytest.mark.process
def test_a_buffer_loads_length_prediction_when_an_actor_requests_it(tmp_path):
    code = f"""
import sys
from pathlib import Path
from leeway.buffer import protocol as p
from tests.world.buffer import Actor, InProcessBuffer, facts
buffer = InProcessBuffer(Path({str(tmp_path)!r}) / "store", facts())
actor = Actor(buffer)
buffer.begin()
for number, wants in enumerate((False, True), 1):
    buffer.ask(p.LeaseRequest(actor.name, 1, number, 1, wants_lengths=wants), p.LeaseGrant)
    print(sorted(name for name in sys.modules if name.startswith("leeway.planning.")))
"""
    assert output_lines(code) == [
        "[]",
        "['leeway.planning.dispatch', 'leeway.planning.lengths', 'leeway.planning.prompts']",
    ]
