"""Which checks there are: of the machine alone, or of a config on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch.config import Config
from launch.doctor.finding import Check, Finding, examine, ok, problem
from launch.doctor.leftovers import check_leftovers
from launch.doctor.libraries import check_engine, check_import, check_python, check_versions
from launch.doctor.machine import check_clock, check_disk, check_memory, check_open_files, check_shm
from launch.doctor.needs import Needs
from launch.doctor.services import check_curve, check_ports, check_ray, check_wandb
from launch.errors import ConfigError


def checkup(config: Config | None, config_path: Path | None) -> Iterator[Finding]:
    """Everything that can be looked at without starting anything.

    Args:
        config: of the run that is meant; None: of the machine alone.
        config_path: its file.
    """
    runs = Path(config.run.dir if config is not None else "runs").expanduser()
    needs = None
    if config is not None:
        with suppress(ConfigError):  # which the check of the config says
            needs = Needs.of(config)
    checks: list[tuple[str, Check]] = [
        ("Python", check_python),
        ("versions", check_versions),
        ("vLLM", check_engine),
        ("import vllm", check_import),
        ("ZeroMQ", check_curve),
        ("runs", partial(check_disk, runs, needs)),
        ("/dev/shm", partial(check_shm, needs)),
        ("memory", partial(check_memory, needs)),
        ("open files", check_open_files),
        ("clock", partial(check_clock, runs)),
        ("Ray", partial(check_ray, config)),
        ("W&B", partial(check_wandb, config)),
        ("leftovers", check_leftovers),
    ]
    if config is not None and config_path is not None:
        checks += [("ports", partial(check_ports, config)), ("config", partial(_check_config, config, config_path))]
    return examine(checks)


def _check_config(config: Config, path: Path) -> list[Finding]:
    from launch.checks import check
    from launch.run_folder import choose_root

    try:
        plan = check(config, choose_root(config, path))
    except ConfigError as error:
        return problem("config", str(error), f"change {path}")
    return ok("config", f"{path}: {plan.task.num_train} prompts, all that can be checked is in order")
