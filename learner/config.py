"""The `[learner]` section: the pipeline, the batch, its updates, the optimizer and checkpoints."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from algorithms.base import CriticKind
from algorithms.registry import AlgorithmConfig
from common.user_input import Knob
from weight_sync.config import WeightSyncConfig

_STEP = "the buffer has recorded draws of that many groups and updates"
ScheduleName = Literal["1f1b", "interleaved_1f1b", "zero_bubble", "fused"]


def stage_of(network: int, rank: int, num_stages: int) -> int:
    """Which stage of a network a rank has; the second network (a critic under the fused schedule) runs backwards."""
    return rank if network == 0 else num_stages - 1 - rank


def default_most_held(num_stages: int) -> int:
    """Micro-batches that the fused schedule keeps at once: a quarter more than 1F1B; more gains nothing."""
    return num_stages + -(-num_stages // 4)


class LearnerConfig(BaseModel):
    """Knobs of training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_stages: PositiveInt = Knob(2, "Pipeline stages, one process each.", basic=True)
    num_replicas: PositiveInt = Knob(
        1, "Data-parallel replicas of the pipeline; there are num_replicas * num_stages processes.", basic=True
    )
    num_chunks: PositiveInt = Knob(
        1, "Model chunks per stage, for interleaved_1f1b and zero_bubble: smaller bubbles, more traffic."
    )
    num_steps: PositiveInt = Knob(100, "Steps of the run; each trains one draw.", basic=True)
    groups_per_step: PositiveInt = Knob(32, "G, prompts (groups of K samples) per step.", basic=True, fixed=_STEP)
    num_minibatches: PositiveInt = Knob(
        1, "Parts, of whole groups, that a draw is divided into; each is an update.", basic=True, fixed=_STEP
    )
    num_epochs: PositiveInt = Knob(
        1, "Passes over the draw; a step is num_minibatches * num_epochs updates.", basic=True, fixed=_STEP
    )
    token_budget: PositiveInt = Knob(
        1024, "Tokens of a micro-batch; the longest sample (prompt and completion) has to fit.", basic=True
    )
    schedule: ScheduleName = Knob(
        "1f1b", "Of the training pass. fused: a critic model's passes fill the policy's bubbles.", basic=True
    )
    precision: Literal["float32", "bfloat16", "float64"] = Knob(
        "float32",
        "Of compute; with bfloat16 too, what is trained and its optimizer are float32, and 2 bytes per "
        "parameter more hold what is computed with. float64 is for comparing runs.",
        basic=True,
        fixed="the stored reference log-probabilities are of it, and a float64 run keeps a checkpoint of it",
    )
    activation_checkpointing: bool = Knob(
        False, "Keep only each layer's input and compute the rest again in the backward pass.", basic=True
    )
    reference_offload: Literal["none", "cpu"] = Knob(
        "none", "Where the frozen reference model is kept while a step trains."
    )
    learning_rate: PositiveFloat = Knob(1e-5, "Peak learning rate.", basic=True)
    critic_learning_rate: PositiveFloat | None = Knob(
        None, "Peak learning rate of a critic: of its model, or of the value head. Unset: as above."
    )
    warmup_steps: NonNegativeInt = Knob(10, "Steps of linear warm-up, also into a longer schedule.", basic=True)
    lr_schedule: Literal["constant", "linear", "cosine"] = Knob(
        "linear", "Decay of the learning rate after warm-up, over num_steps."
    )
    max_grad_norm: PositiveFloat = Knob(
        1.0, "Gradient norm over all stages is clipped to this; a critic's, model or value head, on its own."
    )
    checkpoint_every: PositiveInt = Knob(50, "Steps between checkpoints.", basic=True)
    cpus: float = Knob(0.5, "Ray CPUs reserved per stage, and threads that it computes with.", ge=0)
    gpus: float = Knob(0.0, "GPUs per stage: 0 or 1.", basic=True, ge=0)
    gpu_memory_share: float | None = Knob(
        None, "Share of a GPU's memory for a stage. Unset: all, or 0.5 with launch.colocate.", gt=0, le=1
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

    def progress(self, update: int) -> float:
        """Return the share of the run's updates before this one, at most 1; both counted as if none were skipped."""
        return min(1.0, update / (self.num_steps * self.updates_per_step))

    def check(self, critic: CriticKind | None) -> None:
        """Refuse keys that are at odds or say nothing, as far as no model is needed: ValueError names them.

        `critic` is what the algorithm trains beside the policy.
        """
        chunks = f"learner.num_chunks = {self.num_chunks}"
        if self.num_chunks > 1 and self.schedule in ("1f1b", "fused"):
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
                "is configured has none: use '1f1b', or set algorithm.baseline = 'critic' with off_policy_ppo"
            )
        if self.critic_learning_rate is not None and critic is None:
            raise ValueError(
                f"learner.critic_learning_rate = {self.critic_learning_rate:g}, but the algorithm as it is configured "
                "has no critic: remove it, or set algorithm.baseline = 'value_head' or 'critic' with off_policy_ppo"
            )


class LearnerSections(Protocol):
    """What the learner reads of the config of a run; how old a sample may be, the contract of the run says."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    weight_sync: WeightSyncConfig
