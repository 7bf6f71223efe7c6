"""The command in unusual environments: files that hide modules, no home folder, no locks, lost outputs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leeway.launch import host
from leeway.launch.cli import main
from leeway.launch.errors import ConfigError, ExitStatus, hiding_module, report_failure
from leeway.launch.host import ensure_home
from leeway.launch.observe.status import find_run, read_status, view_run, write_status
from leeway.launch.run_folder import RunFolder, check_writable, claimed, owner_of

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.toml"
RECORDED = ROOT / "tests" / "data" / "status"


def leeway(*arguments: str, path: str = "", **options) -> subprocess.CompletedProcess:
    """Run the command in its own process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))}
    environment |= options.pop("env", {})
    given = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "stdin": subprocess.DEVNULL,
        "timeout": 120,
        **options,
    }
    command = [sys.executable, "-P", "-m", "leeway", *arguments]
    return subprocess.run(command, env=environment, check=False, **given)


@pytest.fixture
def folder(tmp_path):
    """A finished run."""
    folder = RunFolder(tmp_path / "run-\u00e4")
    folder.root.mkdir()
    shutil.copy(RECORDED / "config.toml", folder.config)
    write_status(folder.status, read_status(RECORDED / "done.json"))
    return folder


# --- modules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("calendar.py", "Python's own calendar"),
        ("queue/__init__.py", "Python's own queue"),
        ("scipy.py", "the library scipy"),
        ("transformers/__init__.py", "the library transformers"),
        ("leeway/__init__.py", "Leeway's own leeway"),
    ],
)
def test_a_file_that_hides_a_module_is_named_in_a_folder_and_in_pythonpath(tmp_path, monkeypatch, file, owner):
    (tmp_path / "empty").mkdir()
    path = tmp_path / "mine" / file
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert hiding_module(os.getcwd()) == ""
    assert f"{path} would be imported in place of {owner}, " in hiding_module(str(tmp_path / "mine"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path / 'mine'}")
    assert str(path) in hiding_module()
    assert main(["train", str(DEMO), "--dry-run"]) == ExitStatus.WRONG_INPUT


@pytest.mark.parametrize(
    "name", ["os.py", "sys.py", "my_reward.py", "numpy.txt", "numpy/data.csv", "tests/__init__.py", "sitecustomize.py"]
)
def test_a_file_that_hides_nothing_is_not_reported(tmp_path, monkeypatch, name):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert hiding_module(str(tmp_path)) == ""


def test_an_installation_in_pythonpath_may_hide_libraries_but_not_python(tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    (tmp_path / "numpy-9.9.dist-info").mkdir()
    assert hiding_module(str(tmp_path)) == ""
    (tmp_path / "calendar.py").touch()
    assert "Python's own calendar" in hiding_module(str(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize("name", ["inspect", "select"])
def test_a_hidden_import_of_the_command_itself_is_reported(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("value = 1")
    done = leeway("status", path=str(tmp_path))
    error = done.stderr.decode()
    assert (done.returncode, error.count("\n"), "Traceback" in error) == (ExitStatus.WRONG_INPUT, 1, False), error
    assert f"{tmp_path}/{name}.py would be imported in place of Python's own {name}" in error


@pytest.mark.parametrize("code", ["raise ImportError('no such symbol')", "1 / 0", "import not_installed_here", "x = ("])
def test_a_library_that_fails_to_import_is_one_sentence(tmp_path, monkeypatch, capsys, code):
    (tmp_path / "cut_off.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cut_off", raising=False)
    with pytest.raises(Exception) as raised:
        import cut_off  # noqa: F401
    assert report_failure(raised.value, 0) == ExitStatus.WRONG_INPUT
    error = capsys.readouterr().err
    assert "cannot be imported" in error
    assert "leeway doctor" in error


def test_a_torchvision_that_does_not_match_torch_is_one_sentence_with_the_fix(capsys):
    reported = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    reported.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert report_failure(reported, 0) == ExitStatus.WRONG_INPUT
    assert "run `pip uninstall -y torchvision torchaudio torchcodec`" in capsys.readouterr().err


def test_an_internal_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        report_failure(ZeroDivisionError("ours"), 0)


# --- home ---------------------------------------------------------------------------------------------


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """The folder that replaces an unwritable home; the fake `os.access` ignores the rights of root."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("os.access", lambda path, _: not str(path).startswith(str(tmp_path / "fixed")))
    return tmp_path / "tmp" / f"leeway-{os.geteuid()}-home"


def test_a_writable_home_is_kept(tmp_path, monkeypatch, spare):
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = {"LOGNAME": "user"}
    ensure_home(environment)
    assert environment == {"LOGNAME": "user", "HOME": str(tmp_path)}
    assert not spare.exists()


@pytest.mark.parametrize("home", ["~", "gone"])
def test_without_a_home_folder_a_private_one_is_created(tmp_path, monkeypatch, spare, home):
    monkeypatch.setattr("os.path.expanduser", lambda _: home if home == "~" else str(tmp_path / home))
    environment: dict[str, str] = {}
    ensure_home(environment)
    assert environment == {"HOME": str(spare), "USER": f"user-{os.geteuid()}"}
    assert spare.stat().st_mode & 0o777 == 0o700
    spare.chmod(0o777)
    with pytest.raises(ConfigError, match="set HOME to a writable folder"):
        ensure_home({})


def test_a_read_only_home_is_still_read(tmp_path, monkeypatch, spare):
    home = tmp_path / "fixed"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    environment = {"HOME": str(home), "XDG_DATA_HOME": "/mine"}
    ensure_home(environment)
    assert environment["HOME"] == str(home)
    assert environment["HF_HOME"] == str(home / ".cache" / "huggingface")
    assert (environment["XDG_CACHE_HOME"], environment["XDG_DATA_HOME"]) == (str(spare), "/mine")
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("token")
    known = {"HOME": str(home)}
    ensure_home(known)
    assert "RAY_AUTH_TOKEN" not in known


# --- locks --------------------------------------------------------------------------------------------


def test_without_locks_a_new_run_is_refused_and_an_old_one_is_shown(tmp_path, monkeypatch, folder):
    def flock(*_):
        raise OSError(37, "No locks available")

    with claimed(folder):
        pass
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match=r"run.dir = .* does not support locks \(No locks available\)"):
        check_writable(tmp_path / "runs", "run.dir")
    assert owner_of(folder) == os.getpid(), "the claim names a live process"
    folder.claim.write_text(f"{2**31 - 1}\n")
    assert owner_of(folder) is None
    assert view_run(find_run(folder.root)).is_healthy


# --- outputs ------------------------------------------------------------------------------------------

ENVIRONMENTS = [
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"TERM": "dumb", "COLUMNS": "1"},
    {"TERM": "", "COLUMNS": "0"},
]


@pytest.mark.process
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=str)
def test_any_terminal_and_encoding_gets_a_view_and_a_page(folder, environment):
    for arguments in (["top"], ["report"]):
        done = leeway(*arguments, str(folder.root), env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
    assert folder.report.stat().st_size > 10_000


@pytest.mark.process
@pytest.mark.parametrize("verb", ["status", "top"])
def test_a_full_or_closed_output_gives_no_traceback(folder, verb):
    with open("/dev/full", "wb") as full:
        done = leeway(verb, str(folder.root), stdout=full)
    assert (done.returncode, done.stderr) == (1, b"leeway: the output cannot be written: No space left on device\n")
    done = leeway(verb, str(folder.root), stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("out", ["no/such/folder/page", "f" * 300, "run.pipe"])
def test_a_page_that_cannot_be_written_is_one_sentence(folder, tmp_path, capsys, out):
    os.mkfifo(tmp_path / "run.pipe")
    assert main(["report", str(folder.root), "--out", str(tmp_path / out)]) in (1, 2)
    assert capsys.readouterr().err.startswith("leeway: ")


def test_process_limits_include_those_of_control_groups(monkeypatch):
    monkeypatch.setattr(host, "cgroup_values", lambda *_: iter([(Path("/group"), [300, 40])]))
    assert "the limit of 300 (pids.max of /group) leaves room for 260 " in host.low_limits()
    assert host.low_limits(0) == ""
