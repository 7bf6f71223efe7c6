"""Observer: keeps `status.json` of a run up to date.

It writes at every poll; while none comes (processes start, an evaluation goes on) about every two seconds, from a
thread of its own. So a file that is not written any more is that of a command that is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from launch.checks import Plan
from launch.exit_status import ExitStatus
from launch.state.process_facts import ProcessFacts
from launch.state.progress import Accuracy, PollResult, Progress
from launch.state.snapshot import FORMAT, NUM_EVENTS, Ended, Evaluated, Event, Snapshot, write_snapshot
from launch.state.snapshot_parts import Around, Since, parts

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""After so long without a poll the file is written all the same."""
CLOSE_S = 5.0


class Observer:
    """Follows a run from its command; a context manager. Any thread may call it."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        *,
        look: Callable[[], Sequence[ProcessFacts]] = tuple,
        on_quiet: Callable[[Snapshot], None] = lambda snapshot: None,
        on_news: Callable[[Snapshot, Mapping[str, Any]], None] = lambda snapshot, row: None,
        wall: Callable[[], float] = time.time,
        quiet_s: float = QUIET_S,
    ) -> None:
        """Nothing is written before the first phase.

        Args:
            plan: of the run.
            progress: which takes in the polls.
            look: the processes as they are now; waits for none of them.
            on_quiet: shown what is known while no poll comes, from the thread of the observer.
            on_news: shown every snapshot, and the metrics of the newest step.
            wall: seconds since the epoch.
            quiet_s: after so long.
        """
        self._plan = plan
        self._progress = progress
        self._look = look
        self._on_quiet = on_quiet
        self._on_news = on_news
        self._wall = wall
        self._quiet_s = quiet_s
        self._started_s = wall()
        self._polled_s: float | None = None
        self._written_s = 0.0
        self._phase = ("", self._started_s)
        self._events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self._evaluations: list[Evaluated] = []
        self._since = Since()
        self._complained = ""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed.is_set():
            self.end(f"{type(error).__name__}: {error}", ExitStatus.FAILED)
        self._closed.set()
        self._thread.join(CLOSE_S)

    def phase(self, text: str) -> Snapshot:
        """The run does something else now."""
        with self._lock:
            self._phase = text, self._wall()
            return self._write()

    def event(self, kind: str, text: str) -> None:
        """Something happened; the next snapshot has it."""
        with self._lock:
            self._events.append(Event(time_s=self._wall(), kind=kind, text=text))

    def evaluated(self, accuracy: Accuracy) -> None:
        """An evaluation is over; the next snapshot has it."""
        found = Evaluated(
            versions=", ".join(accuracy.versions),
            greedy=accuracy.greedy,
            sampled=accuracy.sampled,
            num_problems=accuracy.num_problems,
        )
        with self._lock:
            self._evaluations.append(found)

    def take_in(self, news: PollResult) -> list[tuple[int, dict[str, Any]]]:
        """Have the progress take in a poll; nobody looks at it meanwhile. See `Progress.update`."""
        with self._lock:
            self._polled_s = self._wall()
            return self._progress.update(news)

    def polled(self) -> Snapshot:
        """A poll has been taken in, and what there is to say of it is said."""
        with self._lock:
            return self._write()

    def end(self, text: str, exit_status: int) -> None:
        """The last snapshot: how the command ended."""
        with self._lock:
            self._closed.set()
            self._write(Ended(at_s=self._wall(), text=text, exit_status=exit_status))

    # --- parts ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(self._quiet_s / 4):
            try:
                self._write_if_quiet()
            except Exception as error:  # the thread must not end: the run would be taken for gone
                self._complain("what is known of the run cannot be told", error)

    def _write_if_quiet(self) -> None:
        with self._lock:
            is_quiet = self._phase[0] and self._wall() - self._written_s >= self._quiet_s
            if not is_quiet or self._closed.is_set():
                return
            self._look_at_processes()
            snapshot = self._write()
        self._on_quiet(snapshot)

    def _complain(self, what: str, error: Exception) -> None:
        """Once, while it stays the same."""
        text = f"{what}: {type(error).__name__}: {error}"
        if text != self._complained:
            log.warning("%s", text, exc_info=None if isinstance(error, OSError) else error)
        self._complained = text

    def _look_at_processes(self) -> None:
        try:
            self._progress.processes = tuple(self._look()) or self._progress.processes
        except Exception as error:  # one may be taken away under our eyes; the next look, or the next poll, is right
            log.info("the processes cannot be looked at just now: %s", error)

    def _write(self, ended: Ended | None = None) -> Snapshot:
        snapshot = self._snapshot(ended)
        self._written_s = snapshot.written_s
        try:
            write_snapshot(self._plan.folder.status, snapshot)
        except OSError as error:
            # nobody can look in from outside then, and training goes on
            self._complain(f"{self._plan.folder.status} cannot be written", error)
        self._on_news(snapshot, self._progress.last_row)
        return snapshot

    def _snapshot(self, ended: Ended | None) -> Snapshot:
        now_s = self._wall()
        since_s = self._since.update(self._progress.processes, now_s)
        phase, phase_since_s = self._phase
        fields = parts(self._progress, Around(now_s, since_s))
        if ended is not None:
            fields["waits"] = []  # nobody is left
        return Snapshot(
            format=FORMAT,
            run=self._plan.folder.name,
            run_id=self._plan.run_id,
            folder=str(self._plan.folder.root),
            pid=os.getpid(),
            host=socket.gethostname(),
            started_s=self._started_s,
            written_s=now_s,
            polled_s=self._polled_s,
            phase=phase,
            phase_since_s=phase_since_s,
            evaluations=list(self._evaluations),
            events=list(self._events),
            ended=ended,
            **fields,
        )
