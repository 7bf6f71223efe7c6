"""Trajectories of message bodies as objects that tests can compare; the product uses columns only."""

import msgspec
import pyarrow as pa

from leeway.buffer.rows import INTEGERS, WALL_TIMES, flat_values
from leeway.buffer.schema import SCHEMA, Trajectory, VersionSpan, read_stream
from leeway.common.staleness import PolicyVersion


def decode(body: bytes | memoryview) -> list[Trajectory]:
    """Return the trajectories of a message body."""
    return from_batch(read_stream(body))


def from_batch(batch: pa.RecordBatch) -> list[Trajectory]:
    """Return the rows of a record batch; arrays are read-only views of it."""
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
    plain = {name: column[name].to_pylist() for name in (*INTEGERS, *WALL_TIMES, "actor", "finish_reason", "reward")}
    tokens, token_bounds = flat_values(column["token_ids"])
    logprobs, logprob_bounds = flat_values(column["logprobs"])
    reference, reference_bounds = flat_values(column["reference_logprobs"])
    has_reference = column["reference_logprobs"].is_valid().to_pylist()
    spans = column["spans"].to_pylist()
    parts = column["reward_parts"].to_pylist()
    texts = column["columns"].to_pylist()
    return [
        Trajectory(
            **{name: values[i] for name, values in plain.items()},
            token_ids=tokens[token_bounds[i] : token_bounds[i + 1]],
            logprobs=logprobs[logprob_bounds[i] : logprob_bounds[i + 1]],
            spans=tuple(
                VersionSpan(PolicyVersion(span["incarnation"], span["version"]), span["start"], span["end"])
                for span in spans[i]
            ),
            reward_parts={part["name"]: part["value"] for part in parts[i]},
            columns=msgspec.json.decode(texts[i]),
            reference_logprobs=reference[reference_bounds[i] : reference_bounds[i + 1]] if has_reference[i] else None,
        )
        for i in range(batch.num_rows)
    ]
