"""Families: the decoders that the learner splits, and all in which they differ.

A family's forward is embedding, layers, norm and head. What differs inside a module (scaled embeddings, norms that
add one, query scalings) comes with Transformers' own modules and needs nothing here. Imports neither torch nor
transformers, so that a config can be loaded without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """What stages have to know of a model type."""

    typed_rotations: bool = False
    """Does its rotary embedding turn layers of different attention types differently?"""
    caps_logits: bool = False
    """May its config cap logits (`final_logit_softcapping`)?"""
    window_everywhere: bool = False
    """Does `sliding_window` hold in every layer? Else in those that `layer_types` says."""


FAMILY_OF: Mapping[str, Family] = {
    "gemma": Family(),
    "gemma2": Family(caps_logits=True),
    "gemma3_text": Family(caps_logits=True, typed_rotations=True),
    "llama": Family(),
    "mistral": Family(window_everywhere=True),
    "qwen2": Family(),
    "qwen3": Family(),
}

FAMILIES = tuple(FAMILY_OF)
"""Model types that the learner trains."""

BATCH_WIDE_ROTATIONS = ("dynamic", "longrope")
"""Rotary embeddings whose angles follow the longest sequence of a batch, so that packing would change the model."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a Transformers config.

    Raises:
        ValueError: the learner does not split its type, or could not compute the same function in both passes.
    """
    family = FAMILY_OF.get(config.model_type)
    if family is None:
        raise ValueError(
            f"the model is of type '{config.model_type}', and the learner splits decoders of the families "
            f"{', '.join(FAMILIES)}. Use one of those, or add the type to learner.families once the tests of "
            "learner.model pass for it"
        )
    dropout = {name: value for name, value in vars(config).items() if name.endswith("dropout") and value}
    if dropout:
        name, value = next(iter(dropout.items()))
        raise ValueError(
            f"config.json says {name} = {value}, and dropout would make the two passes of a step differ; "
            f"set {name} to 0 in the checkpoint's config.json"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            "config.json says use_bidirectional_attention: such a model embeds texts and generates none. "
            "Use a causal checkpoint"
        )
    for parameters in _rotations(config):
        if parameters.get("rope_type") in BATCH_WIDE_ROTATIONS:
            raise ValueError(
                f"config.json asks for rotary embeddings of type '{parameters['rope_type']}', whose angles follow the "
                "longest sequence of a batch; packed and single sequences would differ. Use a checkpoint with a "
                "static type ('default', 'linear', 'llama3', 'yarn')"
            )
    return family


def _rotations(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Rotary parameters: one set, or one per attention type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The attention type of each layer, as the rotary embedding names it."""
    types = getattr(config, "layer_types", None)
    return list(types) if types else ["full_attention"] * config.num_hidden_layers


def rotation_kinds(config: PreTrainedConfig) -> dict[str, dict[str, str]]:
    """For each attention type of the model's layers, what its rotary embedding wants to be told besides positions."""
    typed = family_of(config).typed_rotations
    return {kind: {"layer_type": kind} if typed else {} for kind in sorted(set(layer_types(config)))}


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Tokens that a token of each layer sees, itself included; None: all before it."""
    window = getattr(config, "sliding_window", None)
    everywhere = family_of(config).window_everywhere
    return [window if everywhere or kind == "sliding_attention" else None for kind in layer_types(config)]


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """The cap of the head's logits; None: there is none."""
    cap = config.final_logit_softcapping if family_of(config).caps_logits else None
    return None if cap is None else float(cap)
