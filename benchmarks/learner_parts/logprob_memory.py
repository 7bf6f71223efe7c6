"""Peak memory of log-probabilities and their gradient: in chunks as the last stage does, and through the full logits.

Each side runs in a process of its own, forward and backward at the size of SmolLM2's head. The figure is the greatest
resident set during it less the resident set before it, so it holds everything: logits, slopes, the gradient of head
and states. The kernel counts it (VmHWM, which writing 5 to /proc/self/clear_refs sets back).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.learner_parts.processes import Figures, Spot
from learner.config import LearnerConfig
from learner.logprobs import LogitRule, token_logprobs

VOCABULARY, HIDDEN, NUM_TOKENS = 49_152, 576, 4096
TEMPERATURE = 0.8


def measure(spot: Spot, *, side: str, quick: bool) -> Figures:
    """Peak in MiB of one side, 'chunked' or 'full'; and checksums, by which the sides are held to be the same."""
    num_tokens = 1024 if quick else NUM_TOKENS
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(0.05).requires_grad_()
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    tokens = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    coefficients = torch.randn(num_tokens, generator=generator)
    _run(side, hidden[:8], weight, tokens[:8], coefficients[:8])  # what a first call allocates stays
    weight.grad = hidden.grad = None
    _set_peak_back()
    before = _resident_mib("VmRSS")
    start = time.perf_counter()
    logprobs = _run(side, hidden, weight, tokens, coefficients)
    seconds = time.perf_counter() - start
    peak = _resident_mib("VmHWM") - before
    spot.say(f"log-probabilities, {side}: {peak:.0f} MiB, {seconds:.1f} s")
    assert weight.grad is not None
    assert hidden.grad is not None
    return {
        "peak_mib": peak,
        "seconds": seconds,
        "num_tokens": num_tokens,
        "chunk_mib": _rule().chunk_mib,
        "sums": [float(each.double().abs().sum()) for each in (logprobs, weight.grad, hidden.grad)],
    }


def _run(side: str, hidden: Tensor, weight: Tensor, tokens: Tensor, coefficients: Tensor) -> Tensor:
    if side == "chunked":
        logprobs = token_logprobs(hidden, weight, tokens, _rule())
    else:
        logits = F.linear(hidden, weight) / TEMPERATURE
        logprobs = F.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
        del logits
    (logprobs * coefficients).sum().backward()
    return logprobs.detach()


def _rule() -> LogitRule:
    return LogitRule(TEMPERATURE, chunk_mib=LearnerConfig().logprob_chunk_mib)


def _set_peak_back() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}: peak memory can be measured on Linux alone")
