"""`leeway top` fits any screen, follows changes of the screen size, and restores the terminal."""

import io
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from leeway.buffer.ledger import COUNTS
from leeway.launch.observe.status import RunStatus, read_status, write_status
from leeway.launch.observe.totals import PoolEngines
from leeway.launch.observe.view import MARK, MAX_LAG_ROWS, View, lag_bars
from leeway.launch.run_folder import RunFolder
from tests.world.terminal import ALTERNATE_SCREEN, CURSOR, Terminal, new_attributes

RECORDED = Path(__file__).parents[1] / "data" / "status"
"""Statuses of real runs of the demo: one in training with two pools, and one that is done."""
SIZES = [(80, 24), (120, 40), (40, 12), (200, 50), (132, 10), (20, 3), (1, 1)]


def recorded(name: str = "training") -> RunStatus:
    return read_status(RECORDED / f"{name}.json")


def lag_lines(lags: dict, max_lag: int | str, width: int):
    return lag_bars(msgspec.structs.replace(recorded(), lags=lags, max_lag=max_lag), width)


def shown(snapshot: RunStatus, columns: int, rows: int, now_s: float | None = None, **view: str) -> list[str]:
    """Return the lines of a view on a terminal of this size."""
    file = io.StringIO()
    console = Console(
        file=file, width=columns, height=rows + 1, force_terminal=True, color_system=None, markup=False, highlight=False
    )
    console.print(View(snapshot, snapshot.written_s if now_s is None else now_s, **view), end="")
    return file.getvalue().splitlines()


# --- the view -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["training", "done"])
def test_a_view_is_never_wider_or_higher_than_its_screen(name, size):
    columns, rows = size
    lines = shown(recorded(name), columns, rows, 0.0)
    assert len(lines) <= rows
    assert max(map(cell_len, lines)) <= columns
    assert lines[0][:1] == recorded(name).run[:1] or columns == 1


def test_a_screen_of_80_by_24_shows_every_part():
    snapshot = recorded()
    text = "\n".join(shown(snapshot, 80, 24))
    for expected in (
        snapshot.run,
        f"step {snapshot.step}/{snapshot.num_steps}",
        *(pool.name for pool in snapshot.pools),
        *(actor.name for actor in snapshot.actors),
        *(stage.name for stage in snapshot.stages),
        "tokens/s generated",
        "groups ready",
        *(f"{name} " for name in COUNTS),
        "trained ",
        "gap 0",
        MARK,
        "waits",
        "events",
    ):
        assert expected in text


def test_on_a_small_screen_lags_share_rows_and_the_bound_is_marked():
    assert sum(MARK in line for line in shown(recorded(), 40, 16)) == 1


def test_lag_control_over_the_newest_steps_is_drawn_and_described():
    lags = {
        "lag/token_mean": [step / 20 for step in range(40)],
        "lag/allowed": [min(4, 1 + step // 10) for step in range(40)],
        "lag/drift": [0.06] * 40,
        "brake/lr_scale": [None, *[0.9] * 39],
    }
    text = shown(msgspec.structs.replace(recorded(), max_lag=4, recent_lags=lags), 80, 50)
    first = next(place for place, line in enumerate(text) if line.startswith("control"))
    found = {line.removeprefix("control").split()[0]: line for line in text[first : first + 3]}
    assert found["mean"].endswith("1.950  " + "".join(" ▁▂▃▄▅▆▇█"[round(step / 10)] for step in range(40)).rstrip())
    assert found["allowed"].endswith("4.000  " + 10 * "▂" + 10 * "▄" + 10 * "▆" + 10 * "█")
    assert found["drift"].endswith("0.060  " + 40 * "█")
    words = " ".join(line.removeprefix("control").strip() for line in text)
    assert "less than max_lag in 75% of the steps, and scaled the learning rate to 90% on average." in words
    for max_lag in (4, "unbounded"):
        off = shown(msgspec.structs.replace(recorded(), max_lag=max_lag), 80, 50)
        assert not any("allowed" in line for line in off), "lag control is off"


def test_a_long_alert_is_shown_to_its_end():
    alerts = ["actor-3 serves version 0.1 " + "and is behind " * 10 + "since noon"]
    lines = shown(msgspec.structs.replace(recorded(), alerts=alerts), 80, 40)
    assert any("since noon" in line for line in lines)


def test_a_pipe_gets_every_row():
    snapshot = recorded()
    many = [msgspec.structs.replace(snapshot.actors[0], name=f"actor-{number}") for number in range(500)]
    file = io.StringIO()
    view = View(msgspec.structs.replace(snapshot, actors=many), snapshot.written_s)
    Console(file=file, width=80, height=24).print(view, end="")
    assert all(f"actor-{number}" in file.getvalue() for number in range(500))


def test_a_run_of_many_actors_leaves_room_for_everything_else():
    snapshot = recorded()
    many = [msgspec.structs.replace(snapshot.actors[0], name=f"actor-{number}") for number in range(500)]
    text = shown(msgspec.structs.replace(snapshot, actors=many, alerts=["actor-3 serves version 0.1"]), 80, 24)
    assert any("more" in line and "..." in line for line in text)
    assert any(MARK in line for line in text)
    assert any("actor-3 serves version 0.1" in line for line in text)


def test_a_pool_shows_lost_tokens_the_requeue_length_and_empty_slots():
    snapshot = recorded()
    slow = PoolEngines(slots=64, slots_used=0.0, tokens_lost=70, requeue_at=420)
    pools = [msgspec.structs.replace(snapshot.pools[0], engines=slow), *snapshot.pools[1:]]
    lines = shown(msgspec.structs.replace(snapshot, pools=pools), 300, 60)
    (line,) = [line for line in lines if "tokens lost" in line]
    assert line.endswith("0% of 64 slots  70 tokens lost  requeues at 420 tokens")
    assert not any("requeues" in line for line in shown(snapshot, 300, 60))


def test_control_characters_in_texts_are_escaped():
    snapshot = msgspec.structs.replace(recorded(), alerts=["bad\x1b[2J\ttext"], phase="x\ny")
    assert all(line.isprintable() for line in shown(snapshot, 80, 24))


def test_a_view_shows_that_it_is_old_and_that_the_launcher_is_gone():
    assert "[cannot be read]" in shown(recorded(), 80, 24, note="cannot be read")[0]
    assert "the launcher is gone" in shown(recorded(), 80, 24, gone="the launcher is gone")[0]


@pytest.mark.parametrize("how", ["done", "gone"])
def test_durations_stop_at_the_end_of_a_run(how):
    """The launcher ended while actors evaluated; the view is shown an hour later."""
    run = recorded("done" if how == "done" else "training")
    evaluating = [msgspec.structs.replace(each, state="evaluating", since_s=run.written_s - 2.5) for each in run.actors]
    run = msgspec.structs.replace(run, actors=evaluating)
    lines = shown(run, 120, 60, run.written_s + 3600.0, gone="the launcher is gone" * (how == "gone"))
    assert sum("evaluating, for 0:02" in line for line in lines) == len(run.actors) == 2


# --- the bars -----------------------------------------------------------------------------------------


def test_bars_have_the_length_of_their_share_and_the_bound_is_always_marked():
    rows = [row.plain for row in lag_lines({"a": {0: 300, 1: 100}}, 3, 48)]
    assert [row.split()[:2] for row in rows] == [["0", "75.0%"], ["1", "25.0%"], ["2", "0.0%"], ["3", "0.0%"]]
    assert rows[0].count("█") == 3 * rows[1].count("█")
    assert [MARK in row for row in rows] == [False, False, False, True]


def test_pools_share_a_bar_in_their_colours():
    (row,) = lag_lines({"a": {0: 100}, "b": {0: 100}}, "unbounded", 60)
    assert [span.style for span in row.spans] == ["cyan", "magenta"]
    assert len({span.end - span.start for span in row.spans}) == 1


def test_many_lags_share_rows_and_a_pool_without_lags_has_no_row():
    rows = lag_lines({"a": dict.fromkeys(range(100), 1)}, "unbounded", 60)
    assert len(rows) == MAX_LAG_ROWS
    assert rows[0].plain.split()[0] == "0-12"
    *_, row = lag_lines({"a": {0: 1, 4: 1}}, 15, 60)
    assert row.plain.split()[:2] == ["14-15", "0.0%"]
    assert MARK in row.plain
    assert lag_lines({"a": {}}, 4, 60) == []


# --- on a terminal ------------------------------------------------------------------------------------


@pytest.fixture
def top(tmp_path, request):
    """Start `leeway top` on a recorded run."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    shutil.copy(RECORDED / "config.toml", folder.config)
    write_status(folder.status, recorded("done"))

    def start(columns: int, rows: int, *before: str) -> Terminal:
        command = [*before, sys.executable, "-m", "leeway", "top", str(folder.root)]
        terminal = Terminal(command, columns, rows)
        request.addfinalizer(terminal.close)
        return terminal

    start.folder = folder
    return start


def shows_the_run(grid) -> bool:
    return any(f"step {recorded('done').step}/" in line for line in grid.lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)])
def test_a_terminal_of_any_size_shows_the_run_and_q_restores_it(top, size):
    terminal = top(*size)
    before = new_attributes()  # `leeway top` may have changed `terminal` already
    terminal.wait_for(shows_the_run)
    assert terminal.grid.lines[0].startswith("demo  ")
    assert terminal.attributes() != before, "the terminal passes on single keys"
    terminal.press("q")
    assert terminal.end() == 0
    assert terminal.attributes() == before
    assert terminal.grid.modes == {ALTERNATE_SCREEN: False, CURSOR: True}
    assert not terminal.grid.overflowed


def test_a_terminal_whose_keys_cannot_be_read_gets_one_view(top):
    terminal = top(80, 24, "sh", "-c", 'exec "$@" < /dev/null', "sh")
    terminal.wait_for(shows_the_run)
    assert terminal.end() == 0
    assert not re.search("Traceback", terminal.written)


def test_the_view_follows_the_size_of_the_screen_and_the_status(top):
    terminal = top(80, 24)
    terminal.wait_for(shows_the_run)
    terminal.resize(40, 12)
    terminal.wait_for(shows_the_run)
    terminal.resize(120, 40)
    terminal.wait_for(lambda grid: shows_the_run(grid) and any("groups ready" in line for line in grid.lines))
    terminal.press("p")  # a key that does nothing
    write_status(top.folder.status, msgspec.structs.replace(recorded("done"), run="renamed"))
    terminal.wait_for(lambda grid: grid.lines[0].startswith("renamed"))
    top.folder.status.unlink()
    terminal.wait_for(lambda grid: "[can no longer be read]" in grid.lines[0])
    terminal.press("\x03")
    assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(top, number):
    terminal = top(80, 24)
    before = new_attributes()  # `leeway top` may have changed `terminal` already
    terminal.wait_for(shows_the_run)
    os.kill(terminal.pid, number)
    assert terminal.end() == 128 + number
    assert terminal.attributes() == before
    assert terminal.grid.modes[ALTERNATE_SCREEN] is False
    assert not re.search("Traceback", terminal.written)
