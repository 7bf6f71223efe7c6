"""Cost models of engines and learners from data sheets of GPUs and models, without measurements.

    H800         like the H100 SXM except for links and double precision: 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB
                 (NVIDIA H100 data sheet)
    H20          148 TFLOP/s dense bf16, 4.0 TB/s, 96 GB (NVIDIA H20 data sheet)
    prices       relative prices of an hour, 2.85 to 1 (StreamRL, arXiv 2504.15930)
    Qwen2.5      layers, widths and heads of the 7B and the 72B model (arXiv 2412.15115)

N is the number of parameters. An engine step reads the weights once and the keys and values of all contexts, and
computes 2 N FLOP per token. A linear model is fitted to that roofline, as `leeway profile` fits a model to
measurements. A step of trajectory balance takes 12 N FLOP per token: 2 N for the reference, 2 N for the shared term of
a group, 2 N forward, 4 N backward, and 2 N for recomputed activations, which are stored only at layer boundaries.
Attention is computed in these six passes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from leeway.planning.costs import LearnerShape, LearnerTime, LeastSquares, TokenTime
from leeway.planning.world import Costs

READS, COMPUTES, TRAINS = 0.8, 0.6, 0.4
"""Assumed fractions of bandwidth and FLOP/s that an engine reaches, and of FLOP/s that a learner reaches."""
LAUNCH_S, REDUCE_S = 3e-3, 1e-5
"""Assumed fixed seconds of an engine step, and seconds of each of the two all-reduces of a layer over its GPUs."""
UPDATE_S, MICRO_BATCH_S = 0.5, 5e-3
"""Assumed seconds of a learner step for optimizer and gradient sum, and fixed seconds of each micro-batch."""
LINK, TO_GPU = 50e9, 25e9
"""Assumed bytes per second of a host's link (400 Gbit/s), and from its memory to a GPU; links are never shared."""
PASSES = 6
"""Number of passes of a learner step, each with the cost of a forward pass."""
FREE = 0.9
"""Fraction of a GPU's memory that is available to weights and caches."""
RANK_BYTES, REST_BYTES = 18, 6e9
"""Bytes of a learner per parameter (float32 weights, gradients and two moments; bf16 weights), and its fixed bytes."""
BUDGET = 20_480
"""Token budget of a micro-batch, which the longest sample does not exceed."""
LOADS = ((1, 8, 16, 24, 32, 48, 64, 96), (512, 2048, 8192))
"""Numbers of running samples, and context tokens per sample, at which the roofline is evaluated."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, from its data sheet."""

    name: str
    flops: float
    """Dense bf16 FLOP per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory: float
    """Memory in bytes."""
    price: float
    """Relative price per hour."""


@dataclass(frozen=True)
class Model:
    """A model, and the number of GPUs of its engine."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_width: int
    """Width of the keys of a token, which is also the width of its values."""
    tensor_parallel: int
    stages: tuple[int, ...]
    """Possible numbers of pipeline stages, which divide the number of layers."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per context token."""
        return 2 * 2 * self.layers * self.kv_width


H800 = Gpu("H800", 989e12, 3.35e12, 80e9, 2.85)
H20 = Gpu("H20", 148e12, 4.0e12, 96e9, 1.0)
SMALL = Model("Qwen2.5-7B", 7.6e9, 28, 3584, 512, 1, (4, 7, 14))
LARGE = Model("Qwen2.5-72B", 72.7e9, 80, 8192, 1024, 8, (20, 40))


def engine_law(model: Model, gpu: Gpu) -> TokenTime:
    """Return the cost model of an engine step."""
    num = model.tensor_parallel
    read_s, token_s = 2 * model.parameters / (num * gpu.bandwidth * READS), _token_s(model, gpu)
    fixed_s = LAUNCH_S + (2 * model.layers * REDUCE_S if num > 1 else 0.0)
    law = LeastSquares(3)
    for samples, context in product(*LOADS):
        keys_s = samples * context * model.kv_bytes / (num * gpu.bandwidth * READS)
        law.add((1.0, samples, samples * context), fixed_s + max(read_s, samples * token_s) + keys_s)
    fit = law.fit()
    assert fit is not None, "there are more loads than terms"
    base, per_sample, per_kv_token = fit.coefficients
    return TokenTime(base, per_sample, per_kv_token, token_s)


def kv_tokens(model: Model, gpu: Gpu) -> float:
    """Return the number of tokens that the cache of an engine holds."""
    return (FREE * gpu.memory * model.tensor_parallel - 2 * model.parameters) / model.kv_bytes


def learner_law(model: Model, gpu: Gpu) -> LearnerTime:
    """Return the cost model of a learner step."""
    rate = gpu.flops * TRAINS
    attention = 2 * model.layers * model.width  # FLOP of a pass per squared token count; half of the pairs are masked
    return LearnerTime(UPDATE_S, MICRO_BATCH_S, PASSES * 2 * model.parameters / rate, PASSES * attention / rate)


def shapes(model: Model, gpu: Gpu, most_ranks: int) -> list[LearnerShape]:
    """Return the shapes of a learner that fit into the memory of the GPUs."""
    kept = BUDGET * model.width * 2 * model.layers + REST_BYTES
    return [
        LearnerShape(stages, replicas, token_budget=BUDGET)
        for stages in model.stages
        if RANK_BYTES * model.parameters / stages + kept <= gpu.memory
        for replicas in range(1, most_ranks // stages + 1)
    ]


def other_costs(model: Model) -> Costs:
    """Return the costs outside engine and learner; weights are sent from the learner's host to all hosts at once."""
    size = 2 * model.parameters
    return Costs(
        reward_s=0.1,
        lease_s=0.025,
        publish_s=size / LINK,
        fetch_s=size / LINK,
        pause_s=size / model.tensor_parallel / TO_GPU,
        between_steps_s=0.05,
    )


def _token_s(model: Model, gpu: Gpu) -> float:
    return 2 * model.parameters / (model.tensor_parallel * gpu.flops * COMPUTES)
