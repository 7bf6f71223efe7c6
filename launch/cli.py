"""The `leeway` command; what its verbs do is in `launch.verbs`.

Exit status: 0 done; 1 the run failed; 2 the input is wrong, and nothing was started; 130 interrupted.
Those of `leeway buffer` are in `launch.verbs.buffer`.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence

from launch.exit_status import ExitStatus
from launch.verbs import buffer, check_reward, doctor, export, report, resume, scale, status, top, trace, train

VERBS = (train, resume, scale, status, top, report, trace, export, doctor, check_reward, buffer)

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
    parsed = parse(arguments)
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    status: int = ExitStatus.OK
    try:
        status = int(parsed.run_verb(parsed))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
    return status


def _reader_is_gone() -> bool:
    """Has whoever reads the standard output seen enough, as `head` has? Then what is left to say goes nowhere."""
    out = select.poll()
    out.register(sys.stdout, 0)
    gone = any(events & select.POLLERR for _, events in out.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, and as `overrides` what is left over: of a config, for the verbs that take them.

    Raises:
        SystemExit: they are wrong; status 2, and a sentence on the standard error.
    """
    parser = argparse.ArgumentParser(
        prog="leeway", description="Asynchronous off-policy reinforcement learning for language models."
    )
    parser.set_defaults(takes_overrides=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_parser(verbs)
    parsed, overrides = parser.parse_known_args(arguments)
    if overrides and not parsed.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    sys.exit(main())
