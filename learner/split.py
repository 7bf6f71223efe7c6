"""How a decoder's layers are split into pipeline stages of like cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from learner.config import FAMILIES


@dataclass(frozen=True)
class StageShare:
    """Which layers a stage owns."""

    rank: int
    num_stages: int
    first_layer: int
    end_layer: int

    @property
    def is_first(self) -> bool:
        """Does it own the embedding?"""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Does it own the head?"""
        return self.rank == self.num_stages - 1


def balance(layer_costs: Sequence[int], first_cost: int, last_cost: int, num_stages: int) -> list[tuple[int, int]]:
    """Split layers into contiguous stages so that the most expensive stage is as cheap as possible.

    Args:
        layer_costs: cost of each layer, for example its parameter count.
        first_cost: what the first stage carries besides (embedding).
        last_cost: what the last stage carries besides (norm and head).
        num_stages: how many stages, each with at least one layer.

    Returns:
        (first, end) of each stage's layers.

    Raises:
        ValueError: there are more stages than layers.
    """
    num_layers = len(layer_costs)
    if num_stages > num_layers:
        raise ValueError(
            f"learner.num_stages = {num_stages}, but the model has only {num_layers} layers and a stage needs one. "
            f"Lower num_stages to {num_layers} or less"
        )
    # best[end]: (cost of the dearest stage, cuts) over splits of layers[:end] into the stages so far
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage in range(num_stages):
        extra = (first_cost if stage == 0 else 0) + (last_cost if stage == num_stages - 1 else 0)
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            longer[end] = min(
                (max(cost, extra + sum(layer_costs[start:end])), [*cuts, end])
                for start, (cost, cuts) in best.items()
                if start < end
            )
        best = longer
    cuts = best[num_layers][1]
    return list(itertools.pairwise(cuts))


def share_of(whole: PreTrainedModel, rank: int, num_stages: int, *, has_lm_head: bool = True) -> StageShare:
    """The layers of a stage, balanced by parameter count with embedding, norm and, where there is one, LM head.

    Raises:
        ValueError: the model is of an unknown family, or there are more stages than layers.
    """
    if whole.config.model_type not in FAMILIES:
        raise ValueError(
            f"the model is of type '{whole.config.model_type}', and the learner splits decoders of the Llama family: "
            f"{', '.join(FAMILIES)}. Use one of those, or add the type to learner.config.FAMILIES once the tests of "
            "learner.model pass for it"
        )

    def cost(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    body = whole.model
    split = balance(
        [cost(layer) for layer in body.layers],
        cost(body.embed_tokens),
        cost(body.norm) + (cost(whole.lm_head) if has_lm_head else 0),
        num_stages,
    )
    return StageShare(rank, num_stages, *split[rank])
