"""benchmarks/accuracy_over_lag.py: names of stored cells, and the figure on lag control."""

import json

from benchmarks.accuracy_over_lag import stored
from benchmarks.accuracy_parts.cells import Cell, parse
from benchmarks.accuracy_parts.page import draw_control

CELLS = [Cell("trajectory_balance", max_lag, 0, control) for max_lag, control in ((0, "off"), (16, "off"), (16, "on"))]


def test_a_cell_is_found_by_the_name_of_its_file(tmp_path):
    for cell in CELLS:
        (tmp_path / f"{cell.name}.json").write_text("{}")
    (tmp_path / "overrides.json").write_text("[]")
    assert [parse(cell.name) for cell in CELLS] == CELLS
    assert {*stored(tmp_path)} == {*CELLS}


def test_the_figure_shows_a_panel_for_each_task_with_cells(tmp_path):
    draw_control(tmp_path)
    assert list(tmp_path.iterdir()) == []
    figures = {cell.name: {"figures": {"greedy": 0.5, "greedy_before": 0.4}, "commit": "abc"} for cell in CELLS}
    (tmp_path / "accuracy_over_lag_sorting.json").write_text(json.dumps(figures))
    draw_control(tmp_path)
    drawn = (tmp_path / "lag_control.svg").read_text()
    assert "lag control on" in drawn
    assert "sorting" in drawn
    assert "adding" not in drawn
