"""A verb imports what it needs and no more: torch takes seconds, Transformers as many again, and each its memory."""

import subprocess
import sys

import pytest

HEAVY = ("ray", "torch", "torch.distributed.checkpoint", "transformers", "vllm")
LOOKING = (
    "launch.run_folder",
    "launch.report.data",
    "launch.report.page",
    "launch.observe.trace",
    "launch.observe.status",
    "launch.text",
    "launch.observe.view",
    "launch.buffer_cli",
)


def imported(code: str) -> list[str]:
    """Which of the heavy ones a process has imported after it has run some code."""
    code += f"\nimport sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("verb", ["status", "top", "report", "scale --count 1", "buffer ls"])
def test_who_looks_at_a_run_or_asks_something_of_it_need_not_wait_for_torch(verb):
    assert imported(f"from launch.cli import main; main({[*verb.split(), 'no-such-run']})") == []


def test_nor_do_the_modules_that_they_look_with_import_it():
    assert imported(f"import {', '.join(LOOKING)}") == []


def test_a_config_is_checked_before_ray_is_imported():
    assert imported("import launch.cli, launch.checks") == ["torch"]


def test_the_command_of_a_run_leaves_models_and_engines_to_its_roles():
    assert imported("import launch.train, launch.resume") == ["ray", "torch", "torch.distributed.checkpoint"]


def test_services_and_what_vllm_loads_into_each_of_its_processes_need_no_torch():
    assert imported("import buffer.service, weight_sync.service, weight_sync.vllm_engine") == []
