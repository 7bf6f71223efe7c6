"""Unpack the archives of pack.sh into a folder of packages: `python3 -m benchmarks.gpu.site_folder ARCHIVES SITE`.

Uses only the standard library. A complete folder is not unpacked again. Leeway is registered in the folder like an
installed distribution. vLLM then finds Leeway's plugin by the entry point, and `leeway doctor` finds the requirements
in the metadata.
"""

from __future__ import annotations

import compileall
import os
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PYTHON = (3, 12)
"""Python version of the wheels."""
DONE = ".done"
COMPILED = ("vllm", "openai", "ray", "pydantic")
"""Packages that most processes of a run import. Compilation in advance saves each process the compilation."""
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def unpack(archive: Path, site: Path) -> None:
    """Extract an archive without its top-level folder."""
    with tarfile.open(archive, "r|xz") as members:
        for member in members:
            member.name = member.name.partition("/")[2]
            if member.name:
                members.extract(member, site, filter="data")


def register(project: dict[str, Any], site: Path) -> Path:
    """Write the metadata of an installed distribution; return the folder of these files.

    Args:
        project: table `project` of pyproject.toml.
        site: folder of packages.
    """
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {each}; extra == "{extra}"' for each in requirements)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    entry_points = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in names.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(entry_points) + "\n", encoding="utf-8")
    return folder


def fill(archives: Iterable[Path], site: Path) -> None:
    """Unpack archives in parallel, and compile the packages that most processes import."""
    site.mkdir(parents=True, exist_ok=True)
    paths = list(archives)
    with ProcessPoolExecutor() as pool:
        list(pool.map(unpack, paths, [site] * len(paths)))
    for name in COMPILED:
        compileall.compile_dir(site / name, quiet=2, workers=0)
    (site / DONE).touch()


def main() -> None:
    """Unpack the archives if the folder is incomplete, and register Leeway in it."""
    folder, site = Path(sys.argv[1]), Path(sys.argv[2])
    if sys.version_info[:2] != PYTHON:
        version = sys.version.split()[0]
        sys.exit(f"unpack.sh: python3 is {version}, but the wheels need 3.12: put Python 3.12 first in PATH")
    archives = sorted(folder.glob("*.tar.xz"))
    began_s = time.monotonic()
    if not (site / DONE).exists():
        if not archives:
            sys.exit(f"unpack.sh: no archive in {folder.resolve()}: run pack.sh and copy .gpu/ to this checkout")
        fill(archives, site)
    register(tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"], site)
    print(f"{os.fspath(site)} is ready after {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
