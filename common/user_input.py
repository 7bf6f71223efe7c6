"""User input: fields of config keys, objects of user files given as `FILE.py:NAME`, and suggestions for typos.

A user file may import modules from its own folder. The folder is appended to the end of `sys.path`, so that these
modules cannot shadow a library. Each file is imported once per process.
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

from leeway.common.errors import LeewayError

_PATTERN = r"^[\s\S]+\.py:[^\W\d]\w*$"
Reference = Annotated[str, StringConstraints(pattern=_PATTERN)]
"""Value of a config key in the form FILE.py:NAME."""


def Knob(default: Any = ..., text: str = "", *, basic: bool = False, fixed: str | None = None, **limits: Any) -> Any:  # noqa: ANN401 -- as `Field`
    """Return the pydantic field of a config key.

    Args:
        default: default value; `...` if the key is required.
        text: description, as shown in docs/config.md.
        basic: whether most users set the key.
        fixed: why a resumed run must not change the key; "" permits a change; None uses the reason of the section.
        limits: constraints on the value, passed to `pydantic.Field`.
    """
    return Field(default, description=text, json_schema_extra={"basic": basic, "fixed": fixed}, **limits)


class UserFileError(LeewayError, ValueError):
    """An object named in the config cannot be loaded from the user's file; the message gives the reason."""


def is_reference(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(_PATTERN, value) is not None


def split(reference: str) -> tuple[Path, str]:
    """Split `FILE.py:NAME` into path and name; raise UserFileError if the file does not exist."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    try:
        is_file = path.is_file()
    except OSError as error:  # for example a folder without permission, or a name that is too long
        raise UserFileError(f"cannot read '{reference}': {error.strerror}") from error
    if not is_file:
        raise UserFileError(f"'{reference}': no file {path.absolute()} on host {socket.gethostname()}")
    return path, name


def load_object(reference: str) -> object:
    """Import the file of `FILE.py:NAME` and return its object NAME.

    Raises UserFileError if the file does not exist, its import fails, or it does not define the name.
    """
    path, name = split(reference)
    module = imported(path)
    if not hasattr(module, name):
        own = ", ".join(sorted(each for each in vars(module) if not each.startswith("_"))) or "no name"
        raise UserFileError(f"'{reference}': the file does not define '{name}'; it defines {own}")
    return getattr(module, name)


def imported(path: Path) -> ModuleType:
    """Import a file, once per process, and return its module; raise UserFileError if the import fails."""
    name = "user_" + blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"cannot import {path}: the file name must end in .py")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution, because dataclasses look up their module by name
    this, exit_now, writes_bytecode = os.getpid(), os._exit, sys.dont_write_bytecode
    os._exit, sys.dont_write_bytecode = sys.exit, True  # type: ignore[assignment]  # it must not end this process
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code may raise anything
        del sys.modules[name]
        how = f"failed: {type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if os.getpid() != this:
                exit_now(status)  # a process that the file forked exits as intended
            how = f"exited the process with status {status}{f': {error}' if isinstance(error.code, str) else ''}"
        raise UserFileError(f"importing {path} {how} (on host {socket.gethostname()})") from error
    finally:
        os._exit, sys.dont_write_bytecode = exit_now, writes_bytecode
    return module


@contextlib.contextmanager
def user_code_errors(setting: str) -> Iterator[None]:
    """Convert exceptions of user code, named by `setting` (`KEY = 'FILE.py:NAME'`), to UserFileError with the line."""
    try:
        yield
    except UserFileError:
        raise
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename in setting]
        where = f", line {lines[-1]}" if lines else ""
        raise UserFileError(f"{setting}{where} raised {type(error).__name__}: {error}") from error


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], object] = repr) -> str:
    """Return a clause that suggests the closest known name, formatted by `shown`; '' if none is close."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f"; did you mean {shown(close[0])}?" if close else ""
