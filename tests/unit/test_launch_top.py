"""`leeway top`: fits any screen, follows its size, and leaves the terminal as it was."""

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

from buffer.ledger import COUNTS
from launch.observe.status import RunStatus, read_status, write_status
from launch.observe.totals import PoolEngines
from launch.observe.view import MARK, MAX_LAG_ROWS, View, lag_bars
from launch.run_folder import RunFolder
from tests.world.terminal import ALTERNATE_SCREEN, CURSOR, Terminal, new_attributes

RECORDED = Path(__file__).parents[1] / "data" / "status"
"""Of real runs of the demo: in training with two pools, and done."""
SIZES = [(80, 24), (120, 40), (40, 12), (200, 50), (132, 10), (20, 3), (1, 1)]


def recorded(name: str = "training") -> RunStatus:
    return read_status(RECORDED / f"{name}.json")


def lag_lines(lags: dict, max_lag: int | str, width: int):
    return lag_bars(msgspec.structs.replace(recorded(), lags=lags, max_lag=max_lag), width)


def shown(snapshot: RunStatus, columns: int, rows: int, now_s: float | None = None, **view: str) -> list[str]:
    """The lines of a view on a terminal of this size."""
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


def test_at_80_by_24_all_that_matters_is_there():
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


def test_where_there_is_little_room_lags_share_rows_and_the_bound_is_marked_all_the_same():
    assert sum(MARK in line for line in shown(recorded(), 40, 16)) == 1


def test_what_lag_control_did_over_the_newest_steps_is_drawn_beside_a_sentence():
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
    assert "younger than max_lag in 75% of the steps, and updates took 90% of their learning rate." in words
    for max_lag in (4, "unbounded"):
        off = shown(msgspec.structs.replace(recorded(), max_lag=max_lag), 80, 50)
        assert not any("allowed" in line for line in off), "it is off"


def test_a_long_sentence_of_what_is_wrong_is_read_to_its_end():
    tripped = ["actor-3 serves version 0.1 " + "and is behind " * 10 + "since noon"]
    lines = shown(msgspec.structs.replace(recorded(), tripped=tripped), 80, 40)
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
    text = shown(msgspec.structs.replace(snapshot, actors=many, tripped=["actor-3 serves version 0.1"]), 80, 24)
    assert any("more" in line and "..." in line for line in text)
    assert any(MARK in line for line in text)
    assert any("actor-3 serves version 0.1" in line for line in text)


def test_a_pool_says_what_it_lost_with_how_many_tokens_it_hands_on_and_that_its_slots_are_empty():
    snapshot = recorded()
    slow = PoolEngines(slots=64, slots_used=0.0, tokens_lost=70, hand_on_at=420)
    pools = [msgspec.structs.replace(snapshot.pools[0], engines=slow), *snapshot.pools[1:]]
    lines = shown(msgspec.structs.replace(snapshot, pools=pools), 300, 60)
    (line,) = [line for line in lines if "tokens lost" in line]
    assert line.endswith("0% of 64 slots  70 tokens lost  hands on at 420 tokens")
    assert not any("hands on" in line for line in shown(snapshot, 300, 60))


def test_what_moves_the_cursor_in_a_text_from_elsewhere_does_not_do_so_here():
    snapshot = msgspec.structs.replace(recorded(), tripped=["bad\x1b[2J\ttext"], phase="x\ny")
    assert all(line.isprintable() for line in shown(snapshot, 80, 24))


def test_a_view_says_that_it_is_old_and_that_the_command_is_gone():
    assert "[cannot be read]" in shown(recorded(), 80, 24, note="cannot be read")[0]
    assert "the command is gone" in shown(recorded(), 80, 24, gone="the command is gone")[0]


@pytest.mark.parametrize("how", ["done", "gone"])
def test_nothing_of_a_run_that_is_over_goes_on(how):
    """As where the command ended while actors evaluated; looked at an hour later."""
    run = recorded("done" if how == "done" else "training")
    evaluating = [msgspec.structs.replace(each, state="evaluating", since_s=run.written_s - 2.5) for each in run.actors]
    run = msgspec.structs.replace(run, actors=evaluating)
    lines = shown(run, 120, 60, run.written_s + 3600.0, gone="the command is gone" * (how == "gone"))
    assert sum("evaluating, for 0:00:02" in line for line in lines) == len(run.actors) == 2


# --- the bars -----------------------------------------------------------------------------------------


def test_bars_have_the_length_of_their_share_and_the_bound_is_marked_though_no_token_is_there():
    rows = [row.plain for row in lag_lines({"a": {0: 300, 1: 100}}, 3, 48)]
    assert [row.split()[:2] for row in rows] == [["0", "75.0%"], ["1", "25.0%"], ["2", "0.0%"], ["3", "0.0%"]]
    assert rows[0].count("█") == 3 * rows[1].count("█")
    assert [MARK in row for row in rows] == [False, False, False, True]


def test_pools_share_a_bar_in_their_colours():
    (row,) = lag_lines({"a": {0: 100}, "b": {0: 100}}, "unbounded", 60)
    assert [span.style for span in row.spans] == ["cyan", "magenta"]
    assert len({span.end - span.start for span in row.spans}) == 1


def test_many_lags_share_rows_and_nothing_trained_has_none():
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
    """Starts `leeway top` on a recorded run."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    shutil.copy(RECORDED / "config.toml", folder.config)
    write_status(folder.status, recorded("done"))

    def start(columns: int, rows: int, *before: str) -> Terminal:
        command = [*before, sys.executable, "-m", "launch.cli", "top", str(folder.root)]
        terminal = Terminal(command, columns, rows)
        request.addfinalizer(terminal.close)
        return terminal

    start.folder = folder
    return start


def shows_the_run(grid) -> bool:
    return any(f"step {recorded('done').step}/" in line for line in grid.lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)])
def test_a_terminal_of_any_size_shows_the_run_and_q_gives_it_back_as_it_was(top, size):
    terminal = top(*size)
    before = new_attributes()  # its own may be changed by now
    terminal.wait_for(shows_the_run)
    assert terminal.grid.lines[0].startswith("demo  ")
    assert terminal.attributes() != before, "keys are read one by one"
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


def test_the_view_follows_the_size_of_the_screen_and_what_the_run_writes(top):
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
    terminal.wait_for(lambda grid: "[cannot be read any more]" in grid.lines[0])
    terminal.press("\x03")
    assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_puts_the_terminal_back_too(top, number):
    terminal = top(80, 24)
    before = new_attributes()  # its own may be changed by now
    terminal.wait_for(shows_the_run)
    os.kill(terminal.pid, number)
    assert terminal.end() == 128 + number
    assert terminal.attributes() == before
    assert terminal.grid.modes[ALTERNATE_SCREEN] is False
    assert not re.search("Traceback", terminal.written)
