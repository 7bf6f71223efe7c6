"""A command imports only the modules that it needs: torch and Transformers each take seconds and memory."""

import subprocess
import sys

import pytest

HEAVY = ("ray", "torch", "torch.distributed.checkpoint", "transformers", "vllm")
VIEW_MODULES = (
    "leeway.launch.run_folder",
    "leeway.launch.report.data",
    "leeway.launch.report.page",
    "leeway.launch.observe.trace",
    "leeway.launch.observe.status",
    "leeway.launch.text",
    "leeway.launch.observe.view",
    "leeway.launch.observe.display",
    "leeway.launch.buffer_cli",
)


def imported(code: str) -> list[str]:
    """Return the heavy modules that a process has imported after it ran this code."""
    code += f"\nimport sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("verb", ["status", "top", "report", "scale --count 1", "buffer ls"])
def test_commands_that_show_or_control_a_run_do_not_import_torch(verb):
    assert imported(f"from leeway.launch.cli import main; main({[*verb.split(), 'no-such-run']})") == []


def test_the_modules_that_show_a_run_do_not_import_torch():
    assert imported(f"import {', '.join(VIEW_MODULES)}") == []


def test_a_config_is_checked_before_ray_is_imported():
    assert imported("import leeway.launch.cli, leeway.launch.checks") == ["torch"]


def test_the_launcher_leaves_models_and_engines_to_its_roles():
    assert imported("import leeway.launch.train, leeway.launch.resume") == ["ray", "torch"]


def test_services_and_the_plugin_of_vllm_do_not_import_torch():
    assert imported("import leeway.buffer.service, leeway.weight_sync.service, leeway.weight_sync.vllm_engine") == []
