"""The `leeway` command.

    leeway train CONFIG.toml [--section.key VALUE ...] [--dry-run]
    leeway buffer ls|show|verify|export|compact RUN ...

Exit status: 0 done; 1 the run failed; 2 the input is wrong, and nothing was started; 130 interrupted.
Those of `leeway buffer` are in `launch.buffer_cli`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import buffer_cli
from launch.exit_status import ExitStatus

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's default; said aloud it prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    # the supervisor looks at every call itself, and says which role died
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Read when Ray is imported, so it is set before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="leeway", description="Asynchronous off-policy reinforcement learning for language models."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = verbs.add_parser(
        "train",
        help="train a model as a TOML file says",
        description="Train a model as CONFIG says. Any key can be overridden: --learner.num_steps 20.",
        epilog="Ctrl-C once: finish the step, write a checkpoint, end. Twice: stop now.",
        allow_abbrev=False,
    )
    train.add_argument("config", type=Path, metavar="CONFIG.toml")
    train.add_argument("--dry-run", action="store_true", help="check everything that can be checked, start nothing")
    buffer_cli.add_parser(verbs)
    parsed, overrides = parser.parse_known_args(arguments)
    if parsed.verb == "buffer":
        if overrides:
            parser.error(f"unrecognized arguments: {' '.join(overrides)}")
        return buffer_cli.run(parsed)
    return _train(parsed.config, overrides, dry_run=parsed.dry_run)


def _train(path: Path, overrides: Sequence[str], *, dry_run: bool) -> int:
    from launch.checks import check
    from launch.load import ConfigError, load_config
    from launch.run_folder import choose_root

    try:
        config = load_config(path, overrides)
        root = choose_root(config, path)
        plan = check(config, root)
    except ConfigError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if dry_run:
        print(plan.describe())
        return ExitStatus.OK
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from launch.train import train

    return train(plan)


if __name__ == "__main__":
    sys.exit(main())
