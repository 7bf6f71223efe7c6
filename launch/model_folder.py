"""The model of a run as a Hugging Face folder: where it comes from, what is asked of it, and how it leaves."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from actors.tasks import TaskFacts
from common.hf_folder import CONFIG_NAME, ModelFacts, ModelFolderError, check_model_folder
from launch.config import MODEL_KEY, Config, ModelConfig, load_config
from launch.errors import ConfigError, as_config_error
from launch.pools import actor_pools
from launch.run_folder import RunFolder
from learner.checkpoint_files import DamagedCheckpoint, TrainingProgress, export_checkpoint, steps_in
from learner.decoders import FAMILIES, check_served, unread_keys

_DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
name, revision, *sources = sys.argv[1:]
for source in sources:
    try:
        print(snapshot_download(name, revision=revision, local_files_only=source == "cache"))
        break
    except Exception as error:  # of many kinds; each means that there is no model
        said = f"{type(error).__name__}: {error}"
else:
    print(said)
    sys.exit(1)
"""
"""In a process of its own: the Hub's client downloads in threads that no signal ends."""


STARTED_NOTE = (
    "prompts end with the start of the answer, {!r}: completions begin behind it, so a reward that looks for it does "
    "not find it"
)


def fetch_model(model: ModelConfig, *, was_here: bool = False) -> Path:
    """Return the model's folder, downloaded if it is of the Hub; ConfigError says why not and what to try.

    Take what is cached if a run of this model was here: without a network the Hub's client retries for half a minute.
    """
    if model.folder is not None:
        return model.folder
    command = [sys.executable, "-c", _DOWNLOAD, *model.on_hub, *["cache"] * was_here, "hub"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its progress is on stderr
    said = ended.stdout.strip() or f"the download ended with exit status {ended.returncode}"
    if ended.returncode:
        raise ConfigError(
            f"{MODEL_KEY} = '{model.path}' is not a folder, and cannot be fetched from the Hugging Face Hub: {said}; "
            "give the folder of a checkpoint, or download it elsewhere"
        )
    return Path(said.splitlines()[-1])


def check_model(config: Config, path: Path, key: str) -> ModelFacts:
    """Check that a model folder is there, that stages can load it, and that it fits the config."""
    if key == MODEL_KEY and not path.exists():
        script = path.with_suffix(".py")  # as those of the examples
        fix = "give the folder of a Hugging Face checkpoint; ORGANISATION/NAME of the Hugging Face Hub is looked up if "
        fix += "no folder ORGANISATION is there"
        fix = f"run `python {script}` once" if script.is_file() else fix
        raise ConfigError(f"{key}: {path}: no such folder; {fix}")
    with as_config_error(f"{key}: ", ModelFolderError):
        model = check_model_folder(path)
    if model.model_type not in FAMILIES:
        raise ConfigError(
            f"{key}: {path} is of type '{model.model_type}', and the learner trains {', '.join(FAMILIES)}"
        )
    is_served = key not in config.model.frozen
    model = replace(model, unread_keys=_check_loads(path, key, is_served=is_served))
    _check_layers(config, path, model.num_layers)
    if config.actors.max_model_tokens > model.max_position:
        raise ConfigError(
            f"actors.max_prompt_tokens + actors.max_new_tokens = {config.actors.max_model_tokens}, but {path} was "
            f"made for at most {model.max_position} tokens"
        )
    return model


def _check_loads(path: Path, key: str, *, is_served: bool) -> tuple[str, ...]:
    """Return the keys of its config.json that nothing reads."""
    from transformers import AutoConfig  # what is wrong elsewhere is said without it

    from learner.model import check_checkpoint

    try:
        with quiet_transformers():
            check_checkpoint(path)
            model = AutoConfig.from_pretrained(path, local_files_only=True)
            if is_served:
                check_served(model)
            return unread_keys(model)
    except (ModelFolderError, FileNotFoundError) as error:  # which name their file
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:  # Transformers refuses a config.json by errors of many kinds
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: {path} cannot be trained: {why}") from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence its warnings: each is either an error here, or nothing."""
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
            f"learner.num_stages{value}, but {path} has only {num_layers} layers; a {'chunk' if chunks else 'stage'} "
            f"needs at least one"
        )


def model_notes(config: Config, model: ModelFacts | None, task: TaskFacts) -> Iterator[str]:
    """Yield a sentence for each thing of model and tokenizer that can be trained, and was probably not meant."""
    if task.answer_start:
        yield STARTED_NOTE.format(task.answer_start)
    if model is None:
        return
    told = {name for pool in actor_pools(config) for name in pool.config.engine_args.get("hf_overrides", ())}
    if overridden := sorted(told - {"head_dtype"}):
        yield (
            f"actors.engine_args.hf_overrides sets {', '.join(overridden)} for the engine alone: if that changes "
            f"what the model computes, set it in the model's {CONFIG_NAME}, which the learner reads too"
        )
    if model.unread_keys:
        yield (
            f"the model's {CONFIG_NAME} sets {', '.join(model.unread_keys)}, which the learner does not read: if the "
            "engine does, or the model was made with them, log-probabilities are those of another model"
        )
    if task.end_of_turn is not None and task.end_of_turn[0] not in model.eos_token_ids:
        number, text, said_by = task.end_of_turn
        known = ", ".join(map(str, model.eos_token_ids))
        base = ". One that was not, as a base model, may need task.chat = false" if said_by == "chat template" else ""
        yield (
            f"the {said_by} ends an answer with {text} (token {number}), at which generation does not stop: "
            f"eos_token_id is {known}. A model that was taught so runs on to actors.max_new_tokens = "
            f"{config.actors.max_new_tokens}: name {number} too in eos_token_id of its generation_config.json{base}"
        )


def check_frozen(config: Config, model: ModelFacts | None) -> None:
    """Check the models that score samples as the model itself; they need its vocabulary."""
    for key, path in config.model.frozen.items():
        facts = check_model(config, path, key)
        if model is not None and facts.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{key} has a vocabulary of {facts.vocab_size} tokens and the model one of {model.vocab_size}: they "
                "must share a tokenizer"
            )


_MAX_TRIES = 5
"""A living run removes its old checkpoints, perhaps the one that is just being read."""


def export(
    folder: RunFolder, out: Path, step: int | None, say: Callable[[str], object]
) -> tuple[TrainingProgress, int]:
    """Write a checkpoint of a run as a Hugging Face folder, by default the newest that is whole.

    `say` gets a line for each damaged one that is passed over. ConfigError says what to try; OSError if a folder cannot
    be read or written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give another folder, or remove it")
    model_path = fetch_model(load_config(folder.config).model, was_here=True)
    if not (model_path / CONFIG_NAME).is_file():
        raise ConfigError(
            f"the model that the run started from is not at {model_path} any more, and its config and tokenizer are "
            "needed; put it back"
        )
    for _ in range(_MAX_TRIES):
        wanted = _candidates(folder, step)
        for tried in wanted:
            try:
                return export_checkpoint(folder.checkpoints / f"step-{tried:08d}", model_path, out)
            except DamagedCheckpoint as error:
                damage = error
            except ValueError as error:  # of another model
                raise ConfigError(str(error)) from None
            if tried != wanted[-1]:
                say(f"{damage}; the checkpoint before it is used")
        if step is not None or _candidates(folder, None) == wanted:
            raise ConfigError(f"{damage}; {_others(folder, step)}")
    raise ConfigError(f"the checkpoints of {folder.root} are replaced faster than they can be read; try again")


def _candidates(folder: RunFolder, step: int | None) -> list[int]:
    """Return the steps that may be taken, newest first; ConfigError if there is none."""
    steps = steps_in(folder.checkpoints)
    if not steps:
        raise ConfigError(
            f"the run {folder.root} has no checkpoint yet: one is written every learner.checkpoint_every steps, and at "
            "the end or the first Ctrl-C"
        )
    if step is not None and step not in steps:
        raise ConfigError(f"the run {folder.root} has no checkpoint of step {step}; {_others(folder, step)}")
    return [step] if step is not None else steps[::-1]


def _others(folder: RunFolder, step: int | None) -> str:
    others = [str(each) for each in steps_in(folder.checkpoints) if each != step]
    if step is None or not others:
        return "there is no other one that is whole"
    return f"there are those of step {', '.join(others)}: --step {others[-1]}"
