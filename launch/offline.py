"""Training on recorded samples: checks of `buffer.source` against the config, and the buffer that they fill.

`leeway train CONFIG --from SOURCE` sets the key. All else is as in any other run; actors, if it has any, evaluate.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from buffer.errors import BufferError
from buffer.groups import most_set_aside
from buffer.offline.recorded import Recorded, Survey, fill, survey
from common.hf_folder import ModelFacts
from common.run import RunFacts
from launch.config import Config
from launch.errors import ConfigError, as_config_error
from launch.run_folder import RecordedFacts, RunFolder, RunIdentity, owner_of

SOURCE_KEY = "buffer.source"
BY_REWARD = ("reward_softmax", "prioritised")
"""Samplers that weigh groups by their rewards."""


def check_offline(config: Config, model: ModelFacts | None, resumed: RunIdentity | None) -> RecordedFacts | None:
    """Survey the samples that a run is to train on; None if actors generate them.

    Args:
        config: of the run.
        model: None if it is not here yet; `check_vocabulary` then checks it.
        resumed: of a run that has its samples already, whose source is not read again; None: it is new.

    Raises:
        ConfigError: config and samples do not fit, or there are no samples.
    """
    _refuse(_faults_of_config(config))
    if config.buffer.source is None:
        return None
    recorded = _survey(config, model, Path(config.buffer.source)) if resumed is None else resumed.recorded
    if recorded is not None:
        _refuse(_faults_of_size(config, recorded))
    return recorded


def check_vocabulary(recorded: RecordedFacts | None, config: Config, model: ModelFacts) -> None:
    """Check the samples against a model that was downloaded or made after `check_offline`.

    Raises:
        ConfigError: it has fewer tokens.
    """
    if recorded is not None and recorded.largest_token >= model.vocab_size:
        raise ConfigError(
            f"{SOURCE_KEY} = '{config.buffer.source}' has token {recorded.largest_token}, and the model only "
            f"{model.vocab_size}: train the model whose tokenizer made these samples"
        )


def fill_buffer(config: Config, facts: RunFacts, folder: RunFolder, expected: RecordedFacts) -> None:
    """Fill the buffer of a new run before its services start.

    Raises:
        ConfigError: the samples have changed since `check_offline`, or the buffer cannot be written.
    """
    source = Path(str(config.buffer.source))
    with as_config_error(f"{SOURCE_KEY}: ", BufferError), Recorded.open(source) as recorded:
        newest = survey(recorded).newest
        num_samples = fill(folder.buffer, facts, config.buffer, recorded, newest)
    if num_samples != expected.num_samples:
        raise ConfigError(
            f"{SOURCE_KEY} = '{source}' had {expected.num_samples} samples a moment ago, and now {num_samples}: start "
            "again once nothing writes to it"
        )


def num_steps_of(num_groups: int, groups_per_step: int, max_uses: int | str) -> int | None:
    """Return for how many steps groups last, whichever are used up first; None: for any number.

    A step takes different groups. After s steps at most floor(s * G / U) of N are used up, U times each, so the next
    step is sure of its G while N less those is at least G.
    """
    if num_groups < groups_per_step:
        return 0
    if isinstance(max_uses, str):
        return None
    return 1 + ((num_groups - groups_per_step + 1) * max_uses - 1) // groups_per_step


def _refuse(faults: Iterator[str]) -> None:
    for fault in faults:
        raise ConfigError(fault)


def _faults_of_config(config: Config) -> Iterator[str]:
    actors, launch = config.actors, config.launch
    if not actors.num_actors and config.buffer.source is None:
        yield "actors.num_actors = 0 generates no samples: set it to at least 1, or pass --from RUN"
    if not actors.num_actors and actors.eval_every:
        yield (
            f"actors.eval_every = {actors.eval_every} needs an actor: set actors.num_actors to at least 1, or "
            "actors.eval_every = 0"
        )
    if config.buffer.source is None:
        return
    recorded = f"the recorded samples of {SOURCE_KEY} = '{config.buffer.source}'"
    if config.weight_sync.max_lag != "unbounded":
        yield (
            f"weight_sync.max_lag = {config.weight_sync.max_lag} cannot be kept for {recorded}, whose age is unknown: "
            "set weight_sync.max_lag = 'unbounded'"
        )
    if config.buffer.sampler == "on_policy_share":
        yield (
            f"buffer.sampler = 'on_policy_share' takes a share of new samples, and {recorded} are old: set "
            f"buffer.sampler = '{config.buffer.replay_sampler}'"
        )
    if config.model.teachers:
        yield (
            f"model.teachers score the prompts of [task], which are not those of {recorded}: train on the samples of "
            "one teacher at a time, with model.reference_path"
        )
    if launch.autoscale != "off":
        yield f"launch.autoscale = '{launch.autoscale}' has no effect on {recorded}: set launch.autoscale = 'off'"


def _survey(config: Config, model: ModelFacts | None, path: Path) -> RecordedFacts:
    limits = {"max_tokens": config.learner.token_budget}
    if model is not None:
        limits = {"max_tokens": min(config.learner.token_budget, model.max_position), "vocab_size": model.vocab_size}
    with as_config_error(f"{SOURCE_KEY}: ", BufferError):
        _refuse(_faults_of_run(config, path))
        with Recorded.open(path) as recorded:
            found = survey(recorded, **limits)
    _refuse(_faults_of_samples(config, found, path, is_recorded=recorded.is_recorded))
    return RecordedFacts.model_validate({name: getattr(found, name) for name in RecordedFacts.model_fields})


def _faults_of_run(config: Config, path: Path) -> Iterator[str]:
    settings = path / "config.toml"
    if not settings.is_file():
        return
    if (owner := owner_of(RunFolder(path))) is not None:
        yield (
            f"{SOURCE_KEY} = '{path}' is a running job (process {owner}): wait for its end, or train on an export: "
            f"leeway buffer export {path} samples.parquet"
        )
    try:
        sampled = tomllib.loads(settings.read_text(encoding="utf-8")).get("actors", {}).get("temperature", 1.0)
    except (OSError, ValueError) as error:
        yield f"{settings} cannot be read: {error}; restore it, or train on {path / 'buffer'}"
        return
    if sampled != config.actors.temperature:
        yield (
            f"actors.temperature = {config.actors.temperature:g}, and the log-probabilities of {path} were sampled at "
            f"{sampled:g}: set actors.temperature = {sampled:g}"
        )


def _faults_of_samples(config: Config, found: Survey, path: Path, *, is_recorded: bool) -> Iterator[str]:
    needs, name, sampler = config.algorithm.needs, config.algorithm.type, config.buffer.sampler
    missing = f"{path}: {found.num_unknown} of {found.num_samples} samples have no logprobs"
    if found.num_unknown and needs.behaviour:
        yield (
            f"{missing}, and algorithm.type = '{name}' as it is set reads them: give them, or use trajectory_balance "
            "or online_dpo with algorithm.corrections = []"
        )
    if not found.num_rewarded:
        by = f", and buffer.sampler = '{sampler}' weighs by rewards" if sampler in BY_REWARD else ""
        yield f"{path}: none of {found.num_samples} samples has a reward, and {name} trains on rewards{by}: give them"
    if needs.groups and (found.num_usable == 0 or (found.single and not is_recorded)):
        yield (
            f"{path}: {found.single or 'every sample with a reward'} is alone in its group, and algorithm.type = "
            f"'{name}' compares the samples of a group: give at least two of each, or leave it out"
        )


def _faults_of_size(config: Config, recorded: RecordedFacts) -> Iterator[str]:
    learner, buffer = config.learner, config.buffer
    most_a_step = most_set_aside(buffer.refill_uninformative, learner.groups_per_step)
    num_lost = min(recorded.num_uninformative, learner.num_steps * most_a_step)
    possible = num_steps_of(recorded.num_usable - num_lost, learner.groups_per_step, buffer.max_uses)
    if possible is not None and learner.num_steps > possible:
        remedy = "lower one of the first two, or raise buffer.max_uses" if possible else "lower learner.groups_per_step"
        aside = f", of which buffer.refill_uninformative may set {num_lost} aside" if num_lost else ""
        yield (
            f"learner.num_steps = {learner.num_steps} with learner.groups_per_step = {learner.groups_per_step} and "
            f"buffer.max_uses = {buffer.max_uses}, but {buffer.source} has {recorded.num_usable} groups to train on"
            f"{aside}, enough for {possible} steps: {remedy}"
        )
    if recorded.longest > learner.token_budget:
        yield (
            f"learner.token_budget = {learner.token_budget}, and {buffer.source} has a sample of {recorded.longest} "
            "tokens: raise it"
        )
    if recorded.num_samples > buffer.capacity_trajectories:
        yield (
            f"buffer.capacity_trajectories = {buffer.capacity_trajectories}, and {buffer.source} has "
            f"{recorded.num_samples} samples, of which some would be evicted: raise it"
        )
