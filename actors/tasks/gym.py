"""Tasks from reasoning-gym: any dataset by name, streamed until there are enough distinct questions."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from leeway.actors.tasks.config import ReasoningGymTask
from leeway.actors.tasks.prompts import HELDOUT_SHARE, Split
from leeway.actors.tasks.task import Codec, Problem, TaskError, after_thoughts, among_known

COLUMNS = ("question", "answer", "metadata")

# A finite dataset repeats items more often the longer it is read. The dataset counts as exhausted
# after this number of repeated items in a row, plus one per distinct question found.
_PATIENCE_ITEMS = 1000
_ACCEPTED_SIZE = 20_000
"""Maximum size that word_ladder accepts."""
_CACHED_ITEMS = 1024
"""Number of items that a scorer caches, because the samples of a group, which share an item, arrive successively."""


def gym_problems(config: ReasoningGymTask, reads: Collection[str] | None = None, codec: Codec | None = None) -> Split:
    """Stream the dataset until there are enough training and held-out problems.

    Raises TaskError if the dataset or a parameter does not exist, the template does not fit the items, or there are
    too few distinct questions.
    """
    dataset = _dataset(config)
    split = Split(config, ("question",), reads, codec)
    limit = min(_most_items(config), dataset.size)
    num_distinct, last_new = 0, 0
    while split.has_room(held=False) or split.has_room(held=True):
        number = split.num_read
        stalled = number - last_new > _PATIENCE_ITEMS + num_distinct
        if stalled or number >= limit:
            split.finish()
            raise TaskError(
                f"dataset {config.name} has only {split.num_distinct} distinct questions in {split.num_read} items: "
                f"{len(split.train)} for task.num_train = {config.num_train} and {len(split.heldout)} for "
                f"task.num_heldout = {config.num_heldout} ({HELDOUT_SHARE:.3g} of all). Lower both keys, or widen "
                "task.params"
            )
        item = _item(dataset, number, config.name)
        split.offer({name: item[name] for name in COLUMNS}, number, f"{config.name} item {number}")
        if split.num_distinct > num_distinct:
            num_distinct, last_new = split.num_distinct, split.num_read
    return split.finish()


def _most_items(config: ReasoningGymTask) -> int:
    # The stream yields a held-out question with probability HELDOUT_SHARE, so even an endless
    # dataset needs this number of items on average. The limit is ten times as many, to allow for repetitions.
    need = max(config.num_train / (1 - HELDOUT_SHARE), config.num_heldout / HELDOUT_SHARE)
    return _PATIENCE_ITEMS + 10 * math.ceil(need)


def gym_scorer(config: ReasoningGymTask) -> Callable[[Sequence[Problem], Sequence[str]], list[float]]:
    """Return the dataset's own `score_answer`, applied to the completion or to the text between the answer tags.

    Items are regenerated from their index, because some values cannot be stored. Some datasets run the answer as code.
    """
    dataset = _dataset(config)

    @lru_cache(_CACHED_ITEMS)
    def item_at(index: int) -> dict[str, Any]:
        return _item(dataset, index, config.name)

    def score(problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        values = []
        for problem, completion in zip(problems, completions, strict=True):
            item = copy.deepcopy(item_at(problem.index))  # a dataset may modify the item
            if item["question"] != problem.question:
                raise TaskError(
                    f"dataset {config.name} generates a different item {problem.index} in each process: start the "
                    "command with PYTHONHASHSEED=0 in its environment"
                )
            answer = extract_answer(completion, config.answer_tag) if config.answer_tag else after_thoughts(completion)
            values.append(_score(dataset, answer, item))
        return values

    return score


def _score(dataset: ProceduralDataset, answer: str | None, item: dict[str, Any]) -> float:
    """Return the dataset's score; 0 if the dataset can parse its own answer, but not the answer of the sample."""
    if "nan" in str(answer).replace(" ", "").lower() and item["metadata"].get("source_dataset") == "complex_arithmetic":
        return 0.0  # the dataset returns min(1.0, nan), which is 1.0
    try:
        return float(dataset.score_answer(answer, item))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        dataset.score_answer(item["answer"], item)
        return 0.0


def _dataset(config: ReasoningGymTask) -> ProceduralDataset:
    if config.name not in DATASETS:
        raise TaskError(
            f"task.name = '{config.name}' is not a dataset of reasoning-gym; {among_known(config.name, DATASETS)}"
        )
    _, config_class = DATASETS[config.name]
    known = {one.name for one in dataclasses.fields(config_class)} - {"size"}
    for name in config.params:
        if name == "size":
            raise TaskError("task.params.size is not supported: set task.num_train instead")
        if name not in known:
            raise TaskError(f"task.params.{name}: {config.name} has no such parameter; {among_known(name, known)}")
    params = {"seed": 0, **config.params}
    if type(params["seed"]) is not int:
        raise TaskError(f"task.params.seed = {params['seed']!r} is not an integer")
    try:
        if config.name == "composite":
            params["datasets"] = [DatasetSpec(**each) for each in params.get("datasets", ())]
        # The index of an item must be below the size. Keep the size small: some datasets generate all items at once.
        size = 1 + _most_items(config)
        try:
            return reasoning_gym.create_dataset(config.name, size=size, **params)
        except ValueError:  # the dataset possibly rejects this size
            size = min(size, _ACCEPTED_SIZE)
            return reasoning_gym.create_dataset(config.name, size=size, **params)
    except Exception as error:  # datasets raise errors of any type
        why = str(error) or type(error).__name__
        raise TaskError(f"task.params: {config.name} rejects {dict(config.params)}: {why}") from error


def _item(dataset: ProceduralDataset, index: int, name: str) -> dict[str, Any]:
    state = random.getstate()
    random.seed(index)  # for datasets that use the global generator: each process must generate equal items
    try:
        item: dict[str, Any] = dataset[index]
    except Exception as error:  # any type: over a hundred datasets have their own generators
        raise TaskError(
            f"reasoning-gym dataset {name} failed at item {index}: {type(error).__name__}: {error}"
        ) from error
    finally:
        random.setstate(state)
    return item
