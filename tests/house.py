"""How large the product is and how it hangs together: `python -m tests.house`, and the bounds that a test holds it to.

Counted is what a user installs and a reader has to carry: the modules of the packages, without tests and benchmarks.
Shell, the page of the report and the examples have bounds of their own, so that nothing moves there. A package's
`__init__` counts its lines, and as a file only where it does more than describe and re-export.
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
ENTRY_POINTS = frozenset({"launch.bootstrap", "launch.cli", "launch.cluster_nodes"})
"""Started by a user, the Makefile or a script; a module that nobody imports is one too."""
DEEP_LINES = 120
"""A module that one other imports is a room of its own from here on."""


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    """Dotted; of a package's `__init__` the package."""
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def is_file(self) -> bool:
        """Does it hold code of its own? An `__init__` of a docstring and re-exports does not."""
        if self.path.name != "__init__.py":
            return True
        frame = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
        return any(not isinstance(node, frame) for node in self.tree.body)


@cache
def modules() -> dict[str, Module]:
    """All modules of the product, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            found[name] = Module(name, path, ast.parse(text), text.count("\n"))
    return found


def imports_of(module: Module, known: dict[str, Module]) -> set[str]:
    """The modules of the product that this one imports, anywhere in it, for types too.

    `from package import module` is an import of the module alone: the `__init__`s import nothing that matters.
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
    """Module -> the modules that it imports."""
    known = modules()
    return {name: imports_of(module, known) for name, module in known.items()}


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components of two or more)."""
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
    """Module -> the only other one that imports it. An `__init__` imports for its readers and does not count."""
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
    """Class names that are public in two or more modules -> those modules."""
    found = defaultdict(list)
    for module in modules().values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module.name)
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


def functions() -> Iterator[tuple[int, str]]:
    """Length in lines and name of every function, the nested ones within those that hold them."""
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield (node.end_lineno or 0) - node.lineno + 1, f"{module.name}.{node.name}"


def num_config_keys() -> int:
    """Rows of docs/config.md, which the schema makes, without the knobs of tables that are a key's value."""
    lines = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("| `") and "[" not in line.split("`")[1] for line in lines)


def num_table_keys() -> int:
    """Rows of docs/config.md of the knobs in tables that are a key's value."""
    lines = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("| `") and "[" in line.split("`")[1] for line in lines)


def lines_of(*patterns: str) -> int:
    """Lines of the files that git knows under these patterns."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return sum((ROOT / name).read_bytes().count(b"\n") for name in listed.stdout.splitlines() if (ROOT / name).exists())


def package_lines(package: str) -> int:
    return sum(module.num_lines for module in modules().values() if module.name.split(".")[0] == package)


def figures() -> dict[str, int]:
    """What is bounded."""
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
    """Print the figures, and where to look."""
    known, arrows = modules(), graph()
    for name, value in figures().items():
        print(f"{value:7,}  {name}")
    if "-v" in sys.argv:
        print("\nimported by one other alone:")
        for name, user in single_use(arrows).items():
            print(f"{known[name].num_lines:5}  {name} <- {user}")
        print("\nimport cycles:", *cycles(arrows), sep="\n  ")
        print(
            "\nclasses of one name:", *(f"{name}: {', '.join(at)}" for name, at in public_classes().items()), sep="\n  "
        )


if __name__ == "__main__":
    main()
