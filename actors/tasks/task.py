"""Task: training prompts by id, held-out problems, and reward functions; PromptCodec: prompts to token ids."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from common.names import did_you_mean


class TaskError(ValueError):
    """The `[task]` section asks for something that cannot be had; the text names the key and the file."""


def among_known(name: str, known: Iterable[str]) -> str:
    """A clause that lists what is known and, where one is close, which name was probably meant."""
    names = sorted({str(one) for one in known})
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"known: {shown or 'none'}{did_you_mean(name, names)}"


Scores = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and what is known of it."""

    question: str
    """What the split hashed."""
    text: str
    """The prompt after the template, before any chat template: what reward functions get."""
    columns: Mapping[str, Any]
    """JSON-safe: what reward functions get, and what is stored with every trajectory."""
    source: Mapping[str, Any] = field(repr=False, compare=False)
    """The item as its dataset made it."""
    token_ids: list[int] = field(default_factory=list)
    """The encoded prompt; empty until `Task.encoded`."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A named function from completions to rewards. Sync ones run in a thread, async ones on the event loop."""

    name: str
    call: Callable[[Sequence[Problem], Sequence[str]], Scores | Awaitable[Scores]]

    @property
    def is_async(self) -> bool:
        """Must its result be awaited?"""
        return inspect.iscoroutinefunction(self.call)


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a run must know of a task. The fingerprint is equal where two processes see the same prompts."""

    num_train: int
    num_heldout: int
    fingerprint: str


@dataclass(frozen=True)
class Task:
    """Prompt ids are 0..num_train-1 and mean the same in every process."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: tuple[RewardFunction, ...]

    def prompt(self, prompt_id: int) -> Problem:
        """The training problem of this id.

        Raises:
            TaskError: there is no such prompt, so buffer and actor disagree about the task.
        """
        if not 0 <= prompt_id < len(self.train):
            raise TaskError(
                f"prompt {prompt_id} was leased but this actor's task has {len(self.train)} training prompts; "
                "the buffer was opened for another [task]: check num_train and the task's files"
            )
        return self.train[prompt_id]

    def facts(self) -> TaskFacts:
        """Sizes and a hash over every prompt."""
        digest = blake2b(digest_size=8)
        for problem in (*self.train, *self.heldout):
            digest.update(problem.text.encode() + b"\0")
        return TaskFacts(len(self.train), len(self.heldout), digest.hexdigest())

    def encoded(self, encode: Callable[[list[str]], list[list[int]]], max_prompt_tokens: int) -> Task:
        """The same task with every prompt turned into token ids.

        Raises:
            TaskError: prompts are empty or too long; says how many, names the longest and what it needs.
        """
        train = encode([problem.text for problem in self.train])
        heldout = encode([problem.text for problem in self.heldout])
        self._check_lengths(train, heldout, max_prompt_tokens)
        return replace(self, train=_with_ids(self.train, train), heldout=_with_ids(self.heldout, heldout))

    def _check_lengths(self, train: list[list[int]], heldout: list[list[int]], most: int) -> None:
        named = [
            (f"{half} prompt {index}", problem, len(ids))
            for half, problems, encoded in (("training", self.train, train), ("held-out", self.heldout, heldout))
            for index, (problem, ids) in enumerate(zip(problems, encoded, strict=True))
            if not 0 < len(ids) <= most
        ]
        if not named:
            return
        of_all = f"of the task's {len(self.train) + len(self.heldout)} prompts"
        name, problem, length = max(named, key=lambda each: each[2])
        if length == 0:
            raise TaskError(
                f"{len(named)} {of_all} have no token at all, {name} the first ({problem.question[:80]!r}): see "
                "task.template"
            )
        num_long = sum(length > most for _, _, length in named)
        raise TaskError(
            f"{num_long} {of_all} are longer than actors.max_prompt_tokens = {most}; the longest, {name}, has {length} "
            f"tokens: {problem.text[:80]!r}. Set actors.max_prompt_tokens = {length}, shorten task.template, or take "
            "the long questions out of the data"
        )


def _with_ids(problems: Sequence[Problem], token_ids: list[list[int]]) -> list[Problem]:
    return [replace(problem, token_ids=ids) for problem, ids in zip(problems, token_ids, strict=True)]


def json_safe(row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy made of JSON types only: tuples become lists, numbers of numpy plain, anything else its text."""
    safe: dict[str, Any] = json.loads(json.dumps(row, default=_plain, skipkeys=True))
    return safe


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    return str(value)


class PromptCodec:
    """Encodes prompts, as they are or as a user turn of a chat, and decodes completions."""

    def __init__(self, folder: Path, chat: bool, system_prompt: str | None) -> None:
        """Load the tokenizer of a local folder; with `chat` each prompt is wrapped in its chat template.

        Raises:
            TaskError: no tokenizer in the folder, or no chat template although `chat` is set.
        """
        from transformers import AutoTokenizer  # imports torch; loading a configuration must not

        if not folder.is_dir():
            raise TaskError(f"model folder {folder} does not exist, so there is no tokenizer to encode prompts with")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise TaskError(f"model folder {folder} holds no tokenizer that can be loaded: {error}") from error
        if chat and not self._tokenizer.chat_template:
            raise TaskError(f"task.chat = true, but the tokenizer in {folder} has no chat template; set chat = false")
        self._chat = chat
        self._system_prompt = system_prompt

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each prompt, with the special tokens that its tokenizer puts in front."""
        if not self._chat:
            return self._ids(texts, special=True)
        head = [{"role": "system", "content": self._system_prompt}] if self._system_prompt is not None else []
        turns = [[*head, {"role": "user", "content": text}] for text in texts]
        # The chat template writes its special tokens as text, so none may be added when encoding.
        rendered = [
            self._tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in turns
        ]
        return self._ids(rendered, special=False)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens such as the end of sequence."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
