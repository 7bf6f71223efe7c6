"""Checkpoints: what a restart needs, written by all stages together and visible only once complete.

    .step-00000050.tmp/   torch.distributed.checkpoint writes and syncs; the lead adds meta.json
    step-00000050/        renamed when all of it is on disk

Tensors are saved under names of the whole model, so a run may restart with another number of stages; those of a
critic model under "critic." before the name.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from learner.model import EMBEDDING, HEAD
from learner.networks import Network, Networks
from weight_sync.files import replace_durably, write_durably

logger = logging.getLogger(__name__)

META_NAME = "meta.json"
_COMPLETE = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Progress:
    """Where training stands."""

    step: int
    """Steps finished, skipped ones included."""
    version: int
    """Optimizer steps taken: up to learner.num_minibatches * learner.num_epochs a step."""
    incarnation: int
    """Of the learner that wrote the checkpoint."""


class Checkpoints:
    """Saves and restores one run's checkpoints. `save` and `restore` are called by all stages together."""

    def __init__(self, folder: Path, keep: int, rank: int, num_stages: int) -> None:
        """Look after a folder.

        Args:
            folder: of the checkpoints; created where missing.
            keep: how many complete checkpoints stay.
            rank: this stage; the last one leads.
            num_stages: how many stages save together.
        """
        self._folder = folder
        self._keep = keep
        self._lead = num_stages - 1
        self._is_lead = rank == self._lead
        folder.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        found = (_COMPLETE.fullmatch(path.name) for path in self._folder.iterdir() if (path / META_NAME).exists())
        return sorted(int(match[1]) for match in found if match)

    def save(self, networks: Networks, progress: Progress) -> None:
        """Write a checkpoint; on the lead it is durable once this returns.

        Raises:
            CheckpointException: a stage could not write, for example because the disk is full.
        """
        final = self._path(progress.step)
        temporary = final.with_name(f".{final.name}.tmp")
        if self._is_lead:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        save(_state(networks), checkpoint_id=temporary)
        if not self._is_lead:
            return
        write_durably(temporary / META_NAME, f"{json.dumps(asdict(progress))}\n".encode())
        if final.exists():
            shutil.rmtree(final)
        replace_durably(temporary, final)
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self._path(step))

    def restore(self, networks: Networks) -> Progress | None:
        """Read the newest checkpoint that is whole.

        Returns:
            Where training stood, or None where there is no checkpoint.

        Raises:
            RuntimeError: there are checkpoints, and none can be read.
        """
        candidates = self.steps()
        while True:
            chosen = torch.tensor([candidates[-1] if candidates else -1])
            # the lead decides: another stage may see a folder that is just being removed
            dist.broadcast(chosen, src=self._lead)
            step = int(chosen)
            if step < 0:
                return None
            if self._read(step, networks):
                progress = Progress(**json.loads((self._path(step) / META_NAME).read_text()))
                logger.info("resumed from %s", self._path(step))
                return progress
            candidates = [candidate for candidate in candidates if candidate < step]
            left = torch.tensor([len(candidates)])
            dist.broadcast(left, src=self._lead)
            if not int(left):
                raise RuntimeError(
                    f"no checkpoint in {self._folder} can be read: they are damaged, or were written with another "
                    "[algorithm] (without its critic). To start from the model again, move that folder away"
                )

    def _read(self, step: int, networks: Networks) -> bool:
        state = _state(networks)
        try:
            load(state, checkpoint_id=self._path(step))
        except (CheckpointException, OSError, EOFError) as error:
            logger.warning("checkpoint %s cannot be read, trying the one before: %s", self._path(step), error)
            return False
        torch.set_rng_state(state["rng"])
        return True

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _state(networks: Networks) -> dict[str, Tensor]:
    """Tensors by the name under which they are saved; reading changes them in place."""
    tensors = _tensors_of(networks.policy)
    if networks.critic is not None:
        tensors |= {f"critic.{name}": tensor for name, tensor in _tensors_of(networks.critic).items()}
    # every stage draws from the same seed, so one state serves all
    return {**tensors, "rng": torch.get_rng_state()}


def _tensors_of(network: Network) -> dict[str, Tensor]:
    tensors = {name: parameter.detach() for name, parameter in network.module.named_parameters()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in network.optimizer.state().items()}
    if network.module.tied:
        # embedding and head are one tensor on two stages: saved once, read by both
        tensors = {name.replace(HEAD, EMBEDDING): tensor for name, tensor in tensors.items()}
    return tensors
