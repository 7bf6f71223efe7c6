"""Training on recorded samples: validation of `buffer.source` against the config, and filling of the buffer.

`leeway train CONFIG --from SOURCE` sets `buffer.source`. The actors of a run with this key only evaluate.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from leeway.buffer.errors import BufferError
from leeway.buffer.groups import max_set_aside
from leeway.buffer.offline.recorded import Recorded, Survey, load_samples, survey
from leeway.common.hf_folder import ModelFacts
from leeway.common.run import RunFacts
from leeway.launch.config import Config
from leeway.launch.errors import ConfigError, as_config_error
from leeway.launch.run_folder import RecordedFacts, RunFolder, RunIdentity, owner_of

SOURCE_KEY = "buffer.source"
BY_REWARD = ("reward_softmax", "prioritised")
"""Samplers that weight groups by their rewards."""


def check_offline(config: Config, model: ModelFacts | None, resumed: RunIdentity | None) -> RecordedFacts | None:
    """Return facts on the recorded samples that a run trains on; None if actors generate its samples.

    Args:
        config: config of the run.
        model: facts on the model; None if it is not downloaded yet and `check_vocabulary` follows.
        resumed: identity of a resumed run, whose buffer has the samples, so the source is not read; None for a new run.

    Raises:
        ConfigError: the samples do not fit the config, or the source has no samples.
    """
    _check_config(config)
    if config.buffer.source is None:
        return None
    recorded = _survey(config, model, Path(config.buffer.source)) if resumed is None else resumed.recorded
    if recorded is not None:
        _check_size(config, recorded)
    return recorded


def check_vocabulary(recorded: RecordedFacts | None, config: Config, model: ModelFacts) -> None:
    """Check the samples against a model that was downloaded after `check_offline`.

    Raises:
        ConfigError: the vocabulary of the model is too small.
    """
    if recorded is not None and recorded.largest_token >= model.vocab_size:
        raise ConfigError(
            f"{SOURCE_KEY} = '{config.buffer.source}' has token {recorded.largest_token}, but the model has only "
            f"{model.vocab_size} tokens: train a model with the tokenizer of these samples"
        )


def fill_buffer(config: Config, facts: RunFacts, folder: RunFolder, expected: RecordedFacts) -> None:
    """Fill the buffer of a new run before its services start.

    Raises:
        ConfigError: the samples have changed since `check_offline`, or the buffer cannot be written.
    """
    source = Path(str(config.buffer.source))
    with as_config_error(f"{SOURCE_KEY}: ", BufferError), Recorded.open(source) as recorded:
        newest = survey(recorded).newest
        num_samples = load_samples(folder.buffer, facts, config.buffer, recorded, newest)
    if num_samples != expected.num_samples:
        raise ConfigError(
            f"{SOURCE_KEY} = '{source}' changed from {expected.num_samples} to {num_samples} samples: start again when "
            "no process writes to it"
        )


def num_steps_of(num_groups: int, groups_per_step: int, max_uses: int | str) -> int | None:
    """Return the number of steps for which the groups suffice in any draw order; None if unlimited.

    A step draws G of N groups, and each group may be drawn U times. After s steps, at most floor(s * G / U) groups are
    used up. The next step can draw G groups for certain if at least G groups remain.
    """
    if num_groups < groups_per_step:
        return 0
    if isinstance(max_uses, str):
        return None
    return 1 + ((num_groups - groups_per_step + 1) * max_uses - 1) // groups_per_step


def _check_config(config: Config) -> None:
    actors, launch = config.actors, config.launch
    if not actors.num_actors and config.buffer.source is None:
        raise ConfigError("actors.num_actors = 0 generates no samples: set it to at least 1, or pass --from RUN")
    if not actors.num_actors and actors.eval_every:
        raise ConfigError(
            f"actors.eval_every = {actors.eval_every} needs an actor: set actors.num_actors to at least 1, or "
            "actors.eval_every = 0"
        )
    if config.buffer.source is None:
        return
    recorded = f"the recorded samples of {SOURCE_KEY} = '{config.buffer.source}'"
    if config.weight_sync.max_lag != "unbounded":
        raise ConfigError(
            f"weight_sync.max_lag = {config.weight_sync.max_lag} cannot bound the lag of {recorded}, which is unknown: "
            "set weight_sync.max_lag = 'unbounded'"
        )
    if config.buffer.sampler == "on_policy_share":
        raise ConfigError(
            f"buffer.sampler = 'on_policy_share' needs a share of new samples, but {recorded} are old: set "
            f"buffer.sampler = '{config.buffer.replay_sampler}'"
        )
    if config.model.teachers:
        raise ConfigError(
            f"model.teachers score the prompts of [task], but {recorded} have other prompts: train on the samples of "
            "one teacher at a time, with model.reference_path"
        )
    if launch.autoscale != "off":
        raise ConfigError(
            f"launch.autoscale = '{launch.autoscale}' has no effect on {recorded}: set launch.autoscale = 'off'"
        )


def _survey(config: Config, model: ModelFacts | None, path: Path) -> RecordedFacts:
    limits = {"max_tokens": config.learner.token_budget}
    if model is not None:
        limits = {"max_tokens": min(config.learner.token_budget, model.max_position), "vocab_size": model.vocab_size}
    with as_config_error(f"{SOURCE_KEY}: ", BufferError):
        _check_run(config, path)
        with Recorded.open(path) as recorded:
            found = survey(recorded, **limits)
    _check_samples(config, found, path, is_recorded=recorded.is_recorded)
    return RecordedFacts.model_validate({name: getattr(found, name) for name in RecordedFacts.model_fields})


def _check_run(config: Config, path: Path) -> None:
    settings = path / "config.toml"
    if not settings.is_file():
        return
    if (owner := owner_of(RunFolder(path))) is not None:
        raise ConfigError(
            f"{SOURCE_KEY} = '{path}' is a running job (process {owner}): wait until it ends, or train on an export: "
            f"leeway buffer export {path} samples.parquet"
        )
    try:
        sampled = tomllib.loads(settings.read_text(encoding="utf-8")).get("actors", {}).get("temperature", 1.0)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{settings} cannot be read: {error}; restore it, or train on {path / 'buffer'}") from None
    if sampled != config.actors.temperature:
        raise ConfigError(
            f"actors.temperature = {config.actors.temperature:g}, but the samples of {path} were generated at "
            f"{sampled:g}: set actors.temperature = {sampled:g}"
        )


def _check_samples(config: Config, found: Survey, path: Path, *, is_recorded: bool) -> None:
    needs, name, sampler = config.algorithm.needs, config.algorithm.type, config.buffer.sampler
    missing = f"{path}: {found.num_unknown} of {found.num_samples} samples have no logprobs"
    if found.num_unknown and needs.behaviour:
        raise ConfigError(
            f"{missing}, but algorithm.type = '{name}' with its settings needs them: add them, or use "
            "trajectory_balance or online_dpo with algorithm.corrections = []"
        )
    if not found.num_rewarded:
        by = f", and buffer.sampler = '{sampler}' weights by rewards" if sampler in BY_REWARD else ""
        raise ConfigError(
            f"{path}: none of {found.num_samples} samples has a reward, but {name} trains on rewards{by}: add rewards"
        )
    if needs.groups and (found.num_usable == 0 or (found.single and not is_recorded)):
        raise ConfigError(
            f"{path}: {found.single or 'every sample with a reward'} is alone in its group, but algorithm.type = "
            f"'{name}' compares the samples of a group: add another sample to the group, or remove this sample"
        )


def _check_size(config: Config, recorded: RecordedFacts) -> None:
    learner, buffer = config.learner, config.buffer
    most_a_step = max_set_aside(buffer.refill_uninformative, learner.groups_per_step)
    num_lost = min(recorded.num_uninformative, learner.num_steps * most_a_step)
    possible = num_steps_of(recorded.num_usable - num_lost, learner.groups_per_step, buffer.max_uses)
    if possible is not None and learner.num_steps > possible:
        fix = "lower num_steps or groups_per_step, or raise max_uses" if possible else "lower learner.groups_per_step"
        aside = f", of which buffer.refill_uninformative may exclude {num_lost}" if num_lost else ""
        raise ConfigError(
            f"learner.num_steps = {learner.num_steps} with learner.groups_per_step = {learner.groups_per_step} and "
            f"buffer.max_uses = {buffer.max_uses}, but {buffer.source} has {recorded.num_usable} usable groups"
            f"{aside}, enough for {possible} steps: {fix}"
        )
    if recorded.longest > learner.token_budget:
        raise ConfigError(
            f"learner.token_budget = {learner.token_budget}, but {buffer.source} has a sample of {recorded.longest} "
            "tokens: raise the budget"
        )
    if recorded.num_samples > buffer.capacity_trajectories:
        raise ConfigError(
            f"buffer.capacity_trajectories = {buffer.capacity_trajectories}, but {buffer.source} has "
            f"{recorded.num_samples} samples, so some would be evicted: raise the capacity"
        )
