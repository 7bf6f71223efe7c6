"""Arguments that several verbs of `leeway` take, and the class of the verbs that read a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from typer._click import Context, HelpFormatter


def run_names(incomplete: str) -> list[str]:
    """Return the runs in runs/ whose names begin so, for shell completion."""
    return [each.parent.name for each in Path("runs").glob(f"{incomplete}*/config.toml")]


def integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise ValueError(f"expected an integer between {least} and {most:,}, got '{text[:40]}'")
        return number

    return parse


ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The config of the run.")]
RunPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of the run, or its name within runs/.", autocompletion=run_names),
]
NewestRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Folder of the run, or its name within runs/; default: the newest.",
        autocompletion=run_names,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make all checks and start nothing.")]


class ConfigVerb(TyperCommand):
    """A verb that takes overrides of a config, as `--learner.num_steps 20`, after its first argument.

    They are in `args` of its context.
    """

    allow_extra_args = True
    ignore_unknown_options = True

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments, and refuse overrides that stand first and options that are misspelt."""
        overrides = super().parse_args(ctx, args)
        subject, *others = self.params
        if str(given := ctx.params[subject.name]).startswith("--"):  # for no override is known here
            what = str(subject.metavar).partition(".")[0]
            ctx.fail(f"give {what} first, and {str(given).partition('=')[0]} after it")
        known = [name for each in others for name in each.opts]
        for name in (word.partition("=")[0] for word in overrides):
            if name.startswith("--") and "." not in name and (close := get_close_matches(name, known, cutoff=0.8)):
                ctx.fail(f"No such option: {name} (Possible options: {', '.join(close)})")
        return overrides

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the keys of a config, or where they are listed."""
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        if self.name != "train":
            formatter.write_text("Every key of the config can be overridden; `leeway train --help` lists them.")
            return
        formatter.write_text("Every key of the config can be overridden. Those that most users set come first.")
        for section, rows in _keys():
            with formatter.section(f"Keys of [{section}]"):
                formatter.write_dl(rows)


def _keys() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section of a config with its keys as options, and what they mean."""
    from launch.config import Config, said_of
    from launch.mistakes import models_of

    for section, info in Config.model_fields.items():
        fields: dict[str, list[FieldInfo]] = {}
        types: dict[str, list[str]] = {}
        models = models_of(info.annotation)
        for model in models:
            for name, field in model.model_fields.items():
                fields.setdefault(name, []).append(field)
                types.setdefault(name, []).append(_values(model.model_fields["type"].annotation) if models[1:] else "")
        option = f"--{section}.NAME." if get_origin(info.annotation) is dict else f"--{section}."
        rows = []
        is_basic = {name: any(said_of(field, "basic") for field in same) for name, same in fields.items()}
        for name, same in sorted(fields.items(), key=lambda item: (item[0] != "type", not is_basic[item[0]])):
            values = "|".join(dict.fromkeys(_values(field.annotation) for field in same))
            of = "" if len(same) == len(models) else f", of type {', '.join(types[name])}"
            rows.append((option + name, f"<{values}>{of}. {same[0].description or ''} [{_default(same[0])}]"))
        yield section, rows


def _values(annotation: Any) -> str:  # noqa: ANN401 -- as of any field
    """Return the values that a type has, as in `int` or `auto|on|off`."""
    origin, inner = get_origin(annotation), [each for each in get_args(annotation) if each is not type(None)]
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin in (Union, UnionType):
        return "|".join(map(_values, inner))
    if origin is Annotated:
        return _values(inner[0])
    return {dict: "table", tuple: "list"}.get(origin, getattr(annotation, "__name__", ""))


def _default(field: FieldInfo) -> object:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        value = [getattr(each, "type", each) for each in value]
    return f"default: {str(value).lower() if isinstance(value, bool) else value}"
