"""The `[task]` section: where prompts come from and what rewards them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

MOST_HELDOUT = 1024
"""Held-out problems of a file where none are asked for by number: an eighth of a large file would take an evaluation
longer than the training."""


class _TaskConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    template: str = Field(
        default="{question}",
        description="Prompt text; {name} is a column of the item, {metadata[name]} an entry of its metadata, "
        "and {name:compact} leaves out all white space.",
    )
    chat: bool = Field(default=False, description="Wrap the prompt as a user turn of the tokenizer's chat template.")
    system_prompt: str | None = Field(default=None, description="System turn; needs chat = true.")
    heldout_share: float = Field(
        default=0.125, gt=0, lt=1, description="Share of all questions whose hash sets them aside for evaluation."
    )
    rewards: tuple[str, ...] = Field(
        default=(), description="Reward functions as FILE.py:FUNCTION; their values are summed."
    )
    correct_at: float = Field(
        default=1.0, description="A held-out answer with at least this reward counts as correct in an evaluation."
    )

    @model_validator(mode="after")
    def _a_system_turn_needs_a_chat(self) -> _TaskConfig:
        if self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt is set but chat = false, so it would be ignored; set chat = true")
        return self


class ReasoningGymTask(_TaskConfig):
    """Any reasoning-gym dataset by name; scored by the dataset itself unless `rewards` are named."""

    type: Literal["reasoning_gym"]
    name: str = Field(description="Dataset of reasoning-gym, for example chain_sum.")
    params: dict[str, Any] = Field(default_factory=dict, description="Arguments of the dataset.")
    seed: int = Field(default=0, description="Seed of the dataset's item stream; it does not decide the split.")
    num_train: PositiveInt = Field(default=4096, description="Distinct training prompts.")
    num_heldout: PositiveInt = Field(default=1024, description="Distinct held-out problems, split by question hash.")
    answer_tag: str | None = Field(
        default=None, description="Score only what stands between <TAG> and </TAG>; unset: the whole completion."
    )


class FileTask(_TaskConfig):
    """A JSONL or Parquet file of prompts, and reward functions in Python files."""

    type: Literal["file"]
    path: str = Field(description="JSONL or Parquet file; one row per prompt.")
    question_column: str = Field(default="question", description="Column whose normalised text the split hashes.")
    heldout_path: str | None = Field(default=None, description="Held-out rows; unset: split `path` by question hash.")
    num_train: PositiveInt | None = Field(default=None, description="Distinct training prompts; unset: all there are.")
    num_heldout: PositiveInt | None = Field(
        default=None,
        description="Distinct held-out problems, all of which are answered before and after training; unset: all "
        f"there are, {MOST_HELDOUT} at most.",
    )


TaskConfig = Annotated[ReasoningGymTask | FileTask, Field(discriminator="type")]
