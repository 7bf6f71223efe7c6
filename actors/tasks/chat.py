"""PromptCodec: prompts to token ids, by the tokenizer and its chat template, and completions to text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from leeway.actors.tasks.task import TaskError, first_line

_ANSWER = {"role": "assistant", "content": "the-answer"}
"""An example turn for rendering a chat template."""
OPEN_TAG = re.compile(r"(<(?:think|thinking|thought|reasoning|answer)>)\s*$", re.IGNORECASE)
"""Pattern for a prompt whose end is the start of the answer."""
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt")
"""File name patterns; a folder with a tokenizer has at least one matching file."""


class PromptCodec:
    """Encodes prompts, unchanged or as a user turn of a chat, and decodes completions."""

    def __init__(self, folder: Path, chat: bool, system_prompt: str | None) -> None:
        """Load the tokenizer of a local folder; if `chat` is set, wrap each prompt in the tokenizer's chat template.

        Raises TaskError if the folder has no tokenizer, or if `chat` is set and the tokenizer has no chat template.
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
        if chat and not self._tokenizer.chat_template:
            raise TaskError(f"task.chat = true, but the tokenizer in {folder} has no chat template; set chat = false")
        self._chat = chat
        self._system_prompt = system_prompt
        self._num_ends = self._num_trailing_ends()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each prompt, with the special tokens that the tokenizer prepends.

        Raises TaskError if the chat template rejects the turns.
        """
        if not self._chat:
            return self._ids(texts, special=True)
        from jinja2 import TemplateError  # import on use: only a chat template needs jinja2

        # The chat template writes special tokens as text, so the encoding must not add special tokens.
        try:
            rendered = self._rendered(map(self._turns, texts), add_generation_prompt=True)
        except TemplateError as error:
            raise TaskError(
                f"task.chat = true, but the tokenizer's chat template rejects the prompts: {error}. If the template "
                "supports no system turn, put the text of task.system_prompt into task.template instead"
            ) from error
        return self._ids(rendered, special=False)

    def end_of_turn(self) -> tuple[int, str, str] | None:
        """Return the token after an answer, its text and its source, for `TaskFacts`; None if there is no token."""
        tokens = self._tokenizer.added_tokens_decoder
        _, found, suffix = self._example(_ANSWER).rpartition(_ANSWER["content"])
        ends = [each for each in self._ids([suffix], special=False)[0] if each in tokens] if found else []
        end = ends[0] if ends else self._tokenizer.eos_token_id
        source = "chat template" if ends else "tokenizer"
        return None if end is None else (end, str(self._tokenizer.convert_ids_to_tokens(end)), source)

    def answer_start(self, text: str) -> str:
        """Return the start of the answer at the end of a prompt, such as '<think>'; empty if there is none.

        With a chat template, compare a prompt with conversations that contain an answer: what a prompt adds to the text
        before the answer is the start of the answer. Without an addition, return an open tag at the prompt's end.
        """
        prompt = self._example(add_generation_prompt=True) if self._chat else text
        answered = (self._example(_ANSWER), self._example(_ANSWER, *self._turns("")[-1:]))
        heads = [head for head, found, _ in (chat.partition(_ANSWER["content"]) for chat in answered) if found]
        starts = [prompt[len(head) :].strip() for head in heads if prompt.startswith(head)]
        return max(starts, key=len, default="") or "".join(OPEN_TAG.findall(prompt))

    def _example(self, *answered: dict[str, str], **options: bool) -> str:
        """Render a question and these turns; return '' without a chat template, or if the template rejects them."""
        try:
            return self._rendered([[*self._turns("the-question"), *answered]], **options)[0] if self._chat else ""
        except Exception:  # errors of any type are harmless, because a run never renders an answer
            return ""

    def _turns(self, text: str) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self._system_prompt}] if self._system_prompt is not None else []
        return [*head, {"role": "user", "content": text}]

    def _rendered(self, chats: Iterable[list[dict[str, str]]], **options: bool) -> list[str]:
        return [self._tokenizer.apply_chat_template(chat, tokenize=False, **options) for chat in chats]

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
