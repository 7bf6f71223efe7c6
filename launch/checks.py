"""What only the whole config can know, checked before any process starts."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from actors.tasks import TaskError, TaskFacts, check_task
from buffer.config import RunFacts
from buffer.shards import admission_shares
from launch.config import Config
from launch.load import ConfigError
from launch.run_folder import RunFolder, already_there
from learner.families import FAMILIES
from weight_sync.serving import ModelFacts, ModelFolderError, check_model_folder
from weight_sync.staleness import StalenessContract


@dataclass(frozen=True)
class Plan:
    """A config that passed every check, and what was learned on the way."""

    config: Config
    folder: RunFolder
    model: ModelFacts | None
    """None where the model has yet to be downloaded or made."""
    task: TaskFacts
    run_id: str

    def run_facts(self, model: ModelFacts, shard: int) -> RunFacts:
        """What a shard of the buffer is told of the run."""
        config = self.config
        return RunFacts(
            run_id=self.run_id,
            seed=config.run.seed,
            num_prompts=self.task.num_train,
            group_size=config.actors.group_size,
            groups_per_step=config.learner.groups_per_step,
            updates_per_step=config.learner.updates_per_step,
            vocab_size=model.vocab_size,
            max_tokens=config.actors.max_model_tokens,
            token_budget=config.learner.token_budget,
            staleness=config.weight_sync.staleness(),
            shard=shard,
            num_shards=config.buffer.shards,
        )

    def describe(self) -> str:
        """A few lines for `--dry-run`."""
        config = self.config
        samples = config.learner.groups_per_step * config.actors.group_size
        updates = _count(config.learner.updates_per_step, "update")
        model = config.model.path or f"{config.model.hub} (from the Hub)"
        if self.model is None:
            model += ", not here yet and not checked"
        return "\n".join(
            [
                f"run        {self.folder.root}",
                f"model      {model}",
                f"task       {config.task.type}, {self.task.num_train} prompts, {self.task.num_heldout} held out",
                f"algorithm  {config.algorithm.type}",
                f"actors     {config.actors.num_actors}, {config.actors.group_size} samples per prompt",
                f"learner    {_pipeline(config)}; {config.learner.num_steps} steps of "
                f"{config.learner.groups_per_step} prompts ({samples} samples), {updates} each",
                f"staleness  max_lag = {config.weight_sync.max_lag}, on_stale = {config.weight_sync.on_stale}",
                "Everything that can be checked before a process starts is in order.",
            ]
        )


def check(config: Config, root: Path) -> Plan:
    """Check a config against itself, its files and the model.

    Raises:
        ConfigError: one sentence that names the key, the reason and what to try.
    """
    if root.exists():
        raise ConfigError(already_there(root))
    try:
        config.learner.check_pipeline()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_steps(config)
    contract = _contract(config)
    _check_sizes(config, contract)
    try:
        task = check_task(config.task)
    except TaskError as error:
        raise ConfigError(f"[task] {error}") from None
    try:
        admission_shares(task.num_train, config.buffer.shards, contract.capacity())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.actors.eval_every and config.actors.eval_problems > task.num_heldout:
        raise ConfigError(
            f"actors.eval_problems = {config.actors.eval_problems}, but the task holds out {task.num_heldout} problems"
        )
    model = None
    if config.model.path is not None and not _is_to_be_made(config):
        model = check_model(config, Path(config.model.path), "model.path")
    if config.model.reference_path is not None:
        reference = check_model(config, Path(config.model.reference_path), "model.reference_path")
        if model is not None and reference.vocab_size != model.vocab_size:
            raise ConfigError(
                f"model.reference_path has a vocabulary of {reference.vocab_size} tokens and the model one of "
                f"{model.vocab_size}: they must share a tokenizer"
            )
    return Plan(config, RunFolder(root), model, task, run_id=uuid.uuid4().hex)


def check_model(config: Config, path: Path, key: str) -> ModelFacts:
    """Check that a model folder is there and fits the config."""
    try:
        model = check_model_folder(path)
    except ModelFolderError as error:
        raise ConfigError(f"{key}: {error}") from None
    if model.model_type not in FAMILIES:
        raise ConfigError(
            f"{key}: {path} is of type '{model.model_type}', and the learner trains {', '.join(FAMILIES)}"
        )
    _check_layers(config, path, model.num_layers)
    if config.actors.max_model_tokens > model.max_position:
        raise ConfigError(
            f"actors.max_prompt_tokens + actors.max_new_tokens = {config.actors.max_model_tokens}, but {path} was "
            f"made for at most {model.max_position} tokens"
        )
    return model


def _is_to_be_made(config: Config) -> bool:
    recipe = config.model.recipe
    if recipe is None or config.model.path is None or Path(config.model.path).exists():
        return False
    if not Path(recipe).is_file():
        raise ConfigError(f"model.recipe = '{recipe}': no such file, and model.path is not there either")
    return True


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _pipeline(config: Config) -> str:
    """How many processes train, and how they share the model, for people."""
    learner = config.learner
    replicas = f"{learner.num_replicas} replicas of " if learner.num_replicas > 1 else ""
    chunks = f" of {learner.num_chunks} chunks" if learner.num_chunks > 1 else ""
    return f"{replicas}{_count(learner.num_stages, 'stage')}{chunks}, schedule {learner.schedule}"


def _contract(config: Config) -> StalenessContract:
    """The staleness contract of the run.

    Raises:
        ConfigError: no sample could be used within the bound.
    """
    learner = config.learner
    try:
        return StalenessContract(config.weight_sync.staleness(), learner.groups_per_step, learner.updates_per_step)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_layers(config: Config, path: Path, num_layers: int) -> None:
    learner = config.learner
    if learner.num_stages * learner.num_chunks > num_layers:
        chunks = f" * learner.num_chunks = {learner.num_stages * learner.num_chunks}" if learner.num_chunks > 1 else ""
        value = chunks or f" = {learner.num_stages}"
        raise ConfigError(
            f"learner.num_stages{value}, but {path} has only {num_layers} layers; a {'chunk' if chunks else 'stage'} "
            f"needs at least one"
        )
    layers = learner.layers_per_chunk
    if layers is not None and sum(layers) != num_layers:
        raise ConfigError(f"learner.layers_per_chunk adds up to {sum(layers)} layers, and {path} has {num_layers}")


def _check_steps(config: Config) -> None:
    """What a step trains, and how."""
    needs, learner = config.algorithm.needs, config.learner
    if learner.groups_per_step < learner.num_minibatches:
        raise ConfigError(
            f"learner.num_minibatches = {learner.num_minibatches}, but a step has only learner.groups_per_step = "
            f"{learner.groups_per_step} groups, and a minibatch needs a whole one"
        )
    if needs.groups and config.actors.group_size < 2:
        raise ConfigError(
            f"actors.group_size = {config.actors.group_size}, but {config.algorithm.type} compares the samples of a "
            f"prompt with each other and needs at least 2"
        )
    if learner.critic_learning_rate is not None and needs.critic is None:
        raise ConfigError(
            f"learner.critic_learning_rate = {learner.critic_learning_rate:g}, but {config.algorithm.type} as it is "
            "configured has no critic: remove it, or set algorithm.baseline = 'critic' with off_policy_ppo"
        )
    if learner.ess_budget is not None and learner.ess_of.endswith("_truncated") and not needs.weights:
        raise ConfigError(
            f"learner.ess_of = '{learner.ess_of}' is of the weights that a loss applies, and {config.algorithm.type} "
            "as it is configured applies none. Use "
            f"'{learner.ess_of.removesuffix('_truncated')}', which is of pi_prox / mu"
        )


def _check_sizes(config: Config, contract: StalenessContract) -> None:
    actors, learner = config.actors, config.learner
    if learner.token_budget < actors.max_model_tokens:
        raise ConfigError(
            f"learner.token_budget = {learner.token_budget} is below actors.max_prompt_tokens + "
            f"actors.max_new_tokens = {actors.max_model_tokens}: the longest sample would fit in no micro-batch"
        )
    if config.launch.eval_timeout_s >= learner.batch_timeout_s:
        raise ConfigError(
            f"launch.eval_timeout_s = {config.launch.eval_timeout_s:g} is not below learner.batch_timeout_s = "
            f"{learner.batch_timeout_s:g}: an evaluating actor makes no samples, so the learner would give up first"
        )
    outstanding = contract.capacity() * actors.group_size
    if config.buffer.capacity_trajectories < outstanding:
        raise ConfigError(
            f"buffer.capacity_trajectories = {config.buffer.capacity_trajectories} is below the {outstanding} samples "
            f"that may be outstanding at once (weight_sync.max_lag, learner.groups_per_step, actors.group_size)"
        )
    if actors.tensor_parallel_size > 1 and actors.gpus < actors.tensor_parallel_size:
        raise ConfigError(
            f"actors.tensor_parallel_size = {actors.tensor_parallel_size} needs as many GPUs, and actors.gpus = "
            f"{actors.gpus:g}"
        )
    if actors.max_running_samples < actors.group_size:
        raise ConfigError(
            f"actors.max_running_samples = {actors.max_running_samples} is below actors.group_size = "
            f"{actors.group_size}: an actor could never hold a whole group"
        )
