"""Resume a run in its own folder, and check for changed config keys and file contents.

A killed run resumes as its learner does after a restart. The buffer has every acknowledged sample, and the newest
intact checkpoint has the learner state. A new incarnation number separates new policy versions from abandoned ones.
Without a checkpoint, training restarts from the initial model on the batches that the buffer has recorded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from leeway.actors.tasks.config import Classifier
from leeway.buffer.errors import StoreError
from leeway.buffer.offline.inspect import Inspection
from leeway.buffer.store import DATA, is_served
from leeway.common.hf_folder import CONFIG_NAME, ModelFolderError, model_identity, tensors_by_file
from leeway.common.user_input import is_reference
from leeway.launch.checks import Plan, check
from leeway.launch.config import NAMED_KEYS, Config, fixed_because, load_config, unknown_keys
from leeway.launch.errors import ConfigError, as_config_error
from leeway.launch.host import role_processes
from leeway.launch.observe.metrics import Rows
from leeway.launch.observe.status import Accuracy, StatusError, read_status
from leeway.launch.run_folder import RunFolder, RunIdentity
from leeway.learner.checkpoint_files import Seal, newest_progress

SHUTDOWN_GRACE_S = 60.0
"""Seconds that processes of a killed launcher may take to exit; Ray's processes exit at once, engines in seconds."""


@dataclass(frozen=True)
class History:
    """Results of the earlier launches of a run."""

    identity: RunIdentity
    last_step: int
    """The last step in metrics.jsonl; the newest checkpoint may be of an earlier step."""
    evaluations: Sequence[Accuracy]
    wall_s: float
    """Seconds that the earlier launches ran."""
    num_redone: int = 0
    changes: str = ""
    """Changed config keys and changed contents, as text; empty if nothing changed."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Current digests, as returned by `contents`."""

    @property
    def before(self) -> Accuracy | None:
        """Return the first evaluation if it evaluated the untrained model; None if it did not."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first is not None and first.policy_version == 0 else None

    def start(self, step: int) -> str:
        """Describe the starting point and the changes; `step` is the step of the newest checkpoint, 0 without one."""
        place = f"the checkpoint of step {step}" if step else "the initial model, because there is no checkpoint"
        return f"{place}; changed: {self.changes}" if self.changes else place

    @classmethod
    def read(cls, folder: RunFolder, changes: str = "", digests: Mapping[str, str] = {}) -> History:
        """Read the history from the run folder.

        Raises:
            ConfigError: `run.json` is missing or damaged.
            ValueError: a line of metrics.jsonl is not JSON.
        """
        identity = folder.read_identity()
        last_step = max((row["step"] for row in Rows(folder.metrics).read()), default=0)
        try:
            status = read_status(folder.status)
        except StatusError:  # the earlier launch ended before it wrote a status
            return cls(identity, last_step, (), 0.0, 0, changes, digests)
        return cls(identity, last_step, status.evaluations, status.wall_s, status.steps_redone, changes, digests)


class Resumption(NamedTuple):
    plan: Plan
    history: History
    step: int
    """Step of the newest checkpoint; 0 if there is none."""

    def describe(self) -> str:
        return f"The run would resume from {self.history.start(self.step)}."


def resume(folder: RunFolder, overrides: Sequence[str], log: Callable[[str], None]) -> Resumption:
    """Check that a run can be resumed, without changing it. The caller must hold the lock of the run.

    Raise ConfigError with the reason and the fix, or OSError if the folder cannot be read or written.
    """
    identity = folder.read_identity()
    if unknown := unknown_keys(folder.config):
        raise ConfigError(
            f"{folder.root} was created by another version of Leeway with keys that this version lacks: "
            f"{', '.join(unknown)}. Resume it with that version, or start a new run"
        )
    before = load_config(folder.config)
    config = _with_overrides(folder.config, overrides, before)
    changes = _changes(before, config)
    _check_unfinished(folder, config)
    plan = check(config, folder.root, resumed=identity)
    if plan.task.fingerprint != identity.task_fingerprint:
        raise ConfigError(
            f"the prompts of the task of {folder.root} changed since the run was created: restore the task's file "
            "or the version of reasoning-gym, or start a new run"
        )
    wait_for_earlier_processes(folder, log)
    _check_buffer(folder, identity.run_id)
    with as_config_error(), as_config_error(kind=ModelFolderError):
        digests = contents(plan, config.model.folder)
        changed = [f"{key} = {new!r} (was {old!r})" for key, old, new in changes]
        changed += [f"the content of {name}" for name in changed_contents(identity.digests, digests)]
        history = History.read(folder, ", ".join(changed), digests)
    return Resumption(plan, history, _newest_step(folder))


_GENERATION = "generation_config.json"
BESIDE_WEIGHTS = (_GENERATION, "tokenizer*", "*tokens*.json", "*.model", "vocab*", "merges.txt", "chat_template*")
_MODEL = f"model: {CONFIG_NAME}"


def contents(plan: Plan, model_path: Path | None) -> dict[str, str]:
    """Return digests of all that a config refers to: models, user files with their local imports, and task columns.

    `model_path` is None if the model is not downloaded. Other files that a reward reads are not covered.
    """
    config = plan.config
    models = {} if model_path is None else {"model": model_path, **config.model.frozen}
    rewards = {f"task.reward_models.{name}": each for name, each in config.task.reward_models.items()}
    folders = models | {key: Path(each.path) for key, each in rewards.items() if isinstance(each, Classifier)}
    named = [getattr(getattr(config, section), key, "") for section, key in (each.split(".") for each in NAMED_KEYS)]
    files = [Path(each.rpartition(":")[0]) for each in (*config.task.rewards, *named) if is_reference(each)]
    found = {f"column {name} of the task": digest for name, digest in plan.task.column_digests.items()}
    found |= {str(path): Seal.of(path).xxh3 for file in files for path in _with_imports(file)}
    for key, folder in folders.items():
        parts = [*(tensors_by_file(folder) or folder.glob("*.bin")), *chain(*map(folder.glob, BESIDE_WEIGHTS))]
        found |= {f"{key}: {path.name}": Seal.of(path).xxh3 for path in {*parts} if path.is_file()}
        found[f"{key}: {CONFIG_NAME}"] = model_identity(folder)
    return found


def changed_contents(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of changed contents; `before` is empty in run folders of an older Leeway.

    Raise ConfigError if the model, its tokenizer or a frozen model changed.
    """
    changed = sorted(name for name in {*before, *now} if before and before.get(name) != now.get(name))
    if _MODEL not in now:  # the model is not downloaded yet
        changed = [name for name in changed if not name.startswith("model")]
    if models := [name for name in changed if name.startswith("model") and not name.endswith(_GENERATION)]:
        raise ConfigError(
            f"{', '.join(models)}: changed since the run was created, but {fixed_because('model')}. Restore the "
            "earlier content, or start a new run"
        )
    return changed


def identity_of(plan: Plan, model_path: Path, earlier: History | None) -> RunIdentity:
    """Return the content of run.json; raise as `changed_contents` does."""
    known = earlier.digests if earlier is not None and _MODEL in earlier.digests else None
    digests = known or contents(plan, model_path)
    changed_contents(earlier.identity.digests if earlier is not None else {}, digests)
    return RunIdentity(
        run_id=plan.run_id,
        task_fingerprint=plan.task.fingerprint,
        started_s=(*(earlier.identity.started_s if earlier else ()), round(time.time(), 3)),
        recorded=plan.recorded,
        digests=dict(digests),
    )


def _with_imports(file: Path) -> set[Path]:
    """Return a user file and the files of its folder that it imports, directly or indirectly."""
    found, left = set[Path](), [file]
    while left:
        found.add(path := left.pop())
        text = path.read_text(encoding="utf-8", errors="replace")
        words = set(re.findall(r"\w+", " ".join(re.findall(r"^\s*(?:from|import)\s.+", text, re.M))))
        beside = (each for word in words for each in (file.parent / f"{word}.py", *(file.parent / word).rglob("*.py")))
        left += [each for each in beside if each.is_file() and each not in found]
    return found


def _newest_step(folder: RunFolder) -> int:
    reached = newest_progress(folder.checkpoints) if folder.checkpoints.is_dir() else None
    return 0 if reached is None else reached.step


def _check_unfinished(folder: RunFolder, config: Config) -> None:
    step = _newest_step(folder)
    if step >= config.learner.num_steps and _is_summarised(folder, step, with_accuracy=config.actors.num_actors > 0):
        raise ConfigError(
            f"the run {folder.root} is finished after learner.num_steps = {config.learner.num_steps}: raise it to "
            f"continue, as in --learner.num_steps {2 * config.learner.num_steps}"
        )


def _with_overrides(path: Path, overrides: Sequence[str], before: Config) -> Config:
    """Return the config with overrides; if they change the algorithm, report this change before unknown keys."""
    try:
        return load_config(path, overrides)
    except ConfigError:
        if any(word.partition("=")[0] in ("--algorithm", "--algorithm.type") for word in overrides):
            raise ConfigError(_refusal("algorithm.type", before.algorithm.type, "another")) from None
        raise


def _refusal(key: str, old: object, new: object) -> str:
    return (
        f"{key} = {old!r} cannot become {new!r} in a resumed run: {fixed_because(key)}. Keep the value, or start a new "
        "run"
    )


def _changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, old, new) of each changed key; raise ConfigError if one of them must not change."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    keys = [(section, key) for section in new for key in {**old[section], **new[section]}]
    values = [(f"{section}.{key}", old[section].get(key), new[section].get(key)) for section, key in keys]
    changed = [(key, was, now) for key, was, now in values if was != now]
    for key, was, now in changed:
        if fixed_because(key):
            raise ConfigError(_refusal(key, was, now))
    if before.algorithm.needs != after.algorithm.needs:
        raise ConfigError(
            "the changed loss needs other data or another critic than the checkpoint and the buffer have; keep "
            "[algorithm], or start a new run"
        )
    return changed


def wait_for_earlier_processes(
    folder: RunFolder, log: Callable[[str], None], *, limit_s: float = SHUTDOWN_GRACE_S, pause_s: float = 0.2
) -> None:
    """Wait until all processes of an earlier launch exit: two learners, or two buffer services, must not overlap.

    If a process still runs after `limit_s`, raise ConfigError with the command that ends the processes.
    """
    deadline = time.monotonic() + limit_s
    is_logged = False
    while True:
        alive = [found for found in role_processes() if found.run == folder.root.resolve()]
        served = is_served(folder.buffer)
        if not alive and not served:
            return
        names = ", ".join(f"{found.name} (process {found.process.pid})" for found in alive) or "its buffer service"
        if time.monotonic() > deadline:
            fix = "run kill -9 " + " ".join(str(each.process.pid) for each in alive) if alive else "end it on its host"
            raise ConfigError(
                f"processes of an earlier launch of {folder.root} still run after {limit_s:g} s ({names}): {fix}"
            )
        if not is_logged:
            log(f"waiting for {names} of an earlier launch to exit")
            is_logged = True
        time.sleep(pause_s)


def _check_buffer(folder: RunFolder, run_id: str) -> None:
    """Check that the buffer in the folder belongs to this run. A run that ended early may have no buffer."""
    if not (folder.buffer / DATA).exists():
        return
    with as_config_error(kind=StoreError), Inspection.open(folder.buffer) as inspection:
        found = inspection.store.facts.run_id
    if found != run_id:
        raise ConfigError(
            f"the buffer in {folder.buffer} belongs to the run {found}, but {folder.identity.name} has {run_id}: "
            "restore the buffer of this run"
        )


def _is_summarised(folder: RunFolder, step: int, *, with_accuracy: bool) -> bool:
    """Return whether the summary covers this step; an earlier launch's summary remains until the next launch ends."""
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    if not isinstance(summary, dict):
        return False
    return summary.get("num_steps", 0) >= step and (not with_accuracy or summary.get("accuracy_after") is not None)
