"""Environments of what Leeway is compared with and does not depend on.

They lie in the user's cache folder, never in the repository, and see the packages of the environment that runs the
benchmark (a .pth file names their folder), so torch and Ray need no second copy. Versions that a peer names win.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

from benchmarks.lib.machine import ROOT

INSTALL_TIMEOUT_S = 900


class PeersUnavailable(RuntimeError):
    """The environment cannot be made; carries what the installer said."""


@lru_cache
def python_with(*requirements: str) -> Path:
    """The interpreter of an environment that has these too; makes it where it is missing or of another make.

    Raises:
        PeersUnavailable: it cannot be made.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = sysconfig.get_path("purelib")
    make = hashlib.sha256("\n".join([sys.version, here, *requirements]).encode()).hexdigest()[:12]
    folder = cache / "leeway" / f"peers-{make}"
    python, done = folder / "bin" / "python", folder / "done"
    if done.exists():
        return python
    print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "leeway_packages.pth").write_text(here + "\n")
    # The versions of the repository hold, above all torch's: a build for CPUs must not be replaced.
    constraints, own = folder / "constraints.txt", {each.partition("==")[0] for each in requirements}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(each for each in lines if each.partition("==")[0] not in own) + "\n")
    _run([str(python), "-m", "pip", "install", "--quiet", *requirements, "-c", str(constraints)])
    done.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, timeout=INSTALL_TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        last = " | ".join(done.stderr.splitlines()[-4:])
        raise PeersUnavailable(f"the environment of the peers cannot be made: {' '.join(command[:4])} ... said: {last}")
