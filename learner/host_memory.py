"""What leaves a device: room for copies in host memory, and the weights of a frozen stage while a step trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weight_sync.tensors import pin

logger = logging.getLogger(__name__)

_ALIGNED_BYTES = 64
"""Tensors begin at multiples of this, as torch's own do."""


def host_room(tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    """Room in host memory for copies of some tensors, by their names; what is in it is undefined.

    `pinned`: for copies from and to a GPU, which wait for each other otherwise. All of it is then one piece, of just
    the bytes that it takes: torch's pinned memory has powers of two alone, of each tensor up to twice its size.
    """
    if not pinned:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    sizes = [-(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for tensor in tensors.values()]
    flat = torch.empty(sum(sizes), dtype=torch.uint8).numpy()
    if code := pin(flat):
        logger.warning(
            "CUDA could not pin %.1f GiB of host memory (error %d): copies to and from the GPU wait for each other. "
            "See how much memory this process, or its container, may lock",
            flat.nbytes / 2**30,
            code,
        )
    room: dict[str, Tensor] = {}
    start = 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        # a storage of its own: what writes a checkpoint copies a tensor that is a part of a larger one
        room[name] = torch.from_numpy(flat[start : start + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        start += size
    return room


class Offload:
    """Where the weights of a frozen stage are while a step trains; takes them away, and brings the same ones back.

        cpu    in the memory of the host; on a stage that computes there they stay where they are
        disk   in a file of the run, read when the stage is to score

    They come and go as a whole: a scoring runs many micro-batches through every layer, and fetching each layer for each
    of them, as hooks of layers would, moves the model that many times. What is tied has to be tied again.
    """

    def __init__(self, stage: nn.Module, device: torch.device, where: Literal["cpu", "disk"], file: Path) -> None:
        """Note the weights, or write them to the file anew; they stay where they are until `release`."""
        assert not any(parameter.requires_grad for parameter in stage.parameters()), "a stage that learns cannot leave"
        self.device = device
        """Where the stage computes."""
        self._stage = stage
        self._file = file if where == "disk" else None
        weights = {name: parameter.detach() for name, parameter in stage.named_parameters()}
        self._empty = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
        self._kept: dict[str, Tensor] = {}
        if self._file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: weight.to("cpu").contiguous() for name, weight in weights.items()}, file)
        elif device.type == "cpu":
            self._kept = weights
        else:
            self._kept = host_room(weights, pinned=device.type == "cuda")
            for name, weight in weights.items():
                self._kept[name].copy_(weight)

    def fetch(self) -> None:
        """Bring the weights to the device; nothing where they are there already."""
        if not next(self._stage.parameters()).is_meta:
            return
        if self._file is None:
            # what runs on the device next waits for them, and nobody changes what is copied from
            self._assign({name: weight.to(self.device, non_blocking=True) for name, weight in self._kept.items()})
            return
        with safe_open(self._file, framework="pt", device=str(self.device)) as opened:
            # copied out of the mapped file: products of tensors that stand at odd addresses differ in their last bits
            self._assign({name: opened.get_tensor(name).clone() for name in self._empty})

    def release(self) -> None:
        """Give the device's copy up."""
        self._assign(self._empty if self._file is not None or self.device.type != "cpu" else self._kept)

    def _assign(self, weights: dict[str, Tensor]) -> None:
        self._stage.load_state_dict(weights, strict=False, assign=True)
