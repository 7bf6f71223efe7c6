"""A verb of `leeway`: its arguments, and the function that does it, whose docstring is what `--help` says of it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_INTEGER = 2**63 - 1

Entry = Callable[[Any], object]
"""Adds an argument, or a group of them, to a parser; argparse has no public type for what takes them."""
Run = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments, returns the exit status; imports what it needs when it runs, so `--help` is quick.

What is left over of the arguments is in `overrides`: of a config, for the verbs that take them.
"""


@dataclass(frozen=True)
class Verb:
    """One verb, or a group of them."""

    name: str
    help: str
    run: Run | None
    entries: Sequence[Entry] = ()
    description: str | None = None
    epilog: str | None = None
    takes_overrides: bool = False
    """Of a config, as `--learner.num_steps 20`; then no option is abbreviated."""
    parts: Sequence[Verb] = ()

    def add_to(self, parsers: Any) -> None:  # noqa: ANN401 -- as above
        """Add its parser, and those of its parts."""
        parser = parsers.add_parser(
            self.name,
            help=self.help,
            description=self.description,
            epilog=self.epilog,
            allow_abbrev=not self.takes_overrides,
        )
        for entry in self.entries:
            entry(parser)
        if self.run is not None:
            parser.set_defaults(run_verb=self.run, takes_overrides=self.takes_overrides)
        if self.parts:
            parts = parser.add_subparsers(dest=f"{self.name}_verb", required=True, metavar="VERB")
            for part in self.parts:
                part.add_to(parts)


def verb(text: str, *entries: Entry, epilog: str | None = None, takes_overrides: bool = False) -> Callable[[Run], Verb]:
    """The verb that a function of its name does, with this help and these arguments."""

    def make(run: Run) -> Verb:
        described = " ".join((inspect.getdoc(run) or "").split())
        return Verb(run.__name__.replace("_", "-"), text, run, entries, described, epilog, takes_overrides)

    return make


def arg(*names: str, **options: Any) -> Entry:  # noqa: ANN401 -- as argparse takes them
    """One argument."""
    return lambda into: into.add_argument(*names, **options)


def flag(name: str, text: str) -> Entry:
    """An option without a value."""
    return arg(name, action="store_true", help=text)


def of_run(text: str = "a run's folder, or its name within runs/", **options: Any) -> Entry:  # noqa: ANN401
    """The run that is meant."""
    return arg("run", type=Path, metavar="RUN", help=text, **options)


def one_of(*entries: Entry, required: bool = False) -> Entry:
    """Arguments that exclude each other."""
    return lambda into: _add(into.add_mutually_exclusive_group(required=required), entries)


def group(title: str, *entries: Entry) -> Entry:
    """Arguments under a title."""
    return lambda into: _add(into.add_argument_group(title), entries)


def _add(into: Any, entries: Sequence[Entry]) -> None:  # noqa: ANN401 -- as above
    for entry in entries:
        entry(into)


def integer(text: str, least: int = 0) -> int:
    """A number of the size that the store's keys have."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not least <= number <= _MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no whole number from {least} to {_MAX_INTEGER}")
    return number


def count(text: str) -> int:
    """The same, but not 0."""
    return integer(text, least=1)
