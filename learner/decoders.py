"""Decoders: the supported model families, the cost of their layers, and the split into chunks.

Differences inside a module (scaled embeddings, norms that add one) are handled by Transformers' own modules. This
module imports neither torch nor transformers. Costs are floating-point operations per token of a training step, derived
from the model config. A layer costs its matrix products and attention at a typical length. The head costs its products,
with logits computed twice. The embedding costs its dense gradient, which every micro-batch writes.
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
    """Properties of a model type that stages need."""

    typed_rotations: bool = False
    """Whether the rotary embedding depends on the attention type of the layer."""
    caps_logits: bool = False
    windows: Literal["none", "typed", "all"] = "none"
    """Layers with a `sliding_window`: none, those listed in `layer_types`, or all."""
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
"""Rotary types whose angles depend on the longest sequence of a batch; packing would change the angles."""


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a config; raise ValueError if it is unsupported or makes the two passes of a step differ."""
    family = FAMILY_OF.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model type '{config.model_type}' is not supported; the learner supports {', '.join(FAMILIES)}. "
            "Use one of those, or add the type to learner.decoders once the tests of leeway.learner.model pass for it"
        )
    dropout = {name: value for name, value in vars(config).items() if name.endswith("dropout") and value}
    if dropout:
        name, value = next(iter(dropout.items()))
        raise ValueError(
            f"config.json has {name} = {value}, but dropout would make the two passes of a step differ: "
            f"set {name} to 0 in the checkpoint's config.json"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(
            "config.json has a quantization_config, but the learner trains plain weights: use the unquantized "
            "checkpoint in float32, bfloat16 or float16"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            "config.json has use_bidirectional_attention = true: such a model computes embeddings and cannot generate. "
            "Use a causal checkpoint"
        )
    for parameters in _rotations(config):
        if parameters.get("rope_type") in BATCH_WIDE_ROTATIONS:
            raise ValueError(
                f"config.json has rope_type = '{parameters['rope_type']}', whose angles depend on the longest sequence "
                "of a batch, so packed and single sequences would differ. Use a checkpoint with a static type "
                "('default', 'linear', 'llama3', 'yarn')"
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
"""Rows (keys, families, values): keys of config.json that only one of vLLM 0.32 and Transformers 5.19 reads, and
the values that do not change the model."""
_OF_ROTATIONS = ("partial_rotary_factor", "rope_dim", "mrope_section", "use_fope")
"""Keys of rope_parameters that only vLLM reads."""
_HARMLESS = (
    "auto_map cache_implementation hidden_act ignore_keys_at_rope_validation is_llama_config layer_types leeway_untied "
    "model_max_length model_type sliding_window tokenizer_class transformers.js_config unsloth_fixed unsloth_version"
)
"""Keys that do not affect the model, or that `check_served` checks."""


def check_served(config: PreTrainedConfig) -> None:
    """Raise ValueError with the name of the key if engines would serve a different model than the learner trains."""
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
                f"config.json has {key} = {value}, which vLLM and the learner interpret differently, so their "
                f"outputs would differ: set {alike[0]} if the model was trained with that value, or use another model"
            )


def _served_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each layer in vLLM, where the model's window is the default if no layer has another type."""
    window, kinds = getattr(config, "sliding_window", None) or None, getattr(config, "layer_types", None)
    default = window if set(kinds or ()) <= {"sliding_attention"} else None
    typed = family_of(config).serves_typed
    return [window if typed and kind == "sliding_attention" else default for kind in layer_types(config)]


def unread_keys(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the keys of a config.json with a truthy value that Transformers ignores for this model type."""
    known = {*vars(type(config)()), *_HARMLESS.split()}
    return tuple(sorted(key for key, value in vars(config).items() if value and key not in known and key[0] != "_"))


def _rotations(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rotary parameters: one set, or one set per attention type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the attention type of each layer, named as in the rotary embedding."""
    types = getattr(config, "layer_types", None)
    return list(types) if types else ["full_attention"] * config.num_hidden_layers


def rotation_kinds(config: PreTrainedConfig) -> dict[str, dict[str, str]]:
    """Return, by attention type, the arguments of the rotary embedding besides positions."""
    typed = family_of(config).typed_rotations
    return {kind: {"layer_type": kind} if typed else {} for kind in sorted(set(layer_types(config)))}


def windows(config: PreTrainedConfig) -> list[int | None]:
    """Return for each layer the number of tokens that a token attends to, including itself; None means no limit."""
    window, where = getattr(config, "sliding_window", None) or None, family_of(config).windows
    has_window = {"none": (), "typed": ("sliding_attention",), "all": layer_types(config)}[where]
    return [window if kind in has_window else None for kind in layer_types(config)]


def logit_softcap(config: PreTrainedConfig) -> float | None:
    cap = config.final_logit_softcapping if family_of(config).caps_logits else None
    return None if cap is None else float(cap)


TRAINING_PASSES = 3
"""Cost of the forward and backward matrix products of a layer, as a multiple of its forward products."""

HEAD_PASSES = 4
"""Number of head products per chunk: logits, their product with the head, recomputed logits, gradient. A GPU keeps
most probabilities and recomputes few logits."""

EMBEDDING_SHARE = 1 / 64
"""Cost per token and embedding weight. Each micro-batch writes and adds a gradient of the whole table, and each step
updates the table. This work takes as long as tens of operations per weight."""

TYPICAL_LENGTH = 512
"""Sequence length in tokens that is assumed for the attention cost of a layer."""


@dataclass(frozen=True)
class StageShare:
    """The layers of one chunk. Rank p of P owns the chunks p, p + P, p + 2P, ..."""

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
    """Return the coefficients (a, b) of the cost of a sequence of n tokens, a * n + b * n^2 floating-point operations.

    A layer with a sliding window costs as much as a full layer up to the window length, and less beyond. If the window
    is shorter than `TYPICAL_LENGTH`, its attention cost is counted as linear in n.
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
    config: PreTrainedConfig, num_chunks: int, *, has_lm_head: bool = True, recomputed: bool = False
) -> list[tuple[int, int]]:
    """Return the layer range (first, end) of each chunk, balanced by cost.

    With `recomputed`, every layer is recomputed in the backward pass. Raises ValueError if the family is unknown, or if
    there are more chunks than layers.
    """
    layer_costs = _layer_costs(config, recomputed=recomputed)
    return balance(layer_costs, _embedding(config), _head(config) if has_lm_head else 0.0, num_chunks)


def cost_shares(config: PreTrainedConfig, split: Sequence[tuple[int, int]], *, recomputed: bool = False) -> list[float]:
    """Return each chunk's fraction of the total cost of the policy."""
    layer_costs = _layer_costs(config, recomputed=recomputed)
    costs = [sum(layer_costs[first:end]) for first, end in split]
    costs[0] += _embedding(config)
    costs[-1] += _head(config)
    return [cost / sum(costs) for cost in costs]


def critic_share(config: PreTrainedConfig) -> float:
    """Return the training cost of a critic model, which has no LM head, divided by that of its policy."""
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
    """Return the contiguous chunks (first, end) of the layers that minimize the maximum cost of a chunk.

    The first chunk also has the embedding, and the last one the head. Each chunk has at least one layer. Raises
    ValueError if there are more chunks than layers.
    """
    num_layers = len(layer_costs)
    if num_chunks > num_layers:
        raise ValueError(
            f"learner.num_stages * learner.num_chunks = {num_chunks}, but the model has only {num_layers} layers and "
            f"each chunk needs at least one: lower num_stages or num_chunks to a product of at most {num_layers}"
        )
    # best[end]: (maximum cost of a chunk, cuts) of the best split of layers[:end] into `chunk` chunks
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
    """Widths of a layer, in values per token."""

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
    """Return the forward operations per token of the matrix products of a layer."""
    return 2.0 * widths(config).num_weights


def _attention(config: PreTrainedConfig) -> float:
    """Return the forward operations per query-key pair of the attention of a layer: scores and weighted values."""
    return 4.0 * config.num_attention_heads * _head_size(config)


def _head(config: PreTrainedConfig) -> float:
    return HEAD_PASSES * 2.0 * config.vocab_size * config.hidden_size


def _embedding(config: PreTrainedConfig) -> float:
    return EMBEDDING_SHARE * config.vocab_size * config.hidden_size


def _head_size(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
