"""Virtual environments for peers: systems that Leeway is compared with and does not depend on.

Environments are created in the user's cache folder, never in the repository. A .pth file makes the packages of the
benchmark's environment visible, so that torch and Ray are not installed twice. Versions that a peer requires take
precedence.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

from leeway.launch.bootstrap import ROOT, pinned_versions

INSTALL_TIMEOUT_S = 900


class PeersUnavailable(RuntimeError):
    """Raised if the environment cannot be created; the message has the installer's output."""


@lru_cache
def python_with(*requirements: str) -> Path:
    """Return the interpreter of an environment with these requirements; create a missing or outdated environment.

    Raises:
        PeersUnavailable: the environment cannot be created.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = sysconfig.get_path("purelib")
    visible = f"{here}\n{ROOT / 'src'}\n"  # an editable install is another .pth file, which is not read
    make = hashlib.sha256("\n".join([sys.version, visible, *requirements]).encode()).hexdigest()[:12]
    folder = cache / "leeway" / f"peers-{make}"
    python, done = folder / "bin" / "python", folder / "done"
    if done.exists():
        return python
    print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "leeway_packages.pth").write_text(visible)
    # Pin the versions of the repository, so that no peer replaces the CPU build of torch.
    constraints, own = folder / "constraints.txt", {each.partition("==")[0] for each in requirements}
    lines = (each for each in pinned_versions() if each.partition("==")[0] not in own)
    constraints.write_text("\n".join(lines) + "\n")
    _run([str(python), "-m", "pip", "install", "--quiet", *requirements, "-c", str(constraints)])
    done.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, timeout=INSTALL_TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        last = " | ".join(done.stderr.splitlines()[-4:])
        raise PeersUnavailable(f"creating the peers' environment failed: {' '.join(command[:4])} ... printed: {last}")
