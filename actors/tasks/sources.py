"""Sources of rows: JSONL and Parquet files."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leeway.actors.tasks.task import TaskError, json_safe

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 1024
_SHALLOW = 100
"""Maximum opening brackets of a row whose nesting depth is not checked."""


def read_rows(
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
