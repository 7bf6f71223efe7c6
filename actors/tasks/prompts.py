"""From an item to a prompt: the template that makes its text, and the half, training or held-out, that it belongs to.

Items are those of a dataset, or the rows of a JSONL or Parquet file, which are read here.

Templates are Python's format language over an item's columns, without attribute access.

Which questions train and which evaluate is decided by the question itself, never by a seed. Generated datasets derive
an item from seed + index, so two seeds share almost all their items. A hash of the question separates them for every
seed, template and order of a file, and for anything else that asks `held_out` (a supervised warm-up, say), so no
held-out question is ever trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from string import Formatter
from typing import Any

from actors.tasks.config import MOST_HELDOUT, FileTask
from actors.tasks.task import Problem, TaskError, among_known, json_safe

_FIELD = re.compile(r"(?P<column>[^.\[\]]+)(?P<keys>(?:\[[^\]]+\])*)")
_KEY = re.compile(r"\[([^\]]+)\]")
_SHALLOW = 100
"""Opening brackets of a row that is certainly not nested too deeply."""


class _Columns(Formatter):
    """`{column}`, `{column[key]}` and the format `compact`; `{column.attribute}` does not exist."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, Any]) -> tuple[object, str]:
        column, keys = split_field(field_name)
        value = _entry(kwargs, column, f"{{{field_name}}}")
        for key in keys:
            value = _entry(value, key, f"{{{field_name}}}")
        return value, column

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
        raise TaskError(f"the item has no '{key}' for {field}; {among_known(key, container)}")
    raise TaskError(f"{field} looks for '{key}' in a {type(container).__name__}, which has no such entry")


def split_field(field: str) -> tuple[str, list[str]]:
    """The column and the keys of `column[key][key]`; TaskError where it has another form."""
    match = _FIELD.fullmatch(field)
    if match is None:
        raise TaskError(
            f"'{{{field}}}' is not a template field; write {{column}} or {{column[key]}}, and {{{{ or }}}} for a brace"
        )
    return match["column"], _KEY.findall(match["keys"])


def value_at(columns: Mapping[str, Any], field: str) -> Any:  # noqa: ANN401 -- any JSON
    """What a row has under `column[key][key]`, None where it has nothing there; TaskError as `split_field`."""
    column, keys = split_field(field)
    value = columns.get(column)
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)] if key.isdecimal() and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def teachers_of(problems: Sequence[Problem], field: str, teachers: Sequence[str]) -> bytes:
    """For each problem the number of the teacher that its column names.

    Args:
        problems: training ones, in the order of their ids.
        field: the column, as `value_at` has it.
        teachers: their names; 256 at most, for a number is a byte.

    Raises:
        TaskError: a problem names none of them, or none names a teacher.
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
                said = "nothing" if name is None else repr(name)[:80]
                why = f"says {said} in {row}, and model.teachers has no teacher of that name"
                known = among_known(str(name), teachers)
            raise TaskError(f"task.teacher_column = '{field}' {why}; {known}")
        found.append(numbers[name])
    if idle := [name for number, name in enumerate(teachers) if number not in found]:
        raise TaskError(
            f"model.teachers.{idle[0]} would teach nothing: task.teacher_column = '{field}' says '{idle[0]}' in no "
            "training row; leave that teacher out, or look at the rows"
        )
    return bytes(found)


class Template:
    """Turns an item into the text of a prompt."""

    def __init__(self, text: str, key: str = "task.template") -> None:
        """Parse a template, for example "{metadata[expression]:compact}=", which stands under this key.

        TaskError if the braces do not pair, or the text names no column at all.
        """
        self.text = text
        self._key = key
        self._formatter = _Columns()
        try:
            fields = [field for _, field, _, _ in self._formatter.parse(text) if field is not None]
        except ValueError as error:
            raise TaskError(f"{key} {text!r} does not parse: {error}; write {{{{ or }}}} for a brace") from error
        if not fields:
            raise TaskError(f"{key} {text!r} names no column, so every prompt would be the same; use {{question}}")
        self.columns = [re.split(r"[.\[]", field)[0] for field in fields]
        """Those it names."""

    def render(self, item: Mapping[str, Any], where: str) -> str:
        """The prompt of one item; `where` (file and row, or dataset and index) is for the error.

        TaskError if the item lacks a column, or its value does not take the format.
        """
        try:
            return self._formatter.vformat(self.text, (), item)
        except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:  # the last two of a width
            why = error if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
            raise TaskError(f"{self._key} {self.text!r} at {where}: {why}") from error


def normalised(text: str) -> str:
    """The text without white space and without case: what makes two questions the same."""
    return "".join(text.split()).casefold()


def held_out(question: str, share: float) -> bool:
    """Is this question set aside for evaluation? White space and case do not matter.

    A smaller share (0 to 1) of all questions is a subset of a greater one.
    """
    value = int.from_bytes(blake2b(normalised(question).encode(), digest_size=8).digest(), "big")
    return value / 2**64 < share


class Split:
    """Collects distinct problems into a training and a held-out half until both have as many as asked."""

    def __init__(self, share: float, num_train: int | None, num_heldout: int | None) -> None:
        """Start with two empty halves; a number of None keeps all."""
        self.share = share
        self.train: list[Problem] = []
        self.heldout: list[Problem] = []
        self._num_train = num_train
        self._num_heldout = num_heldout
        self._seen: set[str] = set()

    @property
    def num_distinct(self) -> int:
        """Distinct questions offered so far."""
        return len(self._seen)

    @property
    def full(self) -> bool:
        """Are both halves complete? Never, where all problems are kept."""
        return len(self.train) == self._num_train and len(self.heldout) == self._num_heldout

    def is_new(self, question: str) -> bool:
        """Was this question never offered before? Marks it as offered."""
        key = normalised(question)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def room_for(self, question: str) -> list[Problem] | None:
        """The half that this question belongs to, or None where that half is complete."""
        if held_out(question, self.share):
            return None if len(self.heldout) == self._num_heldout else self.heldout
        return None if len(self.train) == self._num_train else self.train


# --- rows of a file -----------------------------------------------------------------------------------


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
