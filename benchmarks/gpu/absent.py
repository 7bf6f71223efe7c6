"""Stub of a package that pack.sh omits. Every name is a class, whose attributes are functions that return []."""

from __future__ import annotations

from typing import Any


class _Absent(type):
    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401 -- replaces any object
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: []


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})
