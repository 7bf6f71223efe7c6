"""StageModule: a contiguous share of a Hugging Face decoder's layers.

The first stage owns the embedding, the last the final norm and the head; parameters keep the names of the
Hugging Face checkpoint, so loading, publishing and export need no translation. The last stage returns
log-probabilities, not logits: the schedule keeps every micro-batch's output, and V times less is kept.

A critic is a value head, one linear map from the normed hidden state to a number: on the policy beside its LM head,
or on a model of its own in place of it. It starts at zero, and is neither published nor exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from learner.attention import IMPLEMENTATION, AttentionLayout
from learner.hf_files import read_tensors, tensor_names
from learner.packing import PackedBatch
from learner.split import StageShare, share_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

VALUE_HEAD = "value_head"

Heads = Literal["token", "token_and_value", "value"]
"""What the last stage ends in: the LM head, both, or the value head alone."""

LOGITS_AT_ONCE = 2**24
"""Logits held at a time (64 MiB in float32); a larger head runs in chunks that backward computes again."""


class DeviceBatch:
    """A packed batch on the device of a stage, with what its layers need per micro-batch."""

    def __init__(self, packed: PackedBatch, device: torch.device) -> None:
        """Move a packed batch to a device."""
        self.packed = packed
        self.tokens_ML = torch.from_numpy(packed.tokens_ML).to(device)
        self.positions_ML = torch.from_numpy(packed.positions_ML).to(device)
        self.layouts = [AttentionLayout.build(bounds, packed.width, device) for bounds in packed.bounds]
        self.predicting = [torch.from_numpy(positions).to(device) for positions in packed.predicting]
        self.rotations: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        """Rotary cosines and sines by model and micro-batch: the same for all its layers and passes."""


class StageModule(nn.Module):
    """One stage: [1, L] tokens or [1, L, hidden] states in; states or, on the last stage, what the heads say out.

    That is [1, L]: the log-probability of the next token, or ("value") the value of the state before it; both are
    0 where the next token is not a completion token. With "token_and_value" it is [1, 2, L].
    """

    def __init__(self, whole: PreTrainedModel, share: StageShare, temperature: float, heads: Heads = "token") -> None:
        """Take this stage's share out of a whole model.

        Args:
            whole: a decoder of the Llama family (`ForCausalLM`), usually on the meta device.
            share: which layers are this stage's.
            temperature: of sampling; log-probabilities are those of logits / temperature.
            heads: what the last stage ends in.
        """
        super().__init__()
        body: Any = whole.model
        self.share = share
        self.temperature = temperature
        self.hidden_size = int(whole.config.hidden_size)
        self.vocab_size = int(whole.config.vocab_size)
        self.heads = heads
        self.tied = bool(whole.config.tie_word_embeddings) and heads != "value"
        """Are embedding and LM head one tensor?"""
        self.autocast_dtype: torch.dtype | None = None
        whole.config._attn_implementation = IMPLEMENTATION
        self.model: Any = nn.Module()
        self.model.rotary_emb = body.rotary_emb
        self.model.layers = nn.ModuleDict({str(i): body.layers[i] for i in range(share.first_layer, share.end_layer)})
        if share.is_first:
            self.model.embed_tokens = body.embed_tokens
        if share.is_last:
            self.model.norm = body.norm
            self._add_heads(whole)
        self.batch: DeviceBatch | None = None
        """What `forward`'s index refers to; set before a schedule runs."""

    def _add_heads(self, whole: PreTrainedModel) -> None:
        if self.heads != "value":
            head: Any = whole.lm_head
            if self.tied and self.share.is_first:
                head.weight = whole.model.embed_tokens.weight
            self.lm_head = head
        if self.heads != "token":
            wide = torch.promote_types(next(self.model.norm.parameters()).dtype, torch.float32)
            # made without a draw, so that the stages' random generators stay alike
            self.value_head = nn.Linear(self.hidden_size, 1, dtype=wide, device="meta").to_empty(device="cpu")
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, and of hidden states between stages."""
        return next(self.parameters()).dtype

    def output_shape(self, width: int) -> tuple[int, ...]:
        """Of the last stage's output for a micro-batch of `width` tokens."""
        return (1, 2, width) if self.heads == "token_and_value" else (1, width)

    def forward(self, states: Tensor, micro_batch: Tensor) -> Tensor:
        """Run micro-batch `micro_batch` ([1], int64) of the bound batch through this stage."""
        assert self.batch is not None, "bind a batch before running the stage"
        m = int(micro_batch)
        enabled = self.autocast_dtype is not None
        with torch.autocast(states.device.type, dtype=self.autocast_dtype or torch.bfloat16, enabled=enabled):
            hidden = self.model.embed_tokens(states) if self.share.is_first else states
            rotation = self.batch.rotations.get((self, m))
            if rotation is None:
                rotation = self.model.rotary_emb(hidden, position_ids=self.batch.positions_ML[m : m + 1])
                self.batch.rotations[self, m] = rotation
            for layer in self.model.layers.values():
                hidden = layer(hidden, position_embeddings=rotation, layout=self.batch.layouts[m])
            return self._output(hidden, m) if self.share.is_last else hidden

    def _output(self, hidden: Tensor, m: int) -> Tensor:
        """What the heads say where the next token is a completion token, 0 elsewhere: [1, L, hidden] -> `output_shape`.

        All of it is float32 or wider.
        """
        assert self.batch is not None
        where = self.batch.predicting[m]
        selected = self.model.norm(hidden[0].index_select(0, where))
        found: list[Tensor] = []
        if self.heads != "value":
            found.append(self._log_probabilities(selected, self.batch.tokens_ML[m].index_select(0, where + 1)))
        if self.heads != "token":
            found.append(self._values(selected))
        shape = self.output_shape(hidden.shape[1])
        empty = torch.zeros((len(found), shape[-1]), dtype=found[0].dtype, device=hidden.device)
        return empty.index_copy(1, where, torch.stack(found)).view(shape)

    def _log_probabilities(self, selected: Tensor, tokens: Tensor) -> Tensor:
        """Log pi of the given tokens: [n, hidden], [n] -> [n]."""
        chunk = max(1, LOGITS_AT_ONCE // self.vocab_size)
        if len(tokens) <= chunk:
            return self._score(selected, tokens)
        parts = zip(torch.split(selected, chunk), torch.split(tokens, chunk), strict=True)
        return torch.cat([checkpoint(self._score, *part, use_reentrant=False) for part in parts])

    def _values(self, selected: Tensor) -> Tensor:
        """Values of the states: [n, hidden] -> [n]. In float32 or wider also under autocast: they are regressed."""
        with torch.autocast(selected.device.type, enabled=False):
            values: Tensor = self.value_head(selected.to(self.value_head.weight.dtype))
        return values.squeeze(1)

    def _score(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Log softmax(logits / temperature) at the given tokens: [n, hidden], [n] -> [n], float32 or wider."""
        logits = self.lm_head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        return logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)

    def published_tensors(self) -> dict[str, Tensor]:
        """This stage's weights by checkpoint name; `lm_head.weight` always has its own entry on the last stage.

        A tied head must be sent as well: an engine that serves an untied copy would keep the old one. A value head
        is not: no engine knows it.
        """
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters() if not is_value_head(name)}
        if self.share.is_last:
            tensors[HEAD] = self.lm_head.weight.detach()
        return tensors

    def exported_tensors(self) -> dict[str, Tensor]:
        """This stage's weights for a Hugging Face folder: a tied head is left out, as its config says."""
        tensors = self.published_tensors()
        if self.tied:
            tensors.pop(HEAD, None)
        return tensors


def is_value_head(name: str) -> bool:
    """Is this parameter of a stage one of its value head's, which no checkpoint of the model has?"""
    return name.startswith(f"{VALUE_HEAD}.")


def load_stage(
    model_path: Path,
    rank: int,
    num_stages: int,
    *,
    temperature: float,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    heads: Heads = "token",
) -> StageModule:
    """Build a stage and read its own tensors, and no others, from a checkpoint folder.

    Raises:
        ValueError: the model is not of the Llama family, has fewer layers than stages, or lacks a tensor.
        FileNotFoundError: the folder has no safetensors checkpoint.
    """
    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    with init_empty_weights():
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    share = share_of(whole, rank, num_stages, has_lm_head=heads != "value")
    stage = StageModule(whole, share, temperature, heads)
    names = {name: name for name, _ in stage.named_parameters() if not is_value_head(name)}
    if stage.tied and HEAD in names and HEAD not in tensor_names(model_path):
        names[HEAD] = EMBEDDING
    tensors = read_tensors(model_path, names.values())
    # a clone, for an alias of two names would make the optimizer of one change the other
    state = {name: tensors[source].to(device=device, dtype=dtype, copy=True) for name, source in names.items()}
    stage.load_state_dict(state, strict=False, assign=True)
    if stage.tied and share.is_first and share.is_last:
        stage.lm_head.weight = stage.model.embed_tokens.weight
    left_on_meta = [name for name, parameter in stage.named_parameters() if parameter.is_meta]
    assert not left_on_meta, f"{left_on_meta} were not loaded"
    return stage.to(device)
