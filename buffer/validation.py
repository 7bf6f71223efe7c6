"""What a row from outside must satisfy before it is stored.

Each check costs one pass over the flat values of a message; rows are looked at one by one only
where something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer.config import RunFacts
from buffer.schema import flat_values

LOGPROB_TOLERANCE = 1e-4
"""Log-probabilities may exceed 0 by rounding, no more."""

_json_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True)
class KnownVersions:
    """Which policy versions can exist."""

    newest_by_incarnation: Mapping[int, int]

    def has(self, incarnation: int, version: int) -> bool:
        """Can a token have been sampled by this version?"""
        return 0 <= version <= self.newest_by_incarnation.get(incarnation, -1)


def faults(batch: pa.RecordBatch, facts: RunFacts, known: KnownVersions) -> dict[int, str]:
    """The rows that must not be stored, each with the first reason found, in a few fixed words."""
    column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    found: dict[int, str] = {}

    def blame(rows: npt.NDArray[np.bool_] | list[bool], reason: str) -> None:
        for row in np.flatnonzero(rows):
            found.setdefault(int(row), reason)

    blame([run_id != facts.run_id for run_id in column["run_id"].to_pylist()], "another run")
    blame([reason not in ("stop", "length") for reason in column["finish_reason"].to_pylist()], "finish_reason")
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
    blame([value is not None and not np.isfinite(value) for value in column["reward"].to_pylist()], "reward not finite")
    blame(~np.isfinite(column["started_s"].to_numpy()) | ~np.isfinite(column["finished_s"].to_numpy()), "wall time")
    blame(_wrong_reference(column["reference_logprobs"], num_completion), "reference_logprobs")
    blame([not _is_json_object(text) for text in column["columns"].to_pylist()], "columns are not JSON")
    for row, reason in _span_faults(column["spans"], num_completion, known).items():
        found.setdefault(row, reason)
    return found


def _rows_of(bad_values: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which rows hold a bad value."""
    rows = np.zeros(len(bounds) - 1, np.bool_)
    if bad_values.any():
        rows[np.searchsorted(bounds, np.flatnonzero(bad_values), side="right") - 1] = True
    return rows


def _wrong_reference(column: pa.Array, num_completion: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    values, bounds = flat_values(column)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return present & ((np.diff(bounds) != num_completion) | _rows_of(~np.isfinite(values), bounds))


def _is_json_object(text: str) -> bool:
    try:
        _json_decoder.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _span_faults(column: pa.Array, num_completion: npt.NDArray[np.int64], known: KnownVersions) -> dict[int, str]:
    """Spans must cover the completion without gap, and their versions must exist and never fall."""
    found = {}
    for row, spans in enumerate(column.to_pylist()):
        end, newest = 0, (-1, -1)
        for span in spans:
            version = (span["incarnation"], span["version"])
            if span["start"] != end or span["end"] <= end:
                found[row] = "spans do not cover the completion"
            elif version < newest:
                found[row] = "versions fall within a completion"
            elif not known.has(*version):
                found[row] = "version that was never published"
            end, newest = span["end"], version
        if end != num_completion[row]:
            found.setdefault(row, "spans do not cover the completion")
    return found
