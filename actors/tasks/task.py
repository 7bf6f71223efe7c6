"""Task: training prompts by id, held-out problems, and reward functions."""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from itertools import chain
from typing import Any, Protocol
from unicodedata import normalize

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from leeway.actors.tasks.config import DATA_SOURCE, FileTask, ReasoningGymTask, RewardModel, RewardRule
from leeway.common.errors import LeewayError
from leeway.common.user_input import did_you_mean

MAX_CHECKED_PROMPTS = 50_000
"""Maximum number of prompts that are tokenised before a run starts; the run's actors tokenise all prompts."""
MAX_CHECKED_BYTES = 8_000_000
"""Maximum UTF-8 bytes of all prompts that are tokenised before a run starts. The longest prompt is always checked."""
PROMPTS = "prompts"
"""Name of the prompt's text among the columns that a process reads."""
_AT_ONCE_CHARACTERS = 2**18
"""Characters that each core tokenises at once; a tokenizer needs about a hundred bytes per token."""


class TaskError(LeewayError, ValueError):
    """The `[task]` section is invalid; the error message names the key and the file."""


def among_known(name: str, known: Iterable[str]) -> str:
    """Return a clause that lists the known names, and the most similar name if any."""
    names = sorted({str(one) for one in known})
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"known: {shown or 'none'}{did_you_mean(name, names)}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or the error's type if there is no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class NoScore:
    """Placeholder for the missing score of one sample; other samples of the call are not affected."""

    why: str
    """Reason of the failure. Failures are counted by reason, so the text must not contain details of a sample."""
    detail: str = ""


def after_thoughts(completion: str) -> str:
    """Return the text after the model's thoughts, if any, without white space around it."""
    return completion.rpartition("</think>")[2].strip()


TOOK_TOO_LONG = "took too long"
"""The reason for no score if a sample exceeded its own timeout; the sample is not retried."""
Scores = Sequence[float | NoScore | None]


Message = dict[str, Any]
Prompt = str | list[Message]
"""Text, or the messages of a chat, each with `role` and mostly `content`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt and its data."""

    question: str
    """Text whose hash decides whether the problem is held out; the prompt if this process does not keep that text."""
    prompt: Prompt
    """The prompt for reward functions, rendered by the task's template but not by the chat template. If no reward reads
    prompts, an actor decodes the prompt from its tokens."""
    columns: Mapping[str, Any]
    """JSON-safe values for reward functions, stored with every trajectory. Actors keep only columns of rewards."""
    index: int = 0
    """Index of the item in its dataset, or number of the row in its file."""
    token_ids: list[int] = field(default_factory=list)
    """Empty if the task was loaded without a tokenizer."""

    @property
    def text(self) -> str:
        """Return the prompt as text: one message by its content, several messages with their roles."""
        if isinstance(self.prompt, str):
            return self.prompt
        texts = [(each["role"], each.get("content", "")) for each in self.prompt]
        return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {content}" for role, content in texts)


SAMPLED = ("prompt_ids", "completion_ids", "finish_reasons", "completions_with_special_tokens")
"""Arguments that a function of a file receives only if it names them; they are sent to its process only then."""
Sampled = Callable[[str], Any]
"""Function that returns the value of one sample for an argument of `SAMPLED`."""


Render = Callable[[Mapping[str, Any]], Prompt]
Call = Callable[[Sequence[Problem], Sequence[str]], Scores | Awaitable[Scores]]


@dataclass(frozen=True, slots=True)
class FileReward:
    """A user's function; `call` also receives the arguments of `SAMPLED` that the function names, and `log_metric`."""

    named: frozenset[str]
    call: Callable[[Sequence[Problem], Sequence[str], Mapping[str, Any]], Any]

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> Any:  # noqa: ANN401 -- the user's
        return self.call(problems, completions, {})


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A named function from completions to rewards, and the data from which `tasks.load_reward` loads it."""

    name: str
    task: ReasoningGymTask | FileTask
    columns: Sequence[str]
    reference: str = ""
    """FILE.py:FUNCTION; empty if a model, a rule or the dataset scores answers."""
    has_messages: bool = False
    """Whether prompts are messages; then a function of a file also receives each completion as a message."""

    def applies_to(self, problem: Problem) -> bool:
        """Return whether `task.reward_by_source` lets this function score a problem."""
        is_bound = self.name in self.by_source.values()
        return not is_bound or self.by_source.get(str(problem.columns.get(DATA_SOURCE))) == self.name

    @property
    def by_source(self) -> Mapping[str, str]:
        return self.task.reward_by_source if isinstance(self.task, FileTask) else {}

    @property
    def named(self) -> RewardModel | RewardRule | None:
        """The reward model or rule of this name; None if a file or the dataset scores answers."""
        is_named = not self.reference and self.name in self.task.rewards
        return self.task.named_rewards.get(self.name) if is_named else None


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """Facts of a task that a run needs. The fingerprint is equal if two processes read the same prompts."""

    num_train: int
    num_heldout: int
    fingerprint: str
    rows: str = ""
    """Counts of rows: read, used, duplicate, skipped, and if any, filtered out and too long."""
    teacher_of_prompt: bytes = b""
    """Number of the teacher of each training prompt, one byte per prompt; empty without teachers."""
    end_of_turn: tuple[int, str, str] | None = None
    """The token that ends an answer, its text, and its source: 'chat template' or 'tokenizer'."""
    answer_start: str = ""
    """Text at the end of every prompt that is the start of the answer, such as '<think>'; empty if there is none."""
    unread_kwargs: Sequence[str] = ()
    """Names in `task.chat_template_kwargs` that the chat template does not read."""
    column_digests: Mapping[str, str] = field(default_factory=dict)
    """Hash of each column: equal if reward functions read the same values. Empty in the processes of a run."""


class Codec(Protocol):
    """Encodes prompts; `chat.PromptCodec` is the one with a tokenizer."""

    def encode(self, prompts: list[Prompt]) -> list[list[int]]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class PromptStore:
    """Stores prompts compactly: token ids as int32, columns as JSON. Each access creates a new `Problem`."""

    def __init__(
        self, render: Render, names: Sequence[str], reads: Collection[str] | None, codec: Codec | None
    ) -> None:
        """Store the columns `reads` (None for all) and, with a codec, tokens; the split hashes the columns `names`."""
        self._has_text = reads is None or PROMPTS in reads
        self._reads = None if reads is None else {*reads, *(names if self._has_text else ())}
        self._render, self._names, self._codec = render, names, codec
        self._rows, self._json, self._ends = array("I"), bytearray(), array("q", [0])
        self.ids, self.id_ends = array("i"), array("q", [0])
        self.sizes, self.keys = array("i"), array("Q")
        """Size of each prompt in UTF-8 bytes, and a hash of its NFC text."""
        self.of_shape: dict[tuple[tuple[str, ...], ...], int] = {}
        """Maps the roles and further keys of the messages of a prompt to the first such prompt."""
        self._pending: list[Prompt] = []
        self._num_pending, self._num_cores, self.tokenising_s = 0, len(os.sched_getaffinity(0)), 0.0

    def add(self, row: Mapping[str, Any], prompt: Prompt, number: int = 0, key: int = 0) -> int:
        """Store row `number` of the data, with its prompt and the hash `key` of the prompt; return its place."""
        if self._reads is not None:
            row = {name: value for name, value in row.items() if name in self._reads}
        kept = _to_json(row)
        if self._has_text and not all(isinstance(row.get(name), str) for name in self._names):
            # for example, a decimal renders differently than the number that is stored for it
            kept = kept if self._render(json.loads(kept)) == prompt else _to_json({**row, "": prompt})
        self._json += kept.encode()
        self._ends.append(len(self._json))
        self._rows.append(number)
        self.sizes.append(len(text_of(prompt).encode()))
        self.keys.append(key)
        if not isinstance(prompt, str):
            shape = tuple((each["role"], *sorted(each)) for each in prompt)
            self.of_shape.setdefault(shape, len(self.keys) - 1)
        self._pending.append(prompt)
        self._num_pending += self.sizes[-1]
        if self._num_pending > _AT_ONCE_CHARACTERS * self._num_cores:
            self.flush()
        return len(self.keys) - 1

    def flush(self) -> None:
        """Tokenise the added prompts on all cores: a tokenizer runs without the GIL."""
        prompts, self._pending, self._num_pending = self._pending, [], 0
        if self._codec is None or not prompts:
            return
        started_s, size = time.perf_counter(), 1 + len(prompts) // (8 * self._num_cores)
        with ThreadPoolExecutor(self._num_cores) as pool:
            for found in pool.map(self._codec.encode, (prompts[at : at + size] for at in range(0, len(prompts), size))):
                for ids in found:
                    self.ids.extend(ids)
                    self.id_ends.append(len(self.ids))
        self.tokenising_s += time.perf_counter() - started_s

    def problem(self, place: int) -> Problem:
        columns = json.loads(self._json[self._ends[place] : self._ends[place + 1]])
        ids, prompt = list[int](), columns.pop("", "") if self._has_text else ""
        if self._codec is not None:
            ids = self.ids[self.id_ends[place] : self.id_ends[place + 1]].tolist()
            prompt = prompt if self._has_text else self._codec.decode(ids)
        prompt = prompt or self._render(columns)
        is_hashed = self._reads is None or self._reads.issuperset(self._names)
        question = hashed_text(columns, self._names) if is_hashed else text_of(prompt)
        return Problem(question, prompt, columns, self._rows[place], ids)


class StoredPrompts(Sequence[Problem]):
    """A sequence of prompts of a store, given by their places."""

    def __init__(self, store: PromptStore, places: npt.NDArray[np.int64]) -> None:
        self.store, self.places = store, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 -- a problem; for a slice, prompts
        places = self.places[index]
        return StoredPrompts(self.store, places) if isinstance(index, slice) else self.store.problem(int(places))


@dataclass(frozen=True)
class Task:
    """A loaded task. Prompt ids are 0..num_train-1, and an id refers to the same prompt in every process."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: tuple[RewardFunction, ...]
    rows: str = ""
    store: PromptStore | None = None
    """Storage of the prompts; None if the task was not loaded from a config."""
    chat_template: str = ""
    """Content of the file `task.chat_template`."""

    @property
    def has_messages(self) -> bool:
        return self.store is not None and bool(self.store.of_shape)

    def prompt(self, prompt_id: int) -> Problem:
        """Return the training problem with this id; raise TaskError if buffer and actor have different tasks."""
        if not 0 <= prompt_id < len(self.train):
            raise TaskError(
                f"prompt {prompt_id} was leased, but this actor's task has {len(self.train)} training prompts: "
                "the buffer was created for another [task]. Check num_train and the task's files"
            )
        return self.train[prompt_id]

    def facts(self, teacher_of_prompt: bytes = b"") -> TaskFacts:
        """Return sizes, teachers, and a hash over every prompt and its teacher."""
        digest = blake2b(b"%d " % len(self.train), digest_size=8)
        for values in (self.store.keys, self.store.sizes) if self.store is not None else ():
            digest.update(np.array(values)[self._places()].tobytes())
        digest.update(teacher_of_prompt + self.chat_template.encode())
        return TaskFacts(len(self.train), len(self.heldout), digest.hexdigest(), self.rows, teacher_of_prompt)

    def column_digests(self) -> dict[str, str]:
        found: dict[str, xxhash.xxh3_128] = {}
        for number, problem in enumerate(chain(self.train, self.heldout)):
            for name, value in problem.columns.items():
                entry = msgspec.json.encode((number, value), order="deterministic")
                found.setdefault(name, xxhash.xxh3_128()).update(entry)
        return {name: digest.hexdigest() for name, digest in found.items()}

    def _places(self) -> npt.NDArray[np.int64]:
        halves = [half for half in (self.train, self.heldout) if isinstance(half, StoredPrompts)]
        return np.concatenate([half.places for half in halves])

    def check_sources(self) -> None:
        """Raise TaskError if `task.reward_by_source` leaves a row without any reward."""
        by_source = self.rewards[0].by_source
        for problem in chain(self.train, self.heldout) if by_source else ():
            if not any(function.applies_to(problem) for function in self.rewards):
                source = str(problem.columns.get(DATA_SOURCE))
                raise TaskError(
                    f"task.reward_by_source has no reward for {DATA_SOURCE} '{source}' of row {problem.index}, and all "
                    f"rewards are named there; {among_known(source, by_source)}"
                )

    def check_lengths(self, max_prompt_tokens: int) -> None:
        """Raise TaskError if prompts are empty or too long; the error has their number and the longest length."""
        assert self.store is not None, "the task was loaded from a config"
        lengths = np.diff(self.store.id_ends)[self._places()]
        self._check_lengths(np.arange(len(lengths)), lengths, max_prompt_tokens)

    def check_prompts(self, codec: Codec, max_prompt_tokens: int, vocab_size: int) -> None:
        """Check the lengths of the prompts with the most UTF-8 bytes, as many prompts as a few seconds allow.

        Raises TaskError if prompts are empty or too long, or if the tokenizer has more tokens than the model.
        """
        assert self.store is not None, "the task was loaded from a config"
        places = self._places()
        sizes = np.array(self.store.sizes)[places]
        order = np.argsort(-sizes, kind="stable")[:MAX_CHECKED_PROMPTS]
        order = order[: max(1, int(np.searchsorted(np.cumsum(sizes[order]), MAX_CHECKED_BYTES, "right")))]
        for one in map(self.store.problem, self.store.of_shape.values()):  # templates reject roles, and their orders
            try:
                codec.encode([one.prompt])
            except TaskError as error:
                raise TaskError(f"row {one.index} ({one.text[:80]!r}): {error}") from error
        checked = PromptStore(str, (), (), codec)
        for place in places[order].tolist():
            prompt = self.store.problem(place).prompt
            # no token has 1000 characters, so the rest of a longer text need not be checked
            checked.add({}, prompt[: 1000 * (max_prompt_tokens + 1)] if isinstance(prompt, str) else prompt)
        checked.flush()
        self._check_lengths(order, np.diff(checked.id_ends), max_prompt_tokens)
        if (greatest := max(checked.ids)) >= vocab_size:
            raise TaskError(
                f"the tokenizer returns token {greatest} for a prompt, but the model has a vocabulary of {vocab_size}: "
                "the tokenizer is of another model; put the model's own tokenizer into the model folder"
            )

    def _check_lengths(self, indices: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], max_tokens: int) -> None:
        """Check the lengths of the prompts with these indices; held-out prompts follow the training prompts."""
        wrong = np.flatnonzero((lengths == 0) | (lengths > max_tokens))
        if not len(wrong):
            return
        num_all = len(self.train) + len(self.heldout)
        seen = f"the {len(indices)} checked among " if len(indices) < num_all else ""
        of_all = f"of {seen}the task's {num_all} prompts"
        worst = wrong[np.argmax(lengths[wrong])]
        index, length = int(indices[worst]), int(lengths[worst])
        rank = index - len(self.train)
        name = f"held-out prompt {rank}" if rank >= 0 else f"training prompt {index}"
        text = (self.heldout[rank] if rank >= 0 else self.train[index]).text[:80]
        if length == 0:
            raise TaskError(f"{len(wrong)} {of_all} have no tokens; the first is {name} ({text!r}): see task.template")
        raise TaskError(
            f"{(lengths > max_tokens).sum()} {of_all} are longer than actors.max_prompt_tokens = {max_tokens}; the "
            f"longest, {name}, has {length} tokens: {text!r}. Set actors.max_prompt_tokens = {length}, shorten "
            'task.template, or set task.on_long_prompt = "skip"'
        )


def digest_of(text: str) -> int:
    """Return a 64-bit hash of the NFC text."""
    return int.from_bytes(blake2b(normalize("NFC", text).encode(), digest_size=8).digest(), "big")


def hashed_text(row: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the joined text of some columns of a row; the text of a single column is unchanged."""
    values = (row.get(name, "") for name in names)
    return "\0".join(value if isinstance(value, str) else _to_json(value) for value in values)


def text_of(prompt: Prompt) -> str:
    """Return a prompt as one text: messages as JSON, which differs if and only if the messages differ."""
    return prompt if isinstance(prompt, str) else _to_json(prompt)


def json_safe(value: Any) -> Any:  # noqa: ANN401 -- any JSON
    """Return a copy with JSON types only: tuples become lists, other numbers Python numbers, other values text."""
    return json.loads(_to_json(value))


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    if isinstance(value, Decimal):  # keep as text if a float would change the value
        number = int(value) if value.as_tuple().exponent == 0 else float(value)
        return number if Decimal(repr(number)) == value else str(value)
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


_to_json = json.JSONEncoder(default=_plain, skipkeys=True, ensure_ascii=False, separators=(",", ":")).encode
