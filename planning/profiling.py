"""Profiles of runs, from existing run folders or from three short runs started for this purpose.

A run folder has all measurements: engine steps in status.json, learner steps in metrics.jsonl, weight updates in
timeline.json, lengths in the buffer. So a profile can be read from any run. `take` starts three short runs: as
configured, with fewer samples, and with another token budget. These contrasts make the terms of the cost models
identifiable. Runs that are too alike are refused.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from leeway.buffer.errors import StoreError
from leeway.buffer.offline.inspect import Inspection, joined
from leeway.common.hf_folder import model_identity
from leeway.common.process import usable_cpus
from leeway.launch.checks import check
from leeway.launch.config import Config, load_config
from leeway.launch.errors import ConfigError, as_config_error
from leeway.launch.host import leeway_command
from leeway.launch.observe.metrics import Rows
from leeway.launch.observe.status import RunStatus, StatusError, read_status
from leeway.launch.observe.trace import read
from leeway.launch.pools import actor_pools
from leeway.launch.resources import list_gpus
from leeway.launch.run_folder import WEIGHTS_KEY, RunFolder
from leeway.learner.packing import micro_batches_required
from leeway.planning.costs import NUM_TERMS, LeastSquares, terms
from leeway.planning.lengths import LengthDistribution, explained_by_prompt
from leeway.planning.plans import predict, settings_of, settings_of_engine, shape_of, world_of
from leeway.planning.profile import (
    LEAST_ERROR,
    EngineCosts,
    LearnerCosts,
    MachineFacts,
    Profile,
    SampleFacts,
    WeightCosts,
)
from leeway.planning.world import Costs

WARM_UP = 3
"""Number of first steps of a run that are ignored: caches are cold, and all processes wait for the first samples."""
LEAST_STEPS = 8
"""Minimum number of steps of a run after the warm-up."""
ENOUGH_S, AT_MOST_S = 25.0, 1200.0
"""Minimum and maximum seconds of training per run. The maximum leaves time for enough steps of 90 s each."""
END_S = 120.0
"""Seconds that a run may take to exit after SIGINT."""
POLL_S = 0.5
NUM_RUNS = 3
NUM_LAST_LINES = 8
MIN_ENGINE_STEPS = 50
MOST_UNKNOWN = 0.25
"""Greatest relative standard error of the predictions for `_STEP_CHANGES` and `_ENGINE_CHANGES`."""
Factors = tuple[float, float, float, float]
"""Factors of the terms of a cost model."""
_STEP_CHANGES: Mapping[str, Factors] = {
    "twice as many micro-batches": (1.0, 2.0, 1.0, 1.0),
    "half the tokens per stage": (1.0, 1.0, 0.5, 0.5),
}
_ENGINE_CHANGES: Mapping[str, Factors] = {"twice the running samples": (1.0, 2.0, 2.0, 2.0)}

Progress = Callable[[str], None]


class _Trained(NamedTuple):
    """Statistics of the samples that a run has stored."""

    squares: dict[int, float]
    """Step -> sum of the squared lengths of its sequences."""
    repeated: dict[int, tuple[float, float]]
    """Step -> tokens of prompts shared with another sample of the group, and the sum of their squares."""
    finished_s: dict[int, float]
    """Step -> time of the last token of its samples, for samples that are still stored."""
    prompt_tokens: float
    completions: list[int]
    prompts: list[int]


# --- from run folders ---------------------------------------------------------------------------------


def profile_of(folders: Sequence[RunFolder]) -> Profile:
    """Return the profile of local runs of one model; raise ConfigError if a run is too short or unreadable."""
    return _profile_of([_Run(folder) for folder in folders])


def _profile_of(runs: Sequence[_Run]) -> Profile:
    first = runs[0]
    for run in runs[1:]:
        for key, value in first.settings.items():
            if (other := run.settings.get(key, value)) != value:
                text = f"{key} = {other!r} in {run.folder.root}, but {value!r} in {first.folder.root}"
                raise ConfigError(f"{text}: profile each run separately")
    law_of_steps = LeastSquares(NUM_TERMS)
    for run in runs:
        run.add_steps(law_of_steps)
    fit = law_of_steps.fit()
    assert fit is not None, "each run has LEAST_STEPS"
    _check_separable(runs, "a learner step", law_of_steps, _STEP_CHANGES)
    config = first.config
    learner = LearnerCosts(
        terms=tuple(fit.coefficients),  # type: ignore[arg-type]
        num_steps=law_of_steps.num_measured,
        relative_error=fit.relative_error,
        between_steps_s=_between_steps_s(runs),
        score_token_s=_score_token_s(runs),
    )
    completions = [length for run in runs for length in run.trained.completions]
    explained = [explained_by_prompt(run.trained.prompts, run.trained.completions) for run in runs]
    found = Profile(
        taken_s=time.time(),
        machine=local_machine(),
        model=first.model,
        engines=_engines(runs),
        learner=learner,
        weights=_weights(runs),
        samples=SampleFacts(
            prompt_tokens=fmean(run.trained.prompt_tokens for run in runs),
            quantiles=LengthDistribution.measured(completions).quantiles,
            explained=min(1.0, fmean(explained)),
            settled_s=_settled_s(runs),
        ),
        settings=settings_of(config),
    )
    rates = [(predict(world_of(run.config, found)).samples_per_s, run.samples_per_s) for run in runs]
    errors = [abs(predicted / measured - 1.0) for predicted, measured in rates]
    return msgspec.structs.replace(found, error=max(LEAST_ERROR, *errors))


def _check_separable(runs: Sequence[_Run], what: str, law: LeastSquares, changes: Mapping[str, Factors]) -> None:
    """Raise ConfigError if the measurements of runs cannot predict the time after one of the changes."""
    for change, factors in changes.items():
        if law.error_at(factors) > MOST_UNKNOWN:
            raise ConfigError(
                f"{', '.join(str(run.folder.root) for run in runs)}: loads are too alike to predict the time of {what} "
                f"with {change}. Run `leeway profile CONFIG.toml`, or add runs with other learner.token_budget, "
                "learner.groups_per_step and actors.max_running_samples, as in --from RUN2"
            )


def costs_of(folders: Sequence[RunFolder]) -> Costs:
    """Return the costs other than those of tokens and steps; the runs need no measurements of their engines."""
    runs = [_Run(folder) for folder in folders]
    return _weights(runs).as_costs(_settled_s(runs), _between_steps_s(runs))


def _score_token_s(runs: Sequence[_Run]) -> float:
    """Return the seconds to score a token with the reference model on one stage."""
    tokens = seconds = 0.0
    for run in runs:
        shape = shape_of(run.config)
        for row in run.steps:
            tokens += row["batch/tokens"]
            seconds += (row.get("time/reference") or 0.0) * shape.num_stages * shape.num_replicas
    return seconds / tokens


def _weights(runs: Sequence[_Run]) -> WeightCosts:
    delays, pauses = (list(chain.from_iterable(each)) for each in zip(*(run.weights_s() for run in runs), strict=True))
    return WeightCosts(behind_s=median(delays or [0.0]), pause_s=fmean(pauses or [0.0]))


def _settled_s(runs: Sequence[_Run]) -> float:
    values = [pool.engines.settled_s for run in runs for pool in run.status.pools]
    known = [each for each in values if each is not None]
    return fmean(known) if known else 0.0


def _between_steps_s(runs: Sequence[_Run]) -> float:
    settled_s = _settled_s(runs)
    return median([gap for run in runs for gap in run.gaps_s(settled_s)] or [0.0])


def model_of(config: Config) -> str | None:
    """Return the identity of a config's model, or its name on the Hub; None if the folder does not exist yet."""
    path = config.model.folder
    if path is None:
        return "@".join(config.model.on_hub)
    return model_identity(path) if path.is_dir() else None


def local_machine() -> MachineFacts:
    """Return the facts of this machine that determine the cost of work."""
    processor = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    gpus = [gpu.name for gpu in list_gpus()]
    return MachineFacts(host=socket.gethostname(), processor=processor, cores=usable_cpus(), gpus=gpus)


def _engines(runs: Sequence[_Run]) -> dict[str, EngineCosts]:
    moments: dict[str, LeastSquares] = {}
    for run in runs:
        for state in run.status.pools:
            if state.engines.moments:
                sums = LeastSquares.from_list(state.engines.moments)
                moments[state.name] = moments[state.name] + sums if state.name in moments else sums
    found = {}
    for pool in actor_pools(runs[0].config):
        sums = moments.get(pool.name, LeastSquares(NUM_TERMS))
        fit = sums.fit() if sums.num_measured >= MIN_ENGINE_STEPS else None
        if fit is None:
            raise ConfigError(
                f"the engines of pool '{pool.name}' measured only {sums.num_measured} steps in "
                f"{', '.join(str(run.folder.root) for run in runs)}: let the run train for longer"
            )
        _check_separable(runs, f"an engine step of pool '{pool.name}'", sums, _ENGINE_CHANGES)
        states = [state for run in runs for state in run.status.pools if state.name == pool.name]
        found[pool.name] = EngineCosts(
            terms=tuple(fit.coefficients),  # type: ignore[arg-type]
            num_steps=sums.num_measured,
            relative_error=fit.relative_error,
            most_running=pool.config.max_running_samples,
            kv_tokens=max((state.engines.kv_tokens for state in states), default=0),
            settings=settings_of_engine(pool.config),
        )
    return found


class _Run:
    """Measurements in the folder of a run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        unreadable = as_config_error(f"the run {folder.root} cannot be read: ", OSError)
        with unreadable, as_config_error(kind=(StatusError, StoreError)):
            self.config: Config = load_config(folder.config, [])
            self.status: RunStatus = read_status(folder.status)
            with as_config_error(kind=ValueError):
                rows = list(Rows(folder.metrics).read())
            steps = [row for row in rows if not row["skipped"]]
            self.model = model_of(self.config) or ""
            self.trained = _trained(folder)
        self.steps = steps[WARM_UP:]
        if len(self.steps) < LEAST_STEPS:
            raise ConfigError(
                f"the run {folder.root} has {len(steps)} non-skipped steps; a profile needs {WARM_UP + LEAST_STEPS} "
                f"(the first {WARM_UP} are warm-up): train for longer, then run leeway profile --from RUN"
            )

    @property
    def settings(self) -> dict[str, Any]:
        pools = [(pool.name, settings_of_engine(pool.config)) for pool in actor_pools(self.config)]
        engines = {f"{key} of pool '{name}'": value for name, each in pools for key, value in each.items()}
        return {"model": self.model, **settings_of(self.config), **engines}

    @property
    def samples_per_s(self) -> float:
        """Return the samples used for training per second, from the end of the first counted step."""
        seconds = self.steps[-1]["finished_s"] - self.steps[0]["finished_s"]
        return float(sum(row["batch/trajectories"] for row in self.steps[1:])) / seconds

    def add_steps(self, law: LeastSquares) -> None:
        shape = shape_of(self.config)
        for row in self.steps:
            shared = row["batch/tokens"] * (row.get("batch/shared_frac") or 0.0)
            squares = self.trained.squares.get(int(row["step"]), 0.0)
            repeated, repeated_squares = self.trained.repeated.get(int(row["step"]), (0.0, 0.0))
            if repeated:
                squares -= min(1.0, shared / repeated) * repeated_squares
            num, takes_two = int(row["batch/micro_batches"]) * shape.num_replicas, bool(row.get("time/forward"))
            law.add(
                terms(row["batch/tokens"] - shared, squares, num, shape, takes_two=takes_two),
                row["time/step"] - (row.get("time/reference") or 0.0),
            )

    def gaps_s(self, settled_s: float) -> Iterator[float]:
        """Yield the seconds between steps without waits for samples, which are committed `settled_s` after they end."""
        for before, row in pairwise(self.steps):
            if row["step"] == before["step"] + 1 and row["step"] in self.trained.finished_s:
                ready_s = self.trained.finished_s[row["step"]] + settled_s
                yield max(0.0, row["started_s"] - max(before["finished_s"], ready_s))

    def weights_s(self) -> tuple[list[float], list[float]]:
        """Return the delays from a step until each engine starts to apply its version, and the engines' pauses."""
        ended_s = {int(row["version"]): row["finished_s"] for row in self.steps}
        delays, pauses = [], []
        for span in read(self.folder.timeline):
            if span.cat == "update":
                version = int(span.args["version"])
                pauses.append(float(span.args.get("busy_s", 0.0)))
                if version in ended_s:
                    delays.append(max(0.0, span.start_s - ended_s[version]))
        return delays, pauses


def _trained(folder: RunFolder) -> _Trained:
    squares: defaultdict[int, float] = defaultdict(float)
    repeated: dict[int, tuple[float, float]] = {}
    finished_s: dict[int, float] = {}
    completions: list[int] = []
    prompts: list[int] = []
    prompt_tokens: list[int] = []
    with Inspection.open(folder.root) as inspection:
        for group in inspection.groups(with_samples=True):
            row = group.row
            there = [(total, own) for total, own in zip(row.lengths, row.completion_lengths, strict=True) if total]
            completions += [own for _, own in there]
            prompts += [row.prompt_id] * len(there)
            prompt_tokens += [total - own for total, own in there]
            ended_s = max(joined(group.samples)["finished_s"].to_pylist()) if group.samples else None
            for use in row.trained_at:
                squares[use.step] += sum(total * total for total, _ in there)
                again = [total - own for total, own in there[1:]]
                tokens, tokens_squared = repeated.get(use.step, (0.0, 0.0))
                repeated[use.step] = tokens + sum(again), tokens_squared + sum(each * each for each in again)
                if ended_s is not None:
                    finished_s[use.step] = max(ended_s, finished_s.get(use.step, 0.0))
    if not completions:
        raise ConfigError(f"the buffer of {folder.root} has no samples: use a run that has generated samples")
    return _Trained(dict(squares), repeated, finished_s, float(np.mean(prompt_tokens)), completions, prompts)


# --- runs started for a profile -----------------------------------------------------------------------


def take(config_path: Path, overrides: Sequence[str], progress: Progress) -> Profile:
    """Run a config three times, each time until it has enough steps, and return the profile of these runs.

    Raise ConfigError if the config is invalid or a run fails. KeyboardInterrupt stops all runs.
    """
    config = load_config(config_path, overrides)
    check_generates(config)
    own, weights = partial(tempfile.TemporaryDirectory, prefix="leeway-profile-"), config.weight_sync.folder
    runs: list[_Run] = []
    with own() as root:
        _check(load_config(config_path, [*overrides, *_BASELINE]), Path(root) / "none")
        if weights is not None:
            Path(weights).mkdir(parents=True, exist_ok=True)
        with own(dir=weights) as subfolder:  # on the same disk as the weights, and visible to the same hosts
            for number in range(1, NUM_RUNS + 1):
                variant, name = [*_BASELINE, *_variant(number, runs)], f"run-{number}"
                arguments = [*overrides, *variant, "--run.dir", root, "--run.name", name]
                arguments += [] if weights is None else [f"--{WEIGHTS_KEY}", str(Path(subfolder) / name)]
                folder = RunFolder(Path(root) / name)
                _run(config_path, arguments, folder, Path(root) / f"{name}.log", partial(_report, progress, number))
                runs.append(_Run(folder))
        return _profile_of(runs)


def _report(progress: Progress, number: int, text: str) -> None:
    progress(f"run {number} of {NUM_RUNS}: {text}")


def check_generates(config: Config) -> None:
    """Raise ConfigError if a config generates no samples, whose cost is part of profiles and plans."""
    if config.buffer.source is not None or not config.actors.num_actors:
        key = f"buffer.source = '{config.buffer.source}'" if config.buffer.source else "actors.num_actors = 0"
        raise ConfigError(f"{key} generates no samples, but profiles and plans need samples: remove this setting")


def _check(config: Config, root: Path) -> None:
    """Raise ConfigError if a run could not start; ignore the run and weight folders, which profile runs replace."""
    sync = config.weight_sync.model_copy(update={"folder": None})
    plan = check(config.model_copy(update={"weight_sync": sync}), root)
    if plan.lacking:
        raise ConfigError(plan.lacking)


_BASELINE = (
    *("--tracking.to", "[]", "--learner.learning_rate", "1e-12", "--actors.eval_every", "0"),
    *("--learner.num_steps", "1000000", "--learner.checkpoint_every", "1000000"),
)
"""Overrides of all runs: a learning rate too small to change lengths; no checkpoints, no W&B, and no last step."""


def _variant(number: int, runs: Sequence[_Run]) -> list[str]:
    """Return the overrides of a run: 1 as configured, 2 with fewer samples, 3 with another token budget.

    The budget is doubled; if the first run has hardly more micro-batches than its schedule requires, the budget is
    lowered instead, to four times as many.
    """
    if number == 1:
        return []
    config, learner = runs[0].config, runs[0].config.learner
    if number == 2:
        fewer = max(1, learner.groups_per_step // (2 * learner.num_minibatches)) * learner.num_minibatches
        changed = ["--learner.groups_per_step", str(fewer)]
        for pool in actor_pools(config):
            slots = str(max(1, pool.config.max_running_samples // 4))
            section = f"pools.{pool.name}" if pool.name in config.pools else "actors"
            changed += [f"--{section}.max_running_samples", slots]
        return changed
    least, _ = micro_batches_required(learner.schedule, learner.num_stages)
    least *= learner.num_replicas * learner.num_minibatches
    budget = 2 * learner.token_budget
    if fmean(row["batch/micro_batches"] for row in runs[0].steps) * learner.num_replicas < 2 * least:
        num_tokens = fmean(row["batch/tokens"] for row in runs[0].steps)
        budget = max(config.actors.max_model_tokens, int(num_tokens / (4 * least)))
    return ["--learner.token_budget", str(budget)]


_EXIT_WITH_PARENT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM)"


def _run(config: Path, arguments: Sequence[str], folder: RunFolder, log: Path, progress: Progress) -> None:
    """Train until the run has enough steps, then stop it gracefully."""
    command = leeway_command("train", str(config), *arguments, first=_EXIT_WITH_PARENT)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            _follow(process, folder, progress)
        finally:
            _end(process)
    if process.returncode not in (0, 130):
        tail = log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        raise ConfigError("\n".join(["the profiled run failed; end of its log:", *tail]))


def _follow(process: subprocess.Popen[bytes], folder: RunFolder, progress: Progress) -> None:
    began_s: float | None = None
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
        try:
            status = read_status(folder.status)
        except StatusError:
            continue
        if began_s is None and status.step:
            began_s = time.monotonic()
        progress(f"step {status.step}" if status.step else status.phase)
        if began_s is not None:
            passed_s, is_enough = time.monotonic() - began_s, status.step >= WARM_UP + LEAST_STEPS + 1
            if (is_enough and passed_s >= ENOUGH_S) or passed_s >= AT_MOST_S:
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, then SIGTERM and SIGKILL if the run does not exit."""
    for number, timeout_s in ((signal.SIGINT, END_S), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
