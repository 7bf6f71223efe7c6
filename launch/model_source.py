"""Where a run's model comes from: a folder, a recipe that makes the folder, or the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from launch.config import ModelConfig
from launch.errors import ConfigError

RECIPE_TIMEOUT_S = 1800.0
_LOOK_S = 0.2
_DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
try:
    print(snapshot_download(sys.argv[1], revision=sys.argv[2]))
except Exception as error:  # of many kinds; each means that there is no model
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""
"""In a process of its own: the Hub's client downloads in threads that no signal ends."""


def fetch_model(model: ModelConfig, *, is_there: bool) -> Path:
    """The folder of the model, made or downloaded where it has to be.

    Args:
        model: the section of the config.
        is_there: model.path is, and was checked.

    Raises:
        ConfigError: it cannot be had; says why and what to try.
    """
    if model.path is None:
        return _download(*model.on_hub)
    if not is_there:
        _make(Path(str(model.recipe)), Path(model.path))
    return Path(model.path)


def _download(hub: str, revision: str) -> Path:
    command = [sys.executable, "-c", _DOWNLOAD, hub, revision]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # its progress is on stderr
    said = ended.stdout.strip() or f"the download ended with exit status {ended.returncode}"
    if ended.returncode:
        raise ConfigError(
            f"model.hub = '{hub}' cannot be fetched: {said}; download it elsewhere and give its folder as model.path"
        )
    return Path(said.splitlines()[-1])


def _make(recipe: Path, folder: Path) -> None:
    """Run model.recipe; the folder appears whole or not at all, and one command makes it while others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder.parent):
        if (folder / "config.json").is_file():  # another command has made it meanwhile
            return
        print(f"making {folder} with {recipe.name} (once)", flush=True)
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a command that was killed
        try:
            # ended by whatever ends this command but SIGKILL
            subprocess.run([sys.executable, str(recipe), str(unfinished)], check=True, timeout=RECIPE_TIMEOUT_S)
            unfinished.rename(folder)
        except subprocess.CalledProcessError as error:
            raise _failed(recipe, folder, f"ended with exit status {error.returncode}") from None
        except subprocess.TimeoutExpired:
            raise _failed(recipe, folder, f"did not end within {RECIPE_TIMEOUT_S:g} s") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which leaves nothing behind; the system gives it back where this process is killed.

    Raises:
        ConfigError: another command holds it for longer than a recipe may take.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    deadline, has_told = time.monotonic() + RECIPE_TIMEOUT_S, False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another command has made a model in {folder} for {RECIPE_TIMEOUT_S:g} s; end it, or give "
                        "another model.path"
                    ) from None
                if not has_told:
                    print(f"waiting for another command that makes a model in {folder}", flush=True)
                has_told = True
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _failed(recipe: Path, folder: Path, how: str) -> ConfigError:
    by_hand = f"{sys.executable} {recipe} {folder}"
    return ConfigError(f"model.recipe = '{recipe}' {how}; what it said is above. To see more, by hand: {by_hand}")
