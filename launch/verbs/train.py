"""`leeway train`: trains a model as a TOML file says."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `train` to the command's parser."""
    train = verbs.add_parser(
        "train",
        help="train a model as a TOML file says",
        description="Train a model as CONFIG says. Any key can be overridden: --learner.num_steps 20.",
        epilog="Ctrl-C once: finish the step, write a checkpoint, end. Twice: stop now.",
        allow_abbrev=False,
    )
    train.add_argument("config", type=Path, metavar="CONFIG.toml")
    train.add_argument("--dry-run", action="store_true", help="check everything that can be checked, start nothing")
    train.set_defaults(run_verb=run, takes_overrides=True)


def run(parsed: argparse.Namespace) -> int:
    """Train, or say what is wrong with the config."""
    from launch.checks import check, check_prompts
    from launch.errors import ConfigError
    from launch.load import load_config
    from launch.run_folder import choose_root

    try:
        config = load_config(parsed.config, parsed.overrides)
        plan = check(config, choose_root(config, parsed.config))
        if parsed.dry_run:
            check_prompts(plan)  # a run has its actors look, at once with all else that they start with
    except ConfigError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if parsed.dry_run:
        print(plan.describe())
        return ExitStatus.OK
    from launch.train import train

    return train(plan)
