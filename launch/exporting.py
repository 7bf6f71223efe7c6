"""The model of a run as a Hugging Face folder, while it runs or after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launch.config import Config
from launch.errors import ConfigError
from launch.load import load_config
from launch.run_folder import RunFolder
from learner.checkpoint_meta import DamagedCheckpoint, steps_in
from learner.export import ExportedModel, export_checkpoint

_MAX_TRIES = 5
"""A run that lives removes its old checkpoints, perhaps the one that is just being read."""


def export(folder: RunFolder, out: Path, step: int | None, say: Callable[[str], object]) -> ExportedModel:
    """Write a checkpoint of a run as a Hugging Face folder.

    Args:
        folder: of the run.
        out: the folder to make.
        step: of the checkpoint; None: the newest that is whole.
        say: told of a damaged checkpoint that is passed over.

    Raises:
        ConfigError: one sentence, with what to try.
        OSError: a folder cannot be read or written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give another folder, or remove it")
    model_path = _model_folder(load_config(folder.config))
    for _ in range(_MAX_TRIES):
        wanted = _candidates(folder, step)
        try:
            return _first_whole(folder, wanted, model_path, out, say if step is None else None)
        except DamagedCheckpoint as error:
            if _candidates(folder, None) == wanted or step is not None:
                raise ConfigError(f"{error}; {_others(folder, step)}") from None
    raise ConfigError(
        f"the checkpoints of {folder.root} are replaced faster than they can be read; raise learner.keep_checkpoints"
    )


def _first_whole(
    folder: RunFolder, steps: list[int], model_path: Path, out: Path, say: Callable[[str], object] | None
) -> ExportedModel:
    """Of these steps, newest first.

    Raises:
        DamagedCheckpoint: none is whole, or it is the only one that may be taken (`say` is None).
        ConfigError: the checkpoint is of another model.
    """
    for step in steps:
        try:
            return export_checkpoint(folder.checkpoints / f"step-{step:08d}", model_path, out)
        except DamagedCheckpoint as error:
            if say is None or step == steps[-1]:
                raise
            say(f"{error}; the checkpoint before it is used")
        except ValueError as error:
            raise ConfigError(str(error)) from None
    raise AssertionError("there is at least one step")


def _candidates(folder: RunFolder, step: int | None) -> list[int]:
    """The steps that may be taken, newest first.

    Raises:
        ConfigError: there is none.
    """
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


def _model_folder(config: Config) -> Path:
    """The model that training started from, as it lies on this machine.

    Raises:
        ConfigError: it is not there.
    """
    if config.model.path is not None:
        path = Path(config.model.path)
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"the model that the run started from is not at {path} any more, and its config and tokenizer are "
                "needed; put it back"
            )
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, revision = config.model.on_hub
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"the model that the run started from, {config.model.hub}, is not in this machine's cache of the Hub, and "
            f"its config and tokenizer are needed: huggingface-cli download {name} --revision {revision}"
        ) from error
