"""Prompt templates: Python's format language over an item's columns, without attribute access."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from actors.tasks.errors import TaskError, did_you_mean

_FIELD = re.compile(r"(?P<column>[^.\[\]]+)(?P<keys>(?:\[[^\]]+\])*)")
_KEY = re.compile(r"\[([^\]]+)\]")


class _Columns(Formatter):
    """`{column}`, `{column[key]}` and the format `compact`; `{column.attribute}` does not exist."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, Any]) -> tuple[object, str]:
        match = _FIELD.fullmatch(field_name)
        if match is None:
            raise TaskError(
                f"'{{{field_name}}}' is not a template field; write {{column}} or {{column[key]}}, "
                "and {{ or }} for a brace"
            )
        value = _entry(kwargs, match["column"], f"{{{field_name}}}")
        for key in _KEY.findall(match["keys"]):
            value = _entry(value, key, f"{{{field_name}}}")
        return value, match["column"]

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec == "compact":
            return "".join(str(value).split())
        return format(value, format_spec)


def _entry(container: object, key: str, field: str) -> object:
    if isinstance(container, list | tuple) and key.isdigit() and int(key) < len(container):
        return container[int(key)]
    if isinstance(container, Mapping):
        if key in container:
            return container[key]
        raise TaskError(f"the item has no '{key}' for {field}; {did_you_mean(key, container)}")
    raise TaskError(f"{field} looks for '{key}' in a {type(container).__name__}, which has no such entry")


class Template:
    """Turns an item into the text of a prompt."""

    def __init__(self, text: str) -> None:
        """Parse the template.

        Args:
            text: the template, for example "{metadata[expression]:compact}=".

        Raises:
            TaskError: the braces do not pair, or the text names no column at all.
        """
        self.text = text
        self._formatter = _Columns()
        try:
            fields = [field for _, field, _, _ in self._formatter.parse(text) if field is not None]
        except ValueError as error:
            raise TaskError(
                f"task.template {text!r} does not parse: {error}; write {{{{ or }}}} for a brace"
            ) from error
        if not fields:
            raise TaskError(
                f"task.template {text!r} names no column, so every prompt would be the same; use {{question}}"
            )

    def render(self, item: Mapping[str, Any], where: str) -> str:
        """The prompt of one item.

        Args:
            item: column name to value.
            where: file and row, or dataset and index, for the error message.

        Raises:
            TaskError: the item lacks a column, or its value does not take the format.
        """
        try:
            return self._formatter.vformat(self.text, (), item)
        except (TaskError, ValueError, TypeError) as error:
            raise TaskError(f"task.template {self.text!r} at {where}: {error}") from error
