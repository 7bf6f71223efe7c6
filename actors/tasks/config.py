"""The `[task]` section: the source of prompts, and the reward functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from leeway.common.user_input import Knob, Reference

MAX_HELDOUT = 1024
"""Maximum number of held-out problems of a file if num_heldout is unset. Without this bound, an evaluation on an eighth
of a large file would take longer than the training."""


HUB_DATA = "hf://"
"""Prefix of a source of rows on the Hugging Face Hub."""
DATA_SOURCE = "data_source"
"""Column that selects the reward of a row by task.reward_by_source, as in rows for verl."""


class _NamedReward(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Judge(_NamedReward):
    """A language model behind an endpoint with OpenAI's chat completions API, such as `vllm serve`.

    The rating is the last number of the model's answer. The reward is 0 for rating `worst` and 1 for rating `best`.
    """

    type: Literal["judge"]
    endpoint: str = Knob(..., "Base URL, for example http://HOST:8000/v1.", pattern=r"^https?://")
    model: str = Knob(..., "Model name at the endpoint.")
    prompt: str = Knob(..., "User turn, with {prompt}, {completion} and the task's columns.")
    system_prompt: str | None = Knob(None, "System turn.")
    worst: float = Knob(0.0, "Rating of the worst answer.")
    best: float = Knob(10.0, "Rating of the best answer; a number out of range is invalid.")
    max_tokens: PositiveInt = Knob(512, "Maximum tokens of an answer; a truncated answer is invalid.")
    timeout_s: PositiveFloat = Knob(120.0, "Timeout of a rating, with retries if the endpoint is busy (429) or down.")
    api_key_env: str | None = Knob(None, "Environment variable with the API key, set on every actor host.")
    request: dict[str, Any] = Knob({}, "Further request fields, such as reasoning_effort; temperature is 0.")

    @model_validator(mode="after")
    def _ratings_differ(self) -> Judge:
        if self.worst == self.best:
            raise ValueError(f"worst and best are both {self.best:g}, so ratings cannot differ; set different values")
        return self


class Classifier(_NamedReward):
    """A Transformers sequence classifier with one output, the reward. Each actor runs the model in an extra process."""

    type: Literal["classifier"]
    path: str = Knob(..., "Folder of model and tokenizer.")
    chat: bool = Knob(False, "Use the model's chat template; else join prompt and completion.")
    device: str = Knob("cpu", "cpu, or cuda for a GPU of the actor.")
    dtype: Literal["float32", "bfloat16", "float16"] = Knob("float32", "Model precision.")


RewardModel = Annotated[Judge | Classifier, Field(discriminator="type")]


class _AnswerRule(_NamedReward):
    column: str | None = Knob(
        None,
        "Column with the correct answer or a list of them; unset: the first of answer, solution, ground_truth "
        "and reward_model[ground_truth]. A row without a value is not scored.",
    )


class MathRule(_AnswerRule):
    """Reward 1 if the completion's last answer equals the row's (numbers by value, others by math-verify), else 0."""

    type: Literal["math"] = "math"
    answer_tag: str | None = Knob(None, "Read only the text inside <TAG>; unset: the whole completion.")


class ExactRule(_AnswerRule):
    """Reward 1 if the completion equals the row's answer, ignoring surrounding white space; else 0."""

    type: Literal["exact"] = "exact"
    answer_tag: str | None = Knob(None, "Read only the text inside <TAG>; unset: the whole completion.")
    ignore_case: bool = Knob(False, "Ignore case.")


class ContainsRule(_AnswerRule):
    """Reward 1 if the completion contains the row's answer; else 0."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = Knob(False, "Ignore case.")


class RegexRule(_NamedReward):
    """Reward 1 if Python's `re` finds the pattern in the completion; else 0."""

    type: Literal["regex"] = "regex"
    pattern: str = Knob(..., "Pattern for re.search.")
    column: str | None = Knob(
        None,
        "Column that the first group of the last match must equal, as in '#### (.+)'; unset: any match scores.",
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"the pattern {pattern[:80]!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _a_column_needs_a_group(self) -> RegexRule:
        if self.column is not None and not re.compile(self.pattern).groups:
            raise ValueError(f"column is set, but pattern {self.pattern[:80]!r} has no group (...) for the column")
        return self


class CodeRule(_NamedReward):
    """Reward 1 if the last Python block of the completion passes the tests of its row; else 0."""

    type: Literal["code"] = "code"
    column: str | None = Knob(
        None,
        "Column with the tests (formats: docs/tasks.md); unset: tests or test_list. A row without tests is not scored.",
    )
    partial: bool = Knob(False, "Reward the fraction of tests that pass, instead of all or nothing.")
    timeout_s: PositiveFloat = Knob(10.0, "Timeout of all tests of a completion together; unfinished tests fail.")
    memory_mib: PositiveInt = Knob(1024, "Memory limit per process.")
    require_isolation: bool = Knob(
        False, "Reject the run if the kernel cannot isolate programs from network and files."
    )


RewardRule = Annotated[MathRule | CodeRule | ExactRule | ContainsRule | RegexRule, Field(discriminator="type")]
RULES: Mapping[str, RewardRule] = {rule.type: rule for rule in (MathRule(), CodeRule(), ExactRule(), ContainsRule())}
"""Rules that need no table of options, by their name in `rewards`."""


class _TaskConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    template: str | None = Knob(
        None,
        "Prompt text with columns as {name}, {metadata[name]} or, without white space, {name:compact}; unset: "
        "the prompt is a column.",
        basic=True,
    )
    chat: bool = Knob(False, "Wrap the prompt as a user turn of the chat template.", basic=True)
    system_prompt: str | None = Knob(None, "System turn; needs chat = true.", basic=True)
    chat_template: str | None = Knob(None, "Jinja file that replaces the chat template of the tokenizer.")
    chat_template_kwargs: dict[str, Any] = Knob(
        {}, "Arguments of the chat template, for example { enable_thinking = false }."
    )
    rewards: tuple[str, ...] = Knob(
        (),
        "Rewards to sum: FILE.py:FUNCTION, rules (math, code, exact, contains, names in reward_rules) and names "
        "in reward_models.",
        basic=True,
    )
    reward_rules: dict[str, RewardRule] = Knob({}, "Rules with options: tables [task.reward_rules.NAME].")
    reward_models: dict[str, RewardModel] = Knob({}, "Reward models: tables [task.reward_models.NAME].")
    reward_weights: dict[str, float] = Knob({}, "Weight of each reward in the sum, by its name; unset: 1.")
    normalise_rewards: bool = Knob(False, "Standardise each reward within its group before the sum, in training.")
    informative_rewards: tuple[str, ...] = Knob((), "Rewards that decide whether a group has equal rewards; unset: all")
    overlong_penalty: dict[Literal["from", "to"], PositiveInt] | None = Knob(
        None, "Training penalty of long answers: 0 up to `from` tokens, linearly to -1 at `to`."
    )
    stop: tuple[Annotated[str, Field(min_length=1)] | int, ...] = Knob(
        (), "Texts and token ids that also end an answer."
    )
    prefill_in_completion: bool = Knob(True, "Start completions with what the prompt has of the answer, as <think>.")
    reward_network: bool = Knob(
        True,
        "Whether reward functions have network access; judges always do.",
        fixed="",
    )
    correct_at: float = Knob(
        1.0,
        "Minimum reward of a correct answer, in evaluations and for buffer.prompt_law = 'posterior'.",
    )
    teacher_column: str | None = Knob(
        None, "Column that names a row's teacher in model.teachers, for example metadata[source]."
    )

    @model_validator(mode="after")
    def _a_system_turn_needs_a_chat(self) -> _TaskConfig:
        if self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt has no effect with chat = false; set chat = true")
        return self

    @model_validator(mode="after")
    def _every_reward_table_is_in_rewards(self) -> _TaskConfig:
        for key, tables in (("reward_models", self.reward_models), ("reward_rules", self.reward_rules)):
            if odd := [name for name in tables if not name.isidentifier()]:
                raise ValueError(f"{key}.{odd[0]!r} is not a valid metric name; use letters, digits and _")
            if idle := sorted(tables.keys() - set(self.rewards)):
                raise ValueError(f"{key}.{idle[0]} has no effect: add '{idle[0]}' to rewards")
        if twice := sorted(self.reward_models.keys() & self.reward_rules.keys()):
            raise ValueError(f"{twice[0]} is in both reward_models and reward_rules; rename one table")
        return self

    @model_validator(mode="after")
    def _weights_and_limits_are_valid(self) -> _TaskConfig:
        names, limits = self.reward_names, self.overlong_penalty
        for key in ("reward_weights", "informative_rewards"):
            if unknown := [name for name in getattr(self, key) if name not in names]:
                raise ValueError(f"{key} names '{unknown[0]}', but rewards has only {', '.join(names)}")
        if names and math.isclose(math.fsum(self.weights(names).values()), 0.0, abs_tol=1e-9):
            raise ValueError("reward_weights: the weights of all rewards sum to 0; change a weight, or remove a reward")
        if limits is not None and not (len(limits) == 2 and limits["from"] < limits["to"]):
            raise ValueError("overlong_penalty needs two numbers of tokens, as in { from = 512, to = 640 }")
        return self

    @property
    def reward_names(self) -> list[str]:
        """Return the names of the rewards, as in metrics; a dataset that scores answers itself has its own name."""
        return [each.rpartition(":")[2] for each in self.rewards] or [getattr(self, "name", "")]

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        return {name: self.reward_weights.get(name, 1.0) for name in names}

    def length_penalty(self, num_tokens: int) -> float | None:
        """Return the penalty of an answer, from -1 to 0 (arXiv 2503.14476, equation 13); None if unset."""
        if self.overlong_penalty is None:
            return None
        low, high = self.overlong_penalty["from"], self.overlong_penalty["to"]
        return -min(1.0, max(0, num_tokens - low) / (high - low))

    @property
    def named_rewards(self) -> dict[str, RewardModel | RewardRule]:
        """Return the rewards that `rewards` may name: tables, and rules that need no table."""
        return {**RULES, **self.reward_rules, **self.reward_models}


class ReasoningGymTask(_TaskConfig):
    """Any reasoning-gym dataset by name; the dataset itself scores answers unless `rewards` is set."""

    type: Literal["reasoning_gym"]
    name: str = Knob(..., "Dataset of reasoning-gym, for example chain_sum.", basic=True)
    params: dict[str, Any] = Knob(
        {}, "Arguments of the dataset; seed (default 0) selects its items, but not the split.", basic=True
    )
    num_train: PositiveInt = Knob(4096, "Number of distinct training prompts.", basic=True)
    num_heldout: PositiveInt = Knob(1024, "Number of distinct held-out problems, chosen by question hash.", basic=True)
    answer_tag: str | None = Knob(None, "Read only the text inside <TAG>; unset: the whole completion.", basic=True)


class FileTask(_TaskConfig):
    """Prompts from files or a data set on the Hub, and reward functions in Python files."""

    type: Literal["file"]
    path: str = Knob(
        ...,
        "JSONL, Parquet or CSV file with one row per prompt; a folder or pattern (DIR/*.parquet) of such files; or "
        "hf://ORG/NAME?split=train&revision=COMMIT.",
        basic=True,
    )
    heldout_path: str | None = Knob(
        None, "Source of held-out rows, as `path`; unset: split `path` by a hash of the prompt's columns."
    )
    question_column: str | None = Knob(
        None,
        "Column of the prompt: text or a list of messages; unset: the first of prompt, messages and question.",
        basic=True,
    )
    filter: Reference | None = Knob(None, "FILE.py:NAME, a function that returns whether to keep a row.")
    on_long_prompt: Literal["refuse", "skip"] = Knob(
        "refuse", "Whether prompts longer than actors.max_prompt_tokens are an error, or are skipped."
    )
    reward_by_source: dict[str, str] = Knob(
        {}, "Reward of each value of the column data_source; rewards that are not named here score all rows."
    )
    num_train: PositiveInt | None = Knob(None, "Number of distinct training prompts; unset: all.", basic=True)
    num_heldout: PositiveInt | None = Knob(
        None,
        f"Number of distinct held-out problems; unset: all, up to {MAX_HELDOUT}.",
        basic=True,
    )

    @model_validator(mode="after")
    def _prompt_and_sources_are_consistent(self) -> FileTask:
        if self.template is not None and self.question_column is not None:
            raise ValueError("template and question_column both define the prompt; remove one of them")
        names = self.reward_names
        if unknown := [name for name in self.reward_by_source.values() if name not in names]:
            raise ValueError(f"reward_by_source names '{unknown[0]}', but rewards has only {', '.join(names)}")
        return self

    @property
    def source_columns(self) -> tuple[str, ...]:
        return (DATA_SOURCE,) if self.reward_by_source else ()


TaskConfig = Annotated[ReasoningGymTask | FileTask, Field(discriminator="type")]
