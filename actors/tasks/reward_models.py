"""Reward models: a judge (a language model behind an endpoint, which rates answers), and a sequence classifier."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from leeway.actors.tasks.chat import with_answer
from leeway.actors.tasks.config import Classifier, Judge
from leeway.actors.tasks.prompts import Template
from leeway.actors.tasks.task import TOOK_TOO_LONG, Call, NoScore, Problem, TaskError, among_known, first_line
from leeway.common.rpc.auth import is_loopback

_PROBE_S = 10.0
"""Timeout in seconds for the endpoint's list of models."""
_MAX_RETRIES = 1_000_000
"""Maximum number of retries of a request. The timeout of the request ends the retries long before this number."""
_MAX_PAUSE_S = 120.0
"""Maximum pause before a retry in seconds. A longer Retry-After is shortened, or the library would ignore it."""
_NUMBER = re.compile(r"(-?(?:\d+(?:\.\d+)?|(?<![^\W_])(?<!\.)\.\d+))")
_BREAK = re.compile(r"[:=\n]|[.!?;]\s")
"""Pattern that separates a number from the statement before the number."""
_LISTED = re.compile(r"(?m)^[\s>*-]*\d+[.)]\s")
_IS_RATING = re.compile(r"(?i)rating|score|grade|overall|final|total|verdict|mark")
_MARKUP = re.compile(r"[\s*_`$\\(){}\[\]]+")
_EXPLANATION = re.compile(r"(?:[^\w.!?;\n]|_)*(?:[=:]|[^\W_])")
"""Text after a number that shows that the number is not the rating, such as `10 = best` or `10 is the best`."""
_OF_A_SCALE = frozenset({"/", "of", "out of"})
_OF_A_RANGE = frozenset({",", "\u2013", "to", "or"})
"""Texts between the two numbers of a scale or a range, as in `8/10` and `7 or 8`."""


# --- a judge ------------------------------------------------------------------------------------------


def check_judge(name: str, config: Judge, columns: Collection[str], *, ask: bool) -> None:
    """Check the template and the API key, and with `ask` the endpoint.

    Raises TaskError if the prompt omits the completion or names an unknown column, the key is not set, or the endpoint
    rejects the key, does not answer, or does not have the model.
    """
    _template(name, config, columns)
    key = _api_key(name, config)
    if ask:
        _check_endpoint(name, config, key)


def load_judge(name: str, config: Judge, columns: Collection[str]) -> Call:
    """Return the judge as a reward function that rates concurrently; raise TaskError for an invalid prompt or key.

    If the endpoint is busy (429), fails (5xx) or is down, the request is retried until `timeout_s`. The pauses grow, or
    last as long as the endpoint requests (up to 2 minutes). A sample has no score if the retries time out, the endpoint
    rejects the request or returns no rating, or the row lacks a column of the prompt.
    """
    template = _template(name, config, columns)
    client = _Client(config, _api_key(name, config))

    async def rate(problem: Problem, completion: str) -> float | NoScore:
        try:
            text = template.render({**problem.columns, "prompt": problem.text, "completion": completion}, "a sample")
        except TaskError as error:  # this row lacks a column that other rows have
            return NoScore("the judge's prompt cannot be rendered", str(error))
        answer = await client.answer(text)
        return answer if isinstance(answer, NoScore) else _reward(answer, config)

    async def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        return await asyncio.gather(*(map(rate, problems, completions)))

    return call


class _Client:
    def __init__(self, config: Judge, key: str) -> None:
        import openai

        self._config = config
        self._errors = openai
        self._last_status: int | None = None
        """Last HTTP status of the endpoint; None before the first answer."""
        self._head = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []
        self._request = {"temperature": 0.0, "max_tokens": config.max_tokens, **config.request}
        if "max_completion_tokens" in config.request:  # the newer name, for endpoints that reject the old name
            del self._request["max_tokens"]
        http = _http(openai.DefaultAsyncHttpxClient, config.endpoint, event_hooks={"response": [self._note]})
        self._chat = openai.AsyncOpenAI(
            base_url=config.endpoint, api_key=key, max_retries=_MAX_RETRIES, timeout=config.timeout_s, http_client=http
        ).chat.completions

    async def _note(self, response: Any) -> None:  # noqa: ANN401 -- of the library's HTTP client
        self._last_status = response.status_code
        for name, units in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
            if _pause(response.headers.get(name, "")) > _MAX_PAUSE_S * units:
                response.headers[name] = f"{_MAX_PAUSE_S * units:g}"

    async def answer(self, text: str) -> str | NoScore:
        messages: Any = [*self._head, {"role": "user", "content": text}]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await self._chat.create(model=self._config.model, messages=messages, extra_body=self._request)
        except TimeoutError:
            last = f"last answered {self._last_status}" if self._last_status else "did not answer"
            return NoScore(TOOK_TOO_LONG, f"{self._config.timeout_s:g} s, the endpoint {last}")
        except self._errors.APIStatusError as error:
            return NoScore(f"the judge answered {error.status_code}", error.message)
        except self._errors.APIError as error:
            return NoScore("the judge gave no answer", error.message)
        if not answer.choices:
            return NoScore("the judge gave no answer", "its response has no choices")
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return NoScore("the judge's answer was truncated", f"at max_tokens = {self._config.max_tokens}")
        return choice.message.content or ""


def _pause(header: str) -> float:
    """Return the pause that a header requests: a number in the unit of the header, or seconds until a date."""
    with contextlib.suppress(ValueError):
        return float(header)
    with contextlib.suppress(ValueError, OverflowError):
        return parsedate_to_datetime(header).timestamp() - time.time()
    return 0.0


def _reward(answer: str, config: Judge) -> float | NoScore:
    low, high = sorted((config.worst, config.best))
    rating = _rating(answer, low, high)
    if rating is None or not low <= rating <= high:
        return NoScore("the judge gave no rating", f"no single number from {low:g} to {high:g} ends {answer[-200:]!r}")
    return (rating - config.worst) / (config.best - config.worst)


def _rating(answer: str, low: float, high: float) -> float | None:
    """Return the last number as the rating (8 for "8/10"); None if another number could be the rating too."""
    numbers, pieces, between = _numbers_in(answer)
    if _rated(numbers, between, high):
        numbers, pieces, between = _numbers_in(_LISTED.sub("", answer))
    if not between:
        return numbers[0] if numbers else None
    last, rated = numbers[-1], _rated(numbers, between, high)
    if between[-1] in _OF_A_SCALE:
        return numbers[-2] if last == high else None
    if last in (low, high) and any(low <= one <= high and one != last for one in numbers):
        # the last number may explain the scale after the rating, as in "8, where 10 is best"
        *before, lead = _BREAK.split(pieces[-3])
        if not before or _MARKUP.sub("", lead) or _EXPLANATION.match(pieces[-1]):
            return None
    if rated - {last}:  # after a rating such as 8/10, a number is a rating only with a label
        *_, label, lead = ["", *_BREAK.split(pieces[-3])]
        if _MARKUP.sub("", lead) or not _IS_RATING.search(label):
            return None
    is_end, is_beside, is_another = last in (low, high), not _BREAK.search(pieces[-3]), bool(rated - {last})
    return None if is_end + is_beside + is_another > 1 or between[-1] in _OF_A_RANGE else last


def _numbers_in(answer: str) -> tuple[list[float], list[str], list[str]]:
    """Return the numbers, a list that alternates numbers and texts, and the texts between numbers without markup."""
    _, *pieces = _NUMBER.split(answer)
    between = [_MARKUP.sub(" ", text).strip().lower() for text in pieces[1:-1:2]]
    return [float(number) for number in pieces[::2]], pieces, between


def _rated(numbers: Sequence[float], between: Sequence[str], high: float) -> set[float]:
    """Return the numbers that are given with the scale, such as the 8 of `8/10`."""
    neighbours = zip(numbers, between, numbers[1:], strict=False)
    return {one for one, text, most in neighbours if text in _OF_A_SCALE and most == high}


def _template(name: str, config: Judge, columns: Collection[str]) -> Template:
    key = f"task.reward_models.{name}.prompt"
    template = Template(config.prompt, key)
    known = {"prompt", "completion", *columns}
    for column in template.columns:
        if column not in known:
            raise TaskError(f"{key} names {{{column}}}, but no row has that column; {among_known(column, known)}")
    if "completion" not in template.columns:
        raise TaskError(f"{key} lacks {{completion}}, so the judge would not see the answer; add {{completion}}")
    return template


def _api_key(name: str, config: Judge) -> str:
    if config.api_key_env is None:
        return "none"  # the library needs a key to send requests
    key = os.environ.get(config.api_key_env, "")
    if not key:
        raise TaskError(
            f"task.reward_models.{name}.api_key_env = '{config.api_key_env}' is not set in the environment; export it "
            "on every host of actors before the run"
        )
    return key


def _check_endpoint(name: str, config: Judge, key: str) -> None:
    import openai

    where = f"task.reward_models.{name}: {config.endpoint}"
    http = _http(openai.DefaultHttpxClient, config.endpoint)
    client = openai.OpenAI(base_url=config.endpoint, api_key=key, timeout=_PROBE_S, max_retries=1, http_client=http)
    proxy = _proxy_hint(config.endpoint)
    try:
        with client:
            models = [model.id for model in client.models.list()]
    except openai.APIStatusError as error:
        if error.status_code in (401, 403, 407):
            why = f"rejects the key ({error.status_code}): set api_key_env to the variable with the right key"
            raise TaskError(f"{where} {why}{proxy}") from error
        return  # the endpoint is up; it may have no list of models, or be busy
    except openai.APIError as error:
        raise TaskError(
            f"{where} does not answer ({error.message}): start the judge first, or correct the address{proxy}"
        ) from error
    if models and config.model not in models:
        raise TaskError(f"{where} has no model '{config.model}'; {among_known(config.model, models)}")


def _http(kind: Callable[..., Any], endpoint: str, **options: object) -> Any:  # noqa: ANN401 -- the library's own
    """Create an HTTP client that logs no requests, and bypasses the environment's proxy for a judge on this machine."""
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)
    direct = {"trust_env": False, "verify": ssl.create_default_context()} if _is_local(endpoint) else {}
    try:
        return kind(**direct, **options)
    except (ValueError, ImportError) as error:  # an environment variable, such as HTTPS_PROXY, is invalid
        raise TaskError(f"cannot query the judge {endpoint}: {first_line(error)}{_proxy_hint(endpoint)}") from error


def _is_local(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return is_loopback(host) or host.endswith(".localhost") or host in ("0.0.0.0", socket.gethostname().lower())


def _proxy_hint(endpoint: str) -> str:
    """Return a hint for errors if an endpoint is reached through the environment's proxy; else ''."""
    url = urlsplit(endpoint)
    names = (f"{url.scheme}_proxy", f"{url.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    name = next(filter(os.environ.get, names), "")
    if not name or _is_local(endpoint) or proxy_bypass(url.hostname or ""):
        return ""
    return f"; requests use the proxy of {name}: to bypass it, add {url.hostname} to NO_PROXY"


# --- a classifier -------------------------------------------------------------------------------------


def check_classifier(name: str, config: Classifier) -> None:
    """Check the model's config and tokenizer, without its weights.

    Raises TaskError if there is no model, the model has several outputs, or the tokenizer is of another model.
    """
    _tokenizer_for(name, config, _config_of(name, config))


def load_classifier(name: str, config: Classifier) -> Call:
    """Load the classifier's model and return it as a reward function; raise TaskError if the model is invalid."""
    import torch
    from transformers import AutoModelForSequenceClassification

    where, model_config = f"task.reward_models.{name}", _config_of(name, config)
    tokenizer = _tokenizer_for(name, config, model_config)
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), local_files_only=True, output_loading_info=True
        )
        model = model.to(config.device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # torch without CUDA raises the last type
        raise TaskError(f"{where}: {config.path} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise TaskError(
            f"{where}: {config.path} lacks weight {missing[0]}, so rewards would be random: use a trained classifier"
        )
    limit = _max_tokens(model)
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
        except torch.AcceleratorError:  # after this error, every GPU call of this process fails
            traceback.print_exc()
            os._exit(1)
        return values

    def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        texts = [_text(tokenizer, config, each, answer) for each, answer in zip(problems, completions, strict=True)]
        encoded = tokenizer(texts, add_special_tokens=not config.chat)["input_ids"]
        fit = [number for number, ids in enumerate(encoded) if ids and (limit is None or len(ids) <= limit)]
        values: list[float | NoScore | None] = [
            NoScore("too long for the reward model", f"{len(ids)} tokens, its limit is {limit}")
            if ids
            else NoScore("the reward model's tokenizer returns no token for the text")
            for ids in encoded
        ]
        # without a separate padding token, a classifier cannot find the end of a shorter text
        for batch in [fit] if pads and fit else [[number] for number in fit]:
            for number, value in zip(batch, score([encoded[number] for number in batch]), strict=True):
                values[number] = value
        return values

    return call


def _max_tokens(model: Any) -> int | None:  # noqa: ANN401 -- Transformers
    """Return the maximum number of tokens of a text for a model; None if the model has no limit."""
    if (limit := getattr(model.config.get_text_config(), "max_position_embeddings", None)) is None:
        return None
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (getattr(table, "padding_idx", None) for table in tables)  # RoBERTa numbers positions after this index
    return int(limit) - sum(index + 1 for index in padding if index is not None)


def _text(tokenizer: Any, config: Classifier, problem: Problem, completion: str) -> str:  # noqa: ANN401 -- Transformers
    if not config.chat:
        return problem.text + completion
    text: str = tokenizer.apply_chat_template(with_answer(problem.prompt, completion), tokenize=False)
    return text


def _config_of(name: str, config: Classifier) -> Any:  # noqa: ANN401 -- Transformers
    from transformers import AutoConfig

    where = f"task.reward_models.{name}.path = '{config.path}'"
    if not (Path(config.path) / "config.json").is_file():
        raise TaskError(f"{where}: this folder has no model (config.json)")
    try:
        model_config = AutoConfig.from_pretrained(config.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: its config.json cannot be read: {first_line(error)}") from error
    kinds = model_config.architectures or ["no architecture"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise TaskError(f"{where} is of type {kinds[0]}; use a ...ForSequenceClassification model")
    if model_config.num_labels != 1:
        raise TaskError(
            f"{where} has {model_config.num_labels} outputs, but a reward is one number: use a model with num_labels 1"
        )
    return model_config


def _tokenizer_for(name: str, config: Classifier, model_config: Any) -> Any:  # noqa: ANN401 -- Transformers
    from transformers import AutoTokenizer

    where = f"task.reward_models.{name}.path = '{config.path}'"
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
    except Exception as error:  # libraries raise errors of many types
        raise TaskError(f"{where} has no loadable tokenizer: {first_line(error)}") from error
    vocab_size = model_config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise TaskError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, but the model a vocabulary of {vocab_size}: the "
            "tokenizer is of another model. Put the model's own tokenizer into the folder"
        )
    if config.chat and not tokenizer.chat_template:
        raise TaskError(
            f"task.reward_models.{name}.chat = true, but the tokenizer has no chat template; set chat = false"
        )
    return tokenizer
