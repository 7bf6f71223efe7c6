"""Arguments shared by several subcommands of `leeway`, and the class of subcommands that read a config."""

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
    """Return the names of runs in runs/ that start with `incomplete`, for shell completion."""
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


def _config(text: str) -> Path:
    from leeway.launch.run_folder import find_config

    return find_config(text)


def run_argument(text: str) -> Any:  # noqa: ANN401 -- as `typer.Argument`
    return typer.Argument(metavar="RUN", help=text, autocompletion=run_names)


ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG.toml", help="Config of the run, or a bundled example such as demo.", parser=_config),
]
RunPath = Annotated[Path, run_argument("Folder of the run, or its name within runs/.")]
NewestRun = Annotated[
    Path | None, run_argument("Folder of the run, or its name within runs/; default: the newest run.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run all checks and start nothing.")]


class ConfigVerb(TyperCommand):
    """Subcommand that accepts config overrides, such as `--learner.num_steps 20`, after its first argument.

    The overrides are stored in the attribute `args` of the subcommand's context.
    """

    allow_extra_args = True
    ignore_unknown_options = True

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments; reject overrides before the first argument and misspelt options."""
        overrides = super().parse_args(ctx, args)
        subject, *others = self.params
        if str(given := ctx.params[subject.name]).startswith("--"):  # an override in place of the argument
            metavar = str(subject.metavar).partition(".")[0]
            ctx.fail(f"give {metavar} first, and {str(given).partition('=')[0]} after it")
        known = [name for each in others for name in each.opts]
        for name in (word.partition("=")[0] for word in overrides):
            if name.startswith("--") and "." not in name and (close := get_close_matches(name, known, cutoff=0.8)):
                ctx.fail(f"No such option: {name} (Possible options: {', '.join(close)})")
        return overrides

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the config keys in the help of `train`; in other helps, name the command that lists the keys."""
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        if self.name != "train":
            formatter.write_text("Every key of the config can be overridden; `leeway train --help` lists them.")
            return
        formatter.write_text("Every key of the config can be overridden. Basic keys come first.")
        for section, rows in _keys():
            with formatter.section(f"Keys of [{section}]"):
                formatter.write_dl(rows)


def _keys() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section of the config with its keys as options and their descriptions."""
    from leeway.launch.config import Config, knob_metadata
    from leeway.launch.config_errors import models_of

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
        is_basic = {name: any(knob_metadata(field, "basic") for field in same) for name, same in fields.items()}
        for name, same in sorted(fields.items(), key=lambda item: (item[0] != "type", not is_basic[item[0]])):
            values = "|".join(dict.fromkeys(_values(field.annotation) for field in same))
            of = "" if len(same) == len(models) else f", of type {', '.join(types[name])}"
            rows.append((option + name, f"<{values}>{of}. {same[0].description or ''} [{_default(same[0])}]"))
        yield section, rows


def _values(annotation: Any) -> str:  # noqa: ANN401 -- any annotation
    """Return the values that a type accepts, such as `int` or `auto|on|off`."""
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
