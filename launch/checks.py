"""Checks of the whole config before any process starts."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import psutil

from leeway.actors.tasks import TaskError, TaskFacts, check_task
from leeway.buffer import samplers
from leeway.buffer.core import check_config
from leeway.buffer.errors import StoreError
from leeway.common.hf_folder import ModelFacts
from leeway.common.process import memory_left
from leeway.common.rpc.auth import LOOPBACK, ClientKeys, RunKeys, ServiceKeys
from leeway.common.run import STARTUP_S, RunContext, RunFacts
from leeway.common.staleness import StalenessContract
from leeway.launch.config import MODEL_KEY, Config
from leeway.launch.errors import ConfigError, as_config_error
from leeway.launch.host import CONNECT_S, NO_WANDB_LOGIN, bind_error, has_wandb_login, is_reachable, low_limits
from leeway.launch.model_folder import check_frozen, check_model, model_notes, quiet_transformers
from leeway.launch.offline import check_offline, check_vocabulary
from leeway.launch.pools import actor_pools, serving_dtypes, stage_pools
from leeway.launch.resources import MachineNeeds, check_gpus, describe_gpus, missing_resources
from leeway.launch.run_folder import RecordedFacts, RunFolder, RunIdentity, check_new, check_weights_folder
from leeway.launch.text import gib
from leeway.learner.decoders import cost_shares, split_layers

_SURE_SHARE = 0.8
"""Free memory that a run needs to start, as a share of the predicted memory. The demo used more than this share."""


@dataclass(frozen=True)
class Plan:
    """A config that passed every check, and the facts that the checks found."""

    config: Config
    folder: RunFolder
    model: ModelFacts | None
    """Facts of the model; None if it is not downloaded yet."""
    task: TaskFacts
    run_id: str
    lacking: str = ""
    """Reason why this machine cannot run the config; empty if it can. A dry run prints the reason."""
    keys: RunKeys | None = field(default=None, repr=False)
    """Authentication keys of the sockets of this launch; None if the sockets use no authentication."""
    recorded: RecordedFacts | None = None
    """Facts on the recorded samples to train on; None if actors generate the samples."""

    @property
    def service_keys(self) -> ServiceKeys | None:
        return None if self.keys is None else self.keys.services

    @property
    def client_keys(self) -> ClientKeys | None:
        return None if self.keys is None else self.keys.clients

    @property
    def weights_folder(self) -> Path:
        folder = self.config.weight_sync.folder
        return self.folder.weights if folder is None else Path(folder)

    @property
    def is_cluster(self) -> bool:
        """Return whether the run can use other machines."""
        return self.config.launch.ray_address is not None

    def facts(self, vocab_size: int) -> RunFacts:
        config, recorded = self.config, self.recorded
        return RunFacts(
            run_id=self.run_id,
            seed=config.run.seed,
            num_prompts=self.task.num_train if recorded is None else recorded.num_prompts,
            group_size=(recorded or config.actors).group_size,
            groups_per_step=config.learner.groups_per_step,
            updates_per_step=config.learner.updates_per_step,
            vocab_size=vocab_size,
            max_tokens=config.actors.max_model_tokens,
            token_budget=config.learner.token_budget,
            correct_at=config.task.correct_at,
            normalised_rewards=config.task.weights(config.task.reward_names * config.task.normalise_rewards),
            informative_rewards=config.task.weights(config.task.informative_rewards),
            staleness=config.weight_sync.staleness(),
        )

    def context(self, model_path: Path, model: ModelFacts) -> RunContext[Config]:
        """Return the run context that every process receives, without the addresses of the services."""
        config = self.config
        return RunContext(
            config=config,
            facts=self.facts(model.vocab_size),
            folder=self.folder.root,
            weights_folder=self.weights_folder,
            model_path=model_path,
            reference_paths=tuple(config.model.frozen.values()) or (model_path,),
            teacher_of_prompt=self.task.teacher_of_prompt,
            temperature=config.actors.temperature,
            serving_dtypes=serving_dtypes(config),
            startup_timeout_s=STARTUP_S,
            keys=self.client_keys,
        )

    @property
    def notes(self) -> list[str]:
        """Return warnings about settings that are valid but probably unintended."""
        return list(model_notes(self.config, self.model, self.task))

    def _teachers(self) -> list[str]:
        of = self.task.teacher_of_prompt
        shares = [f"{name} for {_count(of.count(i), 'prompt')}" for i, name in enumerate(self.config.model.teachers)]
        return [f"teachers   {', '.join(shares)}"] if shares else []

    def describe(self) -> str:
        config = self.config
        group_size = (self.recorded or config.actors).group_size
        updates = _count(config.learner.updates_per_step, "update")
        samples = config.learner.groups_per_step * group_size
        use = "for evaluation" if self.recorded else f"{group_size} samples per prompt"
        of_hub = " (on the Hub, because there is no such folder), not downloaded and not checked"
        return "\n".join(
            [
                f"run        {self.folder.root}",
                f"model      {config.model.path}{'' if self.model else of_hub}",
                f"task       {config.task.type}, {self.task.num_train} prompts, {self.task.num_heldout} held out",
                f"rows       {self.task.rows}",
                f"algorithm  {config.algorithm.type}",
                *self._teachers(),
                *([] if self.recorded is None else [f"samples    {self.recorded}: {config.buffer.source}"]),
                f"actors     {_pools(config)}, {use}",
                f"learner    {_pipeline(config)}; {config.learner.num_steps} steps of "
                f"{config.learner.groups_per_step} prompts ({samples} samples), {updates} each",
                *([] if self.model is None else _layers(config)),
                f"staleness  max_lag = {config.weight_sync.max_lag}, on_stale = {config.weight_sync.on_stale}, "
                f"lag control {'on' if config.weight_sync.controls_lag else 'off'}",
                f"weights    transport = {config.weight_sync.transport}, in {', '.join(serving_dtypes(config))}, "
                f"{self.weights_folder}",
                *describe_gpus(config),
                f"The run would not start on this machine: {self.lacking}."
                if self.lacking
                else "All checks that run before the processes start passed.",
                *(f"note       {note}" for note in self.notes),
            ]
        )


def check(config: Config, root: Path, *, resumed: RunIdentity | None = None) -> Plan:
    """Check the config, its files and the model; raise ConfigError with the key, the reason and the fix.

    If `resumed` is None, the run is new, and `root` must not exist; else `root` is the folder of the resumed run.
    """
    if resumed is None:
        check_new(root)
    with as_config_error():
        config.learner.check(config.algorithm.needs.critic)
        samplers.build(config.buffer)  # this call may import a file of the user
    _check_steps(config)
    _check_pools(config)
    learner = config.learner
    with as_config_error():
        contract = StalenessContract(config.weight_sync.staleness(), learner.groups_per_step, learner.updates_per_step)
        config.buffer.check_capacity(config.actors.group_size, contract.capacity() + learner.groups_per_step)
    if config.weight_sync.folder is not None and resumed is None:  # a resumed run has weights in its folder
        check_weights_folder(Path(config.weight_sync.folder))
    _check_port(config)
    _check_ray(config)
    _check_trackers(config)
    model = None if (path := config.model.folder) is None else check_model(config, path, MODEL_KEY)
    task = _check_task(config, path, model)
    check_frozen(config, model)
    plan = Plan(
        config,
        RunFolder(root),
        model,
        task,
        run_id=uuid.uuid4().hex if resumed is None else resumed.run_id,
        lacking=missing_resources(config),
        keys=_keys(config),
        recorded=check_offline(config, model, resumed),
    )
    with as_config_error(kind=StoreError):
        check_config(config.buffer, plan.facts(vocab_size=1))  # the check does not use the vocabulary
    return plan


def _check_trackers(config: Config) -> None:
    for name in config.tracking.to:
        found = find_spec(name)
        if found is None or found.origin is None:  # without an origin: a folder of this name
            raise ConfigError(
                f"tracking.to names '{name}', which is not installed: run `pip install 'leeway-rl[{name}]'`, or remove "
                "the name"
            )
    if "wandb" in config.tracking.to and os.environ.get("WANDB_MODE") == "online" and not has_wandb_login():
        raise ConfigError(NO_WANDB_LOGIN)


def with_limits(plan: Plan) -> Plan:
    """Return the plan; if the run would exceed a limit of this process, `lacking` describes the first such limit."""
    config, left = plan.config, min(memory_left(), psutil.virtual_memory().total)
    if plan.lacking or config.launch.ray_address is not None:
        return plan
    workers = [pool.count for pool in (*stage_pools(config), *actor_pools(config))]
    lacking, needs = low_limits(sum(workers)), MachineNeeds.of(config)
    if not lacking and needs is not None and left < _SURE_SHARE * needs.memory.size_bytes:
        lacking = (
            f"{gib(left)} of memory are left here, but the run takes about {gib(needs.memory.size_bytes)} "
            f"({needs.memory.parts}): lower actors.num_actors, actors.max_running_samples or actors.kv_cache_gib"
        )
    return replace(plan, lacking=lacking)


def _keys(config: Config) -> RunKeys | None:
    """Return new keys for a run whose services listen on ports; None if the services listen on Unix sockets."""
    host, is_cluster = config.launch.host, config.launch.ray_address is not None
    if host is not None and (why := bind_error(host, 0)):
        raise ConfigError(f"launch.host = '{host}' cannot be bound ({why}): set an address of this machine")
    return RunKeys.make() if host is not None or is_cluster else None


def check_fetched(plan: Plan, path: Path) -> Plan:
    """Check a model that was downloaded to `path`, and return the plan with the model; raise as `check` does."""
    config = plan.config.model_copy(update={"model": plan.config.model.pinned(path)})
    model = check_model(config, path, MODEL_KEY)
    task = _check_task(config, path, model)
    check_vocabulary(plan.recorded, config, model)
    check_frozen(config, model)
    return replace(plan, config=config, model=model, task=task)


def _check_task(config: Config, path: Path | None, model: ModelFacts | None) -> TaskFacts:
    """Check the data, the rewards and, if the model is downloaded, the prompts with its tokenizer."""
    is_local = config.launch.ray_address is None  # on a cluster, actors may have modules that this machine lacks
    limit_s = STARTUP_S if is_local and config.task.rewards else None
    with as_config_error("[task] ", TaskError), quiet_transformers():
        return check_task(
            config.task,
            model_folder=path,
            max_prompt_tokens=config.actors.max_prompt_tokens,
            vocab_size=0 if model is None else model.vocab_size,
            import_limit_s=limit_s,
            teachers=tuple(config.model.teachers),
        )


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _pools(config: Config) -> str:
    pools = actor_pools(config)
    if len(pools) == 1:
        return str(pools[0].count)
    shares = (f"{pool.count} in {pool.name} ({pool.config.dtype})" for pool in pools)
    return f"{sum(pool.count for pool in pools)}: {', '.join(shares)}"


def _pipeline(config: Config) -> str:
    """Describe the replicas, stages and schedule of the learner."""
    learner = config.learner
    replicas = f"{learner.num_replicas} replicas of " if learner.num_replicas > 1 else ""
    chunks = f" of {learner.num_chunks} chunks" if learner.num_chunks > 1 else ""
    return f"{replicas}{_count(learner.num_stages, 'stage')}{chunks}, schedule {learner.schedule}"


def _layers(config: Config) -> list[str]:
    """Return a line with the layers and the cost share of each stage; the most expensive stage limits the speed."""
    learner = config.learner
    if learner.num_stages == 1:
        return []
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    recomputed, num_chunks = learner.activation_checkpointing, learner.num_stages * learner.num_chunks
    split = split_layers(model, num_chunks, recomputed=recomputed)
    shares = cost_shares(model, split, recomputed=recomputed)
    stages = []
    for stage in range(learner.num_stages):
        own = range(stage, num_chunks, learner.num_stages)
        layers = " and ".join(f"{split[i][0]}-{split[i][1] - 1}" for i in own)
        stages.append(f"{layers} ({sum(shares[i] for i in own):.0%} of the cost)")
    return [f"layers     {', '.join(stages)}"]


def _check_steps(config: Config) -> None:
    needs, learner = config.algorithm.needs, config.learner
    if learner.groups_per_step < learner.num_minibatches:
        raise ConfigError(
            f"learner.num_minibatches = {learner.num_minibatches}, but a step has only learner.groups_per_step = "
            f"{learner.groups_per_step} groups: lower num_minibatches, as each minibatch needs at least one whole group"
        )
    if learner.token_budget < config.actors.max_model_tokens:
        raise ConfigError(
            f"learner.token_budget = {learner.token_budget} is below actors.max_prompt_tokens + "
            f"actors.max_new_tokens = {config.actors.max_model_tokens}: raise learner.token_budget"
        )
    compares = needs.groups or getattr(config.algorithm, "baseline", "") == "batch"
    num_groups = 1 if needs.groups else learner.groups_per_step // learner.num_minibatches
    if compares and num_groups * config.actors.group_size < 2 and config.buffer.source is None:
        raise ConfigError(
            f"actors.group_size = {config.actors.group_size}, but {config.algorithm.type} compares the samples of "
            f"{'a prompt' if needs.groups else 'an update'} with each other: set group_size to at least 2"
        )
    _check_teachers(config)


def _check_teachers(config: Config) -> None:
    """Check that teachers have a column that names them and a loss that uses them."""
    names, column = list(config.model.teachers), config.task.teacher_column
    if names and not config.algorithm.needs.reference:
        raise ConfigError(
            f"model.teachers.{names[0]} has no effect: algorithm.type = '{config.algorithm.type}' with its settings "
            "uses no reference model; use algorithm.type = 'distillation', or remove the teachers"
        )
    if names and column is None:
        raise ConfigError(
            f"model.teachers has {', '.join(names)}, but no prompt is assigned to a teacher: set task.teacher_column "
            "to the column that names the teacher of each row"
        )
    if column is not None and not names:
        raise ConfigError(
            f"task.teacher_column = '{column}', but there are no teachers: give each teacher's folder in a table "
            "[model.teachers], or remove the key"
        )
    if config.algorithm.type == "distillation" and not config.model.frozen:
        raise ConfigError(
            "algorithm.type = 'distillation', but there is no teacher: set model.reference_path to the teacher's "
            "folder, or name several teachers in a table [model.teachers]"
        )


def _check_port(config: Config) -> None:
    port = config.tracking.prometheus_port
    if port is not None and (why := bind_error(LOOPBACK, port)):
        raise ConfigError(
            f"tracking.prometheus_port = {port}: {LOOPBACK}:{port} cannot be bound ({why}); choose another port"
        )


def _check_ray(config: Config) -> None:
    """Check `launch.ray_address` early: Ray itself retries for a long time and reports little."""
    address = config.launch.ray_address
    if address == "local":
        raise ConfigError(
            "launch.ray_address = 'local' would start Ray on a host in no pool: remove the key to start a local "
            "Ray whose host is in every pool"
        )
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"launch.ray_address = '{address}' is for Ray Client, which cannot place a run: set it to the address of "
            "the GCS on the head node, HOST:6379"
        )
    if address not in (None, "auto") and not is_reachable(address):
        raise ConfigError(
            f"no Ray cluster answers at launch.ray_address = '{address}' within {CONNECT_S:g} s: run launch/cluster.sh "
            "status, or remove the key to start a local Ray"
        )


def _check_pools(config: Config) -> None:
    """Check the names of the pools and the resources that each pool reserves."""
    for name in config.pools:
        if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", name):
            raise ConfigError(f"[pools.{name}]: start the name with a letter, and use only letters, digits, _ and -")
    check_gpus(config)
    for pool in actor_pools(config):
        actors, section = pool.config, f"pools.{pool.name}" if pool.name in config.pools else "actors"
        if actors.tensor_parallel_size > 1 and actors.gpus < actors.tensor_parallel_size:
            raise ConfigError(
                f"{section}.tensor_parallel_size = {actors.tensor_parallel_size} needs an equal number of GPUs, but "
                f"{section}.gpus = {actors.gpus:g}: set gpus to {actors.tensor_parallel_size}"
            )
        if actors.engine_args:
            from leeway.actors.engine_setup import check_engine_args  # imported only if needed: reads vLLM's source

            with as_config_error(f"{section}."):
                check_engine_args(actors.engine_args, on_cpu=not actors.gpus)
