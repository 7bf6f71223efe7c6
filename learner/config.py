"""The `[learner]` section: the pipeline, the batch, its updates, the optimizer and checkpoints."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from algorithms.base import CriticKind
from algorithms.corrections import EssAction
from algorithms.registry import AlgorithmConfig
from buffer.config import BufferConfig
from weight_sync.config import WeightSyncConfig

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "fused"]


def stage_of(network: int, rank: int, num_stages: int) -> int:
    """Which stage of a network a rank has; the second network (a critic under the fused schedule) runs backwards."""
    return rank if network == 0 else num_stages - 1 - rank


def default_most_held(num_stages: int) -> int:
    """Micro-batches that the fused schedule keeps at once: a quarter more than 1F1B; more gains nothing."""
    return num_stages + -(-num_stages // 4)


class LearnerConfig(BaseModel):
    """Knobs of training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_stages: PositiveInt = Field(default=2, description="Pipeline stages, one process each.")
    num_replicas: PositiveInt = Field(
        default=1,
        description="Data-parallel replicas of the pipeline: each trains a share of every batch, and gradients are "
        "summed once per update. There are num_replicas * num_stages processes.",
    )
    num_chunks: PositiveInt = Field(
        default=1,
        description="Model chunks per stage, which interleaved_1f1b and zero_bubble take in turn; more chunks make "
        "smaller bubbles and more traffic.",
    )
    layers_per_chunk: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="Layers of each of the num_stages * num_chunks chunks, in order, of the model that is trained. "
        "Unset, and of a frozen model with another number of layers: balanced by computed cost.",
    )
    num_steps: PositiveInt = Field(default=100, description="Steps of the run; each trains one draw.")
    groups_per_step: PositiveInt = Field(default=32, description="G, prompts (groups of K samples) per step.")
    num_minibatches: PositiveInt = Field(
        default=1,
        description="Into how many parts, of whole groups, a step divides its draw; each is an optimizer step, and a "
        "policy version.",
    )
    num_epochs: PositiveInt = Field(
        default=1, description="How often a step goes over its draw. A step is num_minibatches * num_epochs updates."
    )
    token_budget: PositiveInt = Field(
        default=1024, description="Tokens of a micro-batch; the longest sample (prompt and completion) has to fit."
    )
    schedule: ScheduleName = Field(
        default="1f1b",
        description="Pipeline schedule of the training pass. fused: a critic model's passes fill the policy's bubbles.",
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="Of compute; with bfloat16 too, what is trained and its optimizer are float32, and 2 bytes per "
        "parameter more hold what is computed with. float64 is for comparing runs.",
    )
    residual: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the states between layers and stages, with precision = 'bfloat16' alone: bfloat16 moves and "
        "keeps half of them, and rounds them as a 16-bit engine does.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Keep only each layer's input and compute the rest again in the backward pass."
    )
    reference_offload: Literal["none", "cpu", "disk"] = Field(
        default="none", description="Where the frozen reference model is kept while a step trains."
    )
    score_while_waiting: bool = Field(
        default=True,
        description="While the learner waits for a batch, have the reference score what has arrived for later steps. "
        "How samples are packed for it depends on when they come, so scores differ by rounding from run to run.",
    )
    learning_rate: PositiveFloat = Field(default=1e-5, description="Peak learning rate.")
    critic_learning_rate: PositiveFloat | None = Field(
        default=None, description="Peak learning rate of a critic: of its model, or of the value head. Unset: as above."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps of linear warm-up.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Decay of the learning rate after warm-up, over num_steps."
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="AdamW decoupled weight decay.")
    max_grad_norm: PositiveFloat = Field(
        default=1.0,
        description="Gradient norm over all stages is clipped to this; a critic's, model or value head, on its own.",
    )
    ess_budget: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the samples that must count (effective sample size): an update below it is treated as "
        "ess_action says. Unset: the effective sample size is logged and does not act.",
    )
    ess_action: EssAction = Field(
        default="scale_lr",
        description="Below ess_budget: the learning rate falls by sqrt(ess / ess_budget), or the update is dropped and "
        "the actors catch up.",
    )
    checkpoint_every: PositiveInt = Field(default=50, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(
        default=2, description="How many checkpoints stay; the buffer holds the draws since the oldest of them."
    )
    checkpoint_timeout_s: PositiveFloat = Field(
        default=600.0, description="A checkpoint that takes longer to write ends the learner."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where stages compute.")
    cpus: float = Field(
        default=0.5,
        ge=0,
        description="Ray CPUs reserved per stage, which computes with as many threads, one at least.",
    )
    gpus: float = Field(default=0.0, ge=0, description="GPUs per stage: 0 or 1.")
    gpu_memory_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that a stage may take, beside which an engine can come back at any time. "
        "Unset: all, and with launch.colocate 0.5.",
    )
    collective_timeout_s: PositiveFloat = Field(
        default=120.0,
        description="A stage that waits longer for another raises, naming it; then all are started again. Where they "
        "load and export, launch.startup_timeout_s holds instead.",
    )
    batch_timeout_s: PositiveFloat = Field(
        default=600.0, description="A learner that gets no batch for so long raises, naming who owes it."
    )

    @property
    def memory_limit(self) -> float | None:
        """The share of its GPU that a stage may take; None: all of it."""
        if self.gpu_memory_share is None and 0 < self.gpus < 1:
            return self.gpus
        return self.gpu_memory_share

    @property
    def updates_per_step(self) -> int:
        """M, optimizer steps that a step takes, at most."""
        return self.num_minibatches * self.num_epochs

    def alone(self, gpus: float, cpus: float) -> LearnerConfig:
        """That of a rank which has a whole model, forward only, on so many GPUs or on none."""
        one = dict.fromkeys(("num_stages", "num_replicas", "num_chunks"), 1)
        whole = {"layers_per_chunk": None, "schedule": "gpipe", "reference_offload": "none"}
        return self.model_copy(update={**one, **whole, "gpus": gpus, "cpus": cpus, "device": "auto" if gpus else "cpu"})

    def check(self, critic: CriticKind | None) -> None:
        """Refuse keys that are at odds or say nothing, as far as no model is needed to see it.

        `critic` is what the algorithm trains beside the policy.

        Raises:
            ValueError: names the keys at odds.
        """
        if self.residual == "bfloat16" and self.precision != "bfloat16":
            raise ValueError(
                f"learner.residual = 'bfloat16' says nothing with learner.precision = '{self.precision}': set "
                "learner.precision = 'bfloat16' too, or leave learner.residual out"
            )
        chunks = f"learner.num_chunks = {self.num_chunks}"
        if self.num_chunks > 1 and self.schedule in ("gpipe", "1f1b", "fused"):
            raise ValueError(
                f"{chunks}, but learner.schedule = '{self.schedule}' takes one chunk per stage: use "
                "'interleaved_1f1b' or 'zero_bubble', or learner.num_chunks = 1"
            )
        if self.num_chunks > 1 and self.num_stages == 1:
            raise ValueError(
                f"{chunks}, but learner.num_stages = 1 has no bubble to fill: use learner.num_chunks = 1, or more "
                "stages"
            )
        if self.activation_checkpointing and self.schedule == "zero_bubble":
            raise ValueError(
                "learner.activation_checkpointing = true with learner.schedule = 'zero_bubble' would compute every "
                "layer again for each of its weights: turn it off, or use 'interleaved_1f1b' or '1f1b'"
            )
        if self.schedule == "fused" and self.num_stages == 1:
            raise ValueError(
                "learner.schedule = 'fused' with learner.num_stages = 1 has no bubble to fill: use '1f1b', or more"
                " stages"
            )
        if self.schedule == "fused" and critic != "model":
            raise ValueError(
                "learner.schedule = 'fused' runs a critic model's passes beside the policy's, and the algorithm as it "
                "is configured has none: use '1f1b', or set algorithm.critic = 'model' with off_policy_ppo"
            )
        if self.critic_learning_rate is not None and critic is None:
            raise ValueError(
                f"learner.critic_learning_rate = {self.critic_learning_rate:g}, but the algorithm as it is configured "
                "has no critic: remove it, or set algorithm.baseline = 'critic' with off_policy_ppo"
            )
        if self.ess_action != "scale_lr" and self.ess_budget is None:
            raise ValueError(
                f"learner.ess_action = '{self.ess_action}' says what becomes of an update below learner.ess_budget, "
                "which is unset: set it too, or leave learner.ess_action out"
            )
        layers, num_chunks = self.layers_per_chunk, self.num_stages * self.num_chunks
        if layers is not None and len(layers) != num_chunks:
            raise ValueError(
                f"learner.layers_per_chunk has {len(layers)} numbers, and "
                f"learner.num_stages * learner.num_chunks = {num_chunks}"
            )


class LearnerSections(Protocol):
    """What the learner reads of the config of a run; how old a sample may be, the contract of the run says."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    buffer: BufferConfig
    weight_sync: WeightSyncConfig
