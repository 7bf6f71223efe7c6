"""What a user brings: the keys of a config, files of their own, named there as `FILE.py:NAME`, and mistyped names.

A file may import what lies beside it: its folder is put at the end of `sys.path`, so that no file of its author hides
a library. It is imported once in a process.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import Field, StringConstraints

_PATTERN = r"^[\s\S]+\.py:[^\W\d]\w*$"
Reference = Annotated[str, StringConstraints(pattern=_PATTERN)]
"""A key's value of the form FILE.py:NAME."""
_REFERENCE = re.compile(_PATTERN)


def Knob(default: Any = ..., text: str = "", *, basic: bool = False, fixed: str | None = None, **limits: Any) -> Any:  # noqa: ANN401 -- as `Field`
    """Return the pydantic field of a config key.

    Args:
        default: its value if it is unset; `...` if it is required.
        text: what it does, as in docs/config.md.
        basic: whether most users set it.
        fixed: why a resumed run must not change it; "" if it may, unlike its section. Unset: as its section.
        limits: of the value, as `pydantic.Field` takes them.
    """
    return Field(default, description=text, json_schema_extra={"basic": basic, "fixed": fixed}, **limits)


class UserFileError(ValueError):
    """What the config names cannot be had from the user's file; the text says why."""


def is_reference(value: object) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def split(reference: str) -> tuple[Path, str]:
    """Return the file and the name of `FILE.py:NAME`; UserFileError if there is no such file."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    try:
        is_file = path.is_file()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise UserFileError(f"'{reference}' cannot be read: {error.strerror}") from error
    if not is_file:
        raise UserFileError(f"'{reference}': there is no file {path.absolute()} on host {socket.gethostname()}")
    return path, name


def load_object(reference: str) -> object:
    """Return what the file of `FILE.py:NAME` calls NAME, once it has been imported.

    UserFileError if there is no such file, importing it fails, or it defines no such name.
    """
    path, name = split(reference)
    module = imported(path)
    if not hasattr(module, name):
        own = sorted(each for each in vars(module) if not each.startswith("_"))
        raise UserFileError(f"'{reference}': the file defines no '{name}', but {', '.join(own) or 'nothing'}")
    return getattr(module, name)


def imported(path: Path) -> ModuleType:
    """Return the module of a file, which runs unless this process has imported it; UserFileError if it raises."""
    name = "user_" + blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"Python cannot import {path}; it must end in .py")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look a module up by its name
    this, exit_now = os.getpid(), os._exit
    os._exit = sys.exit  # type: ignore[assignment]  # it would end this process without a word
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file is the user's: it may raise anything
        del sys.modules[name]
        how = f"failed: {type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if os.getpid() != this:
                exit_now(status)  # a process that the file has forked ends as it should
            how = f"ended its process with status {status}{f': {error}' if isinstance(error.code, str) else ''}"
        raise UserFileError(f"importing {path} {how}; on host {socket.gethostname()}") from error
    finally:
        os._exit = exit_now
    return module


@contextlib.contextmanager
def blamed(setting: str) -> Iterator[None]:
    """Raise as UserFileError what the user's code named by `KEY = 'FILE.py:NAME'` raises, with the line of its file."""
    try:
        yield
    except UserFileError:
        raise
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename in setting]
        where = f", line {lines[-1]}" if lines else ""
        raise UserFileError(f"{setting}{where} raised {type(error).__name__}: {error}") from error


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], object] = repr) -> str:
    """A clause that says which name was probably meant, as `shown` gives it; '' where none is close."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f"; did you mean {shown(close[0])}?" if close else ""
