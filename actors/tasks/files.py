"""Tasks from files: JSONL or Parquet rows, one per prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.tasks.config import MOST_HELDOUT, FileTask
from actors.tasks.prompts import Split, Template, normalised
from actors.tasks.task import Problem, TaskError, among_known, json_safe


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
            raise TaskError(f"{where}: '{config.question_column}' must be text and not empty, it is {question!r}")
        yield question, Problem(question, template.render(row, where), json_safe(row), row)


def _rows(path: Path, key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not path.is_file():
        raise TaskError(f"{key}: there is no file {path.absolute()}")
    if path.suffix == ".parquet":
        import pyarrow as pa  # only where needed: loading a configuration stays light
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise TaskError(f"{key}: {path} is not a Parquet file that can be read: {error}") from error
        yield from enumerate(rows, start=1)
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json_row(line, f"{key}: {path}, line {number}")
    else:
        raise TaskError(f"{key}: {path} ends in '{path.suffix}'; it must be .jsonl, .ndjson or .parquet")


def _json_row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where} holds a {type(row).__name__}; a row must be an object with named columns")
    return row


def _check_sizes(config: FileTask, split: Split) -> None:
    halves = (
        ("train", "training", len(split.train), config.num_train, "Add rows, or lower heldout_share"),
        ("heldout", "held-out", len(split.heldout), config.num_heldout, "Raise heldout_share, or name a heldout_path"),
    )
    for name, adjective, found, wanted, remedy in halves:
        if found < (wanted or 1):
            raise TaskError(
                f"{config.path} has only {split.num_distinct} distinct questions, {found} of them {adjective}, "
                f"but task.num_{name} = {wanted or 'all'} needs {wanted or 'at least 1'}. {remedy}"
            )
