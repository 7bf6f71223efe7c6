"""Where everything of a run lies."""

from __future__ import annotations

import time
from pathlib import Path

from launch.config import Config
from launch.load import ConfigError, to_toml


class RunFolder:
    """`runs/NAME/` and its parts."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.config = self.root / "config.toml"
        self.buffer = self.root / "buffer"
        self.weights = self.root / "weights"
        self.checkpoints = self.root / "checkpoints"
        self.serving = self.root / "serving_model"
        self.export = self.root / "model"
        self.logs = self.root / "logs"
        self.metrics = self.root / "metrics.jsonl"
        self.events = self.root / "events.jsonl"
        self.summary = self.root / "summary.json"

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.root.name

    def log(self, role: str, number: int) -> Path:
        """The log of the n-th process of a role."""
        return self.logs / f"{role}.{number}.log"

    def create(self, config: Config) -> None:
        """Make the folders and write the resolved config.

        Raises:
            ConfigError: the folder exists already, or cannot be made.
        """
        try:
            self.root.mkdir(parents=True, mode=0o700)
            for folder in (self.buffer, self.weights, self.checkpoints, self.logs):
                folder.mkdir()
            self.config.write_text(to_toml(config), encoding="utf-8")
        except FileExistsError:
            raise ConfigError(already_there(self.root)) from None
        except OSError as error:
            raise ConfigError(f"the run folder {self.root} cannot be made: {error}") from None


def already_there(root: Path) -> str:
    """Why a run does not start where another one is."""
    return f"the run folder {root} exists already; choose another --run.name, or remove it"


def choose_root(config: Config, config_path: Path) -> Path:
    """The folder of a new run: `run.dir`/`run.name`, by default the config's name and the time."""
    name = config.run.name or f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"run.name = '{name}' is not a folder name; use run.dir for the place")
    return (Path(config.run.dir).expanduser() / name).resolve()
