"""Reward models: a language model behind an endpoint as a judge, whose rating is the reward; a sequence classifier."""

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

from actors.tasks.config import Classifier, Judge
from actors.tasks.prompts import Template
from actors.tasks.task import TOOK_TOO_LONG, Call, NoScore, Problem, TaskError, among_known, first_line
from common.rpc.auth import is_loopback

_LOOK_S = 10.0
"""Timeout for the endpoint's list of models."""
_OFTEN = 1_000_000
"""Tries of a request: its limit is one of time."""
_LONGEST_PAUSE_S = 120.0
"""Before a retry; to an endpoint that asks for more the library makes no further request."""
_NUMBER = re.compile(r"(-?(?:\d+(?:\.\d+)?|(?<![^\W_])(?<!\.)\.\d+))")
_BREAK = re.compile(r"[:=\n]|[.!?;]\s")
"""A number after it is not part of what is said before it."""
_LISTED = re.compile(r"(?m)^[\s>*-]*\d+[.)]\s")
_IS_RATING = re.compile(r"(?i)rating|score|grade|overall|final|total|verdict|mark")
_MARKUP = re.compile(r"[\s*_`$\\(){}\[\]]+")
_SAYS_MORE = re.compile(r"(?:[^\w.!?;\n]|_)*(?:[=:]|[^\W_])")
"""What follows a number that is not the rating: `10 = best`, `10 is the best`."""
_OF_A_SCALE = frozenset({"/", "of", "out of"})
_OF_A_RANGE = frozenset({",", "\u2013", "to", "or"})
"""What stands between two numbers: `8/10`, `7 or 8`."""


# --- a judge ------------------------------------------------------------------------------------------


def check_judge(name: str, config: Judge, columns: Collection[str], *, ask: bool) -> None:
    """Check the template and the key, and with `ask` the endpoint.

    TaskError if the prompt leaves out the completion or names what no row has, the key is not there, or the endpoint
    refuses it, does not answer, or has no such model.
    """
    _template(name, config, columns)
    key = _api_key(name, config)
    if ask:
        _check_endpoint(name, config, key)


def load_judge(name: str, config: Judge, columns: Collection[str]) -> Call:
    """Return the judge as a reward function, whose samples are rated at once; TaskError as `check_judge` without `ask`.

    An endpoint that is busy (429), fails (5xx) or is away is asked again, after as long as it says (two minutes at
    most) or with growing pauses, until `timeout_s` is over. Only then, or if it refuses, or rates nothing, or if the
    row lacks what the prompt names, has a sample no score.
    """
    template = _template(name, config, columns)
    client = _Client(config, _api_key(name, config))

    async def rate(problem: Problem, completion: str) -> float | NoScore:
        try:
            text = template.render({**problem.columns, "prompt": problem.text, "completion": completion}, "a sample")
        except TaskError as error:  # this row lacks what others have
            return NoScore("the judge's prompt cannot be made", str(error))
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
        """What the endpoint answered last; None if it did not."""
        self._head = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []
        self._request = {"temperature": 0.0, "max_tokens": config.max_tokens, **config.request}
        if "max_completion_tokens" in config.request:  # its other name, where the first is refused
            del self._request["max_tokens"]
        http = _http(openai.DefaultAsyncHttpxClient, config.endpoint, event_hooks={"response": [self._note]})
        self._chat = openai.AsyncOpenAI(
            base_url=config.endpoint, api_key=key, max_retries=_OFTEN, timeout=config.timeout_s, http_client=http
        ).chat.completions

    async def _note(self, response: Any) -> None:  # noqa: ANN401 -- of the library's own HTTP client
        self._last_status = response.status_code
        for name, units in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
            if _pause(response.headers.get(name, "")) > _LONGEST_PAUSE_S * units:
                response.headers[name] = f"{_LONGEST_PAUSE_S * units:g}"

    async def answer(self, text: str) -> str | NoScore:
        messages: Any = [*self._head, {"role": "user", "content": text}]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await self._chat.create(model=self._config.model, messages=messages, extra_body=self._request)
        except TimeoutError:
            last = f"answered {self._last_status} last" if self._last_status else "did not answer"
            return NoScore(TOOK_TOO_LONG, f"{self._config.timeout_s:g} s, its endpoint {last}")
        except self._errors.APIStatusError as error:
            return NoScore(f"the judge answered {error.status_code}", error.message)
        except self._errors.APIError as error:
            return NoScore("the judge gave no answer", error.message)
        if not answer.choices:
            return NoScore("the judge gave no answer", "its response has no choice")
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return NoScore("the judge's answer was cut", f"at max_tokens = {self._config.max_tokens}")
        return choice.message.content or ""


def _pause(said: str) -> float:
    """Return the seconds that a header asks for, by a number or a date."""
    with contextlib.suppress(ValueError):
        return float(said)
    with contextlib.suppress(ValueError, OverflowError):
        return parsedate_to_datetime(said).timestamp() - time.time()
    return 0.0


def _reward(answer: str, config: Judge) -> float | NoScore:
    low, high = sorted((config.worst, config.best))
    rating = _rating(answer, low, high)
    if rating is None or not low <= rating <= high:
        return NoScore("the judge rated nothing", f"not one number from {low:g} to {high:g} ends {answer[-200:]!r}")
    return config.weight * (rating - config.worst) / (config.best - config.worst)


def _rating(answer: str, low: float, high: float) -> float | None:
    """Return the last number, of "8/10" the 8; None if another one may be the rating just as well."""
    numbers, pieces, between = _numbers_in(answer)
    if _rated(numbers, between, high):
        numbers, pieces, between = _numbers_in(_LISTED.sub("", answer))
    if not between:
        return numbers[0] if numbers else None
    last, rated = numbers[-1], _rated(numbers, between, high)
    if between[-1] in _OF_A_SCALE:
        return numbers[-2] if last == high else None
    if last in (low, high) and any(low <= one <= high and one != last for one in numbers):
        # an end of the scale may be named after the rating
        *before, lead = _BREAK.split(pieces[-3])
        if not before or _MARKUP.sub("", lead) or _SAYS_MORE.match(pieces[-1]):
            return None
    if rated - {last}:  # behind a rating of a scale, a number is one where it is called so
        *_, label, lead = ["", *_BREAK.split(pieces[-3])]
        if _MARKUP.sub("", lead) or not _IS_RATING.search(label):
            return None
    is_end, is_beside, is_another = last in (low, high), not _BREAK.search(pieces[-3]), bool(rated - {last})
    return None if is_end + is_beside + is_another > 1 or between[-1] in _OF_A_RANGE else last


def _numbers_in(answer: str) -> tuple[list[float], list[str], list[str]]:
    """Return the numbers; numbers and what follows each, in turns; and what stands between two, without markup."""
    _, *pieces = _NUMBER.split(answer)
    between = [_MARKUP.sub(" ", text).strip().lower() for text in pieces[1:-1:2]]
    return [float(number) for number in pieces[::2]], pieces, between


def _rated(numbers: Sequence[float], between: Sequence[str], high: float) -> set[float]:
    """Return what is said to be of the whole scale, as the 8 of `8/10`."""
    neighbours = zip(numbers, between, numbers[1:], strict=False)
    return {one for one, text, most in neighbours if text in _OF_A_SCALE and most == high}


def _template(name: str, config: Judge, columns: Collection[str]) -> Template:
    key = f"task.reward_models.{name}.prompt"
    template = Template(config.prompt, key)
    known = {"prompt", "completion", *columns}
    for column in template.columns:
        if column not in known:
            raise TaskError(f"{key} names {{{column}}}, which no row has; {among_known(column, known)}")
    if "completion" not in template.columns:
        raise TaskError(f"{key} does not name {{completion}}, so the judge would not see what it rates")
    return template


def _api_key(name: str, config: Judge) -> str:
    if config.api_key_env is None:
        return "none"  # the library sends no request without one
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
    client = openai.OpenAI(base_url=config.endpoint, api_key=key, timeout=_LOOK_S, max_retries=1, http_client=http)
    proxy = _proxy_hint(config.endpoint)
    try:
        with client:
            models = [model.id for model in client.models.list()]
    except openai.APIStatusError as error:
        if error.status_code in (401, 403, 407):
            why = f"refuses the key ({error.status_code}): set api_key_env to the variable with the right one"
            raise TaskError(f"{where} {why}{proxy}") from error
        return  # it is there; some have no list, some are busy
    except openai.APIError as error:
        raise TaskError(
            f"{where} does not answer ({error.message}): start the judge first, or mend the address{proxy}"
        ) from error
    if models and config.model not in models:
        raise TaskError(f"{where} has no model '{config.model}'; {among_known(config.model, models)}")


def _http(kind: Callable[..., Any], endpoint: str, **options: object) -> Any:  # noqa: ANN401 -- the library's own
    """Make an HTTP client, which logs no requests; a judge on this machine is asked without the environment's proxy."""
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)
    direct = {"trust_env": False, "verify": ssl.create_default_context()} if _is_here(endpoint) else {}
    try:
        return kind(**direct, **options)
    except (ValueError, ImportError) as error:  # of the value of a variable
        raise TaskError(f"the judge {endpoint} cannot be asked: {first_line(error)}{_proxy_hint(endpoint)}") from error


def _is_here(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return is_loopback(host) or host.endswith(".localhost") or host in ("0.0.0.0", socket.gethostname().lower())


def _proxy_hint(endpoint: str) -> str:
    """Return what an error says of the environment's proxy, if an endpoint is asked through it."""
    url = urlsplit(endpoint)
    names = (f"{url.scheme}_proxy", f"{url.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    name = next(filter(os.environ.get, names), "")
    if not name or _is_here(endpoint) or proxy_bypass(url.hostname or ""):
        return ""
    return f"; it is asked through the proxy of {name}: to ask it directly, add {url.hostname} to NO_PROXY"


# --- a classifier -------------------------------------------------------------------------------------


def check_classifier(name: str, config: Classifier) -> None:
    """Check the model's config and tokenizer, without its weights.

    TaskError if there is no model, it has more than one output, or its tokenizer is of another model.
    """
    _tokenizer_for(name, config, _config_of(name, config))


def load_classifier(name: str, config: Classifier) -> Call:
    """Return the classifier as a reward function, its model in this process; TaskError as `check_classifier`."""
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
        raise TaskError(f"{where}: {config.path} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise TaskError(
            f"{where}: {config.path} lacks {missing[0]}, so its rewards would be random: it is no trained classifier"
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
            NoScore("too long for the reward model", f"{len(ids)} tokens, it was made for {limit}")
            if ids
            else NoScore("the reward model's tokenizer makes no token of the text")
            for ids in encoded
        ]
        # without a token of its own for padding a classifier cannot tell where a shorter text ends
        for batch in [fit] if pads and fit else [[number] for number in fit]:
            for number, value in zip(batch, score([encoded[number] for number in batch]), strict=True):
                values[number] = config.weight * value
        return values

    return call


def _max_tokens(model: Any) -> int | None:  # noqa: ANN401 -- Transformers
    """Return the length of text that a model was made for; None if it has no limit."""
    if (limit := getattr(model.config.get_text_config(), "max_position_embeddings", None)) is None:
        return None
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (getattr(table, "padding_idx", None) for table in tables)  # models like RoBERTa count from behind it
    return int(limit) - sum(index + 1 for index in padding if index is not None)


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
        raise TaskError(f"{where}: its config.json cannot be read: {first_line(error)}") from error
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
        raise TaskError(f"{where} has no tokenizer that can be loaded: {first_line(error)}") from error
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
