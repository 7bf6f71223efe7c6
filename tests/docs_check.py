"""Check the commands and links of README.md and docs/: `make docs-check`, or
python -m tests.docs_check [FILE ...].

Checks fenced shell blocks, and the project's own commands in backticks. A `leeway` command is parsed by its own CLI.
The overrides of the command are validated against its config file, or against the demo config if the file is missing.
Commands that start no processes are run: `check-reward`, and `train` as a dry run. Files, make targets, flags and
subcommands of other commands must exist. A command of the project in a block that is not marked as shell is a fault,
because commands in such a block are not checked. Only links to files are checked.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import typer
from typer.core import TyperCommand

from leeway.launch.cli import main as leeway
from leeway.launch.config import load_config
from leeway.launch.errors import ConfigError

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"
SHELLS = ("bash", "sh", "shell", "console")
ALLOWED = frozenset(
    {"source", "cd", "export", "kill", "ssh", "sbatch", "scp", "rsync", "git", "ls", "cat", "cp", "wandb", "sudo", "ip"}
    | {"apt-get", "sky", "ray", "pip", "curl", "docker", "mount", "umount", "prometheus", "tail", "head", "jq", "echo"}
    | {"ulimit", "grep", "less", "tee", "wc", "chmod", "rm", "mkdir", "openssl", "sbatch", "squeue", "scancel"}
    | {"nvidia-cuda-mps-control", "nvidia-smi", "pkill"}
)
"""External programs, which are not checked."""
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:leeway|make|python|launch/\S+\.sh) [^`]+)`(?!`)")
OURS = re.compile(r"^(?:\$ )?(leeway|make|python|launch/\S+\.sh)( |$)")
INDENTED = re.compile(r"(?:^|\n) *\n((?: {4,}[^\n]*(?:\n|$))+)")
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
RUN_FOR_REAL = ("check-reward",)


@dataclass(frozen=True)
class Command:
    """A command in a document."""

    location: str
    text: str
    is_inline: bool = False
    """True for a command in a sentence. A subcommand without arguments is then only a name and is not run."""
    is_marked: bool = True
    """False for a command in a block that is not marked as shell."""


def commands_in(path: Path) -> Iterator[Command]:
    """Yield the commands of a document with their locations."""
    text = path.read_text(encoding="utf-8")
    name = _name(path)
    for block in FENCE.finditer(text):
        first = text.count("\n", 0, block.start(2)) + 1
        if block[1] in SHELLS:
            yield from _lines(name, block[2], first)
        elif not block[1]:
            yield from _unmarked(name, block[2], first)
    prose = _without(FENCE, text)
    for block in INDENTED.finditer(prose):
        yield from _unmarked(name, block[1], prose.count("\n", 0, block.start(1)) + 1)
    for found in INLINE.finditer(prose):
        line = prose.count("\n", 0, found.start()) + 1
        yield Command(f"{name}:{line}", " ".join(found[1].split()), is_inline=True)


def _unmarked(name: str, block: str, first: int) -> Iterator[Command]:
    for number, line in enumerate(block.splitlines(), start=first):
        if OURS.match(line.strip()):
            yield Command(f"{name}:{number}", line.strip(), is_marked=False)


def _lines(name: str, block: str, first: int) -> Iterator[Command]:
    whole, start = "", first
    for number, line in enumerate(block.splitlines(), start=first):
        start = start if whole else number
        whole += line.strip().removeprefix("$ ")
        if whole.endswith("\\"):
            whole = whole[:-1]
            continue
        if whole.strip() and not whole.lstrip().startswith("#"):
            yield Command(f"{name}:{start}", whole.strip())
        whole = ""


def fault(command: Command) -> str:
    """Return the fault of a command, or '' if it is valid."""
    if not command.is_marked:
        return "the block is not marked as ```bash"
    try:
        words = shlex.split(command.text, comments=True)
    except ValueError as error:
        return f"invalid shell syntax: {error}"
    for part in _split(words):
        while part and re.fullmatch(r"[A-Z_]+=.*", part[0]):
            part = part[1:]
        if part and (found := _fault_of(part, command.is_inline)):
            return found
    return ""


def _split(words: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "||", ";", "|", "&"):
            parts.append([])
        elif word.startswith((">", "2>")):
            break
        else:
            parts[-1].append(word)
    return parts


def _fault_of(words: list[str], is_inline: bool) -> str:
    program, arguments = words[0], words[1:]
    if program == "leeway":
        return _fault_of_leeway(arguments, is_inline)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in arguments if "=" not in word and not word.startswith("-") and word not in targets]
        return f"the Makefile has no target {unknown[0]}" if unknown else ""
    if program.startswith("python") or program.endswith("/python"):
        return _fault_of_python(arguments)
    if "/" in program:
        return _fault_of_script(ROOT / program, program, arguments)
    return "" if program in ALLOWED else f"unknown program {program}"


def _fault_of_leeway(arguments: list[str], is_inline: bool = False) -> str:
    shown = [word.strip("[]") for word in arguments if word != "..."]
    if any("|" in word for word in shown) or shown == []:
        return ""
    if is_inline and all(re.fullmatch(r"[a-z-]+", word) for word in shown) and _is_verb(shown):
        return ""
    context, message = _parse([_filled_in(word) for word in shown])
    if context is None:
        return message
    config = context.params.get("config")
    if config is not None and config.name != "CONFIG.toml" and not (ROOT / config).exists():
        if "/" in str(config):
            return f"{config} does not exist"
        config = None
    path = DEMO if config is None or config.name == "CONFIG.toml" else ROOT / config
    try:
        model = load_config(path, context.args).model.folder
    except ConfigError as error:
        return str(error)
    # not run: the command needs the samples of an earlier run
    if config is None or path is DEMO or context.params.get("source") is not None:
        return ""
    if context.params.get("plan") is not None:  # the previous command writes the plan
        at = shown.index("--plan")
        shown = shown[:at] + shown[at + 2 :]
    # the previous command makes the model
    if model is not None and not model.exists() and model.with_suffix(".py").exists():
        shown += ["--model.path", "organisation/name"]
    verb = str(context.info_name)
    return _run([*shown, "--dry-run"] if verb == "train" and "--dry-run" not in shown else shown, verb)


def _parse(arguments: list[str]) -> tuple[typer.Context | None, str]:
    """Parse a command without running it. Return the context and '', or None and the error ('' for `--help`)."""
    contexts: list[typer.Context] = []
    with (
        mock.patch.object(TyperCommand, "invoke", lambda _, context: contexts.append(context) or 0),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        leeway(arguments)
    return (contexts[0], "") if contexts else (None, errors.getvalue().strip())


def _is_verb(words: list[str]) -> bool:
    return _parse([*words, "--help"]) == (None, "")


def _filled_in(word: str) -> str:
    """Replace a placeholder for a number or a subcommand, such as N in `--count N`, with a valid value."""
    return "3" if re.fullmatch(r"N|GROUP|RECORD|STEP", word) else "train" if word == "VERB" else word


def _run(arguments: list[str], verb: str) -> str:
    """Run a command that starts no processes and return its error, or '' if it succeeds."""
    if verb not in (*RUN_FOR_REAL, "train"):
        return ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        run_dir = ["--run.dir", folder] if verb == "train" else []
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
            status = leeway([*arguments, *run_dir])
    return "" if status == 0 else f"exit status {status}: {(errors.getvalue() or out.getvalue()).strip()}"


def _fault_of_python(arguments: list[str]) -> str:
    if arguments[:1] == ["-m"]:
        name = arguments[1]
        own = ROOT / (name.replace(".", "/"))
        if own.with_suffix(".py").exists() or (own / "__main__.py").exists() or name in ("pytest", "pip", "lmdb"):
            return ""
        return f"module {name} does not exist"
    file = next((word for word in arguments if word.endswith(".py")), None)
    if file is None:
        return ""
    return _fault_of_script(ROOT / file, file, arguments[arguments.index(file) + 1 :])


def _fault_of_script(path: Path, name: str, arguments: list[str]) -> str:
    """Check that a script of the project exists and that its source contains the flags and the subcommand."""
    if not path.exists():
        return "" if name.startswith(("/", ".venv")) else f"{name} does not exist"
    beside = [path, *path.parent.glob(f"{path.stem}_*{path.suffix}")]
    source = "\n".join(each.read_text(encoding="utf-8") for each in beside)
    if path.suffix == ".sh" and arguments and re.fullmatch(r"[a-z]+", arguments[0]):
        if arguments[0] not in _verbs_of(path):
            return f"{name} has no subcommand {arguments[0]}"
        overrides = [word for word in arguments if re.match(r"--\w+\.\w+", word)]
        if overrides:
            return _fault_of_leeway(["train", *[word for word in arguments[1:] if word != "\\"]])
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--") and "." not in word]
    unknown = [flag for flag in flags if flag not in source and flag[2:].replace("-", "_") not in source]
    return f"{name} has no option {unknown[0]}" if unknown else ""


def _verbs_of(script: Path) -> set[str]:
    """Return the labels of the `case` statements of a script."""
    labels = re.findall(r"^ *([a-z]+(?: ?\| ?[a-z]+)*)\)", script.read_text(encoding="utf-8"), re.MULTILINE)
    return {word.strip() for label in labels for word in label.split("|")}


def dead_links(path: Path) -> Iterator[str]:
    """Yield the links of a document to missing files, with their locations."""
    text = path.read_text(encoding="utf-8")
    prose = _without(CODE, _without(FENCE, text))
    for found in LINK.finditer(prose):
        if "://" not in found[1] and not found[1].startswith("mailto:") and not (path.parent / found[1]).exists():
            yield f"{_name(path)}:{prose.count(chr(10), 0, found.start()) + 1}: {found[1]}"


def _without(pattern: re.Pattern[str], text: str) -> str:
    """Remove the matches of a pattern; line numbers stay the same."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def documents() -> list[Path]:
    """Return README.md and all pages in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    """Print every fault; return 1 if there is one."""
    paths = [Path(argument).resolve() for argument in arguments] or documents()
    commands = [command for path in paths for command in commands_in(path)]
    faults = 0
    for command in commands:
        if found := fault(command):
            faults += 1
            print(f"{command.location}: {command.text}\n    {found}")
    for path in paths:
        for link in dead_links(path):
            faults += 1
            print(f"{link}\n    the link leads to a missing file")
    print(f"{len(commands)} commands in {len(paths)} documents: {faults or 'none'} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
