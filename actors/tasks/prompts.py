"""From items to prompts: the template that renders a prompt, and the split into training and held-out prompts.

An item is an entry of a dataset, or a row of a JSONL or Parquet file, which this module reads. Templates use Python's
format language with an item's columns, without attribute access.

The split is decided by a hash of the columns that the template reads (the question), never by a seed. Generated
datasets derive an item from seed + index, so two seeds share almost all their items. The hash gives an equal split for
every seed, row order and fixed text of a template. Other users of `held_out`, such as a supervised warm-up, get an
equal split too, so no held-out question is ever trained on.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from leeway.actors.tasks.config import MAX_HELDOUT, FileTask, ReasoningGymTask
from leeway.actors.tasks.task import (
    Problem,
    PromptCodec,
    PromptStore,
    StoredPrompts,
    TaskError,
    among_known,
    digest_of,
    hashed_text,
    json_safe,
)

if TYPE_CHECKING:
    import pyarrow as pa

QUESTION = "question"
"""The column that is the prompt if task.template is unset."""
_FIELD = re.compile(r"(?P<column>[^.\[\]]+)(?P<keys>(?:\[[^\]]+\])*)")
_KEY = re.compile(r"\[([^\]]+)\]")
_BATCH_ROWS = 1024
_SHALLOW = 100
"""Maximum opening brackets of a row whose nesting depth is not checked."""


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
        codec: PromptCodec | None,
    ) -> None:  # fmt: skip
        """`names` are the columns to hash; if empty, the columns that the template reads are hashed."""
        self.template = Template(config.template or f"{{{QUESTION}}}")
        self._names = names or self.template.columns
        self._max_sizes = config.num_train or 2**63, config.num_heldout or MAX_HELDOUT
        self.store = PromptStore(self.template.render, self._names, reads, codec)
        self._halves, self._num_moved = (array("q"), array("q")), 0
        self._seen, self._held = set[int](), set[int]()
        """Hashes of all offered prompts, and of the held-out ones."""
        self.num_read = 0

    @property
    def num_distinct(self) -> int:
        return len(self._seen)

    def finish(self) -> Split:
        """Tokenise the remaining prompts, and create both halves in the order of their rows."""
        self.store.flush()
        train = [at for at in self._halves[0] if self.store.keys[at] not in self._held]
        self.train, self.heldout = (
            StoredPrompts(self.store, np.array(each, np.int64)) for each in (train, self._halves[1])
        )
        used, equal = len(train) + len(self.heldout), self.num_read - len(self._seen)
        self.rows = f"{self.num_read} read, {used} used, {equal} duplicate, {len(self._seen) - used} skipped"
        return self

    def has_room(self, *, held: bool) -> bool:
        """Return whether a half has fewer prompts than requested."""
        return len(self._halves[held]) - (0 if held else self._num_moved) < self._max_sizes[held]

    def offer(self, row: Mapping[str, Any], number: int, where: str, held: bool | None = None) -> None:
        """Add a row to the held-out half if `held`, else to the training half; None selects the half by a hash.

        Only the first of rows with equal prompts (by NFC) is kept. If one of these rows is held out, none is trained
        on. Raises TaskError if the prompt is empty, or the template does not fit the row.
        """
        text = self.template.render(row, where)
        if not text.strip():
            raise TaskError(f"{where}: the prompt is empty, {text!r}; fix the row or task.template")
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
            self._halves[held].append(self.store.add(row, text, number, key))


# --- rows of a file -----------------------------------------------------------------------------------


def file_problems(
    config: FileTask, reads: Collection[str] | None = None, codec: PromptCodec | None = None
) -> tuple[Split, list[str]]:
    """Read and split the file; return the two halves and the names of the columns.

    Raises TaskError if a file, column or row is invalid, or there are too few distinct questions.
    """
    if not config.rewards:
        raise TaskError("task.rewards is empty: a file of prompts needs at least one FILE.py:FUNCTION to score answers")
    split = Split(config, (), reads, codec)
    columns = dict[str, None]()
    # Read held-out rows first, so that a prompt in both files is held out and not trained on.
    files = [(config.heldout_path, "task.heldout_path", True)] if config.heldout_path else []
    for path, key, held in (*files, (config.path, "task.path", False if files else None)):
        for number, row in _rows(Path(path).expanduser(), key, split.template.columns, reads, columns):
            where = f"{path}, row {number}"
            if config.template is None:
                _check_question(row, where)
            split.offer(row, number, where, held)
    _check_sizes(config, split.finish())
    return split, list(columns)


def _check_question(row: Mapping[str, Any], where: str) -> None:
    if QUESTION not in row:
        raise TaskError(
            f"task.template is unset, so the column '{QUESTION}' is the prompt, but {where} has no such column; "
            f"{among_known(QUESTION, row)}"
        )
    question = row[QUESTION]
    if not isinstance(question, str) or not question.strip():
        raise TaskError(
            f"{where}: '{QUESTION}' must be non-empty text, got {str(question)[:80]!r}; fix the row, or set "
            "task.template"
        )


def _rows(
    path: Path, key: str, needed: Sequence[str], reads: Collection[str] | None, columns: dict[str, None]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each row and its number, and add its columns to `columns`. Read only `needed` and `reads` of Parquet."""
    try:
        is_file = path.is_file()
    except OSError as error:  # a folder without access, or a name that is too long
        raise TaskError(f"{key}: {path} cannot be read: {error.strerror}") from error
    if not is_file:
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise TaskError(f"{key}: {path.absolute()} {what}; give a .jsonl, .ndjson or .parquet file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, key, needed, reads, columns)
    elif path.suffix in (".jsonl", ".ndjson"):
        try:
            with path.open("rb") as lines:  # decoded line by line, so that an error has a line number
                for number, line in enumerate(lines, start=1):
                    # an editor may have put a byte order mark before the first line
                    if text := (line if number > 1 else line.removeprefix(codecs.BOM_UTF8)).strip():
                        row = _json_row(text, f"{key}: {path}, line {number}")
                        columns.update(dict.fromkeys(row))
                        yield number, row
        except OSError as error:
            raise TaskError(f"{key}: {path} cannot be read: {error.strerror}") from error
    else:
        raise TaskError(f"{key}: {path} ends in '{path.suffix}'; give a .jsonl, .ndjson or .parquet file")


def _parquet_rows(
    path: Path, key: str, needed: Sequence[str], reads: Collection[str] | None, columns: dict[str, None]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa  # import on use, so that loading a configuration stays fast
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns.update(dict.fromkeys(names))
            if reads is not None and set(needed) <= set(names):  # else an error lists all existing columns
                names = [name for name in names if name in reads or name in needed]
            numbers = count(1)
            for batch in file.iter_batches(_BATCH_ROWS, columns=names):
                for row in zip(*map(_values, batch.columns), strict=True):
                    yield next(numbers), dict(zip(batch.schema.names, row, strict=True))
    except (pa.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:  # time zones raise the last
        raise TaskError(f"{key}: {path} is not a readable Parquet file: {error}") from error


def _values(column: pa.Array) -> list[Any]:
    kind = _readable(column.type)
    values: list[Any] = (column if kind == column.type else column.cast(kind, safe=False)).to_pylist()
    return [json_safe(each) if isinstance(each, bytes) else each for each in values]


def _readable(kind: pa.DataType) -> pa.DataType:
    """Return the type with microseconds in place of nanoseconds, because Python's times have microseconds."""
    import pyarrow as pa

    if isinstance(kind, pa.StructType):
        return pa.struct([field.with_type(_readable(field.type)) for field in kind])
    if isinstance(kind, pa.MapType):
        return pa.map_(_readable(kind.key_type), _readable(kind.item_type))
    if hasattr(kind, "value_type"):
        inner = _readable(kind.value_type)
        return inner if isinstance(kind, pa.DictionaryType) else pa.list_(inner)
    if getattr(kind, "unit", "") != "ns":
        return kind
    return (
        pa.timestamp("us", kind.tz) if isinstance(kind, pa.TimestampType) else pa.type_for_alias(f"{kind}"[:-3] + "us]")
    )


def _json_row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        text = line.decode()
        row = json.loads(text)
        if "\\ud" in text.lower() or text.count("[") + text.count("{") > _SHALLOW:
            # fail now: half of a surrogate pair or deep nesting can be read, but not written
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{where} is not UTF-8 text (byte 0x{line[error.start]:02x} at column {error.start + 1}); convert the "
            "file, for example with iconv -f LATIN1 (or UTF-16) -t UTF-8"
        ) from error
    except UnicodeEncodeError as error:
        raise TaskError(f"{where} holds half of a surrogate pair ({error.object[error.start]!r}); remove it") from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{where} is not JSON: {error.msg} at column {error.colno}; write one object a line") from error
    except ValueError as error:  # Python's limit on the digits of a number
        raise TaskError(f"{where} holds a number with thousands of digits; write the number as text") from error
    except RecursionError as error:
        raise TaskError(f"{where} is nested too deeply; write the inner part as text") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where} holds a {type(row).__name__}; a row must be an object with named columns")
    return row


def _check_sizes(config: FileTask, split: Split) -> None:
    if not split.num_distinct:
        raise TaskError(f"task.path: {config.path} has no rows; write one JSON object per line, or name another file")
    halves = (
        ("train", "training", len(split.train), config.num_train, "Add rows"),
        ("heldout", "held-out", len(split.heldout), config.num_heldout, "Add rows, or set task.heldout_path"),
    )
    for name, adjective, found, required, remedy in halves:
        if found < (required or 1):
            needs = f"but task.num_{name} = {required}" if required else "and at least 1 is needed"
            raise TaskError(
                f"{config.path} has only {split.num_distinct} distinct questions, {found} of them {adjective}, "
                f"{needs}. {remedy}"
            )
