"""benchmarks/tuning.py: metrics computed from run folders, and the configs of its runs."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks import tuning
from benchmarks.lib.processes import MeasurementFailed
from benchmarks.lib.runs import FinishedRun, KeptResults, train

from leeway.launch.config import load_config
from tests.unit.made_up_run import write_generation

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.toml"
MACHINE = {"cores": 2, "processor": "x86_64", "python": "3.11", "load_before": 0.1, "commit": "abc"}
FIGURES = {key: 1.0 for key, _ in tuning.COLUMNS.values()} | {"num_steps": 60.0}


def row(number, reward, finished_s, **changes):
    return {
        "loss": 0.0, "skipped": False, "step": number, "reward/mean": reward, "finished_s": finished_s,
        "batch/trajectories": 8, "batch/completion_tokens": 10,
        "lag/token_mean": 1.0, "lag/token_p95": 2.0, "lag/token_max": 3, "time/step": 1.0,
        "time/wait_for_batch": 0.5, **changes,
    }  # fmt: skip


def test_the_default_runs_once_although_every_sweep_contains_it():
    runs = tuning.runs_of(tuning.SWEEPS)
    assert runs.count(()) == 1
    assert len(runs) == len(set(runs)) == 1 + sum(len(sweep.values) - 1 for sweep in tuning.SWEEPS)


@pytest.mark.parametrize("sweep", tuning.SWEEPS, ids=lambda sweep: sweep.name)
def test_each_sweep_changes_one_key_whose_default_is_that_of_the_demo(sweep):
    demo = load_config(DEMO)
    section, _, key = sweep.key.partition(".")
    assert getattr(getattr(demo, section), key) == sweep.default
    for value in sweep.values:
        config = load_config(DEMO, (*tuning.EVERY_RUN, *sweep.overrides(value)))
        assert getattr(getattr(config, section), key) == value
        assert config.learner.groups_per_step * config.actors.group_size == tuning.SAMPLES_PER_STEP
        reserved = config.actors.num_actors * config.actors.cpus + config.learner.num_stages * config.learner.cpus
        assert reserved <= 2, "a run must need at most two cores"


def test_the_reward_gain_compares_the_start_and_the_end_of_the_run():
    rows = [row(number, reward=0.1 * number, finished_s=30.0 * number) for number in range(1, 11)]
    assert tuning.reward_per_min(rows) == pytest.approx(0.2)


def write_run(folder, rows, spans):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    write_generation(folder, spans)
    summary = {"accuracy_after": 0.75, "ledger": {"dropped_stale": 5, "committed": 100}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return FinishedRun(folder)


def test_rates_are_measured_from_the_first_step_to_the_last(tmp_path):
    rows = [row(number, 0.5, 100.0 + 2 * number, **{"lag/token_mean": float(number)}) for number in range(6)]
    rows.insert(3, {**row(99, 0.0, 105.0), "skipped": True})
    spans = [
        ("actor-0", 90.0, 110.0, {"num_tokens": 60}),
        ("actor-1", 100.0, 105.0, {"num_tokens": 40}),
    ]
    found = tuning.figures_of(write_run(tmp_path / "run", rows, spans))
    assert found["seconds"] == pytest.approx(10.0)
    assert found["samples_per_s"] == pytest.approx(4.0)
    assert found["trained_tokens_per_s"] == pytest.approx(5.0)
    assert found["generated_tokens_per_s"] == pytest.approx(7.0)
    assert found["learner_idle_frac"] == pytest.approx(0.25)
    assert found["actor_idle_frac"] == pytest.approx(0.25)
    assert found["lag_mean"] == pytest.approx(3.0)
    assert found["dropped_stale"] == pytest.approx(0.05)


def test_a_run_of_few_steps_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [row(number, 0.5, float(number)) for number in range(4)], [])
    with pytest.raises(MeasurementFailed, match="has 4 steps"):
        tuning.figures_of(run)


def test_the_greatest_lag_is_the_maximum_over_seeds():
    found = tuning.over_seeds([
        {"lag_max": 2.0, "samples_per_s": 10.0, "actor_idle_frac": None},
        {"lag_max": 4.0, "samples_per_s": 20.0, "actor_idle_frac": 0.5},
    ])  # fmt: skip
    assert found == {"lag_max": 4.0, "samples_per_s": 15.0, "actor_idle_frac": 0.5}


def test_the_page_has_a_table_and_a_chart_for_every_sweep(tmp_path):
    results = {sweep.key: dict.fromkeys(sweep.values, FIGURES) for sweep in tuning.SWEEPS}
    page = tmp_path / "tuning.md"
    tuning.write_results(page, results, MACHINE, "python benchmarks/tuning.py --seeds 0 --steps 60", [0])
    text = page.read_text()
    for sweep in tuning.SWEEPS:
        assert f"## `{sweep.key}`" in text
        assert f"| **{sweep.default}** (the demo) |" in text
        chart = tmp_path / f"tuning_{sweep.name}.svg"
        assert f"({chart.name})" in text
        assert sweep.key in chart.read_text()


def test_a_chart_skips_missing_values_and_is_deterministic(tmp_path):
    found = {1: FIGURES, 2: {**FIGURES, "actor_idle_frac": None}}
    for name in ("a.svg", "b.svg"):
        tuning.draw(tuning.SWEEPS[1], found, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_stored_run_is_not_repeated(tmp_path, monkeypatch):
    made = []

    def train(config, folder, overrides, log):
        made.append(overrides)
        rows = [row(number, 0.5, float(number)) for number in range(6)]
        folder.parent.mkdir(parents=True, exist_ok=True)
        return write_run(folder, rows, [])

    monkeypatch.setattr(tuning, "train", train)
    overrides = ("--actors.num_actors", "1")
    first = tuning.one(KeptResults(tmp_path, "runs.json", {"num_steps": 60}), 60, overrides, 0)
    assert tuning.one(KeptResults(tmp_path, "runs.json", {"num_steps": 60}), 60, overrides, 0) == first
    assert len(made) == 1
    assert {"--actors.num_actors", "--run.seed", "--learner.num_steps"} <= set(made[0])
    assert not any((tmp_path / "runs").iterdir())
    with pytest.raises(SystemExit, match="holds runs of"):
        KeptResults(tmp_path, "runs.json", {"num_steps": 120})


def test_the_page_is_written_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "measure", lambda *_: {})
    monkeypatch.setattr(tuning, "write_results", lambda path, *_: path.touch())
    monkeypatch.setattr(tuning, "PAGE", tmp_path / "tuning.md")
    for arguments, expected in (([], False), (["--page"], True)):
        monkeypatch.setattr(sys, "argv", ["tuning.py", *arguments])
        tuning.main()
        assert (tmp_path / "tuning.md").exists() == expected
    monkeypatch.setattr(sys, "argv", ["tuning.py", "--page", "--quick"])
    with pytest.raises(SystemExit, match="2"):
        tuning.main()
    assert "--page needs all sweeps" in capsys.readouterr().err


@pytest.mark.process
def test_a_failed_run_reports_its_last_output(tmp_path):
    prints = ["sh", "-c", "seq 30; exit 3"]
    with pytest.raises(MeasurementFailed, match=r"^run ended with status 3; last output:\n    11\n") as failed:
        train(DEMO, tmp_path / "run", [], log=tmp_path / "log", prefix=prints)
    assert str(failed.value).endswith("\n    30")
    hangs = ["sh", "-c", "echo at step 7; sleep 60"]
    with pytest.raises(MeasurementFailed, match=r"took longer than 0.1 s; last output:\n    at step 7$"):
        train(DEMO, tmp_path / "run", [], log=tmp_path / "log", prefix=hangs, limit_s=0.1)
