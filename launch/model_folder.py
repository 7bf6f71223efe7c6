"""The model of a run as a Hugging Face folder: download, validation and export."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from leeway.actors.tasks import TaskFacts
from leeway.common.hf_folder import CONFIG_NAME, ModelFacts, ModelFolderError, check_model_folder
from leeway.common.process import UNUSED, fast_imports
from leeway.launch.config import MODEL_KEY, Config, ModelConfig, load_config
from leeway.launch.errors import ConfigError, as_config_error
from leeway.launch.pools import actor_pools
from leeway.launch.run_folder import RunFolder
from leeway.learner.checkpoint_files import DamagedCheckpoint, TrainingProgress, export_checkpoint, steps_in
from leeway.learner.decoders import FAMILIES, check_served, unread_keys

_DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
name, revision, *sources = sys.argv[1:]
for source in sources:
    try:
        print(snapshot_download(name, revision=revision, local_files_only=source == "cache"))
        break
    except Exception as error:  # the client raises many types; each means that the model is unavailable
        reason = f"{type(error).__name__}: {error}"
else:
    print(reason)
    sys.exit(1)
"""
"""Program that downloads a model, run in its own process because signals do not end the threads of the Hub's client."""


def fetch_model(model: ModelConfig, *, was_here: bool = False) -> Path:
    """Return the folder of the model, and download a Hub model first; raise ConfigError with the reason and the fix.

    With `was_here`, try the local cache first: without a network, the Hub's client retries for half a minute.
    """
    if model.folder is not None:
        return model.folder
    command = [sys.executable, "-c", _DOWNLOAD, *model.on_hub, *["cache"] * was_here, "hub"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # progress goes to stderr
    output = done.stdout.strip() or f"the download exited with status {done.returncode}"
    if done.returncode:
        raise ConfigError(
            f"{MODEL_KEY} = '{model.path}' is not a folder and cannot be downloaded from the Hugging Face Hub: "
            f"{output}; give the folder of a checkpoint, or download it on another machine"
        )
    return Path(output.splitlines()[-1])


def check_model(config: Config, path: Path, key: str) -> ModelFacts:
    """Check that a model folder exists, that stages can load it, and that it fits the config."""
    if key == MODEL_KEY and not path.exists():
        script = path.with_suffix(".py")  # some examples have a script that creates the model
        fix = "give the folder of a Hugging Face checkpoint, or ORGANISATION/NAME of the Hugging Face Hub; "
        fix += "for a model on the Hub, no folder ORGANISATION may exist"
        fix = f"run `python {script}` once" if script.is_file() else fix
        raise ConfigError(f"{key}: {path}: no such folder; {fix}")
    with as_config_error(f"{key}: ", ModelFolderError):
        model = check_model_folder(path)
    if model.model_type not in FAMILIES:
        raise ConfigError(
            f"{key}: {path} is of type '{model.model_type}'; give a model of a supported type: {', '.join(FAMILIES)}"
        )
    is_served = key not in config.model.frozen
    model = replace(model, unread_keys=_check_loads(path, key, is_served=is_served))
    _check_layers(config, path, model.num_layers)
    if config.actors.max_model_tokens > model.max_position:
        raise ConfigError(
            f"actors.max_prompt_tokens + actors.max_new_tokens = {config.actors.max_model_tokens}, but {path} supports "
            f"at most {model.max_position} tokens: lower one of them"
        )
    return model


def _check_loads(path: Path, key: str, *, is_served: bool) -> tuple[str, ...]:
    """Check that the learner and the engine can load the model; return the unused keys of its config.json."""
    with fast_imports(*UNUSED):  # imported late, because the import is slow
        from transformers import AutoConfig

        from leeway.learner.model import check_checkpoint

    try:
        with quiet_transformers():
            check_checkpoint(path)
            model = AutoConfig.from_pretrained(path, local_files_only=True)
            if is_served:
                check_served(model)
            return unread_keys(model)
    except (ModelFolderError, FileNotFoundError) as error:  # the message names the file
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:  # Transformers raises errors of many types for an invalid config.json
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: {path} cannot be trained: {why}") from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress warnings of Transformers: each is either irrelevant or reported as an error by Leeway."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_layers(config: Config, path: Path, num_layers: int) -> None:
    learner = config.learner
    if learner.num_stages * learner.num_chunks > num_layers:
        chunks = f" * learner.num_chunks = {learner.num_stages * learner.num_chunks}" if learner.num_chunks > 1 else ""
        value = chunks or f" = {learner.num_stages}"
        raise ConfigError(
            f"learner.num_stages{value}, but {path} has only {num_layers} layers: lower it, as each "
            f"{'chunk' if chunks else 'stage'} needs at least one layer"
        )


def model_notes(config: Config, model: ModelFacts | None, task: TaskFacts) -> Iterator[str]:
    """Yield a warning for each setting of model and tokenizer that is valid but probably unintended."""
    if task.answer_start and not config.task.prefill_in_completion:
        yield (
            f"the chat template ends each prompt with {task.answer_start!r}, the start of the answer: rewards receive "
            "only the text after it; set task.prefill_in_completion = true"
        )
    if task.unread_kwargs:
        yield (
            f"task.chat_template_kwargs sets {', '.join(task.unread_kwargs)}, which the chat template does not read: "
            "it has no effect"
        )
    if model is None:
        return
    names = {name for pool in actor_pools(config) for name in pool.config.engine_args.get("hf_overrides", ())}
    if overridden := sorted(names - {"head_dtype"}):
        yield (
            f"actors.engine_args.hf_overrides sets {', '.join(overridden)} only for the engine: if that changes the "
            f"output of the model, set the keys in the model's {CONFIG_NAME}, which the learner also reads"
        )
    if model.unread_keys:
        yield (
            f"the model's {CONFIG_NAME} sets {', '.join(model.unread_keys)}, which the learner ignores: if the engine "
            "or the model's training uses these keys, the learner's log-probabilities do not match the model"
        )
    if task.end_of_turn is not None and task.end_of_turn[0] not in model.eos_token_ids:
        number, text, source = task.end_of_turn
        known = ", ".join(map(str, model.eos_token_ids))
        base = ". For a base model, try task.chat = false" if source == "chat template" else ""
        yield (
            f"the {source} ends an answer with {text} (token {number}), but generation does not stop there: "
            f"eos_token_id is {known}. A model trained to end with that token generates until actors.max_new_tokens = "
            f"{config.actors.max_new_tokens}: add {number} to eos_token_id of its generation_config.json{base}"
        )


def check_frozen(config: Config, model: ModelFacts | None) -> None:
    """Run `check_model` on the frozen models that score samples, and compare their vocabulary size with the model's."""
    for key, path in config.model.frozen.items():
        facts = check_model(config, path, key)
        if model is not None and facts.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{key} has a vocabulary of {facts.vocab_size} tokens, but the model has {model.vocab_size}: use two "
                "models with the same tokenizer"
            )


_MAX_TRIES = 5
"""Maximum attempts to read a checkpoint: a running job may remove old checkpoints while they are read."""


def export(
    folder: RunFolder, out: Path, step: int | None, log: Callable[[str], object]
) -> tuple[TrainingProgress, int]:
    """Write a checkpoint of a run as a Hugging Face folder; if `step` is None, the newest intact checkpoint.

    `log` receives a line for each damaged checkpoint that is skipped. Raise ConfigError with the fix, or OSError if
    a folder cannot be read or written.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; give another folder, or remove it")
    model_path = fetch_model(load_config(folder.config).model, was_here=True)
    if not (model_path / CONFIG_NAME).is_file():
        raise ConfigError(
            f"the initial model of the run is no longer at {model_path}: restore it, because its config and tokenizer "
            "are needed"
        )
    for _ in range(_MAX_TRIES):
        candidates = _candidates(folder, step)
        for candidate in candidates:
            try:
                return export_checkpoint(folder.checkpoints / f"step-{candidate:08d}", model_path, out)
            except DamagedCheckpoint as error:
                damage = error
            except ValueError as error:  # the checkpoint is of another model
                raise ConfigError(str(error)) from None
            if candidate != candidates[-1]:
                log(f"{damage}; using the previous checkpoint")
        if step is not None or _candidates(folder, None) == candidates:
            raise ConfigError(f"{damage}; {_others(folder, step)}")
    raise ConfigError(f"the checkpoints of {folder.root} are replaced faster than they can be read; try again")


def _candidates(folder: RunFolder, step: int | None) -> list[int]:
    """Return the steps of the checkpoints to try, newest first; raise ConfigError if there is none."""
    steps = steps_in(folder.checkpoints)
    if not steps:
        raise ConfigError(
            f"the run {folder.root} has no checkpoint yet: wait for the first. Checkpoints are written every "
            "learner.checkpoint_every steps, at the end and after the first Ctrl-C"
        )
    if step is not None and step not in steps:
        raise ConfigError(f"the run {folder.root} has no checkpoint of step {step}; {_others(folder, step)}")
    return [step] if step is not None else steps[::-1]


def _others(folder: RunFolder, step: int | None) -> str:
    others = [str(each) for each in steps_in(folder.checkpoints) if each != step]
    if step is None or not others:
        return "there is no other intact checkpoint"
    return f"give a step that has a checkpoint ({', '.join(others)}), such as --step {others[-1]}"
