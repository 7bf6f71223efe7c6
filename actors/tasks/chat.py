"""Messages of a chat, and PromptCodec: prompts to token ids by a tokenizer and its chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from leeway.actors.tasks.task import Message, Prompt, TaskError, first_line

_ANSWER = {"role": "assistant", "content": "the-answer"}
"""An example turn for rendering a chat template."""
OPEN_TAG = re.compile(r"(<(?:think|thinking|thought|reasoning|answer)>)\s*$", re.IGNORECASE)
"""Pattern for a prompt whose end is the start of the answer."""
_TAIL_TOKENS = 64
"""Number of tokens at the end of a prompt that may contain the start of the answer."""
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt")
"""File name patterns; a folder with a tokenizer has at least one matching file."""


def messages_of(value: Sequence[object], where: str) -> list[Message]:
    """Return messages with the keys role, content, and others, without nulls, which Parquet adds for missing keys.

    Raises TaskError if an entry is no object, has no role, or has content other than text.
    """
    if not value:
        raise TaskError(f"{where}: the list of messages is empty; give at least one message")
    found = []
    for number, each in enumerate(value, start=1):
        message, name = _without_nulls(each), f"{where}: message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role:
            raise TaskError(f"{name} has no role: {str(each)[:80]}; give each message a role")
        if len(message) == 1 or not isinstance(message.get("content", ""), str):
            raise TaskError(f"{name} ({role}) has no content of type text; give it text")
        found.append(dict(sorted(message.items(), key=lambda item: (item[0] != "role", item[0] != "content", item[0]))))
    return found


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 -- any JSON
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def with_answer(prompt: Prompt, completion: str) -> list[Message]:
    """Return a chat of the prompt and the answer, which continues a last message of the assistant."""
    *head, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if last["role"] != "assistant":
        head, last = [*head, last], {"content": ""}
    return [*head, {"role": "assistant", "content": last.get("content", "") + completion}]


class PromptCodec:
    """Encodes prompts (text, text as a user turn of a chat, or messages), and decodes completions."""

    def __init__(
        self,
        folder: Path,
        chat: bool,
        system_prompt: str | None,
        chat_template: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: Sequence[str | int] = (),
    ) -> None:
        """Load the tokenizer of a local folder; `chat` wraps each prompt of text in the chat template.

        A system prompt is the first turn of each chat that has no system turn. `chat_template` replaces the template of
        the tokenizer unless it is empty. Raises TaskError if the folder has no tokenizer, `chat` is set and there is no
        chat template, or an argument is none of the template.
        """
        from transformers import AutoTokenizer  # import on use, because this imports torch

        if not folder.is_dir():
            raise TaskError(f"model folder {folder} does not exist on this host, so prompts cannot be tokenised")
        if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):  # Transformers' error is unclear
            raise TaskError(
                f"model folder {folder} has no tokenizer ({_TOKENIZER_FILES[0]}), but prompts need one: copy it from "
                "the model's source, or save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # errors have many types, such as a bare Exception for a damaged file
            raise TaskError(
                f"model folder {folder} has no loadable tokenizer: {first_line(error)}; download its files again"
            ) from error
        self._tokenizer.chat_template = chat_template or self._tokenizer.chat_template
        if chat and not self._tokenizer.chat_template:
            raise TaskError(f"task.chat = true, but the tokenizer in {folder} has no chat template; set chat = false")
        self._kwargs = dict(chat_template_kwargs or {})
        own = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
        if reserved := sorted(own & self._kwargs.keys()):
            raise TaskError(f"task.chat_template_kwargs.{reserved[0]} is not an argument of the template; remove it")
        self.is_chat = chat
        """Whether prompts are chats; of messages, the task sets this after it has read the rows."""
        self._system_prompt = system_prompt
        self._num_ends = self._num_trailing_ends()
        added = self._tokenizer.added_tokens_decoder
        special = {str(each): number for number, each in added.items() if each.special}
        ends = [special.get(each, each) if isinstance(each, str) else each for each in stop]
        self.stop_token_ids = [each for each in ends if isinstance(each, int)]
        """Tokens of `stop`, of which some are given by the text of a special token."""
        self.stop_texts = [each for each in ends if isinstance(each, str)]
        # each byte of a text takes at most one token; two more tokens give the first of them its usual context
        self.stop_window = max((len(each.encode()) + 2 for each in self.stop_texts), default=0)
        """Number of tokens in which a text of `stop` must end an answer; 0 without texts."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt, with the special tokens that the tokenizer prepends to text.

        All prompts are text, or all are messages. Raises TaskError if the chat template rejects the turns.
        """
        texts = [each for each in prompts if isinstance(each, str)]
        if len(texts) == len(prompts) and not self.is_chat:
            return self.ids(texts, special=True)
        # The chat template writes special tokens as text, so the encoding must not add special tokens.
        return self.ids([self._chat_text(self._turns(each)) for each in prompts], special=False)

    def _chat_text(self, turns: list[Message]) -> str:
        """Render a chat up to the start of the answer, or to the end of a last message of the assistant."""
        if not self._tokenizer.chat_template:
            raise TaskError("the prompts are messages, but the tokenizer has no chat template; set task.chat_template")
        goes_on = turns[-1]["role"] == "assistant"
        try:
            return self._rendered([turns], add_generation_prompt=not goes_on, continue_final_message=goes_on)[0]
        except Exception as error:  # a template may also fail with errors of Python, such as None + "text"
            roles = ", ".join(each["role"] for each in turns)
            why = f"the chat template rejects messages of the roles {roles}: {first_line(error)}"
            raise TaskError(f"{why}. Change the rows, remove task.system_prompt, or set task.chat_template") from error

    def unread_kwargs(self) -> list[str]:
        """Return the names of `chat_template_kwargs` that the chat template does not read."""
        from jinja2 import TemplateSyntaxError, meta
        from transformers.utils.chat_template_utils import _compile_jinja_template  # knows the tags of Transformers

        if not self._kwargs:
            return []
        text = self._tokenizer.get_chat_template(tools=self._kwargs.get("tools"))
        try:
            read = meta.find_undeclared_variables(_compile_jinja_template(text).environment.parse(text))
        except TemplateSyntaxError:  # the first prompt reports this error
            return []
        return [name for name in self._kwargs if name not in read]

    def check_stop(self, vocab_size: int) -> None:
        """Raise TaskError if the model cannot generate a token of `stop`, or the tokenizer cannot write a text."""
        if wrong := [each for each in self.stop_token_ids if not 0 <= each < vocab_size]:
            raise TaskError(f"task.stop: the model has no token {wrong[0]}, its vocabulary has {vocab_size}; remove it")
        for text in self.stop_texts:
            ids = self.ids([text], special=False)[0]
            if text not in self.decode(ids) and text not in self.decode(self.ids([f"1{text}"], special=False)[0]):
                raise TaskError(f"task.stop: the tokenizer cannot write {text!r}, so it ends no answer; remove it")

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """Return whether a text of `stop` ends with the last of these tokens."""
        tail = self.decode(token_ids[-self.stop_window :])
        return any(each in tail for each in self.stop_texts)

    def completion(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, prefill: bool, special: bool = False
    ) -> str:
        """Return a completion without special tokens up to a text of `stop`; with `special`, the text of all tokens.

        With `prefill`, the text begins with the start of the answer at the prompt's end.
        """
        start = self.prefill(prompt_ids) if prefill else ""
        if special:
            return start + self.decode(token_ids, special=True)
        text = self.decode(token_ids[:-1] if {*token_ids[-1:]} & {*self.stop_token_ids} else token_ids)
        ends = [place for each in self.stop_texts if (place := text.find(each)) >= 0]
        return start + text[: min(ends, default=None)]

    def prefill(self, prompt_ids: Sequence[int]) -> str:
        """Return the start of the answer at the end of a prompt, with its white space; empty if there is none."""
        return self._prefill_of(tuple(prompt_ids[-_TAIL_TOKENS:]))

    @lru_cache(maxsize=1024)  # noqa: B019 -- an actor has one codec, and the samples of a group share a prompt
    def _prefill_of(self, tail_ids: tuple[int, ...]) -> str:
        tail, start = self.decode(tail_ids, special=True), self._chat_start
        if start and tail.endswith(start):
            return start
        found = OPEN_TAG.search(tail)
        return "" if found is None else found[0]

    def end_of_turn(self) -> tuple[int, str, str] | None:
        """Return the token after an answer, its text and its source, for `TaskFacts`; None if there is no token."""
        tokens = self._tokenizer.added_tokens_decoder
        _, found, suffix = self._example(_ANSWER).rpartition(_ANSWER["content"])
        ends = [each for each in self.ids([suffix], special=False)[0] if each in tokens] if found else []
        end = ends[0] if ends else self._tokenizer.eos_token_id
        source = "chat template" if ends else "tokenizer"
        return None if end is None else (end, str(self._tokenizer.convert_ids_to_tokens(end)), source)

    def answer_start(self, text: str) -> str:
        """Return the start of the answer at the end of a prompt, such as '<think>'; empty if there is none.

        With a chat template, compare a prompt with conversations that contain an answer: what a prompt adds to the text
        before the answer is the start of the answer. Without an addition, return an open tag at the prompt's end.
        """
        prompt = self._example(add_generation_prompt=True) if self.is_chat else text
        return self._chat_start.strip() or "".join(OPEN_TAG.findall(prompt))

    @cached_property
    def _chat_start(self) -> str:
        """What the chat template adds to a prompt after the head of an answer, with its white space."""
        prompt = self._example(add_generation_prompt=True)
        answered = (self._example(_ANSWER), self._example(_ANSWER, *self._turns("")[-1:]))
        heads = [head for head, found, _ in (chat.partition(_ANSWER["content"]) for chat in answered) if found]
        starts = [prompt[len(head) :] for head in heads if prompt.startswith(head) and prompt[len(head) :].strip()]
        return max(starts, key=len, default="")

    def _example(self, *answered: Message, **options: bool) -> str:
        """Render a question and these turns; return '' without a chat template, or if the template rejects them."""
        try:
            return self._rendered([[*self._turns("the-question"), *answered]], **options)[0] if self.is_chat else ""
        except Exception:  # errors of any type are harmless, because a run never renders an answer
            return ""

    def _turns(self, prompt: Prompt) -> list[Message]:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system_prompt is None or turns[0]["role"] == "system":
            return turns
        return [{"role": "system", "content": self._system_prompt}, *turns]

    def _rendered(self, chats: Iterable[list[Message]], **options: bool) -> list[str]:
        render = self._tokenizer.apply_chat_template
        return [render(chat, tokenize=False, **self._kwargs, **options) for chat in chats]

    def ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text; with `special`, as of a prompt of text."""
        ids: list[list[int]]
        if self._tokenizer.is_fast:  # no offsets or masks; `_num_trailing_ends` has disabled truncation and padding
            backend = self._tokenizer.backend_tokenizer
            ids = [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=special)]
        else:
            ids = self._tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
        return [each[: len(each) - self._num_ends] for each in ids] if special and self._num_ends else ids

    def _num_trailing_ends(self) -> int:
        """Return the number of end-of-sequence tokens that the tokenizer appends; prompts must not end with them."""
        (ids,), (bare,) = (self._tokenizer(["1"], add_special_tokens=added)["input_ids"] for added in (True, False))
        length = len(ids)
        while bare and length and ids[length - 1] == self._tokenizer.eos_token_id:
            length -= 1
        return len(ids) - length

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, without special tokens unless `special` is set."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text
