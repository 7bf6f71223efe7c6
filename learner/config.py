"""The `[learner]` section: the pipeline, the batch, its updates, the optimizer and checkpoints."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from leeway.algorithms.base import CriticKind
from leeway.algorithms.registry import AlgorithmConfig
from leeway.common.user_input import Knob
from leeway.weight_sync.config import WeightSyncConfig

_STEP = "the buffer's records of draws depend on it"
ScheduleName = Literal["1f1b", "interleaved_1f1b", "zero_bubble", "fused"]


def stage_of(network: int, rank: int, num_stages: int) -> int:
    """Return the stage of a network on a rank; network 1, a critic in a fused schedule, has its stages reversed."""
    return rank if network == 0 else num_stages - 1 - rank


def default_most_held(num_stages: int) -> int:
    """Return the limit of micro-batches in flight for `fused`: 1.25 times that of 1F1B; a higher limit is no faster."""
    return num_stages + -(-num_stages // 4)


class LearnerConfig(BaseModel):
    """Settings of training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_stages: PositiveInt = Knob(2, "Pipeline stages, one process each.", basic=True)
    num_replicas: PositiveInt = Knob(
        1, "Number of data-parallel pipelines, each with num_stages processes.", basic=True
    )
    num_chunks: PositiveInt = Knob(
        1, "Model chunks per stage (interleaved_1f1b, zero_bubble): more chunks shrink bubbles but add traffic."
    )
    num_steps: PositiveInt = Knob(100, "Steps of the run, one batch each.", basic=True)
    groups_per_step: PositiveInt = Knob(32, "G, prompts per step, each with K samples.", basic=True, fixed=_STEP)
    num_minibatches: PositiveInt = Knob(
        1, "Minibatches of whole groups per batch, one update each.", basic=True, fixed=_STEP
    )
    num_epochs: PositiveInt = Knob(
        1, "Passes over the batch; num_minibatches * num_epochs updates per step.", basic=True, fixed=_STEP
    )
    token_budget: PositiveInt = Knob(
        1024, "Tokens per micro-batch; the longest prompt plus completion must fit.", basic=True
    )
    schedule: ScheduleName = Knob(
        "1f1b", "Pipeline schedule. fused: the passes of a critic model fill the policy's bubbles.", basic=True
    )
    precision: Literal["float32", "bfloat16", "float64"] = Knob(
        "float32",
        "Compute dtype. bfloat16 keeps float32 master weights and optimizer state, and adds 2 bytes per parameter; "
        "float64 is for comparing runs.",
        basic=True,
        fixed="the stored reference log-probabilities and the checkpoint of a float64 run have this precision",
    )
    activation_checkpointing: bool = Knob(
        False, "Store only the inputs of layers; recompute the rest in the backward pass.", basic=True
    )
    reference_offload: Literal["none", "cpu"] = Knob(
        "none", "cpu: keep the reference model in host memory during training."
    )
    learning_rate: PositiveFloat = Knob(1e-5, "Peak learning rate.", basic=True)
    critic_learning_rate: PositiveFloat | None = Knob(
        None, "Peak learning rate of a critic model or value head; unset: learning_rate."
    )
    warmup_steps: NonNegativeInt = Knob(10, "Steps of linear warm-up; repeated if num_steps is raised.", basic=True)
    lr_schedule: Literal["constant", "linear", "cosine"] = Knob("linear", "Decay after warm-up, over num_steps.")
    max_grad_norm: PositiveFloat = Knob(1.0, "Maximum gradient norm over all stages; critics are clipped separately.")
    checkpoint_every: PositiveInt = Knob(50, "Steps between checkpoints.", basic=True)
    cpus: float = Knob(0.5, "Ray CPUs and threads per stage.", ge=0)
    gpus: float = Knob(0.0, "GPUs per stage: 0 or 1.", basic=True, ge=0)
    gpu_memory_share: float | None = Knob(
        None, "Fraction of GPU memory per stage; unset: all, or 0.5 with launch.colocate.", gt=0, le=1
    )

    @property
    def memory_limit(self) -> float | None:
        """Fraction of its GPU memory that a stage may use; None means all of the memory."""
        if self.gpu_memory_share is None and 0 < self.gpus < 1:
            return self.gpus
        return self.gpu_memory_share

    @property
    def updates_per_step(self) -> int:
        """M, the maximum number of updates (optimizer steps) in a training step."""
        return self.num_minibatches * self.num_epochs

    def progress(self, update: int) -> float:
        """Return the fraction of the run's updates before this one, at most 1; skipped updates are counted."""
        return min(1.0, update / (self.num_steps * self.updates_per_step))

    def check(self, critic: CriticKind | None) -> None:
        """Raise ValueError for conflicting or unused keys that can be detected without the model.

        `critic` is the kind of critic that the algorithm trains.
        """
        chunks = f"learner.num_chunks = {self.num_chunks}"
        if self.num_chunks > 1 and self.schedule in ("1f1b", "fused"):
            raise ValueError(
                f"{chunks}, but learner.schedule = '{self.schedule}' supports one chunk per stage: use "
                "'interleaved_1f1b' or 'zero_bubble', or learner.num_chunks = 1"
            )
        if self.num_chunks > 1 and self.num_stages == 1:
            raise ValueError(
                f"{chunks}, but learner.num_stages = 1 has no bubble to fill: use learner.num_chunks = 1, or more "
                "stages"
            )
        if self.activation_checkpointing and self.schedule == "zero_bubble":
            raise ValueError(
                "learner.activation_checkpointing = true with learner.schedule = 'zero_bubble' would recompute every "
                "layer for each of its weights: turn checkpointing off, or use 'interleaved_1f1b' or '1f1b'"
            )
        if self.schedule == "fused" and self.num_stages == 1:
            raise ValueError(
                "learner.schedule = 'fused' with learner.num_stages = 1 has no bubble to fill: use '1f1b', or more"
                " stages"
            )
        if self.schedule == "fused" and critic != "model":
            raise ValueError(
                "learner.schedule = 'fused' needs a critic model, but the configured algorithm has none: "
                "use '1f1b', or set algorithm.baseline = 'critic' with off_policy_ppo"
            )
        if self.critic_learning_rate is not None and critic is None:
            raise ValueError(
                f"learner.critic_learning_rate = {self.critic_learning_rate:g}, but the configured algorithm "
                "has no critic: remove it, or set algorithm.baseline = 'value_head' or 'critic' with off_policy_ppo"
            )


class LearnerSections(Protocol):
    """Config sections that the learner reads; it reads the staleness bound from the contract of the run."""

    learner: LearnerConfig
    algorithm: AlgorithmConfig
    weight_sync: WeightSyncConfig
