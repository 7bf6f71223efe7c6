"""Every command and link that stands in README.md and docs/ leads somewhere: `make docs-check`, or
python -m tests.docs_check [FILE ...].

Looked at are the fenced blocks of shell, and commands of ours between backticks. A `leeway` command is parsed by its
own parser; its overrides are read against its config where that is a file, and else against the demo's. Those that
start nothing are run: `check-reward`, and of `train` the dry run. Of other programs, files, make targets, flags and
verbs must be there. A command of ours in a block that is not marked as shell is a fault, for nobody would look at it.
Of links those to files are looked at.
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

from launch.cli import main as leeway
from launch.config import load_config
from launch.errors import ConfigError

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"
SHELLS = ("bash", "sh", "shell", "console")
ALLOWED = frozenset(
    {"source", "cd", "export", "kill", "ssh", "sbatch", "scp", "rsync", "git", "ls", "cat", "cp", "wandb", "sudo", "ip"}
    | {"apt-get", "sky", "ray", "pip", "curl", "docker", "mount", "umount", "prometheus", "tail", "head", "jq", "echo"}
    | {"ulimit", "grep", "less", "tee", "wc", "chmod", "rm", "mkdir", "openssl", "sbatch", "squeue", "scancel"}
    | {"nvidia-cuda-mps-control", "nvidia-smi", "pkill"}
)
"""Programs of others: not ours to check."""
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:leeway|make|python|launch/\S+\.sh) [^`]+)`(?!`)")
OURS = re.compile(r"^(?:\$ )?(leeway|make|python|launch/\S+\.sh)( |$)")
INDENTED = re.compile(r"(?:^|\n) *\n((?: {4,}[^\n]*(?:\n|$))+)")
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
RUN_FOR_REAL = ("check-reward",)


@dataclass(frozen=True)
class Command:
    """One line of a document."""

    where: str
    text: str
    in_a_sentence: bool = False
    """There a verb alone is its name."""
    is_marked: bool = True
    """It stands where commands are looked for."""


def commands_in(path: Path) -> Iterator[Command]:
    """The commands of a document, with their places."""
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
        yield Command(f"{name}:{line}", " ".join(found[1].split()), in_a_sentence=True)


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
    """What is wrong with a command; '' where nothing is."""
    if not command.is_marked:
        return "it stands in a block that is not marked as ```bash"
    try:
        words = shlex.split(command.text, comments=True)
    except ValueError as error:
        return f"the shell cannot read it: {error}"
    for part in _split(words):
        while part and re.fullmatch(r"[A-Z_]+=.*", part[0]):
            part = part[1:]
        if part and (found := _fault_of(part, command.in_a_sentence)):
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


def _fault_of(words: list[str], in_a_sentence: bool) -> str:
    program, arguments = words[0], words[1:]
    if program == "leeway":
        return _fault_of_leeway(arguments, in_a_sentence)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in arguments if "=" not in word and not word.startswith("-") and word not in targets]
        return f"the Makefile has no target {unknown[0]}" if unknown else ""
    if program.startswith("python") or program.endswith("/python"):
        return _fault_of_python(arguments)
    if "/" in program:
        return _fault_of_script(ROOT / program, program, arguments)
    return "" if program in ALLOWED else f"nobody knows the program {program}"


def _fault_of_leeway(arguments: list[str], in_a_sentence: bool = False) -> str:
    shown = [word.strip("[]") for word in arguments if word != "..."]
    if any("|" in word for word in shown) or shown == []:
        return ""
    if in_a_sentence and all(re.fullmatch(r"[a-z-]+", word) for word in shown) and _is_verb(shown):
        return ""
    context, said = _parsed([_number(word) for word in shown])
    if context is None:
        return said
    config = context.params.get("config")
    if config is not None and config.name != "CONFIG.toml" and not (ROOT / config).exists():
        if "/" in str(config):
            return f"there is no {config}"
        config = None
    path = DEMO if config is None or config.name == "CONFIG.toml" else ROOT / config
    try:
        model = load_config(path, context.args).model.folder
    except ConfigError as error:
        return str(error)
    if config is None or path is DEMO or context.params.get("source") is not None:  # on samples of a run before it
        return ""
    if context.params.get("plan") is not None:  # a file that the command before has written
        at = shown.index("--plan")
        shown = shown[:at] + shown[at + 2 :]
    if model is not None and not model.exists() and model.with_suffix(".py").exists():  # the command before made it
        shown += ["--model.path", "organisation/name"]
    verb = str(context.info_name)
    return _run([*shown, "--dry-run"] if verb == "train" and "--dry-run" not in shown else shown, verb)


def _parsed(arguments: list[str]) -> tuple[typer.Context | None, str]:
    """The arguments of a command that is not run, or None and what it says instead; "" where that is its help."""
    contexts: list[typer.Context] = []
    with (
        mock.patch.object(TyperCommand, "invoke", lambda _, context: contexts.append(context) or 0),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        leeway(arguments)
    return (contexts[0], "") if contexts else (None, said.getvalue().strip())


def _is_verb(words: list[str]) -> bool:
    return _parsed([*words, "--help"]) == (None, "")


def _number(word: str) -> str:
    """A placeholder for a number, as in --count N, is one."""
    return "3" if re.fullmatch(r"N|GROUP|RECORD|STEP", word) else "train" if word == "VERB" else word


def _run(arguments: list[str], verb: str) -> str:
    """Run what starts nothing."""
    if verb not in (*RUN_FOR_REAL, "train"):
        return ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        place = ["--run.dir", folder] if verb == "train" else []
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
            status = leeway([*arguments, *place])
    return "" if status == 0 else f"exit status {status}: {(said.getvalue() or out.getvalue()).strip()}"


def _fault_of_python(arguments: list[str]) -> str:
    if arguments[:1] == ["-m"]:
        name = arguments[1]
        own = ROOT / (name.replace(".", "/"))
        if own.with_suffix(".py").exists() or (own / "__main__.py").exists() or name in ("pytest", "pip", "lmdb"):
            return ""
        return f"there is no module {name}"
    file = next((word for word in arguments if word.endswith(".py")), None)
    if file is None:
        return ""
    return _fault_of_script(ROOT / file, file, arguments[arguments.index(file) + 1 :])


def _fault_of_script(path: Path, name: str, arguments: list[str]) -> str:
    """A script of ours: it is there, and knows the flags and verbs by name."""
    if not path.exists():
        return "" if name.startswith(("/", ".venv")) else f"there is no {name}"
    beside = [path, *path.parent.glob(f"{path.stem}_*{path.suffix}")]
    source = "\n".join(each.read_text(encoding="utf-8") for each in beside)
    if path.suffix == ".sh" and arguments and re.fullmatch(r"[a-z]+", arguments[0]):
        if arguments[0] not in _verbs_of(path):
            return f"{name} has no verb {arguments[0]}"
        overrides = [word for word in arguments if re.match(r"--\w+\.\w+", word)]
        if overrides:
            return _fault_of_leeway(["train", *[word for word in arguments[1:] if word != "\\"]])
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--") and "." not in word]
    unknown = [flag for flag in flags if flag not in source and flag[2:].replace("-", "_") not in source]
    return f"{name} knows no {unknown[0]}" if unknown else ""


def _verbs_of(script: Path) -> set[str]:
    """Words that a `case` of a script takes."""
    labels = re.findall(r"^ *([a-z]+(?: ?\| ?[a-z]+)*)\)", script.read_text(encoding="utf-8"), re.MULTILINE)
    return {word.strip() for label in labels for word in label.split("|")}


def dead_links(path: Path) -> Iterator[str]:
    """Links of a document to files that are not there, with their places."""
    text = path.read_text(encoding="utf-8")
    prose = _without(CODE, _without(FENCE, text))
    for found in LINK.finditer(prose):
        if "://" not in found[1] and not found[1].startswith("mailto:") and not (path.parent / found[1]).exists():
            yield f"{_name(path)}:{prose.count(chr(10), 0, found.start()) + 1}: {found[1]}"


def _without(pattern: re.Pattern[str], text: str) -> str:
    """Lines keep their numbers."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def documents() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong; exit status 1 where something is."""
    paths = [Path(argument).resolve() for argument in arguments] or documents()
    commands = [command for path in paths for command in commands_in(path)]
    faults = 0
    for command in commands:
        if found := fault(command):
            faults += 1
            print(f"{command.where}: {command.text}\n    {found}")
    for path in paths:
        for link in dead_links(path):
            faults += 1
            print(f"{link}\n    a link to what is not there")
    print(f"{len(commands)} commands in {len(paths)} documents: {faults or 'none'} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
