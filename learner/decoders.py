"""Decoders: the families that the learner trains, what their layers cost, and how they are split into chunks.

What differs inside a module (scaled embeddings, norms that add one) comes with Transformers' own modules. Imports
neither torch nor transformers. Costs are floating-point operations per token of a training step, from the model's
config alone: a layer's products and its attention at a typical length; the head, as if its logits were always computed
twice; and the embedding, a lookup whose dense gradient is written for every micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """What stages have to know of a model type."""

    typed_rotations: bool = False
    """Does its rotary embedding treat layers of different attention types differently?"""
    caps_logits: bool = False
    windows: Literal["none", "typed", "all"] = "none"
    """The layers with a `sliding_window`: those that `layer_types` says, or all."""
    serves_typed: bool = True


FAMILY_OF: Mapping[str, Family] = {
    "gemma": Family(serves_typed=False),
    "gemma2": Family(caps_logits=True, windows="typed"),
    "gemma3_text": Family(caps_logits=True, typed_rotations=True, windows="typed"),
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(windows="typed", serves_typed=False),
    "qwen3": Family(windows="typed", serves_typed=False),
}

FAMILIES = tuple(FAMILY_OF)

BATCH_WIDE_ROTATIONS = ("dynamic", "longrope")
"""Rotary types whose angles follow the longest sequence of a batch: packing would change the model."""


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a config; ValueError if the model cannot be split, or computed alike in both passes."""
    family = FAMILY_OF.get(config.model_type)
    if family is None:
        raise ValueError(
            f"the model is of type '{config.model_type}', and the learner splits decoders of the families "
            f"{', '.join(FAMILIES)}. Use one of those, or add the type to learner.decoders once the tests of "
            "learner.model pass for it"
        )
    dropout = {name: value for name, value in vars(config).items() if name.endswith("dropout") and value}
    if dropout:
        name, value = next(iter(dropout.items()))
        raise ValueError(
            f"config.json says {name} = {value}, and dropout would make the two passes of a step differ; "
            f"set {name} to 0 in the checkpoint's config.json"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "config.json says quantization_config: the learner trains plain weights. Use the checkpoint that was "
            "quantized, in float32, bfloat16 or float16"
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


SERVED_ALIKE: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("logit_scale", "llama mistral", (1,)),
    ("bias qkv_bias", "llama mistral", (False,)),
    ("mlp_bias llama_4_scaling ada_rms_norm_t_cond", "mistral", (False,)),
    ("attention_bias", "mistral gemma qwen3", (False,)),
    ("qk_norm", "qwen2", (False,)),
    ("hidden_act", "llama mistral qwen2 qwen3", ("silu",)),
    ("hidden_act", "gemma", ("gelu_pytorch_tanh",)),
    ("hidden_activation", "gemma gemma2 gemma3_text", ("gelu_pytorch_tanh",)),
    ("is_causal", " ".join(FAMILIES), (True,)),
    ("compression_config dual_chunk_attention_config text_config", " ".join(FAMILIES), ({},)),
)
"""Keys of config.json that vLLM 0.32 or Transformers 5.19 alone reads, for which families, and values that change
nothing."""
_OF_ROTATIONS = ("partial_rotary_factor", "rope_dim", "mrope_section", "use_fope")
"""Keys of rope_parameters that vLLM alone reads."""
_HARMLESS = (
    "auto_map cache_implementation hidden_act ignore_keys_at_rope_validation is_llama_config layer_types leeway_untied "
    "model_max_length model_type sliding_window tokenizer_class transformers.js_config unsloth_fixed unsloth_version"
)
"""Keys that change nothing of the model, or that `check_served` looks at."""


def check_served(config: PreTrainedConfig) -> None:
    """Refuse a model that engines would serve differently than the learner trains it: ValueError names the key."""
    family, name = config.model_type, type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    rows = [(key, alike) for keys, names, alike in SERVED_ALIKE if family in names.split() for key in keys.split()]
    rows += [("architectures", ([name],))]
    rows += [("head_dim", (config.hidden_size // config.num_attention_heads,))] * (family == "qwen2")
    found = [(key, getattr(config, key, None), alike) for key, alike in rows]
    found += [(key, each.get(key), (1, False)) for each in _rotations(config) for key in _OF_ROTATIONS]
    if windows(config) != _served_windows(config):
        found.append(("sliding_window", config.sliding_window, ("null",)))
    for key, value, alike in found:
        if value is not None and value not in alike:
            raise ValueError(
                f"config.json says {key} = {value}, which engine and learner do not read alike, so samples would be of "
                f"another model than is trained: set it to {alike[0]} if the model was made so, or use another one"
            )


def _served_windows(config: PreTrainedConfig) -> list[int | None]:
    """As `windows`, by vLLM: layers without one of their own have the model's if no layer is of another type."""
    window, kinds = getattr(config, "sliding_window", None) or None, getattr(config, "layer_types", None)
    default = window if set(kinds or ()) <= {"sliding_attention"} else None
    typed = family_of(config).serves_typed
    return [window if typed and kind == "sliding_attention" else default for kind in layer_types(config)]


def unread_keys(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the keys of a config.json that Transformers does not know for this model type, and that say something."""
    known = {*vars(type(config)()), *_HARMLESS.split()}
    return tuple(sorted(key for key, value in vars(config).items() if value and key not in known and key[0] != "_"))


def _rotations(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Rotary parameters: one set, or one per attention type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the attention type of each layer, as the rotary embedding names it."""
    types = getattr(config, "layer_types", None)
    return list(types) if types else ["full_attention"] * config.num_hidden_layers


def rotation_kinds(config: PreTrainedConfig) -> dict[str, dict[str, str]]:
    """Return, by attention type of the layers, the arguments of its rotary embedding besides positions."""
    typed = family_of(config).typed_rotations
    return {kind: {"layer_type": kind} if typed else {} for kind in sorted(set(layer_types(config)))}


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the tokens that a token of each layer sees, itself included; None: all before it."""
    window, where = getattr(config, "sliding_window", None) or None, family_of(config).windows
    has_window = {"none": (), "typed": ("sliding_attention",), "all": layer_types(config)}[where]
    return [window if kind in has_window else None for kind in layer_types(config)]


def logit_softcap(config: PreTrainedConfig) -> float | None:
    cap = config.final_logit_softcapping if family_of(config).caps_logits else None
    return None if cap is None else float(cap)


TRAINING_PASSES = 3
"""Forward and backward products of a layer, in units of the forward pass."""

HEAD_PASSES = 4
"""With gradients made a chunk at a time: logits, their product with the head, logits again, gradient. A GPU keeps
most probabilities, and needs no logits again."""

EMBEDDING_SHARE = 1 / 64
"""Cost per token and weight of the embedding: each micro-batch writes and adds a gradient of the whole table, and a
step updates it, tens of operations' time per weight."""

TYPICAL_LENGTH = 512
"""Tokens of a sequence, for the share of attention in a layer's cost."""


@dataclass(frozen=True)
class StageShare:
    """The layers of a chunk. Rank p of P has the chunks p, p + P, p + 2P..."""

    chunk: int
    num_chunks: int
    first_layer: int
    end_layer: int

    @property
    def is_first(self) -> bool:
        return self.chunk == 0

    @property
    def is_last(self) -> bool:
        return self.chunk == self.num_chunks - 1


def cost_of(config: PreTrainedConfig) -> tuple[float, float]:
    """Return the floating-point operations a of a token and b of a squared token: a sequence costs a * n + b * n^2.

    A layer with a sliding window costs as much as one without up to the window's length, and less beyond; it is counted
    linearly at `TYPICAL_LENGTH` if the window is shorter than that.
    """
    per_token = TRAINING_PASSES * config.num_hidden_layers * _products(config) + _head(config) + _embedding(config)
    squared = 0.0
    for window in windows(config):
        if window is not None and window < TYPICAL_LENGTH:
            per_token += TRAINING_PASSES * _attention(config) * window
        else:
            squared += TRAINING_PASSES * _attention(config) / 2
    return per_token, squared


def split_layers(
    config: PreTrainedConfig,
    num_chunks: int,
    *,
    has_lm_head: bool = True,
    recomputed: bool = False,
) -> list[tuple[int, int]]:
    """Return (first, end) of each chunk's layers, balanced by cost.

    With `recomputed` every layer is computed again in the backward pass. ValueError if the family is unknown, or there
    are more chunks than layers.
    """
    layer_costs = _layer_costs(config, recomputed=recomputed)
    return balance(layer_costs, _embedding(config), _head(config) if has_lm_head else 0.0, num_chunks)


def cost_shares(config: PreTrainedConfig, split: Sequence[tuple[int, int]], *, recomputed: bool = False) -> list[float]:
    """Return each chunk's share of a policy's whole cost."""
    layer_costs = _layer_costs(config, recomputed=recomputed)
    costs = [sum(layer_costs[first:end]) for first, end in split]
    costs[0] += _embedding(config)
    costs[-1] += _head(config)
    return [cost / sum(costs) for cost in costs]


def critic_share(config: PreTrainedConfig) -> float:
    """Return the cost of training a critic model, which has no LM head, over that of its policy."""
    layers = sum(_layer_costs(config, recomputed=False)) + _embedding(config)
    return layers / (layers + _head(config))


def _layer_costs(config: PreTrainedConfig, *, recomputed: bool) -> list[float]:
    passes = TRAINING_PASSES + recomputed
    return [
        passes * (_products(config) + _attention(config) * min(window or TYPICAL_LENGTH, TYPICAL_LENGTH / 2))
        for window in windows(config)
    ]


def balance(
    layer_costs: Sequence[float], first_cost: float, last_cost: float, num_chunks: int
) -> list[tuple[int, int]]:
    """Split layers into contiguous chunks so that the dearest is as cheap as possible: (first, end) of each.

    The first chunk has the embedding too, the last the head; each has at least one layer. ValueError if there are more
    chunks than layers.
    """
    num_layers = len(layer_costs)
    if num_chunks > num_layers:
        raise ValueError(
            f"learner.num_stages * learner.num_chunks = {num_chunks}, but the model has only {num_layers} layers and "
            f"every chunk of a stage needs one. Lower num_stages or num_chunks to a product of {num_layers} or less"
        )
    # best[end]: (cost of the dearest chunk, cuts) over splits of layers[:end] into the chunks so far
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    sums = list(itertools.accumulate(layer_costs, initial=0.0))
    for chunk in range(num_chunks):
        extra = (first_cost if chunk == 0 else 0.0) + (last_cost if chunk == num_chunks - 1 else 0.0)
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(chunk + 1, num_layers - (num_chunks - chunk - 1) + 1):
            longer[end] = min(
                (max(cost, extra + sums[end] - sums[start]), [*cuts, end])
                for start, (cost, cuts) in best.items()
                if start < end
            )
        best = longer
    cuts = best[num_layers][1]
    return list(itertools.pairwise(cuts))


class Widths(NamedTuple):
    """How many numbers a layer has per token."""

    states: int
    queries: int
    keys: int
    block: int

    @property
    def num_weights(self) -> int:
        return self.states * (2 * self.queries + 2 * self.keys + 3 * self.block)


def widths(config: PreTrainedConfig) -> Widths:
    size = _head_size(config)
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    return Widths(config.hidden_size, queries, keys, config.intermediate_size)


def _products(config: PreTrainedConfig) -> float:
    """Return a layer's matrix products per token, forward, in operations."""
    return 2.0 * widths(config).num_weights


def _attention(config: PreTrainedConfig) -> float:
    """Return a layer's attention per token and token that it sees, forward: scores, and values summed."""
    return 4.0 * config.num_attention_heads * _head_size(config)


def _head(config: PreTrainedConfig) -> float:
    return HEAD_PASSES * 2.0 * config.vocab_size * config.hidden_size


def _embedding(config: PreTrainedConfig) -> float:
    return EMBEDDING_SHARE * config.vocab_size * config.hidden_size


def _head_size(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
