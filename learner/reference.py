"""Reference: frozen models that score every sample once: one for all, or several teachers, each for its own prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig

from common.run import RunContext
from learner.batch import StepBatch
from learner.config import LearnerSections
from learner.decoders import cost_of
from learner.mesh import Mesh
from learner.model import DeviceBatch
from learner.networks import gather_tokens, load_chunks, share_of
from learner.packing import CostModel, IntArray, PackingRule, micro_batches_asked
from learner.pipeline import Pipeline

Scores = dict[int, npt.NDArray[np.float32]]
"""Log-probabilities of a completion's tokens, by index of the trajectory in the batch."""


class Reference:
    """Scores what no earlier step has scored."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        teacher_of_prompt: bytes = b"",
    ) -> None:
        """Take this rank's chunks of the frozen models; none if the algorithm needs no reference.

        `dtype` is that of the log-probabilities which a loss reads. `teacher_of_prompt` gives the model of a prompt, by
        its id; empty if one scores all.
        """
        self.pipelines = tuple(pipelines)
        self._mesh = mesh
        self._device = device
        self._dtype = dtype
        self._teacher_of_prompt = np.frombuffer(teacher_of_prompt, np.uint8)

    def score(self, batch: StepBatch, on_device: DeviceBatch) -> tuple[Tensor | None, Scores]:
        """Return reference log-probabilities, and those computed anew. All ranks call it together.

        On the last stages [T], to float32 in any precision, NaN without a reference, and the new ones; None and nothing
        on the others. Off-loaded models leave the device after it.
        """
        reference_T = self._stored(batch) if self._mesh.place.is_last else None
        unscored = batch.unscored()
        scores: Scores = {}
        for pipeline, found in self._by_model(batch.prompt_B[unscored]):
            own = unscored[found]
            is_all = len(own) == batch.rows.num_rows
            packed = on_device if is_all else share_of(batch.pack(own), self._mesh, self._device)
            new_T = self._logprobs(pipeline, packed)
            if new_T is None or reference_T is None:
                continue
            where_T = torch.from_numpy(batch.tokens_of(own)).to(reference_T.device)
            reference_T[where_T] = new_T.to(reference_T.dtype)
            scores |= _by_sequence(new_T, own, np.diff(batch.bounds_T())[own])
        self._release()
        return reference_T, scores

    def _by_model(self, prompt_B: IntArray) -> Iterator[tuple[Pipeline, IntArray]]:
        """Yield the models that have some of these sequences, in the same order on all ranks, and which each has."""
        if not self.pipelines:
            return
        has_several = len(self._teacher_of_prompt) > 0
        number_B = self._teacher_of_prompt[prompt_B] if has_several else np.zeros_like(prompt_B)
        for number in np.unique(number_B):
            yield self.pipelines[number], np.flatnonzero(number_B == number)

    def _logprobs(self, pipeline: Pipeline, on_device: DeviceBatch) -> Tensor | None:
        """Of all T tokens, as stored, so that a step taken again reads the same numbers also in float64."""
        self._release(but=pipeline)
        found = gather_tokens(pipeline.forward_only(on_device), on_device, self._mesh)
        return None if found is None else found[0].to(torch.float32)

    def _release(self, but: Pipeline | None = None) -> None:
        for pipeline in self.pipelines:
            for module in pipeline.modules if pipeline is not but else ():
                module.release()

    def _stored(self, batch: StepBatch) -> Tensor:
        """Return what earlier steps have scored, NaN elsewhere: [T]."""
        column = batch.rows.column("reference_logprobs")
        known_T = np.full(len(batch.sequence_T), np.nan)
        known_T[np.asarray(column.is_valid())[batch.sequence_T]] = column.flatten()
        return torch.from_numpy(known_T).to(self._device, self._dtype)


def _by_sequence(logprobs_T: Tensor, sequences: IntArray, lengths: IntArray) -> Scores:
    return dict(zip(sequences.tolist(), np.split(logprobs_T.cpu().numpy(), np.cumsum(lengths)[:-1]), strict=True))


def build_reference(context: RunContext[LearnerSections], mesh: Mesh, device: torch.device) -> Reference:
    """Load the frozen models, each split like the policy, if the algorithm needs some; all ranks call it together."""
    config = context.config.learner
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    if not context.config.algorithm.needs.reference:
        return Reference((), mesh, device, dtype)
    pipelines = []
    for number, path in enumerate(context.reference_paths):
        chunks = load_chunks(path, "token", config, context.temperature, mesh, device, frozen=True)
        for chunk in chunks:
            if config.reference_offload != "none":
                away = context.folder / "offload" / f"replica-{mesh.place.replica}" / f"model-{number}"
                chunk.offload(config.reference_offload, away)
        pipelines.append(Pipeline(chunks, mesh, config.schedule))
    return Reference(pipelines, mesh, device, dtype, context.teacher_of_prompt)


def packing_rule(context: RunContext[LearnerSections]) -> PackingRule:
    config = context.config.learner
    least, multiple = micro_batches_asked(config.schedule, config.num_stages)
    return PackingRule(
        config.token_budget,
        num_replicas=config.num_replicas,
        min_micro_batches=least,
        multiple=multiple,
        cost=CostModel(*cost_of(AutoConfig.from_pretrained(context.model_path, local_files_only=True))),
        unit=context.config.algorithm.needs.separable or "sequence",
        num_stages=config.num_stages,
    )
