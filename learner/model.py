"""StageModule: a contiguous range of the layers of a Hugging Face decoder.

The first stage owns the embedding, the last one the final norm and the head. Parameters keep the names of the Hugging
Face checkpoint. The last stage returns log-probabilities instead of logits: the schedule stores the outputs of every
micro-batch, and logits would be larger by a factor of the vocabulary size.

A critic is a value head, a linear map from the normed hidden state to a scalar. A value head is a second head of the
policy, or the only head of a separate model. A value head is initialized to zero, and neither published nor exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leeway.common.hf_folder import HEAD, ModelFolderError, damaged, file_of_each_tensor, stored_tensors
from leeway.learner.attention import IMPLEMENTATION, AttentionLayout
from leeway.learner.decoders import StageShare, family_of, layer_types, logit_softcap, rotation_kinds, split_layers
from leeway.learner.device import Offload
from leeway.learner.kernels import fuse
from leeway.learner.packing import PackedBatch
from leeway.learner.products import (
    COMPUTED,
    LogitRule,
    embed,
    linear,
    narrow_norms,
    round_parameters,
    token_logprobs,
)

EMBEDDING = "model.embed_tokens.weight"
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Suffix of buffers that old checkpoints contain but models compute."""
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""safetensors dtype codes of unquantized weights."""

VALUE_HEAD = "value_head"

Heads = Literal["token", "token_and_value", "value"]
"""Heads of the last stage: the LM head, the LM head and a value head, or only a value head."""


class DeviceBatch:
    """A packed batch of one replica on the device of a stage.

    The constructor copies everything except the attention grids that are used without flash attention. A copy during a
    pass would block until the device finishes all earlier work.
    """

    def __init__(self, packed: PackedBatch, device: torch.device) -> None:
        self.packed = packed
        self.tokens_ML = torch.from_numpy(packed.tokens_ML).to(device)
        self.positions_ML = torch.from_numpy(packed.positions_ML).to(device)
        self.num_tokens = [int(places.max()) + 1 for places in packed.places]
        """Per micro-batch: number of tokens before the padding."""
        self.layouts = [
            AttentionLayout.build(bounds, device, places)
            for bounds, places in zip(packed.bounds, packed.places, strict=True)
        ]
        self.predicting = [torch.from_numpy(positions).to(device) for positions in packed.predicting]
        self.predicted = [torch.from_numpy(tokens).to(device) for tokens in packed.predicted]
        self.completions = [
            torch.from_numpy(packed.output_T[where_T] - m * packed.width).to(device)
            for m, where_T in enumerate(packed.predicted)
        ]
        """Per micro-batch: positions of its completion tokens, in the order of `predicted`."""
        self.output_T = torch.from_numpy(packed.output_T).to(device)


class StageModule(nn.Module):
    """One stage or chunk, which maps [1, L] tokens or [1, L, hidden] states to states, or to the output of the heads.

    The head output is [1, L]: the log-probability of each token, or ("value") the value of the state before it; 0 for
    tokens that are not completion tokens. With "token_and_value", the output is [1, 2, L].

    All shapes have the token budget L, but only the tokens before the padding of a micro-batch are computed. States of
    padding are 0 in the forward pass, and their gradients are 0 in the backward pass.
    """

    def __init__(
        self,
        whole: PreTrainedModel,
        share: StageShare,
        rule: LogitRule,
        heads: Heads = "token",
        activation_checkpointing: bool = False,
    ) -> None:
        """Take the layers of `share` from a decoder (`ForCausalLM`) of a known family, usually on the meta device.

        With `activation_checkpointing`, layers store only their input and recompute the rest in the backward pass.
        """
        super().__init__()
        body: Any = whole.model
        self.share = share
        self.rule = rule
        self.hidden_size = int(whole.config.hidden_size)
        self.heads = heads
        self.tied = bool(whole.config.tie_word_embeddings) and heads != "value"
        """Whether embedding and LM head are one tensor."""
        self.activation_checkpointing = activation_checkpointing
        self.masters: dict[str, nn.Parameter] = {}
        """Float32 master weights by name, for parameters that are rounded copies of them."""
        self._is_rounded = False
        whole.config._attn_implementation = IMPLEMENTATION
        self._layer_types = layer_types(whole.config)
        self._rotation_kinds = rotation_kinds(whole.config)
        self.model: Any = nn.Module()
        self.model.rotary_emb = body.rotary_emb
        self.model.layers = nn.ModuleDict({str(i): body.layers[i] for i in range(share.first_layer, share.end_layer)})
        if share.is_first:
            self.model.embed_tokens = body.embed_tokens
        if share.is_last:
            self.model.norm = body.norm
            self._add_heads(whole)
        self._batch: DeviceBatch | None = None
        self._offload: Offload | None = None

    def _add_heads(self, whole: PreTrainedModel) -> None:
        if self.heads != "value":
            self.lm_head: Any = whole.lm_head
            self.tie()
        if self.heads != "token":
            wide = torch.promote_types(next(self.model.norm.parameters()).dtype, torch.float32)
            # created without random numbers, so that the random generators of all stages stay in sync
            self.value_head = nn.Linear(self.hidden_size, 1, dtype=wide, device="meta").to_empty(device="cpu")
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def device(self) -> torch.device:
        """Compute device of the stage, also while its parameters are offloaded."""
        return next(self.parameters()).device if self._offload is None else self._offload.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def states_dtype(self) -> torch.dtype:
        """Dtype of hidden states within stages and between them."""
        return torch.float32 if self._is_rounded else self.dtype

    def add_gradients_in_place(self) -> None:
        """Add gradients of matrices directly to `grad`. Autograd would store, widen and add each product.

        Requires a schedule that computes input and weight gradients together: one graph node computes both.
        """
        self.rule = replace(self.rule, adds_in_place=True)
        for module in self.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.__dict__["forward"] = partial(linear, module)

    def compute_in_bfloat16(self) -> None:
        """Round weights, except the value head, and run products in bfloat16; keep float32 masters and states."""
        self._is_rounded = True
        self.masters = round_parameters(self, exclude=is_value_head)
        self.tie()
        narrow_norms(self.model.layers)
        self.rule = replace(self.rule, is_fused=fuse(self.model, self.device))

    @property
    def batch(self) -> DeviceBatch | None:
        """The batch that `forward` indexes; None between passes. Setting a batch fetches offloaded weights."""
        return self._batch

    @batch.setter
    def batch(self, batch: DeviceBatch | None) -> None:
        self._batch = batch
        if self._offload is not None and batch is not None:
            self._offload.fetch()
            self.tie()

    def release(self) -> None:
        """Free the device copy of offloaded weights until a batch is set; do nothing if the stage is not offloaded."""
        assert self._batch is None, "a pass is in progress"
        if self._offload is not None:
            self._offload.release()
            self.tie()

    def offload(self) -> None:
        """Keep the weights of this frozen stage in host memory between passes from now on."""
        self._offload = Offload(self, self.device)
        self.release()

    @property
    def num_heads(self) -> int:
        """Number of outputs per token of the last stage."""
        return 2 if self.heads == "token_and_value" else 1

    def output_shape(self, width: int) -> tuple[int, ...]:
        """Return the shape of the last stage's output for a micro-batch of `width` tokens."""
        return (1, 2, width) if self.heads == "token_and_value" else (1, width)

    def forward(self, states: Tensor, micro_batch: Tensor) -> Tensor:
        """Run micro-batch `micro_batch` ([1], int64) of the bound batch through this stage."""
        assert self._batch is not None, "set `batch` before running the stage"
        m = int(micro_batch)
        width = states.shape[1]
        states = states[:, : self._batch.num_tokens[m]]
        # autocast casts operands that are still float32: their products would be slow, or fail on mixed dtypes
        with torch.autocast(states.device.type, dtype=COMPUTED, enabled=self._is_rounded):
            if self.share.is_first:
                states = embed(self.model.embed_tokens, states, adds_in_place=self.rule.adds_in_place)
            hidden = self._run_layers(states, m)
            if self.share.is_last:
                return self._output(hidden, m, width)
        return F.pad(hidden, (0, 0, 0, width - hidden.shape[1]))

    def _run_layers(self, hidden: Tensor, m: int) -> Tensor:
        """Run the layers: [1, T, hidden] -> [1, T, hidden]."""
        batch = self._batch
        assert batch is not None
        positions = batch.positions_ML[m : m + 1, : hidden.shape[1]]
        rotations = {
            kind: self.model.rotary_emb(hidden, positions, **kwargs) for kind, kwargs in self._rotation_kinds.items()
        }
        for index, layer in self.model.layers.items():
            options: dict[str, Any] = {
                "position_embeddings": rotations[self._layer_types[int(index)]],
                "layout": batch.layouts[m],
            }
            if self.activation_checkpointing and torch.is_grad_enabled():
                # layers draw no random numbers: dropout is rejected
                hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **options)
            else:
                hidden = layer(hidden, **options)
        return hidden

    def _output(self, hidden: Tensor, m: int, width: int) -> Tensor:
        """Return the output of the heads from [1, T, hidden], float32 or wider; 0 except for completion tokens."""
        assert self._batch is not None
        where = self._batch.completions[m]
        selected = self.model.norm(hidden[0].index_select(0, self._batch.predicting[m]))
        found: list[Tensor] = []
        if self.heads != "value":
            tokens = self._batch.tokens_ML[m].index_select(0, where)
            found.append(token_logprobs(selected, self.lm_head.weight, tokens, self.rule))
        if self.heads != "token":
            found.append(self._values(selected))
        empty = torch.zeros((len(found), width), dtype=found[0].dtype, device=hidden.device)
        return empty.index_copy(1, where, torch.stack(found)).view(self.output_shape(width))

    def _values(self, selected: Tensor) -> Tensor:
        """Return the values of states, [n, hidden] -> [n], in float32 or wider even under autocast, for regression."""
        with torch.autocast(selected.device.type, enabled=False):
            return self.value_head(selected.to(self.value_head.weight.dtype)).squeeze(1)

    def tie(self) -> None:
        """Make embedding and head one parameter, if this stage has both and they are tied."""
        if self.tied and self.share.is_first and self.share.is_last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the trained weights by parameter name."""
        return {name: self.masters.get(name, parameter) for name, parameter in self.named_parameters()}

    def published_tensors(self, *, rounded: bool = False) -> dict[str, Tensor]:
        """Return the weights of this stage by checkpoint name; the last stage always has `lm_head.weight`.

        A tied head is included: an engine that serves an untied copy would otherwise keep the old head. A value head is
        excluded. With `rounded`, return the weights that modules compute with.
        """
        weights = dict(self.named_parameters()) if rounded else self.weights()
        tensors = {name: weight.detach() for name, weight in weights.items() if not is_value_head(name)}
        if self.share.is_last and HEAD not in tensors:
            tensors[HEAD] = tensors[EMBEDDING]
        return tensors

    def exported_tensors(self) -> dict[str, Tensor]:
        """Return the weights of this stage for a Hugging Face folder, without a tied head."""
        return {name: tensor for name, tensor in self.published_tensors().items() if self.stored_name(name) == name}

    def stored_name(self, name: str) -> str:
        """Return the name under which a parameter is stored; a tied head is stored as the embedding."""
        return name.replace(HEAD, EMBEDDING) if self.tied else name


def is_value_head(name: str) -> bool:
    """Return whether this parameter belongs to a value head, which model checkpoints do not contain."""
    return name.startswith(f"{VALUE_HEAD}.")


def load_stage(
    model_path: Path,
    index: int,
    total: int,
    *,
    temperature: float,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    heads: Heads = "token",
    activation_checkpointing: bool = False,
) -> StageModule:
    """Build chunk `index` (from 0) of `total` and load only its tensors from a checkpoint, cast to `dtype`.

    Raises ValueError if the model family is unknown, the model cannot be split into `total` chunks, or its files are
    damaged or do not match its config; FileNotFoundError without a safetensors checkpoint.
    """
    whole = _empty_model(model_path, dtype)
    split = split_layers(whole.config, total, has_lm_head=heads != "value", recomputed=activation_checkpointing)
    _compute_buffers(whole)
    rule = LogitRule(temperature, logit_softcap(whole.config))
    share = StageShare(index, total, *split[index])
    stage = StageModule(whole, share, rule, heads, activation_checkpointing)
    named = {name: parameter for name, parameter in stage.named_parameters() if not is_value_head(name)}
    # a separate head in a tied checkpoint is ignored
    shapes = {stage.stored_name(name): tuple(parameter.shape) for name, parameter in named.items()}
    # copied one tensor at a time, so that the file's pages are released at once
    stored = {name: tensor.to(device, dtype, copy=True) for name, tensor in _read_tensors(model_path, shapes)}
    state = {name: stored[stage.stored_name(name)] for name in named}
    stage.load_state_dict(state, strict=False, assign=True)
    stage.tie()
    left_on_meta = [n for n, tensor in (*stage.named_parameters(), *stage.named_buffers()) if tensor.is_meta]
    assert not left_on_meta, f"{left_on_meta} were not loaded"
    return stage.to(device)


def check_checkpoint(model_path: Path) -> None:
    """Raise any error that `load_stage` would raise on a rank, but read only config.json and file headers."""
    whole = _empty_model(model_path, torch.float32)
    # named_parameters() lists a tied head as the embedding
    _files_of(model_path, {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()})


def _empty_model(model_path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the whole model on the meta device; raise ModelFolderError if the checkpoint has unknown tensors."""
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    family_of(config)
    with torch.device("meta"):
        whole: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _check_names(model_path, whole.state_dict())
    return whole


def _compute_buffers(whole: PreTrainedModel) -> None:
    """Create buffers that modules compute on construction, which the meta device prevented."""
    body: Any = whole.model
    body.rotary_emb = type(body.rotary_emb)(whole.config)
    embedding = body.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):  # Gemma
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=embedding.weight.dtype)


def _check_names(folder: Path, known: Iterable[str]) -> None:
    found = {name for name in file_of_each_tensor(folder) if not name.endswith(_COMPUTED_SUFFIX)}
    unknown = sorted(found - set(known))
    if unknown:
        raise ModelFolderError(
            f"checkpoint {folder} has {len(unknown)} tensors that the model of its config.json lacks, such as "
            f"{unknown[0]}: its weights do not match its config.json. Download the checkpoint again, or set another "
            "model_path"
        )


def _read_tensors(folder: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors as stored, one at a time; to save memory, drop each before reading the next."""
    for path, names in _files_of(folder, shapes).items():
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:  # safe_open checks more than `_check_tensors`
            raise damaged(path, error) from error
        with opened as file:
            for name in names:
                yield name, file.get_tensor(name)


def _files_of(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[Path, list[str]]:
    """Return the names of the tensors to read from each file; raise ModelFolderError if one is missing or unusable."""
    file_of = file_of_each_tensor(folder)
    missing = sorted(shapes.keys() - file_of.keys())
    if missing:
        raise ModelFolderError(
            f"checkpoint {folder} has no tensor {missing[0]} ({len(missing)} of {len(shapes)} are missing): its "
            "weights do not match its config.json. Download the checkpoint again, or set another model_path"
        )
    files: dict[Path, list[str]] = {}
    for name in sorted(shapes, key=lambda name: (file_of[name], name)):
        files.setdefault(folder / file_of[name], []).append(name)
    for path, names in files.items():
        _check_tensors(path, {name: tuple(shapes[name]) for name in names})
    return files


def _check_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    stored = stored_tensors(path)
    for name, shape in shapes.items():
        if name not in stored:
            raise ModelFolderError(f"{path} has no tensor {name}, but its index lists it: download the file again")
        if stored[name].shape != shape:
            raise ModelFolderError(
                f"{path}: tensor {name} has shape {list(stored[name].shape)}, but config.json implies {list(shape)}: "
                "the weights belong to another model. Download the checkpoint again, or set another model_path"
            )
        if stored[name].code not in _PLAIN:
            raise ModelFolderError(
                f"{path}: tensor {name} is stored as {stored[name].code}, but the learner trains plain weights: use a "
                "checkpoint in float32, bfloat16 or float16"
            )
