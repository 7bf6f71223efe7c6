"""What a row from outside must satisfy before it is stored.

Each check costs one pass over the flat values of a message; rows are looked at one by one only
where something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from buffer.rows import flat_values, list_bounds
from buffer.schema import MAX_REWARD_PARTS
from common.run import RunFacts

LOGPROB_TOLERANCE = 1e-4
"""Log-probabilities may exceed 0 by rounding, no more."""
MAX_REWARD = 1e100
"""Beyond it, either way, the mean and the spread of a group's rewards would soon be no numbers any more."""

_json_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Raw: that the values are well-formed is seen without making objects of them."""


@dataclass(frozen=True)
class KnownVersions:
    """Which policy versions can exist."""

    newest_by_incarnation: Mapping[int, int]

    def newest(self, incarnation: int) -> int:
        """The newest version that can have sampled a token; -1 where there was no such incarnation."""
        return self.newest_by_incarnation.get(incarnation, -1)


def faults(batch: pa.RecordBatch, facts: RunFacts, known: KnownVersions) -> dict[int, str]:
    """The rows that must not be stored, each with the first reason found, in a few fixed words."""
    column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    found: dict[int, str] = {}

    def blame(rows: npt.NDArray[np.bool_] | list[bool], reason: str) -> None:
        for row in np.flatnonzero(rows):
            found.setdefault(int(row), reason)

    blame(_other_than(column["run_id"], (facts.run_id,)), "another run")
    blame(_other_than(column["finish_reason"], ("stop", "length")), "finish_reason")
    for name, low, high in (
        ("sample_index", 0, facts.group_size),
        ("prompt_id", 0, facts.num_prompts),
        ("prompt_length", 1, facts.max_tokens),
        ("lease_id", 1, None),
        ("group_id", 1, None),
        ("attempt", 1, None),
    ):
        values = column[name].to_numpy()
        blame((values < low) | (values >= (np.iinfo(np.int64).max if high is None else high)), f"{name} out of range")

    tokens, token_bounds = flat_values(column["token_ids"])
    logprobs, logprob_bounds = flat_values(column["logprobs"])
    num_tokens = np.diff(token_bounds)
    num_completion = num_tokens - column["prompt_length"].to_numpy()
    blame(num_tokens > facts.max_tokens, "longer than max_tokens")
    blame(num_completion < 1, "empty completion")
    blame(np.diff(logprob_bounds) != num_completion, "logprobs and completion differ in length")
    blame(_rows_of((tokens < 0) | (tokens >= facts.vocab_size), token_bounds), "token outside the vocabulary")
    blame(_rows_of(~np.isfinite(logprobs), logprob_bounds), "logprob not finite")
    blame(_rows_of(logprobs > LOGPROB_TOLERANCE, logprob_bounds), "logprob above 0")
    blame(_not_finite(column["reward"]), "reward not finite")
    blame(_too_large(column["reward"]), "reward out of range")
    parts, part_bounds = column["reward_parts"], list_bounds(column["reward_parts"])
    part_values = parts.flatten().field(1)
    blame(np.diff(part_bounds) > MAX_REWARD_PARTS, "too many reward parts")
    blame(_rows_of(_not_finite(part_values), part_bounds), "reward part not finite")
    blame(_rows_of(_too_large(part_values), part_bounds), "reward part out of range")
    blame(~np.isfinite(column["started_s"].to_numpy()) | ~np.isfinite(column["finished_s"].to_numpy()), "wall time")
    blame(_wrong_reference(column["reference_logprobs"], num_completion), "reference_logprobs")
    blame(_not_json_objects(column["columns"]), "columns are not JSON")
    for rows, reason in _span_faults(column["spans"], num_completion, known):
        blame(rows, reason)
    return found


def _rows_of(bad_values: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which rows hold a bad value."""
    rows = np.zeros(len(bounds) - 1, np.bool_)
    if bad_values.any():
        rows[np.searchsorted(bounds, np.flatnonzero(bad_values), side="right") - 1] = True
    return rows


def _other_than(column: pa.Array, allowed: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return ~pc.is_in(column, pa.array(allowed)).to_numpy(zero_copy_only=False)


def _not_finite(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Which values of a float column are there, but NaN or infinite."""
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return present & ~np.isfinite(column.to_numpy(zero_copy_only=False))


def _too_large(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Which values of a float column are beyond any reward; what is not there, or not a number, is not."""
    return np.abs(column.to_numpy(zero_copy_only=False)) > MAX_REWARD


def _wrong_reference(column: pa.Array, num_completion: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    values, bounds = flat_values(column)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return present & ((np.diff(bounds) != num_completion) | _rows_of(~np.isfinite(values), bounds))


def _not_json_objects(column: pa.Array) -> list[bool]:
    """Which rows' text is no JSON object; equal texts, as those of one group, are looked at once."""
    texts = column.to_pylist()
    verdicts = {text: not _is_json_object(text) for text in set(texts)}
    return [verdicts[text] for text in texts]


def _is_json_object(text: str) -> bool:
    try:
        _json_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):  # nested beyond any use
        return False
    return True


def _span_faults(
    column: pa.Array, num_completion: npt.NDArray[np.int64], known: KnownVersions
) -> list[tuple[npt.NDArray[np.bool_], str]]:
    """Spans must cover the completion without gap, and their versions must exist and never fall."""
    bounds = list_bounds(column)
    spans = column.flatten()
    incarnation, version, start, end = (spans.field(i).to_numpy().astype(np.int64) for i in range(4))
    num_rows = len(bounds) - 1
    row_of = np.repeat(np.arange(num_rows), np.diff(bounds))
    first = np.zeros(len(start), np.bool_)
    first[bounds[:-1][np.diff(bounds) > 0]] = True
    expected_start = np.where(first, 0, np.roll(end, 1))
    older = (np.roll(incarnation, 1) > incarnation) | (
        (np.roll(incarnation, 1) == incarnation) & (np.roll(version, 1) > version)
    )
    numbers, which = np.unique(incarnation, return_inverse=True)
    newest = np.array([known.newest(int(number)) for number in numbers], np.int64)[which] if len(start) else version
    last_end = np.zeros(num_rows, np.int64)
    last_end[row_of] = end  # later spans of a row overwrite earlier ones

    def rows(bad_spans: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        bad = np.zeros(num_rows, np.bool_)
        bad[row_of[bad_spans]] = True
        return bad

    gaps = rows((start != expected_start) | (end <= start)) | (last_end != num_completion)
    return [
        (gaps, "spans do not cover the completion"),
        (rows(~first & older), "versions fall within a completion"),
        (rows((version < 0) | (version > newest)), "version that was never published"),
    ]
