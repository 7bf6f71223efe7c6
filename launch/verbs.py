"""A verb of `leeway`: a function that does it, whose docstring is what `--help` says of it, and its arguments."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""As `add_argument` takes them."""
Run = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments, returns the exit status; imports what it needs when it runs, so `--help` is quick.

What is left over of the arguments is in `overrides`: of a config, for the verbs that take them.
"""


class Verb(NamedTuple):
    """One verb, or a group of them."""

    name: str
    add_to: Callable[[Any], None]
    """Adds its parser to those of `leeway`, for which argparse has no public type."""


def verb(
    text: str, *arguments: Argument, epilog: str | None = None, takes_overrides: bool = False
) -> Callable[[Run], Verb]:
    """The verb that a function of its name does, with this help and these arguments.

    One that takes overrides of a config, as `--learner.num_steps 20`, has no option that can be abbreviated.
    """

    def make(run: Run) -> Verb:
        name = run.__name__.replace("_", "-")

        def add_to(parsers: Any) -> None:  # noqa: ANN401 -- as above
            described = " ".join((inspect.getdoc(run) or "").split())
            parser = parsers.add_parser(
                name, help=text, description=described, epilog=epilog, allow_abbrev=not takes_overrides
            )
            for names, options in arguments:
                parser.add_argument(*names, **options)
            parser.set_defaults(run_verb=run, takes_overrides=takes_overrides)

        return Verb(name, add_to)

    return make


def arg(*names: str, **options: Any) -> Argument:  # noqa: ANN401 -- as argparse takes them
    """One argument."""
    return names, options


def flag(name: str, text: str) -> Argument:
    """An option without a value."""
    return arg(name, action="store_true", help=text)


def of_run(text: str = "a run's folder, or its name within runs/", **options: Any) -> Argument:  # noqa: ANN401
    """The run that is meant."""
    return arg("run", type=Path, metavar="RUN", help=text, **options)
