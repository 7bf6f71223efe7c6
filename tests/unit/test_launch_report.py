"""The report page: its content, its output for damaged run folders, and its escaping of text."""

import html
import json
import math
import re
import time
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from leeway.launch import train as training
from leeway.launch.cli import main
from leeway.launch.config import Config
from leeway.launch.config_errors import models_of
from leeway.launch.observe.metrics import METRICS
from leeway.launch.observe.status import read_status, write_status
from leeway.launch.report.charts import CHARTS, figures, lines, short
from leeway.launch.report.data import MAX_BUCKETS, Metrics, RunData, collect, read_buffer, thinned
from leeway.launch.report.page import QUESTIONS, render
from leeway.launch.run_folder import RunFolder
from tests.unit.report_run import CONFIG, NASTY, START_S, make_run, row

PARTS = ("learning", "health", "waiting", "lag", "samples", "ledger", "events", "config")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "sums")


@pytest.fixture(scope="module")
def page(whole):
    return render(collect(whole))


def words(page):
    """Return the visible text of a page."""
    body = re.sub(r"<(style|script)[^>]*>.*?</\1>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_the_page_of_a_complete_run_has_no_missing_data(page):
    assert "Missing data" not in page
    assert re.findall(r'<section id="(\w+)">', page) == [*PARTS], "the parts are in order, and the questions come first"
    assert "No values in this run" not in page
    text = words(page)
    assert text.index("Learned: greedy 0.40 -&gt; 0.90") < text.index("40 steps, trained on"), (
        "it opens with the verdict"
    )
    assert text.count("In order: no alert.") == len(re.findall("<figcaption>", page))
    assert "maximum 3, max_lag 4" in text
    assert "finished" in text
    assert "exit status 0" in text


def test_the_page_is_self_contained(page):
    assert not re.findall(r"""(?:src|href|action)=["'](?!#|data:)""", page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_text_of_a_model_a_run_or_an_event_is_escaped(page):
    assert NASTY not in page
    # The text is in one event and in one reason; the headline and the table both have the reason.
    assert page.count("&lt;script&gt;document.title=") == 3
    name = "</script><script>alert(1)</script>"
    chart = lines(RunData("sums", Path()), CHARTS["reward"], {name: [(1, 2.0)]})
    assert name in json.dumps(chart.plot), "the chart has the unescaped name"


def test_the_values_of_the_charts_cannot_close_their_script(tmp_path):
    run = make_run(tmp_path / "sums")
    rows = [row(step, START_S, **{f"reward/part/{NASTY}": 0.5}) for step in range(1, 9)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    page = render(collect(run))
    assert NASTY not in page
    assert len(plots_of(page)) > 10


def plots_of(page):
    """Return the data that page.js reads."""
    return json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, flags=re.S)[1])


def test_the_best_the_worst_and_a_random_sample_are_shown(whole, page):
    best, worst, other = read_buffer(whole.root, 10.0).samples
    assert [each.kind for each in (best, worst, other)] == ["best reward", "worst reward", "random"]
    assert best.reward > other.reward > worst.reward == 0.0
    assert (best.prompt, best.completion[:3]) == ("abc", "def")
    assert '<span class="prompt">abc</span><span class="completion">def' in page
    assert (worst.facts[0], worst.facts[-1]) == ("actor-0, version 0", "lag 0 at step 1")
    assert worst.facts[2].startswith("trained, record 1, group 1, prompt "), "of equal samples the newest is shown"
    assert "; ".join(worst.facts) in html.unescape(page)


def test_unprintable_characters_are_escaped(tmp_path):
    run = make_run(tmp_path / "sums")
    text = (run.export / "tokenizer.json").read_text()
    (run.export / "tokenizer.json").write_text(text.replace('"d"', json.dumps(NASTY + "!\u202e\x1b")))
    page = render(collect(run))
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "!\\u202e\\x1b" in page
    assert NASTY not in page


def test_the_distribution_of_lags_comes_from_the_status(tmp_path):
    run = make_run(tmp_path / "sums")
    status = read_status(run.status)
    write_status(run.status, msgspec.structs.replace(status, lags={"a": {0: 30, 2: 10}, "b": {0: 10, 2: 50}}))
    (tokens,) = figure(run, "Lags of training tokens").plot["series"]
    assert [list(each) for each in tokens["points"]] == [[0, 1, 2], [40.0, 0.0, 60.0]]


def test_a_buffer_too_large_for_the_timeout_is_shown_in_part(whole):
    moments = iter([0.0, *[99.0] * 1000])
    buffer = read_buffer(whole.root, 10.0, clock=lambda: next(moments))
    assert buffer.num_read == 1 < buffer.num_groups


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (lambda run: run.status.unlink(), "The status of the run is unknown"),
        (lambda run: run.metrics.unlink(), "metrics.jsonl is missing"),
        (lambda run: run.events.unlink(), "events.jsonl is missing"),
        (lambda run: run.timeline.unlink(), "timeline.json is missing"),
        (lambda run: run.timeline.write_text(""), "timeline.json is empty"),
        (
            lambda run: run.metrics.write_text(run.metrics.read_text()[:-9]),
            "Skipped 1 unreadable line of metrics.jsonl",
        ),
        (
            lambda run: run.events.write_text(run.events.read_text() + '{"ki'),
            "Skipped 1 unreadable line of events.jsonl",
        ),
        (lambda run: run.metrics.write_text("\0" * 100), "metrics.jsonl has no step yet"),
        (lambda run: run.status.write_text("[]"), "is not a valid status file"),
        (lambda run: run.status.write_text('{"format": 3, "run": "an older one"}'), "is not a valid status file"),
        (lambda run: run.status.write_text('{"format": 0}'), "has format 0, but this Leeway reads 3"),
        (lambda run: run.config.write_text("[run"), "cannot be read"),
        (lambda run: (run.buffer / "data.mdb").unlink(), "The buffer cannot be read"),
        (lambda run: (run.buffer / "data.mdb").write_bytes(b"x" * 9000), "The buffer cannot be read"),
    ],
)
def test_a_broken_run_has_a_page_that_lists_missing_data(tmp_path, broken, expected, capsys):
    run = make_run(tmp_path / "sums")
    broken(run)
    assert main(["report", str(run.root)]) == 0
    page = run.report.read_text()
    assert "Missing data" in page
    assert expected in words(page).replace("&#39;", "'")
    assert expected in capsys.readouterr().out
    for part in PARTS:
        assert f'<section id="{part}">' in page


def test_a_folder_with_only_a_config_has_a_page(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    page = render(collect(RunFolder(tmp_path)))
    assert "no step yet" in page
    assert words(page).count("is missing") == 3
    assert "maximum 0" not in page, "the maximum lag is unknown"


def test_a_page_without_a_config_states_that_it_is_unavailable(tmp_path):
    assert "The config is unavailable." in render(collect(RunFolder(tmp_path)))


def test_malformed_rows_do_not_prevent_a_page(tmp_path):
    run = make_run(tmp_path / "sums")
    odd = [
        {"step": 41},
        {"step": "x", "version": 1},
        {"kind": 3},
        row(41, START_S, **{"reward/mean": "high", "loss": None}),
    ]
    with run.metrics.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in odd)
    with run.events.open("a") as file:
        file.write('{"time_s": "noon", "kind": null, "eval/policy_version": 3}\n')
    data = collect(run)
    assert data.metrics.num_steps == 41
    assert render(data)


def test_a_failed_run_states_the_reason_first(tmp_path):
    run = make_run(tmp_path / "sums")
    run.status.unlink()
    with run.events.open("a") as file:
        file.write(json.dumps({"time_s": 1.0, "kind": "failed", "text": "stage.0 ran out of memory"}) + "\n")
    text = words(render(collect(run)))
    assert "failed after 40 steps. stage.0 ran out of memory" in text


def test_a_page_that_cannot_be_written_is_one_sentence(whole, tmp_path, capsys):
    assert main(["report", str(whole.root), "--out", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.startswith(f"leeway: {tmp_path / 'no' / 'page.html'} cannot be written: ")
    assert main(["report", str(whole.root), "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "no run at" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*tmp"))


def test_only_the_owner_can_read_a_page(whole):
    main(["report", str(whole.root)])
    assert whole.report.stat().st_mode & 0o777 == 0o600


def figure(run, title):
    return {each.chart.title: each for each in figures(collect(run))}[title]


def set_failures(run, failed):
    """Set the number of failed samples in the status and in the rows."""
    status = read_status(run.status)
    ledger = {**status.buffer.ledger, "issued": 1000, "failed": sum(failed.values())}
    buffer = msgspec.structs.replace(status.buffer, ledger=ledger, failed_by_reason=failed)
    write_status(run.status, msgspec.structs.replace(status, buffer=buffer))
    rows = []
    for step in range(1, 41):
        # rewards fail from step 20 on
        counts = {"failed": 0, "failed_reward": 0, "failed_lease": 0}
        if failed:
            counts = {"failed": 5 + max(0, step - 20), "failed_reward": max(0, step - 20), "failed_lease": 5}
        rows.append(
            row(
                step,
                START_S,
                **{f"buffer/{name}": count for name, count in counts.items()},
                **{"buffer/issued": 25 * step},
            )
        )
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_the_share_of_failed_samples_is_a_headline_and_a_curve_by_reason(tmp_path):
    run = make_run(tmp_path / "sums")
    set_failures(run, {"lease expired": 5, "reward failed: f: KeyError": 18, "reward failed: f: TypeError": 2})
    text = words(render(collect(run)))
    headline = "25 of 1,000: reward failed: f: KeyError (18); lease expired (5); 1 other reason (2)"
    assert f"Failed samples 2.5% {headline}" in text
    assert "No sample failed" not in text
    chart = figure(run, "Failed samples")
    assert [(each.name, each.numbers) for each in chart.legend] == [
        *(("all", "5 → 25"), ("reward", "0 → 20"), ("lease lost", "5")),
    ]


def test_failed_samples_of_a_run_without_buffer_and_end_are_known(tmp_path):
    run = make_run(tmp_path / "sums")
    set_failures(run, {"fenced": 25})
    (run.buffer / "data.mdb").unlink()
    write_status(run.status, msgspec.structs.replace(read_status(run.status), ended=None))
    data = collect(run)
    assert data.exit_status is None
    assert data.counts.ledger["failed"] == 25


def test_a_run_without_a_failed_sample_states_it_once(tmp_path):
    run = make_run(tmp_path / "sums")
    set_failures(run, {})
    text = words(render(collect(run)))
    assert text.count("No sample failed.") == 1
    assert text.count("Failed samples") == 1, "the chart has this title, and no headline has it"


def test_each_of_several_reward_functions_has_a_curve_beside_their_sum(tmp_path):
    run = make_run(tmp_path / "sums")
    assert [each.name for each in figure(run, "Reward").legend] == ["reward"]
    parts = {f"reward/part/{name}": 0.5 for name in ("exact", "format", "c", "d", "e", "f", "g")}
    run.metrics.write_text("".join(json.dumps(row(step, START_S, **parts)) + "\n" for step in range(1, 20)))
    chart = figure(run, "Reward")
    assert [each.name for each in chart.legend] == ["sum", "exact", "format", "c", "d", "e"]
    assert chart.note == "Not drawn: f, g."


@pytest.mark.parametrize(("num", "dots"), [(1, True), (2, True), (11, True), (12, False)])
def test_few_points_are_marked(num, dots):
    points = [(x, 0.5 + x / 100) for x in range(num)]
    (curve,) = lines(RunData("sums", Path()), CHARTS["loss"], {"loss": points}).plot["series"]
    assert (curve["dots"], len(curve["points"][0])) == (dots, num)


def test_the_bound_of_the_lag_is_a_line_over_all_steps(whole):
    *_, bound = figure(whole, "Lag").plot["series"]
    assert (bound["name"], bound["color"], bound["dots"]) == ("max_lag", "bound", False)
    assert [list(each) for each in bound["points"]] == [[1.0, 40.0], [4.0, 4.0]]


def test_lag_control_is_described_and_the_drift_has_its_own_axis(tmp_path):
    run = make_run(tmp_path / "sums")
    assert figure(run, "Lag").note == "", "the run has no lag control"
    control = [
        {"lag/allowed": min(4, 1 + step // 5), "lag/drift": 0.06, "brake/lr_scale": 0.9} for step in range(1, 21)
    ]
    run.metrics.write_text("".join(json.dumps(row(1 + n, START_S, **more)) + "\n" for n, more in enumerate(control)))
    chart = figure(run, "Lag")
    assert chart.note == (
        "Lag control limited the lag of new samples to less than max_lag in 70% of the steps, and scaled the learning "
        "rate to 90% on average."
    )
    scales = {each["name"]: each["scale"] for each in chart.plot["series"]}
    assert scales == {"mean": "y", "maximum": "y", "allowed": "y", "drift (nats, right)": "right", "max_lag": "y"}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_of_equal_values_is_drawn_and_an_empty_one_is_not(name):
    run = RunData("sums", Path())
    equal = lines(run, CHARTS[name], {"mean": [(1, 2.0), (2, 2.0)]})
    assert (equal.plot["log"], equal.legend[0].numbers) == (False, "2")
    assert lines(run, CHARTS[name], {"mean": []}).plot is None
    assert "No values in this run" in render(run)


def answers(run):
    return {name: answer(run) for name, (_, answer) in QUESTIONS.items()}


def test_the_four_questions_have_answers(whole):
    found = answers(collect(whole))
    assert found["learning"].startswith("Learned: greedy 0.40 -> 0.90 (+0.50 ± 0.07), sampled 0.30 -> 0.80 (+0.50")
    assert found["health"] == "Yes: no alert is active and every sample is accounted for."
    waits = "the learner waits 40% of the time for batches, an actor 5% for weights."
    assert found["waiting"] == f"The learner: {waits}"
    assert found["lag"] == "Little: 97% of a batch is effective at a mean lag of 1.50 versions."


def test_the_answers_of_a_bad_run_state_the_problem(tmp_path):
    run = make_run(tmp_path / "sums")
    status = read_status(run.status)
    status = msgspec.structs.replace(status, alerts=["the reward falls"], alert_kinds=["unstable"], ledger_gap=3)
    write_status(run.status, msgspec.structs.replace(status, evaluations=[]))
    bad = {"time/wait_for_batch": 0.0, "time/wait_for_policy": 0.3, "off_policy/ess_sequence": 0.3}
    rows = [row(step, START_S + step, **bad, **{"reward/mean": 1 - step / 50}) for step in range(1, 41)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = answers(collect(run))
    assert found["learning"].startswith("Worse: reward 0.89 -> 0.29 (-0.60 ± 0.03)")
    text = words(render(collect(run)))
    assert text.index("Worse: reward 0.89") < text.index("40 steps, trained on"), "the page opens with the verdict"
    assert figure(run, "Reward").alerts == ["the reward falls"]
    assert text.count("Not in order: the reward falls") == sum("unstable" in chart.alerts for chart in CHARTS.values())
    assert figure(run, "Gradient norm").alerts == []
    assert found["health"] == "No: the reward falls; 3 samples are unaccounted for, which is a bug"
    assert found["waiting"] == "The actors: the learner waits 0% of the time for batches, an actor 50% for weights."
    assert found["lag"].startswith("Yes: 30% of a batch is effective")


def test_a_run_whose_launcher_was_killed_is_not_healthy(tmp_path):
    run = make_run(tmp_path / "sums")
    write_status(run.status, msgspec.structs.replace(read_status(run.status), ended=None))
    assert answers(collect(run))["health"].startswith("No: the launcher (pid 1 on here) exited at ")


def test_noise_and_too_few_steps_give_no_answer(tmp_path):
    run = make_run(tmp_path / "sums")
    write_status(run.status, msgspec.structs.replace(read_status(run.status), evaluations=[]))
    rows = [row(step, START_S + step, **{"reward/mean": 0.5 + (step % 2) / 10}) for step in range(1, 41)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert answers(collect(run))["learning"].startswith("No improvement: reward 0.5")
    assert all(each.startswith("Unknown") for each in answers(RunData("sums", Path())).values())


def test_the_page_has_its_numbers_without_javascript(page):
    text = words(page)
    assert "reward 0.02 → 0.8" in text, "the text has the first and the last value of a curve"
    assert "waiting for a batch 40.0" in text
    assert "Charts require JavaScript." in text


def test_the_library_of_the_charts_has_its_version_and_its_license():
    library = resources.files("leeway.launch.report").joinpath("uplot.js").read_text()
    assert library.startswith("/*! uPlot 1.6.32")
    assert "Permission is hereby granted, free of charge" in library


def test_every_chart_has_a_guide(tmp_path):
    run = make_run(tmp_path / "sums")
    pools = {
        f"pool/{name}/{key}": 1.0 for name in ("a", "b") for key in ("lag_mean", "mismatch_lag0_abs", "tokens_per_s")
    }
    run.metrics.write_text("".join(json.dumps(row(step, START_S, **pools)) + "\n" for step in range(1, 20)))
    data = collect(run)
    page = render(data)
    assert page.count('<p class="note hint">') == page.count("<figure") == len(CHARTS)
    text = html.unescape(words(page))
    assert [name for name, chart in CHARTS.items() if f"{chart.good} {chart.otherwise}" not in text] == []


def test_a_guide_names_keys_and_metrics_that_exist():
    text = " ".join(f"{chart.good} {chart.otherwise}" for chart in CHARTS.values())
    keys = re.findall(r"\b(\w+)\.(\w+)\b", text)
    assert ("learner", "learning_rate") in keys
    sections = {name: models_of(info.annotation) for name, info in Config.model_fields.items()}
    known = {(section, key) for section, models in sections.items() for model in models for key in model.model_fields}
    assert [key for key in keys if key not in known and not key[0].isdigit() and key[1] != "md"] == []
    assert [name for name in re.findall(r"\b\w+/\w+\b", text) if name not in METRICS and name != "docs/tuning"] == []
    drawn = {metric for chart in CHARTS.values() for metric in chart.curves}
    assert drawn <= set(METRICS)


def test_a_long_run_fits_on_a_page_and_keeps_its_spikes(tmp_path):
    run = make_run(tmp_path / "sums")
    rows = [row(step, START_S + step, loss=1.0 + step % 7) for step in range(1, 6001)]
    rows[3210]["loss"] = 1000.0
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    event = json.dumps({"time_s": START_S, "kind": "restart", "text": "a long story " * 1000}) + "\n"
    run.events.write_text(event * 1000)
    data = collect(run)
    assert (len(data.events), data.num_older) == (300, 700)
    assert len(data.metrics.of("loss")) <= 2 * MAX_BUCKETS
    assert (3211.0, 1000.0) in data.metrics.of("loss")
    assert len(render(data).encode()) < 2 * 2**20


def test_a_curve_of_any_length_keeps_its_extremes_and_its_order():
    points = thinned([(float(x), math.sin(x / 100) + (99 if x == 777 else 0)) for x in range(12_345)])
    assert len(points) <= 2 * MAX_BUCKETS
    assert max(y for _, y in points) > 98
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert (points[0], points[-1][0]) == ((0.0, 0.0), 12_344.0)


def test_a_sparse_metric_keeps_the_steps_of_its_values():
    metrics = Metrics()
    for step, more in ((1, {}), (2, {"late": 5}), (3, {"late": None}), (4, {"late": True}), (5, {"late": math.inf})):
        metrics.ingest({"step": step, "loss": step / 2, **more})
    assert metrics.of("late") == [(2.0, 5.0)]
    assert metrics.of("loss") == [(step, step / 2) for step in range(1, 6)]
    assert (metrics.mean("late"), metrics.mean("none"), metrics.num_steps) == (5.0, None, 5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1234, "1,234"),
        (15_300, "15.3k"),
        (2.5e6, "2.5M"),
        (1e-5, "1e-5"),
        (-3.14159, "-3.14"),
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text


@pytest.mark.process
def test_at_the_end_of_a_run_another_process_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.py").write_text("raise SystemExit('this is not Leeway')")
    run = make_run(tmp_path / "sums")
    messages, events = [], []
    training.report_at_end(run, lambda *event: events.append(event), messages.append)
    assert (messages, events) == ([f"report: {run.report}"], [])
    assert run.report.stat().st_size > 10_000


@pytest.mark.process
def test_a_page_that_times_out_is_an_event_and_a_line(tmp_path, monkeypatch):
    run = make_run(tmp_path / "sums")
    messages, events = [], []
    monkeypatch.setattr(training, "REPORT_S", 0.05)
    began = time.monotonic()
    training.report_at_end(run, lambda *event: events.append(event), messages.append)
    assert time.monotonic() - began < 60
    assert messages[0].startswith("no report: it timed out after 0.05 s; to retry, run `leeway report ")
    assert events == [("report", messages[0])]


@pytest.mark.process
def test_a_page_that_fails_at_the_end_is_an_event_and_a_line(tmp_path):
    run = RunFolder(tmp_path / "nothing")
    messages, events = [], []
    training.report_at_end(run, lambda *event: events.append(event), messages.append)
    assert messages[0].startswith("no report: no run at ")
    assert events == [("report", messages[0])]
