"""A sequence classifier as a reward model: one number for prompt and completion."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.tasks.config import Classifier
from actors.tasks.task import NoScore, Problem, TaskError


def check_classifier(name: str, config: Classifier) -> None:
    """Look at the model's config and tokenizer, without its weights.

    Raises:
        TaskError: there is no model, it has more than one output, or its tokenizer is of another model.
    """
    _tokenizer_for(name, config, _config_of(name, config))


def load_classifier(
    name: str, config: Classifier
) -> Callable[[Sequence[Problem], Sequence[str]], list[float | NoScore | None]]:
    """The classifier as a reward function, its model in this process; TaskError as `check_classifier`."""
    import torch
    from transformers import AutoModelForSequenceClassification

    where, made = f"task.reward_models.{name}", _config_of(name, config)
    tokenizer = _tokenizer_for(name, config, made)
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), local_files_only=True, output_loading_info=True
        )
        model = model.to(config.device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last of a torch without CUDA
        raise TaskError(f"{where}: {config.path} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise TaskError(
            f"{where}: {config.path} lacks {missing[0]}, so its rewards would be random: it is no trained classifier"
        )
    limit = getattr(made.get_text_config(), "max_position_embeddings", None)
    for part, module in model.named_modules():  # models like RoBERTa count positions from their padding's on
        if limit is not None and part.endswith("position_embeddings"):
            padding = getattr(module, "padding_idx", None)
            limit -= 0 if padding is None else padding + 1
    pads = tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id
    if pads:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.padding_side = "right"

    def score(ids: Sequence[list[int]]) -> list[float]:
        batch = (
            tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt") if pads else {"input_ids": torch.tensor(ids)}
        )
        try:
            with torch.inference_mode():
                logits = model(**{key: value.to(config.device) for key, value in batch.items()}).logits
            values: list[float] = logits[:, 0].float().tolist()
        except torch.AcceleratorError:  # with it all that this process asks of its GPU fails from now on
            traceback.print_exc()
            os._exit(1)
        return values

    def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        texts = [
            _text(tokenizer, config, each.text, answer) for each, answer in zip(problems, completions, strict=True)
        ]
        encoded = tokenizer(texts, add_special_tokens=not config.chat)["input_ids"]
        fit = [number for number, ids in enumerate(encoded) if ids and (limit is None or len(ids) <= limit)]
        values: list[float | NoScore | None] = [
            NoScore("too long for the reward model", f"{len(ids)} tokens, it was made for {limit}") for ids in encoded
        ]
        # without a token of its own for padding a classifier cannot tell where a shorter text ends
        for batch in [fit] if pads and fit else [[number] for number in fit]:
            for number, value in zip(batch, score([encoded[number] for number in batch]), strict=True):
                values[number] = config.weight * value
        return values

    return call


def _text(tokenizer: Any, config: Classifier, prompt: str, completion: str) -> str:  # noqa: ANN401 -- Transformers
    if not config.chat:
        return prompt + completion
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    return text


def _config_of(name: str, config: Classifier) -> Any:  # noqa: ANN401 -- Transformers
    from transformers import AutoConfig

    where = f"task.reward_models.{name}.path = '{config.path}'"
    if not (Path(config.path) / "config.json").is_file():
        raise TaskError(f"{where}: there is no model (config.json) in this folder")
    try:
        made = AutoConfig.from_pretrained(config.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: its config.json cannot be read: {_first_line(error)}") from error
    kinds = made.architectures or ["no architecture"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise TaskError(f"{where} is of type {kinds[0]}; a reward model is a ...ForSequenceClassification")
    if made.num_labels != 1:
        raise TaskError(
            f"{where} has {made.num_labels} outputs, and a reward is one number: take one with num_labels 1"
        )
    return made


def _tokenizer_for(name: str, config: Classifier, made: Any) -> Any:  # noqa: ANN401 -- Transformers
    from transformers import AutoTokenizer

    where = f"task.reward_models.{name}.path = '{config.path}'"
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
    except Exception as error:  # of many kinds
        raise TaskError(f"{where} has no tokenizer that can be loaded: {_first_line(error)}") from error
    vocab_size = made.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise TaskError(
            f"{where}: its tokenizer has {len(tokenizer)} tokens and its model a vocabulary of {vocab_size}: the "
            "tokenizer is of another model; put the model's own into the folder"
        )
    if config.chat and not tokenizer.chat_template:
        raise TaskError(
            f"task.reward_models.{name}.chat = true, but its tokenizer has no chat template; set chat = false"
        )
    return tokenizer


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
