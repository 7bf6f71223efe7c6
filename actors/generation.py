"""What one request to an engine generated, whole or in parts, and how it is read from vLLM's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from buffer.trajectory import HANDED_ON, Prefix, VersionSpan
from common.staleness import PolicyVersion

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


class EngineError(RuntimeError):
    """Base of what can go wrong with an engine."""


class RequestRefused(EngineError):
    """This request is not one that the engine can generate; others are not affected."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one request generated. The end-of-sequence token is part of it: the learner trains on it."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Of each token under the distribution that it was sampled from."""
    spans: tuple[VersionSpan, ...]
    """Which version sampled which tokens, without gap, in order."""
    finish_reason: Literal["stop", "length", "handed_on"]
    """`HANDED_ON`: it was interrupted, and these are its first tokens, if any."""

    def after(self, prefix: Prefix | None) -> Generation:
        """With the tokens that it went on from."""
        if prefix is None:
            return self
        first = len(prefix.token_ids)
        spans = [
            *prefix.spans,
            *(VersionSpan(each.version, first + each.start, first + each.end) for each in self.spans),
        ]
        joint = len(prefix.spans)
        if self.spans and spans[joint - 1].version == spans[joint].version:
            spans[joint - 1 : joint + 1] = [VersionSpan(spans[joint].version, spans[joint - 1].start, spans[joint].end)]
        return Generation(
            token_ids=np.concatenate((prefix.token_ids, self.token_ids)),
            logprobs=np.concatenate((prefix.logprobs, self.logprobs)),
            spans=tuple(spans),
            finish_reason=self.finish_reason,
        )


def completion_of(final: RequestOutput, sent_under: PolicyVersion) -> Generation | None:
    """Read vLLM's output; RequestRefused if it ended neither by an end-of-sequence token nor by length nor by us.

    A request may wait inside the engine until weights have changed, and then find a prefix that the old ones computed.
    What grew from that is of no version: it is left out where the request was interrupted, and else the result is None,
    for it has to be generated anew. That does not depend on what was sampled, so nothing is favoured by it.
    """
    output: CompletionOutput = final.outputs[0]
    spans = tuple(
        VersionSpan(PolicyVersion.parse(span.version), span.start, span.end) for span in output.weight_versions or ()
    )
    is_interrupted = output.finish_reason == "abort"
    is_of_no_version = bool(final.num_cached_tokens and spans) and spans[0].version != sent_under
    if is_interrupted and (is_of_no_version or not spans):
        return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), HANDED_ON)
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RequestRefused(f"a request ended with '{output.finish_reason}' after {len(output.token_ids)} tokens")
    if is_of_no_version:
        return None
    return Generation(
        token_ids=np.asarray(output.token_ids, dtype=np.int32),
        logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
        spans=spans,
        finish_reason=HANDED_ON if is_interrupted else output.finish_reason,
    )
