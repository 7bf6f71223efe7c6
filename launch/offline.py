"""Training on recorded samples alone: what the config and the samples ask of each other, and the buffer they fill.

The key `buffer.source` names them, and `leeway train CONFIG --from` is a short form of it. Everything but who pushes
into the buffer is as in any other run; its actors, if it has any, evaluate.
"""

from __future__ import annotations

import tomllib
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
    """Look at the samples that a new run is to train on; None where its actors make them.

    Args:
        config: of the run.
        model: None where it is not here yet; its vocabulary is then `check_vocabulary`'s.
        resumed: of a run that has its samples already, whose source is not looked at again; None: it is new.

    Raises:
        ConfigError: config and samples do not suit each other, or the samples are not there; one sentence.
    """
    _check_actors(config)
    source = config.buffer.source
    if source is None:
        return None
    _check_laws(config)
    recorded = _look_at(config, model, Path(source)) if resumed is None else resumed.recorded
    if recorded is not None:
        _check_steps(config, recorded)
    return recorded


def check_vocabulary(recorded: RecordedFacts | None, config: Config, model: ModelFacts) -> None:
    """Hold a model that had to be downloaded or made against the samples.

    Raises:
        ConfigError: it has fewer tokens.
    """
    if recorded is not None and recorded.largest_token >= model.vocab_size:
        raise ConfigError(
            f"{SOURCE_KEY} = '{config.buffer.source}' has token {recorded.largest_token}, and the model only "
            f"{model.vocab_size}: train the model whose tokenizer made these samples"
        )


def fill_buffer(config: Config, facts: RunFacts, folder: RunFolder, expected: RecordedFacts) -> None:
    """Fill the buffer of a new run, whose services have not started.

    Raises:
        ConfigError: the samples are others than `check_offline` has seen, or the buffer cannot be written.
    """
    source = Path(str(config.buffer.source))
    with as_config_error(f"{SOURCE_KEY}: ", BufferError), Recorded.open(source) as recorded:
        newest = survey(recorded).newest
        num_samples = fill(folder.buffer, facts, config.buffer, recorded, newest)
    if num_samples != expected.num_samples:
        raise ConfigError(
            f"{SOURCE_KEY} = '{source}' had {expected.num_samples} samples a moment ago, and now "
            f"{num_samples}: somebody writes to it; start again once that has ended"
        )


# --- parts ----------------------------------------------------------------------------------------------


def _check_actors(config: Config) -> None:
    """A run without actors trains on recorded samples, and evaluates nothing."""
    if config.actors.num_actors:
        return
    if config.buffer.source is None:
        raise ConfigError(
            "actors.num_actors = 0, so nobody makes samples: give it at least 1, or samples that there are: --from RUN"
        )
    if config.actors.eval_every:
        raise ConfigError(
            f"actors.eval_every = {config.actors.eval_every}, and with actors.num_actors = 0 nobody evaluates: give it "
            "at least 1, or set actors.eval_every = 0"
        )


def _look_at(config: Config, model: ModelFacts | None, path: Path) -> RecordedFacts:
    """What is there; all of it can be trained on by this config."""
    limits = {"max_tokens": config.learner.token_budget}
    if model is not None:
        limits = {"max_tokens": min(config.learner.token_budget, model.max_position), "vocab_size": model.vocab_size}
    with as_config_error(f"{SOURCE_KEY}: ", BufferError):
        _check_run(config, path)
        with Recorded.open(path) as recorded:
            found = survey(recorded, **limits)
    _check_samples(config, found, path, is_recorded=recorded.is_recorded)
    return RecordedFacts(
        num_samples=found.num_samples,
        num_groups=found.num_groups,
        num_usable=found.num_usable,
        num_prompts=found.num_prompts,
        group_size=found.group_size,
        largest_token=found.largest_token,
        longest=found.longest,
        num_uninformative=found.num_uninformative,
    )


def _check_laws(config: Config) -> None:
    """What says nothing of samples whose age nobody knows, and that never become more."""
    what = f"{SOURCE_KEY} = '{config.buffer.source}'"
    if config.weight_sync.max_lag != "unbounded":
        raise ConfigError(
            f"{what} has samples of another run's versions, whose age in this one is not known, so weight_sync.max_lag "
            f"= {config.weight_sync.max_lag} cannot be kept: set weight_sync.max_lag = 'unbounded'"
        )
    if config.buffer.sampler == "on_policy_share":
        raise ConfigError(
            f"buffer.sampler = 'on_policy_share' takes a share of the newest samples, and {what} makes all "
            f"of them old: use buffer.sampler = '{config.buffer.replay_sampler}'"
        )
    if config.model.teachers:
        raise ConfigError(
            f"model.teachers teach the prompts of [task], and {what} has prompts of its own, which are nobody's: train "
            "on the samples of one teacher at a time, with model.reference_path"
        )
    if config.launch.autoscale != "off":
        raise ConfigError(
            f"launch.autoscale = '{config.launch.autoscale}' counts what actors make, and with {what} they make "
            "nothing: leave it off"
        )


def _check_run(config: Config, path: Path) -> None:
    """A source that is a run must be over, and have sampled as the config says."""
    settings = path / "config.toml"
    if not settings.is_file():
        return
    owner = owner_of(RunFolder(path))
    if owner is not None:
        raise ConfigError(
            f"{SOURCE_KEY} = '{path}' is a run that lives (process {owner}): wait for its end, or train on an export: "
            f"leeway buffer export {path} samples.parquet"
        )
    try:
        sampled = tomllib.loads(settings.read_text(encoding="utf-8")).get("actors", {}).get("temperature", 1.0)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{settings} cannot be read: {error}; restore it, or train on {path / 'buffer'}") from None
    if sampled != config.actors.temperature:
        raise ConfigError(
            f"actors.temperature = {config.actors.temperature:g}, and {path} was sampled at {sampled:g}: its "
            f"log-probabilities are of that one, so set actors.temperature = {sampled:g}"
        )


def _check_samples(config: Config, found: Survey, path: Path, *, is_recorded: bool) -> None:
    """Have they what loss and sampler read?"""
    needs, name = config.algorithm.needs, config.algorithm.type
    if found.num_unknown and (needs.behaviour or config.learner.ess_budget is not None):
        reader = f"algorithm.type = '{name}' as it is set" if needs.behaviour else "learner.ess_budget"
        remedy = (
            "give them, or use trajectory_balance or online_dpo with algorithm.corrections = []"
            if needs.behaviour
            else "give them, or leave it out"
        )
        raise ConfigError(
            f"{path}: {found.num_unknown} of {found.num_samples} samples have no logprobs, and {reader} reads them: "
            f"{remedy}"
        )
    if not found.num_rewarded:
        sampler = config.buffer.sampler
        by = f", and buffer.sampler = '{sampler}' weighs by rewards" if sampler in BY_REWARD else ""
        raise ConfigError(
            f"{path}: none of {found.num_samples} samples has a reward, and {name} trains on rewards{by}: give them"
        )
    if needs.groups and (found.num_usable == 0 or (found.single and not is_recorded)):
        alone = found.single or "every sample with a reward"
        raise ConfigError(
            f"{path}: {alone} is alone in its group, and algorithm.type = '{name}' compares the samples of a group "
            "with each other: give at least two of each, or leave it out"
        )


def _check_steps(config: Config, recorded: RecordedFacts) -> None:
    """Are there samples for all steps, whichever the sampler takes, and room for all?"""
    learner, buffer = config.learner, config.buffer
    most_a_step = most_set_aside(buffer.refill_uninformative, learner.groups_per_step)
    num_lost = min(recorded.num_uninformative, learner.num_steps * most_a_step)
    possible = num_steps_of(recorded.num_usable - num_lost, learner.groups_per_step, buffer.max_uses)
    if possible is not None and learner.num_steps > possible:
        remedy = "lower one of the first two, or raise buffer.max_uses" if possible else "lower learner.groups_per_step"
        aside = f", of which buffer.refill_uninformative may set {num_lost} aside" if num_lost else ""
        raise ConfigError(
            f"learner.num_steps = {learner.num_steps} with learner.groups_per_step = {learner.groups_per_step} and "
            f"buffer.max_uses = {buffer.max_uses}, but {buffer.source} has {recorded.num_usable} groups to train on"
            f"{aside}, enough for {possible} steps: {remedy}"
        )
    if recorded.longest > learner.token_budget:
        raise ConfigError(
            f"learner.token_budget = {learner.token_budget}, and {buffer.source} has a sample of {recorded.longest} "
            "tokens, which no step could take: raise it"
        )
    if recorded.num_samples > buffer.capacity_trajectories:
        raise ConfigError(
            f"buffer.capacity_trajectories = {buffer.capacity_trajectories}, and {buffer.source} has "
            f"{recorded.num_samples} samples: raise it, or some would be evicted"
        )


def num_steps_of(num_groups: int, groups_per_step: int, max_uses: int | str) -> int | None:
    """For how many steps groups last, whichever are used up first; None: for any number.

    A step takes different groups. After s steps at most floor(s * G / U) of N are used up, U times each, so the next
    step is sure of its G while N less those is at least G.
    """
    if num_groups < groups_per_step:
        return 0
    if isinstance(max_uses, str):
        return None
    return 1 + ((num_groups - groups_per_step + 1) * max_uses - 1) // groups_per_step
