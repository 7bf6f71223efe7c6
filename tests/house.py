"""Measure the size and the import graph of the product: `python -m tests.house`. A test bounds the metrics.

Counts the modules of the packages, without tests and benchmarks. Shell scripts, the report page and the examples have
separate bounds, so that code cannot move there unnoticed. The lines of an `__init__` count, but an `__init__` counts
as a file only if it does more than describe and re-export.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "algorithms", "buffer", "common", "launch", "learner", "planning", "weight_sync")
ENTRY_POINTS = frozenset({"leeway.launch.bootstrap", "leeway.launch.cli", "leeway.launch.cluster_nodes"})
"""Modules that a user, the Makefile or a script starts. A module without importers is an entry point too."""
DEEP_LINES = 120
"""Minimum number of lines of a module that may stay separate although only one other module imports it."""


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    """Dotted name; an `__init__` has the name of its package."""
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def is_file(self) -> bool:
        """True unless the module is an `__init__` with only a docstring and re-exports."""
        if self.path.name != "__init__.py":
            return True
        frame = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
        return any(not isinstance(node, frame) for node in self.tree.body)


@cache
def modules() -> dict[str, Module]:
    """Return all modules of the product by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("leeway", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            text = path.read_text(encoding="utf-8")
            found[name] = Module(name, path, ast.parse(text), text.count("\n"))
    return found


def imports_of(module: Module, known: dict[str, Module]) -> set[str]:
    """Return the modules of the product that this one imports, at any depth and including imports for types.

    `from package import module` counts as an import of the module, not of the package.
    """
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return {name for name in found if name in known and name != module.name}


@cache
def graph() -> dict[str, set[str]]:
    """Return the imported modules of each module."""
    known = modules()
    return {name: imports_of(module, known) for name, module in known.items()}


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in arrows[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in arrows:
        if node not in index:
            visit(node)
    return sorted(found)


def single_use(arrows: dict[str, set[str]]) -> dict[str, str]:
    """Return each module with a single importer, and that importer. Imports in an `__init__` do not count."""
    known = modules()
    users = defaultdict(set)
    for name, imported in arrows.items():
        for other in imported:
            if known[name].path.name != "__init__.py":
                users[other].add(name)
    return {
        name: next(iter(users[name]))
        for name, module in sorted(known.items())
        if len(users[name]) == 1 and module.path.name != "__init__.py" and name not in ENTRY_POINTS
    }


def public_classes() -> dict[str, list[str]]:
    """Return class names that are public in two or more modules, with those modules."""
    found = defaultdict(list)
    for module in modules().values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module.name)
    return {name: at for name, at in sorted(found.items()) if len(at) > 1}


def functions() -> Iterator[tuple[int, str]]:
    """Yield the length in lines and the name of every function. The length includes the nested functions."""
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield (node.end_lineno or 0) - node.lineno + 1, f"{module.name}.{node.name}"


def num_config_keys() -> int:
    """Count the keys in docs/config.md, which is generated from the schema, without keys inside tables."""
    lines = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("| `") and "[" not in line.split("`")[1] for line in lines)


def num_table_keys() -> int:
    """Count the keys inside tables in docs/config.md; a row may list several tables, as `KEY[ONE, TWO].NAME`."""
    lines = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    keys = (line.split("`")[1] for line in lines if line.startswith("| `"))
    return sum(1 + key.count(",") for key in keys if "[" in key)


def lines_of(*patterns: str) -> int:
    """Count the lines of the tracked files that match the given patterns."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return sum((ROOT / name).read_bytes().count(b"\n") for name in listed.stdout.splitlines() if (ROOT / name).exists())


def package_lines(package: str) -> int:
    return sum(module.num_lines for module in modules().values() if module.name.split(".")[1] == package)


def figures() -> dict[str, int]:
    """Return the bounded metrics by name."""
    known, arrows = modules(), graph()
    files = [module for module in known.values() if module.is_file]
    lines = sum(module.num_lines for module in known.values())
    return {
        "files": len(files),
        "lines": lines,
        "lines without planning": lines - package_lines("planning"),
        "lines of buffer": package_lines("buffer"),
        "lines of launch": package_lines("launch"),
        "lines of shell": lines_of("*.sh", "*.sbatch"),
        "lines of the report's page": lines_of("launch/report/*.html", "launch/report/*.css", "launch/report/*.js"),
        "lines of examples": lines_of("examples/*.py", "examples/*.toml"),
        "longest file": max(module.num_lines for module in files),
        "longest function": max(length for length, _ in functions()),
        "modules imported by exactly one other": len(single_use(arrows)),
        "of those with less than 120 lines": sum(known[name].num_lines < DEEP_LINES for name in single_use(arrows)),
        "import cycles": len(cycles(arrows)),
        "class names with two meanings": len(public_classes()),
        "config keys": num_config_keys(),
        "config keys inside tables": num_table_keys(),
    }


def main() -> None:
    """Print the metrics; with -v also the modules and classes that they count."""
    known, arrows = modules(), graph()
    for name, value in figures().items():
        print(f"{value:7,}  {name}")
    if "-v" in sys.argv:
        print("\nmodules imported by exactly one other:")
        for name, user in single_use(arrows).items():
            print(f"{known[name].num_lines:5}  {name} <- {user}")
        print("\nimport cycles:", *cycles(arrows), sep="\n  ")
        print(
            "\nshared class names:", *(f"{name}: {', '.join(at)}" for name, at in public_classes().items()), sep="\n  "
        )


if __name__ == "__main__":
    main()
