"""Resuming a run in its own folder: what may differ from before, and what must be as it was.

A run that was killed is resumed as a learner is that was lost within one: the buffer has all that it acknowledged, the
newest whole checkpoint has the learner, and a new incarnation tells both apart from what was abandoned. Without a
checkpoint training starts at the model again, on the draws that the buffer has recorded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from actors.tasks.config import Classifier
from buffer.errors import StoreError
from buffer.offline.inspect import Inspection
from buffer.store import DATA, is_served
from common.hf_folder import CONFIG_NAME, ModelFolderError, model_identity, tensors_by_file
from common.user_input import is_reference
from launch.checks import Plan, check
from launch.config import NAMED_KEYS, Config, fixed_because, load_config, unknown_keys
from launch.errors import ConfigError, as_config_error
from launch.host import role_processes
from launch.observe.metrics import Rows
from launch.observe.status import Accuracy, StatusError, read_status
from launch.run_folder import RunFolder, RunIdentity
from learner.checkpoint_files import Seal, newest_progress

GOODBYE_S = 60.0
"""How long processes of a command that was killed may take to end. Ray's notice at once, an engine in seconds."""


@dataclass(frozen=True)
class History:
    """What earlier commands of a run did."""

    identity: RunIdentity
    last_step: int
    """The last step in metrics.jsonl; a checkpoint may be older."""
    evaluations: Sequence[Accuracy]
    wall_s: float
    """Seconds that the commands before worked on the run."""
    num_redone: int = 0
    changes: str = ""
    """Which keys of the config, and which contents, are other than before, as a sentence; empty where none is."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """As `contents` of launch.resume gives them now."""

    @property
    def before(self) -> Accuracy | None:
        """The first evaluation, if it is of a model that is not trained yet."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first is not None and first.policy_version == 0 else None

    def start(self, step: int) -> str:
        """Return where the run resumes, and what was changed; `step` is of its newest checkpoint, 0 if it has none."""
        place = f"the checkpoint of step {step}" if step else "the model, for there is no checkpoint"
        return f"{place}; changed: {self.changes}" if self.changes else place

    @classmethod
    def read(cls, folder: RunFolder, changes: str = "", digests: Mapping[str, str] = {}) -> History:
        """Read what is there.

        Raises:
            ConfigError: `run.json` is not there, or damaged.
            ValueError: a line of the files is no JSON.
        """
        identity = folder.read_identity()
        last_step = max((row["step"] for row in Rows(folder.metrics).read()), default=0)
        try:
            status = read_status(folder.status)
        except StatusError:  # a command that ended before it wrote one
            return cls(identity, last_step, (), 0.0, 0, changes, digests)
        return cls(identity, last_step, status.evaluations, status.wall_s, status.steps_redone, changes, digests)


class Resumption(NamedTuple):
    plan: Plan
    history: History
    step: int
    """Of the newest checkpoint; 0 where there is none."""

    def describe(self) -> str:
        return f"The run would go on from {self.history.start(self.step)}."


def resume(folder: RunFolder, overrides: Sequence[str], say: Callable[[str], None]) -> Resumption:
    """Check that a run, which is claimed, can be resumed; change nothing yet.

    ConfigError says what to do instead; OSError if the folder cannot be read or written.
    """
    identity = folder.read_identity()
    if unknown := unknown_keys(folder.config):
        raise ConfigError(
            f"{folder.root} was made by another version of Leeway, whose keys this one lacks: {', '.join(unknown)}. "
            "Resume it with that version, or start a new run"
        )
    before = load_config(folder.config)
    config = _with_overrides(folder.config, overrides, before)
    changes = _changes(before, config)
    _check_unfinished(folder, config)
    plan = check(config, folder.root, resumed=identity)
    if plan.task.fingerprint != identity.task_fingerprint:
        raise ConfigError(
            f"the task of {folder.root} has other prompts than when the run was made: its file, or the installed "
            "reasoning-gym, is another. Restore it, or start a new run"
        )
    wait_for_the_dead(folder, say)
    _check_buffer(folder, identity.run_id)
    with as_config_error(), as_config_error(kind=ModelFolderError):
        digests = contents(plan, config.model.folder)
        told = [f"{key} = {new!r} (was {old!r})" for key, old, new in changes]
        told += [f"the content of {name}" for name in changed_contents(identity.digests, digests)]
        history = History.read(folder, ", ".join(told), digests)
    return Resumption(plan, history, _newest_step(folder))


_GENERATION = "generation_config.json"
BESIDE_WEIGHTS = (_GENERATION, "tokenizer*", "*tokens*.json", "*.model", "vocab*", "merges.txt", "chat_template*")
_MODEL = f"model: {CONFIG_NAME}"


def contents(plan: Plan, model_path: Path | None) -> dict[str, str]:
    """Return digests of what a config only names: models, user files with what they import beside them, columns.

    `model_path` is None while the model is not here. Other files that a reward reads are not known.
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
        parts = [
            *(tensors_by_file(folder) or folder.glob("*.bin")),
            *chain(*map(folder.glob, BESIDE_WEIGHTS)),
        ]
        found |= {f"{key}: {path.name}": Seal.of(path).xxh3 for path in {*parts} if path.is_file()}
        found[f"{key}: {CONFIG_NAME}"] = model_identity(folder)
    return found


def changed_contents(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of what is not as it was; `before` is empty in run folders of an older Leeway.

    ConfigError if the model, its tokenizer or a frozen model is another.
    """
    changed = sorted(name for name in {*before, *now} if before and before.get(name) != now.get(name))
    if _MODEL not in now:  # it is not here yet
        changed = [name for name in changed if not name.startswith("model")]
    if models := [name for name in changed if name.startswith("model") and not name.endswith(_GENERATION)]:
        raise ConfigError(
            f"{', '.join(models)}: not as when the run was made, and {fixed_because('model')}. Put it back, or start a "
            "new run"
        )
    return changed


def identity_of(plan: Plan, model_path: Path, earlier: History | None) -> RunIdentity:
    """Return what run.json is to say; errors as of `changed_contents`."""
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
    """Return a user's file, and the files of its folder that it names where it imports."""
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
    if step >= config.learner.num_steps and _is_told(folder, step, with_accuracy=config.actors.num_actors > 0):
        raise ConfigError(
            f"the run {folder.root} is finished: it has taken all learner.num_steps = {config.learner.num_steps}. Give "
            f"it more to go on: --learner.num_steps {2 * config.learner.num_steps}"
        )


def _with_overrides(path: Path, overrides: Sequence[str], before: Config) -> Config:
    """The config with overrides; of another algorithm than before the keys of that one would be unknown."""
    try:
        return load_config(path, overrides)
    except ConfigError:
        if any(word.partition("=")[0] in ("--algorithm", "--algorithm.type") for word in overrides):
            raise ConfigError(_refusal("algorithm.type", before.algorithm.type, "another")) from None
        raise


def _refusal(key: str, old: object, new: object) -> str:
    return (
        f"{key} = {old!r} cannot become {new!r} in a run that is resumed: {fixed_because(key)}. Leave it as it is, or "
        "start a new run"
    )


def _changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, old, new) of what differs; ConfigError if one of them must be as it was."""
    changed = list(_differences(before, after))
    for key, old, new in changed:
        if fixed_because(key):
            raise ConfigError(_refusal(key, old, new))
    if before.algorithm.needs != after.algorithm.needs:
        raise ConfigError(
            "the loss would need other data or another critic than the checkpoint and the buffer have; leave "
            "[algorithm] as it is, or start a new run"
        )
    return changed


def _differences(before: Config, after: Config) -> Iterator[tuple[str, Any, Any]]:
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    for section in new:
        for key in {**old[section], **new[section]}:
            if old[section].get(key) != new[section].get(key):
                yield f"{section}.{key}", old[section].get(key), new[section].get(key)


def wait_for_the_dead(
    folder: RunFolder, say: Callable[[str], None], *, limit_s: float = GOODBYE_S, pause_s: float = 0.2
) -> None:
    """Wait until no process of an earlier command lives: two learners, or two buffer services, must not meet.

    ConfigError if some are left; it says how to end them.
    """
    deadline = time.monotonic() + limit_s
    has_told = False
    while True:
        alive = [found for found in role_processes() if found.run == folder.root.resolve()]
        served = is_served(folder.buffer)
        if not alive and not served:
            return
        names = ", ".join(f"{found.name} (process {found.process.pid})" for found in alive) or "its buffer service"
        if time.monotonic() > deadline:
            remedy = "kill -9 " + " ".join(str(found.process.pid) for found in alive) if alive else "end it on its host"
            raise ConfigError(
                f"{names} of an earlier command of the run {folder.root} still lives {limit_s:g} s after it: {remedy}"
            )
        if not has_told:
            say(f"waiting for {names} of an earlier command to end")
            has_told = True
        time.sleep(pause_s)


def _check_buffer(folder: RunFolder, run_id: str) -> None:
    """See that the buffer in the folder is that of this run; none is there where the run ended before it was made."""
    if not (folder.buffer / DATA).exists():
        return
    with as_config_error(kind=StoreError), Inspection.open(folder.buffer) as inspection:
        theirs = inspection.store.facts.run_id
    if theirs != run_id:
        raise ConfigError(
            f"the buffer in {folder.buffer} is that of another run ({theirs}), and "
            f"{folder.identity.name} says {run_id}; put back the buffer that belongs here"
        )


def _is_told(folder: RunFolder, step: int, *, with_accuracy: bool) -> bool:
    """Does the summary tell of this step's model? That of an earlier command lies there until the next one is done."""
    try:
        said = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    if not isinstance(said, dict):
        return False
    return said.get("num_steps", 0) >= step and (not with_accuracy or said.get("accuracy_after") is not None)
