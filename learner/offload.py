"""Offload: where the weights of a frozen stage are while it does not score.

    cpu    in the memory of the host; on a stage that computes there they stay where they are
    disk   in a file of the run, read when the stage is to score

The stage's weights come and go as a whole: a scoring runs many micro-batches through every layer, and fetching each
layer for each of them, as hooks of layers would, moves the model that many times.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from learner.model import StageModule


class Offload:
    """Takes a stage's weights away, and brings the same ones back."""

    def __init__(self, stage: StageModule, where: Literal["cpu", "disk"], file: Path) -> None:
        """Note or write down the weights; they stay where they are until `release`.

        Args:
            stage: frozen: what it had learned would be lost.
            where: see the module.
            file: for "disk"; written anew.
        """
        assert not any(parameter.requires_grad for parameter in stage.parameters()), "a stage that learns cannot leave"
        self.device = stage.device
        """Where the stage computes."""
        self._stage = stage
        self._file = file if where == "disk" else None
        weights = {name: parameter.detach() for name, parameter in stage.named_parameters()}
        self._empty = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
        self._kept: dict[str, Tensor] = {}
        if self._file is None:
            self._kept = {name: weight.to("cpu") for name, weight in weights.items()}
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: weight.to("cpu").contiguous() for name, weight in weights.items()}, file)

    def fetch(self) -> None:
        """Bring the weights to the device; nothing where they are there already."""
        if not next(self._stage.parameters()).is_meta:
            return
        if self._file is None:
            self._assign({name: weight.to(self.device) for name, weight in self._kept.items()})
            return
        with safe_open(self._file, framework="pt", device=str(self.device)) as opened:
            # copied out of the mapped file: products of tensors that stand at odd addresses differ in their last bits
            self._assign({name: opened.get_tensor(name).clone() for name in self._empty})

    def release(self) -> None:
        """Give the device's copy up."""
        self._assign(self._empty if self._file is not None or self.device.type != "cpu" else self._kept)

    def _assign(self, weights: dict[str, Tensor]) -> None:
        self._stage.load_state_dict(weights, strict=False, assign=True)
        self._stage.tie()
