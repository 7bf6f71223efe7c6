"""From items to prompts: the template that renders a prompt, and the split into training and held-out prompts.

An item is an entry of a dataset, or a row of a file. Templates use Python's format language with an item's columns,
without attribute access.

The split is decided by a hash of the columns that the template reads (the question), never by a seed. Generated
datasets derive an item from seed + index, so two seeds share almost all their items. The hash gives an equal split for
every seed, row order and fixed text of a template. Other users of `held_out`, such as a supervised warm-up, get an
equal split too, so no held-out question is ever trained on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from string import Formatter
from typing import Any

import numpy as np

from leeway.actors.tasks.chat import messages_of
from leeway.actors.tasks.config import MAX_HELDOUT, FileTask, ReasoningGymTask
from leeway.actors.tasks.sources import columns_of, read_rows, row_filter
from leeway.actors.tasks.task import (
    Codec,
    Problem,
    Prompt,
    PromptStore,
    StoredPrompts,
    TaskError,
    among_known,
    digest_of,
    hashed_text,
    json_safe,
    text_of,
)

QUESTION = "question"
PROMPT_COLUMNS = ("prompt", "messages", QUESTION)
"""Columns that are the prompt, in order of preference, if task.template and task.question_column are unset."""
_FIELD = re.compile(r"(?P<column>[^.\[\]]+)(?P<keys>(?:\[[^\]]+\])*)")
_KEY = re.compile(r"\[([^\]]+)\]")


class _Columns(Formatter):
    """Formats `{column}`, `{column[key]}` and the format `compact`, but not `{column.attribute}`."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, Any]) -> tuple[object, str]:
        column, keys = split_field(field_name)
        value = _entry(kwargs, column, f"{{{field_name}}}")
        for key in keys:
            value = _entry(value, key, f"{{{field_name}}}")
        return value, column

    def convert_field(self, value: object, conversion: Any) -> object:  # noqa: ANN401 -- as in typeshed
        if isinstance(value, list | tuple | dict | bytes) and _has_null(value := json_safe(value)):
            raise ValueError(f"{str(value)[:80]} contains a null; name single entries, or write the column as text")
        return "" if value is None else super().convert_field(value, conversion)

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec == "compact":
            return "".join(str(value).split())
        return format(value, format_spec) if value != "" else ""  # '' is a null, which no number format accepts


def _has_null(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, inner))


def _entry(container: object, key: str, field: str) -> object:
    if container is None:
        return None
    if isinstance(container, list | tuple) and key.isdecimal() and int(key) < len(container):
        return container[int(key)]
    if isinstance(container, Mapping):
        if key in container:
            return container[key]
        raise TaskError(f"the item has no '{key}' for {field}; {among_known(key, container)}")
    raise TaskError(f"{field}: a {type(container).__name__} has no entry '{key}'")


@lru_cache(1024)
def split_field(field: str) -> tuple[str, list[str]]:
    """Return the column and the keys of `column[key][key]`; raise TaskError if the field has another form."""
    match = _FIELD.fullmatch(field)
    if match is None:
        raise TaskError(
            f"'{{{field}}}' is not a template field; write {{column}} or {{column[key]}}, and {{{{ or }}}} for a brace"
        )
    return match["column"], _KEY.findall(match["keys"])


def value_at(columns: Mapping[str, Any], field: str) -> Any:  # noqa: ANN401 -- any JSON
    """Return a row's value at `column[key][key]`; None if there is none. Raise TaskError if the field is malformed."""
    split_field(field)
    try:
        return _Columns().get_field(field, (), columns)[0]
    except TaskError:
        return None


def teachers_of(problems: Sequence[Problem], field: str, teachers: Sequence[str]) -> bytes:
    """Return the number (a byte) of each problem's teacher, in order of ids; column `field` names the teacher.

    Raises TaskError if a problem names no known teacher, or if no problem names one of the teachers.
    """
    column, _ = split_field(field)
    numbers = {name: number for number, name in enumerate(teachers)}
    found = bytearray()
    for problem in problems:
        name = value_at(problem.columns, field)
        if not isinstance(name, str) or name not in numbers:
            row = f"row {problem.index} ({problem.question[:80]!r})"
            if column not in problem.columns:
                why, known = f"is not in {row}", among_known(column, problem.columns)
            else:
                value = "null" if name is None else repr(name)[:80]
                why = f"is {value} in {row}, but model.teachers has no teacher of that name"
                known = among_known(str(name), teachers)
            raise TaskError(f"task.teacher_column = '{field}' {why}; {known}")
        found.append(numbers[name])
    if idle := [name for number, name in enumerate(teachers) if number not in found]:
        raise TaskError(
            f"model.teachers.{idle[0]} has no prompts: task.teacher_column = '{field}' is '{idle[0]}' in no "
            "training row; remove that teacher, or check the rows"
        )
    return bytes(found)


class Template:
    """Renders the text of a prompt from an item."""

    def __init__(self, text: str, key: str = "task.template") -> None:
        """Parse a template, for example "{metadata[expression]:compact}="; errors name the config key.

        Raises TaskError if the braces are unbalanced, or the text names no column.
        """
        self.text = text
        self._key = key
        self._formatter = _Columns()
        try:
            fields = list(self._fields(text))
        except ValueError as error:
            raise TaskError(f"{key} {text!r} cannot be parsed: {error}; write {{{{ or }}}} for a brace") from error
        if not fields:
            raise TaskError(f"{key} {text!r} names no column, so every prompt would be the same; use {{question}}")
        self.columns = list(dict.fromkeys(re.split(r"[.\[]", field)[0] for field in fields))

    def _fields(self, text: str) -> Iterator[str]:
        for _, field, spec, _ in self._formatter.parse(text):
            if field is not None:
                yield from (field, *self._fields(spec or ""))

    def render(self, item: Mapping[str, Any], where: str = "a row") -> str:
        """Return the prompt of one item, with a null as an empty string; errors name the item by `where`.

        Raises TaskError if the item lacks a column, or its value does not support the format.
        """
        try:
            return self._formatter.vformat(self.text, (), item)
        except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:  # widths raise the last 2
            why = error if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
            raise TaskError(f"{self._key} {self.text!r} at {where}: {why}") from error


class PromptColumn:
    """Reads the prompt of an item from a column with text or with the messages of a chat."""

    def __init__(self, name: str) -> None:
        self.name, self.columns = name, [name]

    def render(self, item: Mapping[str, Any], where: str = "a row") -> Prompt:
        """Return the prompt of one item; errors name the item by `where`.

        Raises TaskError if the column is missing, or holds neither text nor messages.
        """
        if self.name not in item:
            raise TaskError(f"{where} has no column '{self.name}', which is the prompt; {among_known(self.name, item)}")
        value = item[self.name]
        if isinstance(value, list):
            return messages_of(value, f"{where}, column '{self.name}'")
        if not isinstance(value, str) or not value.strip():
            raise TaskError(
                f"{where}: '{self.name}' must be non-empty text or a list of messages, got {str(value)[:80]!r}; fix "
                "the row, or set task.template"
            )
        return value


HELDOUT_SHARE = 0.125
"""Fraction of all questions that are held out for evaluation."""


def held_out(text: str) -> bool:
    """Return whether a row is held out for evaluation, by a hash of its text as `hashed_text` returns it.

    White space and case change the hash; equivalent Unicode spellings (by NFC) do not change it.
    """
    return digest_of(text) / 2**64 < HELDOUT_SHARE


class Split:
    """Collects rows with distinct prompts into a training and a held-out half until both have the requested size."""

    def __init__(
        self, config: FileTask | ReasoningGymTask, names: Sequence[str], reads: Collection[str] | None,
        codec: Codec | None, column: str = QUESTION, max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`names` are the columns to hash; if empty, the columns of the prompt are hashed.

        Without a template, `column` is the prompt. With `max_tokens`, longer prompts are skipped.
        """
        self.template = Template(config.template) if config.template else PromptColumn(column)
        self._names = names or self.template.columns
        self._max_sizes = config.num_train or 2**63, config.num_heldout or MAX_HELDOUT
        self.store = PromptStore(self.template.render, self._names, reads, codec)
        self._halves, self._num_moved = (array("q"), array("q")), 0
        self._seen, self._held = set[int](), set[int]()
        """Hashes of all offered prompts, and of the held-out ones."""
        self._max_tokens = max_tokens
        self.num_read = self.num_filtered = self.num_too_long = 0

    @property
    def num_distinct(self) -> int:
        return len(self._seen)

    def finish(self) -> Split:
        """Tokenise the remaining prompts, and create both halves in the order of their rows."""
        self.store.flush()
        halves = [at for at in self._halves[0] if self.store.keys[at] not in self._held], list(self._halves[1])
        if self._max_tokens is not None:
            num_all, lengths = sum(map(len, halves)), np.diff(self.store.id_ends)
            train, heldout = ([at for at in half if lengths[at] <= self._max_tokens] for half in halves)
            self.num_too_long = num_all - len(train) - len(heldout)
            halves = train, heldout
        self.train, self.heldout = (
            StoredPrompts(self.store, np.array(half[:size], np.int64))
            for half, size in zip(halves, self._max_sizes, strict=True)
        )
        used, equal = len(self.train) + len(self.heldout), self.num_read - len(self._seen)
        skipped = len(self._seen) - used - self.num_too_long
        self.rows = f"{self.num_read} read, {used} used, {equal} duplicate, {skipped} skipped"
        extra = ((self.num_too_long, "too long"), (self.num_filtered, "removed by task.filter"))
        self.rows += "".join(f", {number} {what}" for number, what in extra if number)
        return self

    def has_room(self, *, held: bool) -> bool:
        """Return whether a half has fewer prompts than requested, or some of these may be too long."""
        num_found = len(self._halves[held]) - (0 if held else self._num_moved)
        return self._max_tokens is not None or num_found < self._max_sizes[held]

    def offer(self, row: Mapping[str, Any], number: int, where: str, held: bool | None = None) -> None:
        """Add a row to the held-out half if `held`, else to the training half; None selects the half by a hash.

        Only the first of rows with equal prompts (by NFC) is kept. If one of these rows is held out, none is trained
        on. Raises TaskError if the prompt is empty or of another form than the first, or the template does not fit.
        """
        prompt = self.template.render(row, where)
        text, is_chat = text_of(prompt), not isinstance(prompt, str)
        if not text.strip():
            raise TaskError(f"{where}: the prompt is empty, {text!r}; fix the row or task.template")
        if self.num_read and is_chat != bool(self.store.of_shape):
            forms = ("text", "a list of messages")
            raise TaskError(
                f"{where}: the prompt is {forms[is_chat]}, but earlier prompts are {forms[not is_chat]}; use one form"
            )
        if is_chat:
            row = {**row, self.template.columns[0]: prompt}
        if held is None:
            held = held_out(hashed_text(row, self._names))
        key = digest_of(text)
        self.num_read += 1
        if key in self._seen and (not held or key in self._held):
            return
        if held:
            self._held.add(key)
            self._num_moved += key in self._seen and key in self.store.keys
        self._seen.add(key)
        if self.has_room(held=held):
            self._halves[held].append(self.store.add(row, prompt, number, key))


# --- rows of a file -----------------------------------------------------------------------------------


def file_problems(
    config: FileTask, reads: Collection[str] | None = None, codec: Codec | None = None, max_tokens: int = 0
) -> tuple[Split, list[str]]:
    """Read and split the rows; return the two halves and the names of the columns.

    Raises TaskError if a file, column or row is invalid, or there are too few distinct questions.
    """
    if not config.rewards:
        raise TaskError("task.rewards is empty: a file of prompts needs at least one FILE.py:FUNCTION to score answers")
    column = config.question_column or ("" if config.template else _prompt_column(config))
    skips = codec is not None and config.on_long_prompt == "skip"
    split = Split(config, (), reads, codec, column, max_tokens if skips else None)
    keeps = None if config.filter is None else row_filter(config.filter)
    columns = dict[str, None]()
    # Read held-out rows first, so that a prompt in both files is held out and not trained on.
    files = [(config.heldout_path, "task.heldout_path", True)] if config.heldout_path else []
    for path, key, held in (*files, (config.path, "task.path", False if files else None)):
        wanted = None if keeps is not None else reads  # a filter reads any column
        for where, number, row in read_rows(path, key, split.template.columns, wanted, columns):
            if keeps is None or keeps(row, where):
                split.offer(row, number, where, held)
            else:
                split.num_filtered += 1
    _check_sizes(config, split.finish())
    return split, list(columns)


def _prompt_column(config: FileTask) -> str:
    columns = columns_of(config.path, "task.path")
    if columns and not set(columns) & set(PROMPT_COLUMNS):
        raise TaskError(
            f"task.template and task.question_column are unset, and {config.path} has no column "
            f"{' or '.join(PROMPT_COLUMNS)}; {among_known(QUESTION, columns)}"
        )
    return next((name for name in PROMPT_COLUMNS if name in columns), QUESTION)


def _check_sizes(config: FileTask, split: Split) -> None:
    if not split.num_distinct:
        kept = " that task.filter keeps" if split.num_filtered else ""
        raise TaskError(f"task.path: {config.path} has no rows{kept}; write one row per prompt, or name another source")
    halves = (
        ("train", "training", len(split.train), config.num_train, "Add rows"),
        ("heldout", "held-out", len(split.heldout), config.num_heldout, "Add rows, or set task.heldout_path"),
    )
    for name, adjective, found, required, remedy in halves:
        if found < (required or 1):
            needs = f"but task.num_{name} = {required}" if required else "and at least 1 is needed"
            usable = split.num_distinct - split.num_too_long
            short = " that fit actors.max_prompt_tokens" if split.num_too_long else ""
            raise TaskError(
                f"{config.path} has only {usable} distinct questions{short}, {found} of them {adjective}, "
                f"{needs}. {remedy}"
            )
