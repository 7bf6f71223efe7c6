"""benchmarks/overlap.py: metrics computed from run folders, and the model of its long-tailed task."""

import json
import os

import numpy as np
import psutil
import pytest
import torch
from benchmarks import overlap
from benchmarks.lib.processes import MeasurementFailed
from benchmarks.lib.runs import FinishedRun, Samples
from benchmarks.overlap_parts import long_tail, reward

from tests.unit.made_up_run import write_generation


def samples(*rows):
    step, length, started_s, finished_s = zip(*rows, strict=True)
    return Samples(np.array(step), np.array(length), np.array(started_s), np.array(finished_s))


def side(**changes):
    names = ("samples_per_s", "learner_idle_frac", "actor_idle_frac", "step_s", "generation_s", "U")
    return {**dict.fromkeys(names, 1.0), **changes}


def test_u_averages_the_ratio_of_longest_to_mean_length_over_the_counted_steps():
    made = samples((1, 90, 0, 9), (2, 10, 0, 1), (2, 30, 0.5, 4), (3, 10, 5, 6), (3, 10, 5, 7))
    found = overlap.batches(made, [2, 3])
    assert found.longest_over_mean == pytest.approx((1.5 + 1.0) / 2)
    assert found.generation_s == pytest.approx((4 + 2) / 2)


def test_a_sample_is_in_flight_from_its_start_to_its_end():
    made = samples((1, 5, 0.0, 4.0), (1, 5, 3.0, 9.0), (2, 5, 8.0, 9.0))
    assert overlap.running(made, (2.0, 6.0)) == pytest.approx((2 + 3) / 4)


def test_the_ratio_comes_from_the_rounds_and_r_from_the_synchronous_runs():
    rounds = [
        (side(samples_per_s=10, step_s=2.0, generation_s=1.0, U=3.0), side(samples_per_s=18, learner_idle_frac=0.1)),
        (side(samples_per_s=20, step_s=2.0, generation_s=3.0, U=3.0), side(samples_per_s=30, learner_idle_frac=0.3)),
        (side(samples_per_s=10, step_s=2.0, generation_s=2.0, U=3.0), side(samples_per_s=17, learner_idle_frac=0.2)),
    ]
    found = overlap.compared(rounds)
    assert found["async_over_sync"] == pytest.approx(1.7)
    assert found["spread"] == pytest.approx(0.2)
    assert found["r"] == pytest.approx(1.0)
    assert found["limit"] == pytest.approx(2.0)
    assert found["learner_idle_frac"] == pytest.approx(0.2)


def test_separate_cores_at_most_double_throughput_if_both_sides_take_equal_time():
    assert overlap.ceiling(3.0, 1.0) == pytest.approx(2.0)
    assert overlap.ceiling(3.0, 0.5) == pytest.approx(3.0)
    assert overlap.ceiling(3.0, 0.1) == pytest.approx(3.3)


def test_a_bar_is_judged_only_at_full_size_and_if_r_is_about_1():
    def met(**changes):
        result = {"quick": False, "r": 1.0, "async_over_sync": 1.7, **changes}
        return overlap.judged(result)["async_over_sync"]["met"]

    assert met() is True
    assert met(async_over_sync=1.5) is False
    assert met(r=2.0) is None
    assert met(quick=True) is None


def write_run(folder, step_s, waits_s, busy):
    """Write a run that begins at 100 s. Each step takes its wait plus `step_s`."""
    folder.mkdir()
    rows, now = [], 100.0
    for number, wait_s in enumerate(waits_s, 1):
        now += wait_s + step_s
        rows.append({
            "loss": 0.0, "skipped": False, "step": number, "finished_s": now, "time/step": step_s,
            "time/wait_for_batch": wait_s, "batch/trajectories": 4, "batch/completion_tokens": 40,
            "lag/token_mean": 1.0, "lag/token_max": 2,
        })  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    write_generation(folder, [("actor-0", start_s, end_s, {}) for start_s, end_s in busy])
    summary = {"accuracy_after": 0.5, "ledger": {"dropped_stale": 1, "committed": 10}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return FinishedRun(folder)


@pytest.fixture
def no_store(monkeypatch):
    made = samples(*((step, length, 0.0, 1.0) for step in range(1, 9) for length in (5, 15)))
    monkeypatch.setattr(FinishedRun, "samples", lambda run: made)


@pytest.mark.usefixtures("no_store")
def test_warm_up_steps_do_not_count(tmp_path):
    run = write_run(tmp_path / "run", 1.0, [50.0, 9.0, 1.0, 1.0, 2.0], [(100.0, 161.0), (161.0, 163.0)])
    found = overlap.figures_of(run, num_warmup=2)
    assert found["seconds"] == pytest.approx(7.0)
    assert found["samples_per_s"] == pytest.approx(12 / 7)
    assert found["learner_idle_frac"] == pytest.approx(4 / 7)
    assert found["actor_idle_frac"] == pytest.approx(1 - 2 / 7)
    assert found["dropped_stale"] == pytest.approx(0.1)


@pytest.mark.usefixtures("no_store")
def test_a_run_of_warm_up_steps_only_is_refused(tmp_path):
    run = write_run(tmp_path / "run", 1.0, [1.0, 1.0, 1.0], [(100.0, 101.0)])
    with pytest.raises(MeasurementFailed, match="has 3 steps including 2 of warm-up"):
        overlap.figures_of(run, num_warmup=2)


def test_the_model_ends_a_completion_with_the_probability_of_its_prompt_class():
    model = long_tail.make_model()
    for number in (0, long_tail.NUM_CLASSES - 1):
        word = long_tail.words(number)[-1]
        with torch.no_grad():
            ids = torch.tensor([[long_tail.VOCABULARY.index("7"), long_tail.words(number)[0], word]])
            probs_V = model(ids).logits[0, -1].softmax(-1)
        assert float(probs_V[long_tail.EOS]) == pytest.approx(1 / long_tail.mean_length(number), rel=0.01)
        assert float(probs_V[long_tail.words(number)].sum()) == pytest.approx(1 - float(probs_V[long_tail.EOS]))


def test_the_lengths_of_the_classes_are_log_normal():
    lengths = [long_tail.mean_length(number) for number in range(long_tail.NUM_CLASSES)]
    assert np.median(lengths) == pytest.approx(long_tail.MEDIAN_LENGTH, rel=0.01)
    assert lengths[-1] / lengths[0] > 5


def test_prompts_are_distinct_and_end_with_their_class(tmp_path):
    config = long_tail.write_setting(tmp_path / "setting", long_tail.Setting(10, 2, 16))
    lines = (tmp_path / "setting" / "prompts.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    assert len(set(questions)) == long_tail.NUM_PROMPTS
    assert {question[-1] for question in questions} == set(long_tail.CLASSES)
    assert {len(question) for question in questions} == {long_tail.PROMPT_TOKENS}
    assert "max_running_samples = 64" in config.read_text()


def test_the_written_config_is_valid(tmp_path):
    from leeway.launch.config import load_config

    config = load_config(long_tail.write_setting(tmp_path / "setting", long_tail.Setting(10, 2, 16)))
    assert config.learner.groups_per_step * config.actors.group_size == config.actors.max_running_samples
    assert config.learner.token_budget >= long_tail.PROMPT_TOKENS + long_tail.MAX_NEW_TOKENS


def test_an_even_number_of_words_is_rewarded():
    assert reward.even(["ab", "a", ""]) == [1.0, 0.0, 1.0]


def test_the_check_of_cores_fails_if_no_actor_process_was_found(tmp_path):
    cores = overlap.Cores(0, 1)
    cores.look(tmp_path)  # the run has not written status.json yet
    with pytest.raises(MeasurementFailed, match="0 processes of the actor were found"):
        cores.check()


def test_all_threads_of_a_process_are_pinned():
    cpus = sorted(os.sched_getaffinity(0))
    with psutil.Popen(["sleep", "30"]) as process:
        try:
            assert overlap._move_threads(process.pid, cpus[-1])
            assert process.cpu_affinity() == [cpus[-1]]
        finally:
            process.kill()
    assert not overlap._move_threads(process.pid, cpus[-1])
