"""The `[task]` section: where prompts come from and what rewards them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from common.user_input import Knob

MOST_HELDOUT = 1024
"""Held-out problems of a file where none are asked for by number: an eighth of a large file would take an evaluation
longer than the training."""


class _NamedReward(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: float = Knob(1.0, "What its reward is multiplied by before rewards are summed.")


class Judge(_NamedReward):
    """A language model behind an endpoint that speaks OpenAI's chat completions, as `vllm serve` does.

    Its rating is the last number of its answer. The reward is 0 at `worst` and 1 at `best`.
    """

    type: Literal["judge"]
    endpoint: str = Knob(..., "Base address, as http://HOST:8000/v1.", pattern=r"^https?://")
    model: str = Knob(..., "The model's name there.")
    prompt: str = Knob(..., "What it is asked: a template over {prompt}, {completion} and the columns of the task.")
    system_prompt: str | None = Knob(None, "Its system prompt.")
    worst: float = Knob(0.0, "The rating of the worst answer.")
    best: float = Knob(10.0, "The rating of the best; what lies outside is no rating.")
    max_tokens: PositiveInt = Knob(512, "Longest answer of the judge; one that is cut rates none.")
    timeout_s: PositiveFloat = Knob(120.0, "For one rating, with all waiting where the endpoint is busy (429) or away.")
    api_key_env: str | None = Knob(
        None, "Environment variable that holds the key of the endpoint, on every host of actors."
    )
    request: dict[str, Any] = Knob({}, "Further fields of the request, as reasoning_effort; temperature is 0.")

    @model_validator(mode="after")
    def _ratings_differ(self) -> Judge:
        if self.worst == self.best:
            raise ValueError(f"worst and best are both {self.best:g}, so no rating says anything; set them apart")
        return self


class Classifier(_NamedReward):
    """A sequence classifier of Transformers with one output, which is the reward, in one process beside each actor."""

    type: Literal["classifier"]
    path: str = Knob(..., "Folder of the model and its tokenizer.")
    chat: bool = Knob(False, "Score prompt and completion as turns of its tokenizer's chat template; else as one text.")
    device: str = Knob("cpu", "Where it computes: cpu, or cuda for a GPU of its actor.")
    dtype: Literal["float32", "bfloat16", "float16"] = Knob("float32", "Its precision.")


RewardModel = Annotated[Judge | Classifier, Field(discriminator="type")]


class _AnswerRule(_NamedReward):
    column: str | None = Knob(
        None,
        "Column with the right answer, or a list of right ones, as answer or reward_model[ground_truth]. "
        "Unset: answer, solution or ground_truth, whichever the rows have first. A row without one is not scored.",
    )


class MathRule(_AnswerRule):
    """1 where the completion's last answer equals the row's, by value for numbers, else by math-verify; else 0."""

    type: Literal["math"] = "math"
    answer_tag: str | None = Knob(None, "Read only what stands between <TAG> and </TAG>; unset: the whole completion.")


class ExactRule(_AnswerRule):
    """1 where the completion is the row's answer, but for white space around both, else 0."""

    type: Literal["exact"] = "exact"
    answer_tag: str | None = Knob(
        None, "Compare only what stands between <TAG> and </TAG>; unset: the whole completion."
    )
    ignore_case: bool = Knob(False, "Whether upper and lower case are the same.")


class ContainsRule(_AnswerRule):
    """1 where the row's answer stands somewhere in the completion, else 0."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = Knob(False, "Whether upper and lower case are the same.")


class RegexRule(_NamedReward):
    """1 where Python's `re` finds the pattern in the completion, else 0."""

    type: Literal["regex"] = "regex"
    pattern: str = Knob(..., "What re.search looks for; (?s), (?i) and the like may begin it.")
    column: str | None = Knob(
        None,
        "Column that the first group of the last match must equal, as in pattern = '#### (.+)'; unset: any "
        "match scores.",
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"the pattern {pattern[:80]!r} is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _a_column_is_held_against_a_group(self) -> RegexRule:
        if self.column is not None and not re.compile(self.pattern).groups:
            raise ValueError(f"column is set, but pattern {self.pattern[:80]!r} has no group (...) to compare with it")
        return self


class CodeRule(_NamedReward):
    """1 where the last Python block of the completion passes the tests of its row, else 0."""

    type: Literal["code"] = "code"
    column: str | None = Knob(
        None,
        "Column with the tests, in a form that docs/tasks.md lists. Unset: tests or test_list. A row "
        "without tests is not scored.",
    )
    partial: bool = Knob(False, "Reward the share of the tests that pass, instead of all or none.")
    timeout_s: PositiveFloat = Knob(
        10.0, "For all tests of a completion together; those that are not done by then have failed."
    )
    memory_mib: PositiveInt = Knob(1024, "What each process of a test's program may allocate.")
    require_isolation: bool = Knob(
        False, "Whether a run is refused where the kernel does not cut the programs off from network and files."
    )


RewardRule = Annotated[MathRule | CodeRule | ExactRule | ContainsRule | RegexRule, Field(discriminator="type")]
RULES: Mapping[str, RewardRule] = {rule.type: rule for rule in (MathRule(), CodeRule(), ExactRule(), ContainsRule())}
"""Rules that need no table, by the name that stands for them in `rewards`."""


class _TaskConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    template: str | None = Knob(
        None,
        "Prompt text; {name} is a column of the item, {metadata[name]} an entry of its metadata, "
        "and {name:compact} leaves out all white space. Unset: the column question.",
        basic=True,
    )
    chat: bool = Knob(False, "Wrap the prompt as a user turn of the tokenizer's chat template.", basic=True)
    system_prompt: str | None = Knob(None, "System turn; needs chat = true.", basic=True)
    rewards: tuple[str, ...] = Knob(
        (),
        "Reward functions as FILE.py:FUNCTION, rules by name (math, code, exact, contains, and those of "
        "reward_rules), and names of reward_models; their values are summed.",
        basic=True,
    )
    reward_rules: dict[str, RewardRule] = Knob(
        {}, "Rules that need more than their name: tables [task.reward_rules.NAME]."
    )
    reward_models: dict[str, RewardModel] = Knob({}, "Models that reward, by name: tables [task.reward_models.NAME].")
    reward_network: bool = Knob(
        True,
        "Whether reward functions have the network. If not, the kernel cuts their processes off from it, "
        "but for judges.",
        fixed="",
    )
    correct_at: float = Knob(
        1.0,
        "An answer with at least this reward counts as correct: a held-out one in an evaluation, any other "
        "for buffer.prompt_law = 'posterior'.",
    )
    teacher_column: str | None = Knob(
        None, "Column of a row with the name of its teacher, one of model.teachers; as domain or metadata[source]."
    )

    @model_validator(mode="after")
    def _a_system_turn_needs_a_chat(self) -> _TaskConfig:
        if self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt is set but chat = false, so it would be ignored; set chat = true")
        return self

    @model_validator(mode="after")
    def _every_table_of_a_reward_has_a_name_that_is_asked(self) -> _TaskConfig:
        for key, tables in (("reward_models", self.reward_models), ("reward_rules", self.reward_rules)):
            if odd := [name for name in tables if not name.isidentifier()]:
                raise ValueError(f"{key}.{odd[0]!r} is no name that metrics can carry; use letters, digits and _")
            if idle := sorted(tables.keys() - set(self.rewards)):
                raise ValueError(f"{key}.{idle[0]} is not in rewards, so it would be ignored; add its name there")
        if twice := sorted(self.reward_models.keys() & self.reward_rules.keys()):
            raise ValueError(f"{twice[0]} is a table of reward_models and of reward_rules; rename one")
        return self

    @property
    def named_rewards(self) -> dict[str, RewardModel | RewardRule]:
        """What may stand in `rewards` by its name: tables, and rules that need none."""
        return {**RULES, **self.reward_rules, **self.reward_models}


class ReasoningGymTask(_TaskConfig):
    """Any reasoning-gym dataset by name; scored by the dataset itself unless `rewards` are named."""

    type: Literal["reasoning_gym"]
    name: str = Knob(..., "Dataset of reasoning-gym, for example chain_sum.", basic=True)
    params: dict[str, Any] = Knob(
        {}, "Arguments of the dataset; seed, 0 unless given, is of its item stream, and decides no split.", basic=True
    )
    num_train: PositiveInt = Knob(4096, "Distinct training prompts.", basic=True)
    num_heldout: PositiveInt = Knob(1024, "Distinct held-out problems, split by question hash.", basic=True)
    answer_tag: str | None = Knob(
        None, "Score only what stands between <TAG> and </TAG>; unset: the whole completion.", basic=True
    )


class FileTask(_TaskConfig):
    """A JSONL or Parquet file of prompts, and reward functions in Python files."""

    type: Literal["file"]
    path: str = Knob(..., "JSONL or Parquet file; one row per prompt.", basic=True)
    heldout_path: str | None = Knob(
        None, "Held-out rows; unset: split `path` by a hash of the columns that template reads."
    )
    num_train: PositiveInt | None = Knob(None, "Distinct training prompts; unset: all there are.", basic=True)
    num_heldout: PositiveInt | None = Knob(
        None,
        "Distinct held-out problems, all of which are answered before and after training; unset: all "
        f"there are, {MOST_HELDOUT} at most.",
        basic=True,
    )


TaskConfig = Annotated[ReasoningGymTask | FileTask, Field(discriminator="type")]
