"""Text to token ids and back, with the tokenizer of the model's own folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.tasks.errors import TaskError


class PromptCodec:
    """Encodes prompts, as they are or as a user turn of a chat, and decodes completions."""

    def __init__(self, folder: Path, chat: bool, system_prompt: str | None) -> None:
        """Load the tokenizer.

        Args:
            folder: a local folder with a tokenizer; nothing is downloaded.
            chat: wrap each prompt in the tokenizer's chat template.
            system_prompt: system turn of that chat.

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
