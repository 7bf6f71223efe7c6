"""Tasks: training prompts, which are leased by id, held-out problems, and reward functions.

config     the `[task]` section
task       Task, Problem, RewardFunction
chat       the messages of a chat; PromptCodec: prompts to token ids, completions to text
prompts    Template, PromptColumn: the prompt of an item; held_out: splits questions by their hash;
           teachers_of: the teacher of a prompt
sources    rows of files, folders and data sets on the Hub; the filter of rows
gym        any reasoning-gym dataset by name
functions  reward functions from FILE.py:FUNCTION, with TRL's signature
rules      rewards by name: math, exact, contains, regex, code
reward_models  a judge: a language model behind an endpoint; a sequence classifier, whose output is the reward

Importing this package, or calling `check_task` without a model folder, imports neither torch, vllm nor ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from leeway.actors.tasks.chat import PromptCodec
from leeway.actors.tasks.config import Classifier, CodeRule, FileTask, Judge, ReasoningGymTask, RegexRule, TaskConfig
from leeway.actors.tasks.functions import arguments_of, check_functions, load_function, try_imports
from leeway.actors.tasks.prompts import Template, file_problems, held_out, split_field, teachers_of
from leeway.actors.tasks.rules import ANSWERS, check_rule, load_rule
from leeway.actors.tasks.task import (
    PROMPTS,
    Call,
    Codec,
    FileReward,
    Problem,
    RewardFunction,
    Task,
    TaskError,
    TaskFacts,
)

_log = logging.getLogger(__name__)

__all__ = [
    "Problem",
    "RewardFunction",
    "Task",
    "TaskError",
    "TaskFacts",
    "check_task",
    "codec_of",
    "held_out",
    "load_encoded",
    "load_reward",
    "load_task",
]


def check_task(
    config: ReasoningGymTask | FileTask,
    *,
    model_folder: Path | None = None,
    max_prompt_tokens: int = 0,
    vocab_size: int = 0,
    import_limit_s: float | None = None,
    teachers: Sequence[str] = (),
) -> TaskFacts:
    """Check a `[task]` section as far as possible before a process starts; raise TaskError, which names the fix.

    Reads the data, renders every prompt, and parses reward files. With `import_limit_s` it also imports reward files in
    a separate process, queries judges for their models, and checks that this machine supports rules and network
    isolation. Without a model folder, prompt lengths and classifiers are not checked, and torch is not imported.
    With `teachers`, a list of names, each prompt must name one of these teachers.
    """
    reads = None if teachers else _read_columns(config)
    codec = None if model_folder is None else codec_of(config, model_folder)
    skips = isinstance(config, FileTask) and config.on_long_prompt == "skip"
    reads = None if reads is None else reads | {PROMPTS}
    task = load_task(config, reads, codec if skips else None, max_prompt_tokens)
    columns, named = task.rewards[0].columns, config.named_rewards
    for function in task.rewards if config.rewards else ():
        _check_named(function, task, has_model=model_folder is not None, here=import_limit_s is not None)
    task.check_sources()
    end_of_turn, answer_start, unread_kwargs = None, "", list[str]()
    if codec is not None:
        codec.is_chat |= task.has_messages
        task.check_prompts(codec, max_prompt_tokens, vocab_size)
        codec.check_stop(vocab_size)
        end_of_turn, answer_start = codec.end_of_turn(), codec.answer_start(task.train[0].text)
        unread_kwargs = codec.unread_kwargs()
    if import_limit_s is not None:
        files = [reference for reference in config.rewards if reference not in named]
        try_imports(files, columns, import_limit_s, has_network=config.reward_network)
    teacher_of_prompt = b""
    if config.teacher_column is not None and teachers:
        teacher_of_prompt = teachers_of(task.train, config.teacher_column, teachers)
    return replace(
        task.facts(teacher_of_prompt),
        end_of_turn=end_of_turn,
        answer_start=answer_start,
        unread_kwargs=unread_kwargs,
        column_digests=task.column_digests(),
    )


def codec_of(config: TaskConfig, model_folder: Path) -> PromptCodec:
    """Return the codec of a model folder; raise TaskError if its tokenizer does not fit the task."""
    kwargs = config.chat_template_kwargs
    return PromptCodec(model_folder, config.chat, config.system_prompt, _chat_template(config), kwargs, config.stop)


def _chat_template(config: TaskConfig) -> str:
    """Return the content of the file `task.chat_template`; "" if unset. Raise TaskError if it cannot be read."""
    try:
        return "" if config.chat_template is None else Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task.chat_template: {config.chat_template} cannot be read: {error}") from error


def _check_named(function: RewardFunction, task: Task, *, has_model: bool, here: bool) -> None:
    """Check a reward model or rule on the problems that it scores; large libraries are imported only if needed."""
    name, section, columns = function.name, function.named, function.columns
    if isinstance(section, Judge):
        from leeway.actors.tasks.reward_models import check_judge

        check_judge(name, section, columns, ask=here)
    elif isinstance(section, Classifier):
        if has_model:
            from leeway.actors.tasks.reward_models import check_classifier

            check_classifier(name, section)
    elif section is not None:
        scored = [each for each in task.train if function.applies_to(each)] if function.by_source else ()
        check_rule(name, section, columns, scored or task.train, here=here)


def load_encoded(
    config: TaskConfig, model_path: Path, max_prompt_tokens: int, *, all_columns: bool = False
) -> tuple[Task, PromptCodec]:
    """Return a task for actors, with encoded prompts and the columns that rewards read, and the prompt codec."""
    codec = codec_of(config, model_path)
    started_s = time.perf_counter()
    task = load_task(config, None if all_columns else _read_columns(config), codec, max_prompt_tokens)
    task.check_lengths(max_prompt_tokens)
    codec.is_chat |= task.has_messages
    tokenising_s = 0.0 if task.store is None else task.store.tokenising_s
    read_s = time.perf_counter() - started_s - tokenising_s
    _log.info("rows: %s; read in %.1f s, tokenised in %.1f s", task.rows, read_s, tokenising_s)
    return task, codec


def load_task(
    config: TaskConfig, reads: Collection[str] | None = None, codec: Codec | None = None, max_tokens: int = 0
) -> Task:
    """Return the task with the columns `reads` (None for all), without loading rewards; raise TaskError if invalid.

    With a codec and `task.on_long_prompt = "skip"`, prompts longer than `max_tokens` are skipped.
    """
    if isinstance(config, ReasoningGymTask):
        # import on use: processes with prompts from files do not need this library
        from leeway.actors.tasks.gym import COLUMNS, gym_problems

        split, columns = gym_problems(config, reads, codec), list(COLUMNS)
    else:
        split, columns = file_problems(config, reads, codec, max_tokens)
    has_messages, template = bool(split.store.of_shape), _chat_template(config)
    if (template or config.chat_template_kwargs) and not (config.chat or has_messages):
        raise TaskError("task.chat_template and its arguments have no effect on prompts of text; set task.chat = true")
    named = config.named_rewards
    check_functions(config.rewards, columns, named)
    rewards = [
        RewardFunction(each.rpartition(":")[2], config, columns, "" if each in named else each, has_messages)
        for each in config.rewards
    ]
    if not rewards:
        assert isinstance(config, ReasoningGymTask), "a file task without rewards is rejected earlier"
        rewards = [RewardFunction(config.name, config, columns)]
    return Task(split.train, split.heldout, tuple(rewards), split.rows, split.store, template)


def _read_columns(config: ReasoningGymTask | FileTask) -> frozenset[str] | None:
    """Return the columns that rewards read, and `PROMPTS` if they read prompts; None if they may read all columns."""
    found: set[str] = set()
    for name in config.rewards:
        named = config.named_rewards.get(name)
        if named is None:
            arguments = arguments_of(name) if ":" in name else frozenset[str]()  # else rejected later
            if arguments is None:
                return None
            found |= arguments
        elif isinstance(named, Judge):
            columns = Template(named.prompt, f"task.reward_models.{name}.prompt").columns
            found.update(columns, [PROMPTS] if "prompt" in columns else [])
        elif isinstance(named, Classifier):
            found.add(PROMPTS)
        elif isinstance(named, CodeRule):
            return None  # other columns may define how to run the tests
        else:
            defaults = () if isinstance(named, RegexRule) else ANSWERS
            found.update(split_field(each)[0] for each in (defaults if named.column is None else [named.column]))
    found.update(config.source_columns if isinstance(config, FileTask) else ())
    return frozenset(found) if config.rewards else None


def load_reward(function: RewardFunction) -> Call | FileReward:
    """Load a reward into this process: run the user's file, or load the model; raise TaskError if the load fails."""
    named = function.named
    if function.reference:
        return load_function(function.reference, function.columns, has_messages=function.has_messages)
    if isinstance(named, Judge):
        from leeway.actors.tasks.reward_models import load_judge

        return load_judge(function.name, named, function.columns)
    if isinstance(named, Classifier):
        from leeway.actors.tasks.reward_models import load_classifier

        return load_classifier(function.name, named)
    if named is not None:
        return load_rule(function.name, named, function.columns)
    from leeway.actors.tasks.gym import gym_scorer

    assert isinstance(function.task, ReasoningGymTask), "rows of a file cannot score answers"
    return gym_scorer(function.task)
