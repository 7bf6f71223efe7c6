"""The public API, exported by `import leeway`: start a run as a separate process, and read a run.

A run outlives the Python process that started the run. After a kernel restart, a notebook can call `load_run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leeway.common.errors import LeewayError
from leeway.launch.host import leeway_command
from leeway.launch.observe.status import RunStatus, StatusView, view_run
from leeway.launch.run_folder import RunFolder, choose_root, find_config, open_run, owner_of, read_json_lines
from leeway.launch.text import TextOf

if TYPE_CHECKING:
    import pyarrow as pa

START_S = 120.0
"""Maximum time in seconds from the start of a command to the first status of its run; then the start fails."""
_POLL_S = 0.2


class Run:
    """A run that is active or has ended.

    `train`, `resume` and `load_run` return a `Run`. All methods read the files of the run folder, so they also work
    in a process that did not start the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"Run('{self.path}')"

    @property
    def name(self) -> str:
        """Name of the run and of its folder."""
        return self._folder.name

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.root

    @property
    def model_path(self) -> Path:
        """Hugging Face folder of the trained model; raises LeewayError until the run has exported the model."""
        if not (self._folder.export / "config.json").is_file():
            raise LeewayError(
                f"the run {self.path} has not exported its model yet: wait for its end, or export a checkpoint with "
                f"`leeway export {self.path} OUT`"
            )
        return self._folder.export

    def status(self) -> RunStatus:
        """Return the newest status (phase, step, rates, lag, ledger, alerts); raise LeewayError if it is unreadable."""
        return self.view().status

    def view(self) -> StatusView:
        """Return the status and, if the launcher has exited without a final status, the reason and the fix."""
        return view_run(self._folder)

    def metrics(self) -> pa.Table:
        """Return one row per optimizer step, in order; docs/metrics.md describes the columns.

        Columns that a step lacks are null in the row of the step. The table is empty before the first step.
        """
        import pyarrow as pa

        rows = [row for row in read_json_lines(self._folder.metrics) if row is not None]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def samples(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the trajectories in the buffer, one row each, as `leeway buffer export` writes them.

        Args:
            columns: names of the columns to keep, as listed in docs/buffer.md; default: all.

        Damaged rows are left out with a warning. Raises LeewayError if a column or the buffer cannot be read.
        """
        from leeway.buffer.offline.inspect import Inspection, samples

        with Inspection.open(self.path) as inspection:
            table = samples(inspection, columns, TextOf(inspection.folder))
            for message in dict.fromkeys(inspection.damaged):
                warnings.warn(f"left out: {message}", stacklevel=2)
            return table

    def wait(self, timeout_s: float | None = None) -> Run:
        """Block until the run has ended, and return the run.

        Raises:
            LeewayError: the run failed, or its launcher exited early.
            TimeoutError: the run is still active after `timeout_s` seconds; the run continues.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (view := self.view()).is_active:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the run {self.path} is still {view.status.phase} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        if view.gone:
            raise LeewayError(view.gone)
        ended = view.status.ended
        if ended is not None and ended.exit_status == 1:
            raise LeewayError(f"the run {self.path} failed: {ended.text}")
        return self

    def stop(self, timeout_s: float = 600.0) -> Run:
        """End the run after its current step and a checkpoint, and return the run. Do nothing if the run has ended.

        Raises:
            LeewayError: the launcher of the run is on another host.
            TimeoutError: the run is still active after `timeout_s` seconds.
        """
        if owner := owner_of(self._folder):
            if self.status().host != os.uname().nodename:
                raise LeewayError(f"the launcher of {self.path} runs on {self.status().host}: stop it there")
            os.kill(owner, signal.SIGINT)
        return self.wait(timeout_s)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return the run at a path or with a name in `runs/`; raise LeewayError if the run is missing or unreadable."""
    run = Run(open_run(Path(path)))
    run.status()
    return run


def train(config: str | os.PathLike[str], *, wait: bool = True, **overrides: Mapping[str, Any]) -> Run:
    """Start `leeway train` as a separate process, and return the run.

        leeway.train("sums.toml", learner={"num_steps": 50}, run={"name": "first"})

    Args:
        config: path of the TOML file, or the name of a bundled example, such as "demo".
        wait: return after the run has ended; if False, return after the run has written its first status.
        overrides: section -> keys with the values that replace those in the file.

    Raises:
        LeewayError: the config or an override is invalid, so nothing was started; or the run failed.
    """
    from leeway.launch.config import load_config

    path, words = find_config(os.fspath(config)), _words(overrides)
    root = choose_root(load_config(path, words), path)
    return _start(["train", str(path), *words, f"--run.name={root.name}"], RunFolder(root), wait)


def resume(path: str | os.PathLike[str], *, wait: bool = True, **overrides: Mapping[str, Any]) -> Run:
    """Resume a run from its latest checkpoint in a separate process, and return the run; arguments as in `train`."""
    folder = open_run(Path(path))
    return _start(["resume", str(folder.root), *_words(overrides)], folder, wait)


def _words(overrides: Mapping[str, Mapping[str, Any]]) -> list[str]:
    from leeway.launch.config import literal

    return [f"--{section}.{key}={literal(value)}" for section, keys in overrides.items() for key, value in keys.items()]


def _start(words: Sequence[str], folder: RunFolder, wait: bool) -> Run:
    """Start a `leeway` command in a new process session, and wait until the command writes the status of the run."""
    with tempfile.TemporaryFile("w+") as output:
        before = folder.status.stat().st_mtime_ns if folder.status.exists() else 0
        process = subprocess.Popen(
            leeway_command(*words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        deadline = time.monotonic() + START_S
        while not (folder.status.exists() and folder.status.stat().st_mtime_ns > before):
            if (status := process.poll()) is not None or time.monotonic() > deadline:
                output.seek(0)
                errors = [line for line in output.read().splitlines() if line.startswith("leeway: ")]
                reason = errors[-1].removeprefix("leeway: ") if errors else f"no status within {START_S:g} s"
                if status is None:
                    process.terminate()
                raise LeewayError(reason)
            time.sleep(_POLL_S)
    run = Run(folder)
    return run.wait() if wait else run
