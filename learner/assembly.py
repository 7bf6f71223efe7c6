"""What a rank computes with, put together from its orders: the trained networks and the frozen reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig

from common.run import RunContext
from learner.config import LearnerConfig, LearnerSections
from learner.decoders import cost_of
from learner.mesh import Mesh
from learner.model import Heads, StageModule, load_stage
from learner.networks import Network, Networks
from learner.packing import CostModel, PackingRule
from learner.pipeline import Pipeline, micro_batch_rule
from learner.reference import Reference

LoadChunks = Callable[[Path, Heads], list[StageModule]]


def chunk_loader(config: LearnerConfig, temperature: float, mesh: Mesh, device: torch.device) -> LoadChunks:
    """A function that loads this rank's chunks of a checkpoint folder with the given heads.

    Stage p of P holds the chunks p, p + P, p + 2P, ... of P * learner.num_chunks.
    """
    num_stages, stage = mesh.place.num_stages, mesh.place.stage
    dtype = torch.float64 if config.precision == "float64" else torch.float32

    def load(path: Path, heads: Heads) -> list[StageModule]:
        chunks = [
            load_stage(
                path,
                chunk * num_stages + stage,
                num_stages * config.num_chunks,
                temperature=temperature,
                device=device,
                dtype=dtype,
                heads=heads,
                layers_per_chunk=config.layers_per_chunk,
                logprob_chunk_mib=config.logprob_chunk_mib,
                activation_checkpointing=config.activation_checkpointing,
            )
            for chunk in range(config.num_chunks)
        ]
        for chunk in chunks:
            chunk.autocast_dtype = torch.bfloat16 if config.precision == "bfloat16" else None
        return chunks

    return load


def build_networks(context: RunContext[LearnerSections], mesh: Mesh, device: torch.device) -> Networks:
    """The policy, and a critic where the algorithm needs one; all ranks call it together."""
    config, kind = context.config.learner, context.config.algorithm.needs.critic
    load = chunk_loader(config, context.temperature, mesh, device)
    policy = Network.build(load(context.model_path, "token_and_value" if kind == "head" else "token"), config, mesh)
    critic = Network.build(load(context.model_path, "value"), config, mesh) if kind == "model" else None
    return Networks(policy, critic, config, mesh)


def build_reference(context: RunContext[LearnerSections], networks: Networks) -> Reference:
    """The frozen reference, split like the policy, where the algorithm needs one."""
    config, mesh = context.config.learner, networks.mesh
    if not context.config.algorithm.needs.reference:
        return Reference(None, networks)
    chunks = chunk_loader(config, context.temperature, mesh, networks.policy.device)(context.reference_path, "token")
    for chunk in chunks:
        chunk.requires_grad_(False)
        if config.reference_offload != "none":
            chunk.offload(config.reference_offload, context.folder / "offload" / f"replica-{mesh.place.replica}")
    return Reference(Pipeline(chunks, mesh, config.schedule), networks)


def packing_rule(context: RunContext[LearnerSections]) -> PackingRule:
    """How batches of this run become micro-batches."""
    config = context.config.learner
    asked = micro_batch_rule(config.schedule, config.num_stages)
    return PackingRule(
        config.token_budget,
        num_replicas=config.num_replicas,
        min_micro_batches=asked.least,
        multiple=asked.multiple,
        cost=CostModel(*cost_of(AutoConfig.from_pretrained(context.model_path, local_files_only=True))),
    )
