"""Task: training prompts by id, held-out problems, and reward functions; PromptCodec: prompts to token ids."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from actors.tasks.config import FileTask, ReasoningGymTask, RewardModel, RewardRule
from common.user_input import did_you_mean

MOST_LOOKED_AT = 10_000
"""Prompts whose length is looked at before a run starts; its actors look at all."""
MOST_CHARACTERS = 4_000_000
"""Of those prompts together; the longest is looked at even if it has more."""


class TaskError(ValueError):
    """The `[task]` section asks for something that cannot be had; the text names the key and the file."""


def among_known(name: str, known: Iterable[str]) -> str:
    """A clause that lists what is known and, where one is close, which name was probably meant."""
    names = sorted({str(one) for one in known})
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"known: {shown or 'none'}{did_you_mean(name, names)}"


def first_line(error: BaseException) -> str:
    """What a library says first of what went wrong; the kind of the error where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class NoScore:
    """In the place of a score: this sample has none, and no other is to blame."""

    why: str
    """What failures are counted by, so it names no sample."""
    detail: str = ""


TOOK_TOO_LONG = "took too long"
"""The `why` of a sample whose own limit of time was over: it is not tried again."""
Scores = Sequence[float | NoScore | None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and what is known of it."""

    question: str
    """What the split hashed."""
    text: str
    """The prompt after the template, before any chat template: what reward functions get."""
    columns: Mapping[str, Any]
    """JSON-safe: what reward functions get, and what is stored with every trajectory."""
    index: int = 0
    """Of the item in its dataset, or of the row in its file."""
    token_ids: list[int] = field(default_factory=list)
    """The encoded prompt; empty until `Task.encoded`."""


Call = Callable[[Sequence[Problem], Sequence[str]], Scores | Awaitable[Scores]]
"""A reward function that is loaded."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A named function from completions to rewards, and what a process needs to load it: `tasks.load_reward`."""

    name: str
    task: ReasoningGymTask | FileTask
    columns: Sequence[str]
    """Names of those that the problems have."""
    reference: str = ""
    """FILE.py:FUNCTION; empty where a model, a rule or the dataset scores answers."""

    @property
    def named(self) -> RewardModel | RewardRule | None:
        """The reward model or rule of this name; None where a file or the dataset scores answers."""
        is_named = not self.reference and self.name in self.task.rewards
        return self.task.named_rewards.get(self.name) if is_named else None


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a run must know of a task. The fingerprint is equal where two processes see the same prompts."""

    num_train: int
    num_heldout: int
    fingerprint: str
    teacher_of_prompt: bytes = b""
    """Of each training prompt the number of its teacher among those that were asked for; empty where none were."""
    end_of_turn: tuple[int, str] | None = None
    """The token that the chat template puts behind an answer, and its text; None where there is none."""
    column_digests: Mapping[str, str] = field(default_factory=dict)
    """By column: equal if reward functions read the same of every prompt. A process of the run leaves it empty."""


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

    def facts(self, teacher_of_prompt: bytes = b"") -> TaskFacts:
        """Sizes, teachers, and a hash over every prompt and its teacher."""
        digest = blake2b(digest_size=8)
        for problem in (*self.train, *self.heldout):
            digest.update(problem.text.encode() + b"\0")
        digest.update(teacher_of_prompt)
        return TaskFacts(len(self.train), len(self.heldout), digest.hexdigest(), teacher_of_prompt)

    def column_digests(self) -> dict[str, str]:
        """Return a digest of each column over all prompts."""
        found: dict[str, xxhash.xxh3_128] = {}
        for number, problem in enumerate((*self.train, *self.heldout)):
            for name, value in problem.columns.items():
                entry = msgspec.json.encode((number, value), order="deterministic")
                found.setdefault(name, xxhash.xxh3_128()).update(entry)
        return {name: digest.hexdigest() for name, digest in found.items()}

    def encoded(self, encode: Callable[[list[str]], list[list[int]]], max_prompt_tokens: int) -> Task:
        """The same task with every prompt turned into token ids.

        Raises:
            TaskError: prompts are empty or too long; says how many, names the longest and what it needs.
        """
        train = encode([problem.text for problem in self.train])
        heldout = encode([problem.text for problem in self.heldout])
        self._check_lengths(dict(enumerate([*train, *heldout])), max_prompt_tokens)
        return replace(self, train=_with_ids(self.train, train), heldout=_with_ids(self.heldout, heldout))

    def check_prompts(self, codec: PromptCodec, max_prompt_tokens: int, vocab_size: int) -> None:
        """Look at as many prompts as a few seconds allow: the longest by characters, and others evenly spread.

        Raises:
            TaskError: as `encoded`; or the tokenizer has more tokens than the model.
        """
        everyone = [*self.train, *self.heldout]
        longest = sorted(range(len(everyone)), key=lambda index: -len(everyone[index].text))
        spread = range(0, len(everyone), 1 + len(everyone) // MOST_LOOKED_AT)
        chosen: dict[int, str] = {}
        left = MOST_CHARACTERS
        for index in (*longest[: MOST_LOOKED_AT // 2], *spread):
            left -= len(everyone[index].text) * (index not in chosen)
            if chosen and (left < 0 or len(chosen) == MOST_LOOKED_AT):
                break
            # no token has so many characters; the rest of a text that is longer need not be looked at
            chosen[index] = everyone[index].text[: 1000 * (max_prompt_tokens + 1)]
        encoded = dict(zip(chosen, codec.encode(list(chosen.values())), strict=True))
        self._check_lengths(encoded, max_prompt_tokens)
        greatest = max(max(ids) for ids in encoded.values())
        if greatest >= vocab_size:
            raise TaskError(
                f"the tokenizer makes token {greatest} of a prompt, and the model has a vocabulary of {vocab_size}: it "
                "is of another model; put the model's own tokenizer into its folder"
            )

    def _check_lengths(self, encoded: Mapping[int, list[int]], most: int) -> None:
        """Of the prompts of these numbers, training ones first."""
        everyone = [*self.train, *self.heldout]
        wrong = {index: len(ids) for index, ids in encoded.items() if not 0 < len(ids) <= most}
        if not wrong:
            return
        seen = f"the {len(encoded)} that were looked at of " if len(encoded) < len(everyone) else ""
        of_all = f"of {seen}the task's {len(everyone)} prompts"
        index, length = max(wrong.items(), key=lambda each: each[1])
        problem, rank = everyone[index], index - len(self.train)
        name = f"held-out prompt {rank}" if rank >= 0 else f"training prompt {index}"
        if length == 0:
            raise TaskError(
                f"{len(wrong)} {of_all} have no token at all, {name} the first ({problem.question[:80]!r}): see "
                "task.template"
            )
        num_long = sum(length > most for length in wrong.values())
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


_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt")
"""Of which a folder with a tokenizer has at least one."""


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
        if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):  # Transformers speaks of its packages
            raise TaskError(
                f"model folder {folder} holds no tokenizer ({_TOKENIZER_FILES[0]}), and prompts need one: copy it from "
                "the model's origin, or save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of many kinds, among them a bare Exception for a file that is damaged
            raise TaskError(
                f"model folder {folder} holds no tokenizer that can be loaded: {first_line(error)}; fetch its files "
                "again"
            ) from error
        if chat and not self._tokenizer.chat_template:
            raise TaskError(f"task.chat = true, but the tokenizer in {folder} has no chat template; set chat = false")
        self._chat = chat
        self._system_prompt = system_prompt
        self._num_ends = self._ends_behind()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each prompt, with the special tokens that its tokenizer puts in front.

        Raises:
            TaskError: the chat template refuses the turns.
        """
        if not self._chat:
            return self._ids(texts, special=True)
        from jinja2 import TemplateError  # only with a chat template, as in Transformers

        head = [{"role": "system", "content": self._system_prompt}] if self._system_prompt is not None else []
        turns = [[*head, {"role": "user", "content": text}] for text in texts]
        # The chat template writes its special tokens as text, so none may be added when encoding.
        try:
            rendered = [
                self._tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in turns
            ]
        except TemplateError as error:
            raise TaskError(
                f"task.chat = true, and the tokenizer's chat template refuses the prompts: {error}. Where it knows no "
                "system turn, leave task.system_prompt out and say it in task.template"
            ) from error
        return self._ids(rendered, special=False)

    def end_of_turn(self) -> tuple[int, str] | None:
        """The token that the chat template puts behind an answer, and its text; None where none can be told."""
        if not self._chat:
            return None
        answer = "the-answer"
        turns = [{"role": "user", "content": "the-question"}, {"role": "assistant", "content": answer}]
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # a template may refuse or break at an answer: it is asked for none in a run
            return None
        _, found, behind = text.rpartition(answer)
        tokens = self._tokenizer.added_tokens_decoder
        ends = [each for each in self._ids([behind], special=False)[0] if each in tokens] if found else []
        return (ends[0], str(tokens[ends[0]])) if ends else None

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        return [each[: len(each) - self._num_ends] for each in ids] if special and self._num_ends else ids

    def _ends_behind(self) -> int:
        """How many ends of a sequence the tokenizer puts behind a text: an answer would begin after its own end."""
        (ids,), (bare,) = (self._tokenizer(["1"], add_special_tokens=added)["input_ids"] for added in (True, False))
        behind = len(ids)
        while bare and behind and ids[behind - 1] == self._tokenizer.eos_token_id:
            behind -= 1
        return len(ids) - behind

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens such as the end of sequence."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
