"""Record which functions of Leeway run, and when, in every process of a traced run; `python -m tests.walks` reads it.

Python imports a module of this name at its start if its folder is in PYTHONPATH, so every process of the run is traced.
Environment: LEEWAY_TRACE is the folder for the records, LEEWAY_TRACE_EXACT the functions whose every call and return is
recorded, LEEWAY_TRACE_KEY the config key whose reads are recorded.

A record is a line with milliseconds since the epoch, event, file and function, separated by tabs.
"""

import functools
import inspect
import os
import sys
import threading
import time
from pathlib import Path

SLOT_MS = 20
"""Minimum milliseconds between two records of a function, so that a hot function does not fill the disk."""

FOLDER = os.environ.get("LEEWAY_TRACE")
ROOT = f"{Path(__file__).parents[2]}/src/leeway/"
EXACT = frozenset(os.environ.get("LEEWAY_TRACE_EXACT", "").split())
KEY_MODULE, _, KEY = os.environ.get("LEEWAY_TRACE_KEY", "").partition(":")
KEY_CLASS, _, KEY_NAME = KEY.partition(".")
RAY_METHODS = "/ray/_private/function_manager.py"

_last_ms = {}
_files = {}


@functools.cache
def _name(code):
    """Return `package/file.py<tab>function` for a function of the product, or '' for any other function."""
    path = code.co_filename
    if not code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "<module>":
        return ""  # a class body, which runs at import
    file = path.removeprefix(ROOT)
    return f"{file}\t{code.co_name}" if path.startswith(ROOT) and "/" in file else ""  # without __main__


def _write(event, name):
    pid = os.getpid()
    if pid not in _files:  # a forked process opens its own file
        _files[pid] = os.open(f"{FOLDER}/{pid}.trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_files[pid], f"{time.time() * 1000:.1f}\t{event}\t{name}\n".encode())


def _profile(frame, event, argument):
    if event != "call" and event != "return":
        return
    code = frame.f_code
    if event == "return" and code.co_name == "<module>" and code.co_filename.endswith(RAY_METHODS):
        _trace_methods(frame.f_globals["FunctionActorManager"])
    if not (name := _name(code)):
        return
    if code.co_name == "<module>":
        if event == "return" and KEY and name.startswith(KEY_MODULE):
            _watch(frame.f_globals.get(KEY_CLASS))
        return
    if name.replace("\t", ":") in EXACT:
        _write(event, name)
    elif event == "call":
        now_ms = time.monotonic() * 1000
        if now_ms - _last_ms.get(code, -SLOT_MS) >= SLOT_MS:
            _last_ms[code] = now_ms
            _write(event, name)


def _trace_methods(manager):
    """Trace the methods of Ray actors too, which run in threads that Python did not start."""
    make = manager._make_actor_method_executor

    def traced(self, method_name, method):
        execute = make(self, method_name, method)

        @functools.wraps(execute)
        def run(*arguments, **named):
            sys.setprofile(_profile)
            return execute(*arguments, **named)

        return run

    manager._make_actor_method_executor = traced


def _watch(section):
    """Record the files on the call stack of every read of the key."""

    def read(self, name, get=object.__getattribute__):
        if name == KEY_NAME:
            frame = sys._getframe(1)
            while frame is not None:
                if passed := _name(frame.f_code):
                    _write("key", passed)
                frame = frame.f_back
        return get(self, name)

    section.__getattribute__ = read


if FOLDER:
    threading.setprofile(_profile)
    sys.setprofile(_profile)
