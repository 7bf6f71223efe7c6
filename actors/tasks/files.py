"""Tasks from files: JSONL or Parquet rows, one per prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.tasks.config import MOST_HELDOUT, FileTask
from actors.tasks.prompts import Split, Template, normalised
from actors.tasks.task import Problem, TaskError, among_known, json_safe

_SHALLOW = 100
"""Opening brackets of a row that is certainly not nested too deeply."""


def file_problems(config: FileTask) -> tuple[Split, list[str]]:
    """Read and split the file: the two halves, and the names of the columns.

    Raises:
        TaskError: a file, column or row is not as it should be, or there are too few distinct questions.
    """
    if not config.rewards:
        raise TaskError("task.rewards is empty: a file of prompts needs at least one FILE.py:FUNCTION to score answers")
    template = Template(config.template)
    num_heldout = MOST_HELDOUT if config.num_heldout is None else config.num_heldout
    split = Split(config.heldout_share, config.num_train, num_heldout)
    columns: list[str] = []
    if config.heldout_path:
        # Held-out rows come first, so that a question in both files is held out and not trained on.
        for question, problem in _problems(config.heldout_path, "task.heldout_path", config, template, columns):
            if split.is_new(question) and len(split.heldout) != num_heldout:
                split.heldout.append(problem)
    for question, problem in _problems(config.path, "task.path", config, template, columns):
        if not split.is_new(question):
            continue
        half = split.train if config.heldout_path else split.room_for(question)
        if half is not None and (half is split.heldout or len(half) != config.num_train):
            half.append(problem)
    _check_sizes(config, split)
    return split, columns


def _problems(
    path: str, key: str, config: FileTask, template: Template, columns: list[str]
) -> Iterator[tuple[str, Problem]]:
    """Yield every row with its question; fill `columns` in the order they first appear."""
    for number, row in _rows(Path(path).expanduser(), key):
        columns.extend(name for name in row if name not in columns)
        where = f"{path}, row {number}"
        if config.question_column not in row:
            raise TaskError(
                f"task.question_column = '{config.question_column}' is not in {where}; "
                f"{among_known(config.question_column, row)}"
            )
        question = row[config.question_column]
        if not isinstance(question, str) or not normalised(question):
            raise TaskError(
                f"{where}: '{config.question_column}' must be text and not empty, it is {str(question)[:80]!r}; mend "
                "the row, or name another task.question_column"
            )
        yield question, Problem(question, template.render(row, where), json_safe(row), number)


def _rows(path: Path, key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        is_file = path.is_file()
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise TaskError(f"{key}: {path} cannot be read: {error.strerror}") from error
    if not is_file:
        what = "is a folder, not a file" if path.is_dir() else "is not there"
        raise TaskError(f"{key}: {path.absolute()} {what}; give a .jsonl, .ndjson or .parquet file")
    if path.suffix == ".parquet":
        import pyarrow as pa  # only where needed: loading a configuration stays light
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:  # the last of text that is not UTF-8
            raise TaskError(f"{key}: {path} is not a Parquet file that can be read: {error}") from error
        yield from enumerate(rows, start=1)
    elif path.suffix in (".jsonl", ".ndjson"):
        try:
            with path.open("rb") as lines:  # decoded line by line, so that a mistake has a line
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, _json_row(line, f"{key}: {path}, line {number}", is_first=number == 1)
        except OSError as error:
            raise TaskError(f"{key}: {path} cannot be read: {error.strerror}") from error
    else:
        raise TaskError(f"{key}: {path} ends in '{path.suffix}'; it must be .jsonl, .ndjson or .parquet")


def _json_row(line: bytes, where: str, *, is_first: bool) -> Mapping[str, Any]:
    try:
        # an editor may have put a mark of the order of bytes before the first line
        text = line.decode("utf-8-sig" if is_first else "utf-8").strip()
        row = json.loads(text)
        if "\\ud" in text.lower() or text.count("[") + text.count("{") > _SHALLOW:
            # half of a surrogate pair can be read and not written again, and so what is nested deeply
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{where} is not UTF-8 text (byte 0x{line[error.start]:02x} at column {error.start + 1}); convert the "
            "file, as with iconv -f LATIN1 -t UTF-8, or -f UTF-16"
        ) from error
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{where} holds half of a surrogate pair ({error.object[error.start]!r}); take it out"
        ) from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{where} is not JSON: {error.msg} at column {error.colno}; write one object a line") from error
    except ValueError as error:  # Python's bound on the digits of a number
        raise TaskError(f"{where} holds a number of thousands of digits; write it as text") from error
    except RecursionError as error:
        raise TaskError(f"{where} is nested too deeply; write the inner part as text") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where} holds a {type(row).__name__}; a row must be an object with named columns")
    return row


def _check_sizes(config: FileTask, split: Split) -> None:
    if not split.num_distinct:
        raise TaskError(f"task.path: {config.path} holds no row; write one JSON object a line, or name another file")
    halves = (
        ("train", "training", len(split.train), config.num_train, "Add rows, or lower heldout_share"),
        ("heldout", "held-out", len(split.heldout), config.num_heldout, "Raise heldout_share, or name a heldout_path"),
    )
    for name, adjective, found, wanted, remedy in halves:
        if found < (wanted or 1):
            needs = f"but task.num_{name} = {wanted}" if wanted else "and at least 1 is needed"
            raise TaskError(
                f"{config.path} has only {split.num_distinct} distinct questions, {found} of them {adjective}, "
                f"{needs}. {remedy}"
            )
