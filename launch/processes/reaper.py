"""Ends what a killed command leaves behind: run as a program, beside the command, until that ends.

    python reaper.py < PIPE

A line of the pipe names the processes to be ended, each as PID:START (ticks since boot, as in /proc/PID/stat, so that a
reused number is not taken for it). If the pipe ends without the line "done", the command was killed: what is left of
them after a while is killed too. Imports little of the standard library: it lives as long as the run.
"""

from __future__ import annotations

import os
import signal
import sys
import time

PATIENCE_S = 5.0
"""Ray's workers end by themselves when their command does; its agents take a minute and a half."""
DONE = "done"


def started(pid: int) -> str:
    """Return when a process was started, in ticks since boot; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def main() -> None:
    """Wait for the end of the command."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the command, whose end is what counts
    named: list[str] = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        named = line.split()
    time.sleep(PATIENCE_S)
    for each in named:
        pid, _, start = each.partition(":")
        if start and started(int(pid)) == start:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main()
