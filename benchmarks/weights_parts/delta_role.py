"""What a step changes: real optimizer steps at one learning rate, and the delta of each in bfloat16."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.weights_parts.training import Trainer
from weight_sync.delta import decode_delta, encode_delta
from weight_sync.tensors import host_bytes

ITEM_BYTES = 2


class Role:
    """Trains, and takes the differences."""

    def __init__(
        self,
        *,
        model: str,
        samples: str,
        scratch: str,
        learning_rate: float,
        groups_per_step: int,
        snapshots: str,
        spread: bool,
    ) -> None:
        """Load the model.

        Args:
            model: checkpoint folder.
            samples: file of `samples_role`.
            scratch: a folder of this measurement.
            learning_rate: of AdamW.
            groups_per_step: prompts of a step.
            snapshots: folder for the weights of the last two versions, which other measurements send; "": none.
            spread: begin as `Trainer.spread` says.
        """
        self._trainer = Trainer(
            Path(model), Path(samples), Path(scratch), learning_rate=learning_rate, groups_per_step=groups_per_step
        )
        self._snapshots = snapshots
        if spread:
            self._trainer.spread()

    def boundary_share(self) -> float:
        """As of the trainer."""
        return self._trainer.boundary_share()

    def steps(self, *, num_steps: int) -> list[dict[str, float]]:
        """Steps, and what each changed.

        Returns:
            Of each step: `unchanged` (share of the values that are the same in bfloat16), `delta_bytes`,
            `full_bytes`, `encode_s`, `decode_s`, `step_s` and `norm` of the gradient.
        """
        old = self._rounded()
        rounds: list[dict[str, float]] = []
        for number in range(num_steps):
            if self._snapshots and number == num_steps - 1:
                self._save("before")
            start = time.perf_counter()
            norm = self._trainer.step()
            step_s = time.perf_counter() - start
            new = self._rounded()
            rounds.append({**differences(new, old), "step_s": step_s, "norm": norm})
            old = new
        if self._snapshots:
            self._save("after")
        return rounds

    def close(self) -> None:
        """End the process group."""
        self._trainer.close()

    def _rounded(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in self._trainer.tensors().items()}

    def _save(self, name: str) -> None:
        """As float32: what a sender wants in bfloat16 it rounds itself."""
        tensors = {key: tensor.clone() for key, tensor in self._trainer.tensors().items()}
        save_file(tensors, Path(self._snapshots) / f"{name}.safetensors")


def differences(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> dict[str, float]:
    """The delta of all tensors, tried: it has to give the new bytes back.

    Args:
        new: of the version, bfloat16.
        old: of its parent.
    """
    found = dict.fromkeys(("delta_bytes", "full_bytes", "encode_s", "decode_s"), 0.0)
    num_same = num_values = 0
    for name, tensor in new.items():
        num_same += int((tensor == old[name]).sum())
        num_values += tensor.numel()
        ours, theirs = host_bytes(tensor), host_bytes(old[name])
        start = time.perf_counter()
        encoding, blob = encode_delta(ours, theirs, ITEM_BYTES)
        encoded = time.perf_counter()
        back = decode_delta(encoding, memoryview(blob), theirs, ITEM_BYTES)
        found["decode_s"] += time.perf_counter() - encoded
        found["encode_s"] += encoded - start
        found["delta_bytes"] += len(blob)
        found["full_bytes"] += len(ours)
        if bytes(back) != bytes(ours):
            raise RuntimeError(f"the delta of {name} does not give its bytes back")
    return {**found, "unchanged": num_same / num_values}
