"""Sources of rows: JSONL, Parquet and CSV files, folders of such files, and data sets on the Hugging Face Hub."""

from __future__ import annotations

import codecs
import contextlib
import copy
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from leeway.actors.tasks.config import HUB_DATA
from leeway.actors.tasks.task import TaskError, among_known, first_line, json_safe
from leeway.common.user_input import UserFileError, load_object, user_code_errors

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
_KINDS = (".jsonl", ".ndjson", ".parquet", ".csv")
_BATCH_ROWS = 1024
_MAX_CSV_ROW_BYTES = 2**26
_SHALLOW = 100
"""Maximum opening brackets of a row whose nesting depth is not checked."""
_HUB_OPTIONS = ("name", "split", "revision")
_COMMIT = re.compile("[0-9a-f]{40}")


def read_rows(
    source: str, key: str, needed: Sequence[str], reads: Collection[str] | None, columns: dict[str, None]
) -> Iterator[tuple[str, int, Row]]:
    """Yield the place, the number and the values of each row, and add the row's columns to `columns`.

    Read only the columns `needed` and `reads` (None for all), except of JSONL. Errors name the config key by `key`.
    Raises TaskError if the source does not exist or is damaged.
    """

    def select(names: Sequence[str]) -> list[str]:
        columns.update(dict.fromkeys(names))
        is_partial = reads is not None and set(needed) <= set(names)  # else an error lists all existing columns
        return [name for name in names if not is_partial or name in (reads or ()) or name in needed]

    if source.startswith(HUB_DATA):
        data = _hub_data(source, key)
        tables = data.select_columns(select(data.column_names)).with_format("arrow").iter(_BATCH_ROWS)
        yield from ((f"{source}, row {number}", number, row) for number, row in enumerate(_arrow_rows(tables), start=1))
        return
    for path in files_of(source, key):
        if path.suffix in (".parquet", ".csv"):
            with _arrow_errors(path, key):
                rows = _arrow_rows(_parquet(path, select) if path.suffix == ".parquet" else _csv(path, select))
                yield from ((f"{path}, row {number}", number, row) for number, row in enumerate(rows, start=1))
        else:
            for number, row in _json_rows(path, key):
                columns.update(dict.fromkeys(row))
                yield f"{path}, row {number}", number, row


def columns_of(source: str, key: str) -> list[str]:
    """Return the columns of the first row of a source."""
    columns = dict[str, None]()
    next(read_rows(source, key, (), (), columns), None)
    return list(columns)


def files_of(source: str, key: str) -> list[Path]:
    """Return the file of a path, or the files of a folder or pattern, in order of their names.

    Raises TaskError if there are none, a file is of another kind, or a folder has shards of several splits.
    """
    path = Path(source).expanduser()
    try:
        is_folder = path.is_dir()
        if is_folder:
            found = [each for each in path.iterdir() if each.suffix in _KINDS and not each.name.startswith(".")]
        else:
            found = [path] if path.is_file() else [*path.parent.glob(path.name)] if "*" in path.name else []
    except OSError as error:  # a folder without access, or a name that is too long
        raise TaskError(f"{key}: {path} cannot be read: {error.strerror}") from error
    kinds = f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]} file"
    if not found:
        what = f"has no {kinds}" if is_folder else f"does not exist; give a {kinds}, or a folder of such files"
        raise TaskError(f"{key}: {path.absolute()} {what}")
    if other := [each for each in found if each.suffix not in _KINDS]:
        raise TaskError(f"{key}: {other[0]} ends in '{other[0].suffix}'; give a {kinds}")
    splits = sorted({match[1] for each in found if (match := re.fullmatch(r"(.+)-\d+-of-\d+", each.stem))})
    if len(splits) > 1:
        raise TaskError(
            f"{key}: {path} has shards of {len(splits)} splits ({', '.join(splits)}); select one by a pattern, such as "
            f"{path if is_folder else path.parent}/{splits[-1]}-*"
        )
    return sorted(found)


def row_filter(reference: str) -> Callable[[Row, str], bool]:
    """Load the function of `task.filter`, which decides whether to keep a row; it gets a copy of the row.

    Raises TaskError if the function cannot be loaded, and later if a call raises or does not return a bool.
    """
    setting = f"task.filter = '{reference}'"
    try:
        function = load_object(reference)
    except UserFileError as error:
        raise TaskError(f"task.filter: {error}") from error
    if not callable(function):
        raise TaskError(f"{setting} is not a function but {function!r}")

    def keeps(row: Row, where: str) -> bool:
        try:
            with user_code_errors(setting):
                found = function(copy.deepcopy(dict(row)))
        except UserFileError as error:
            raise TaskError(f"{error} (at {where})") from error
        if not isinstance(found, bool | np.bool_):
            raise TaskError(f"{setting} returned {found!r:.80} at {where}; return True to keep the row, else False")
        return bool(found)

    return keeps


# --- Arrow: Parquet, CSV, Hub ---------------------------------------------------------------------------

_Select = Callable[[Sequence[str]], list[str]]


@contextlib.contextmanager
def _arrow_errors(path: Path, key: str) -> Iterator[None]:
    import pyarrow as pa  # import on use, so that loading a configuration stays fast

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:  # time zones raise the last
        kind = "Parquet" if path.suffix == ".parquet" else "CSV"
        raise TaskError(f"{key}: {path} is not a readable {kind} file: {error}") from error


def _parquet(path: Path, select: _Select) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(_BATCH_ROWS, columns=select(file.schema_arrow.names))


def _csv(path: Path, select: _Select) -> Iterator[pa.RecordBatch]:
    """Yield batches with text in all columns: a guessed type would change answers such as 007 and 46.00."""
    import pyarrow as pa
    from pyarrow import csv

    reading, parsing = csv.ReadOptions(block_size=_MAX_CSV_ROW_BYTES), csv.ParseOptions(newlines_in_values=True)
    with csv.open_csv(path, reading, parsing) as file:
        names = file.schema.names
    types = dict.fromkeys(names, pa.string())
    options = csv.ConvertOptions(column_types=types, include_columns=select(names))
    with csv.open_csv(path, reading, parsing, options) as file:
        yield from file


@lru_cache(4)
def _hub_data(source: str, key: str) -> Any:  # noqa: ANN401 -- of the library datasets
    """Return a data set, from the cache of the library if the Hub cannot be reached."""
    if find_spec("datasets") is None:
        raise TaskError(
            f"{key} = '{source}' needs the library datasets, which is missing here: pip install 'datasets>=5.2,<6'"
        )
    import datasets

    address = urlsplit(source)
    options = dict(parse_qsl(address.query, keep_blank_values=True))
    if unknown := [name for name in options if name not in _HUB_OPTIONS]:
        raise TaskError(f"{key} = '{source}' has no option '{unknown[0]}'; {among_known(unknown[0], _HUB_OPTIONS)}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each retry
    revision, repository = options.get("revision"), f"{address.netloc}{address.path}".removeprefix("datasets/")
    try:
        data = datasets.load_dataset(
            repository, options.get("name"), split=options.get("split", "train"), revision=revision
        )
    except Exception as error:  # of the library, the network or a damaged file
        raise TaskError(f"{key}: {source} cannot be loaded: {first_line(error)}") from error
    # without the Hub, the library returns the newest revision of its cache
    cached = Path(data.cache_files[0]["filename"]).parent.name if data.cache_files else revision
    if _COMMIT.fullmatch(revision or "") and cached != revision:
        raise TaskError(f"{key}: {source}: the Hub cannot be reached, and the cache has revision {cached} instead")
    return data


def _arrow_rows(batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[Row]:
    for batch in batches:
        for row in zip(*map(_values, batch.columns), strict=True):
            yield dict(zip(batch.schema.names, row, strict=True))


def _values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
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


# --- JSONL ----------------------------------------------------------------------------------------------


def _json_rows(path: Path, key: str) -> Iterator[tuple[int, Row]]:
    try:
        with path.open("rb") as lines:  # decoded line by line, so that an error has a line number
            for number, line in enumerate(lines, start=1):
                # an editor may have put a byte order mark before the first line
                if text := (line if number > 1 else line.removeprefix(codecs.BOM_UTF8)).strip():
                    yield number, _json_row(text, f"{key}: {path}, line {number}")
    except OSError as error:
        raise TaskError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _json_row(line: bytes, where: str) -> Row:
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
