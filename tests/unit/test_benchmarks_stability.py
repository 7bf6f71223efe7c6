"""The synchronous loop of the stability benchmark: its samples, their age, and the criterion of stability."""

import pytest
import torch
from benchmarks import stability
from benchmarks.stability_parts import response
from benchmarks.stability_parts.loop import PARTS, DelayedRun, Sampler, completion_logprobs
from examples.demo_model.make_checkpoint import EOS, PAD, make_model, make_tokenizer

SMALL = ["--learner.groups_per_step", "4", "--task.num_train", "64", "--task.num_heldout", "16"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return make_model(1).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_samples_have_the_log_probabilities_of_the_model_and_end_once(model):
    prompts = [[3, 4, 13, 5, 15], [9, 13, 8, 15], [3, 3, 3, 13, 4, 4, 4, 15]]
    samples = Sampler(model, PAD, EOS, max_new_tokens=6).sample(prompts, 50, torch.Generator().manual_seed(0))
    assert samples.prompts == [prompt for prompt in prompts for _ in range(50)]
    torch.testing.assert_close(samples.logprobs_T, completion_logprobs(model, samples, PAD).detach(), rtol=0, atol=1e-5)
    finished = samples.finished_B.tolist()
    assert 0 < sum(finished) < len(finished)
    for completion, is_finished in zip(samples.completions, finished, strict=True):
        assert EOS not in completion[:-1]
        assert (completion[-1] == EOS) == is_finished
        assert is_finished or len(completion) == 6


def test_greedy_sampling_picks_the_most_likely_token(model):
    prompts = [[3, 4, 13, 5, 15], [9, 13, 8, 15]]
    samples = Sampler(model, PAD, EOS, max_new_tokens=4).sample(prompts, 1)
    for prompt, completion in zip(prompts, samples.completions, strict=True):
        for place, token in enumerate(completion):
            assert int(model(torch.tensor([prompt + completion[:place]])).logits[0, -1].argmax()) == token


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_samples_come_from_the_policy_lag_updates_ago(folder, lag):
    lagged = ["--learner.learning_rate", "1e-2", "--weight_sync.max_lag", str(lag), "--weight_sync.lag_control", "off"]
    run = DelayedRun(["--model.path", str(folder), *SMALL, *lagged], seed=0)
    run._scorer = lambda problems, texts: [float(len(text)) for text in texts]  # unequal rewards
    seen, versions = [], []
    run._load, load = lambda values: (seen.append(values[0].clone()), load(values)), run._load
    run._update, update = lambda *args: (update(*args), versions.append(run._past[-1][0].clone())), run._update
    run.train(6)
    trained = seen[: 6 * PARTS]
    for number in range(6):
        for values in trained[number * PARTS : (number + 1) * PARTS]:
            assert torch.equal(values, versions[max(0, number - lag)])
    assert not torch.equal(versions[0], versions[1])


def test_a_file_task_is_scored_by_its_own_rewards(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(80)))
    (tmp_path / "reward.py").write_text(
        "def even(completions, answer, **columns):\n    return [float(int(each) % 2 == 0) for each in answer]\n"
    )
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{folder}"\n[task]\ntype = "file"\npath = "rows.jsonl"\nnum_heldout = 8\n'
        'rewards = ["reward.py:even"]\n[algorithm]\ntype = "trajectory_balance"\n'
        "[actors]\nmax_prompt_tokens = 8\nmax_new_tokens = 4\n[learner]\ngroups_per_step = 4\n"
    )
    run = DelayedRun([], seed=0, config=tmp_path / "run.toml")
    assert run.accuracy() == sum(int(each.columns["answer"]) % 2 == 0 for each in run._heldout) / len(run._heldout)
    assert set(run.train(2).reward) <= {step / 4 for step in range(5)}


@pytest.mark.parametrize(
    ("accuracies", "stable"),
    [([0.3, 0.4, 0.5, 0.49], True), ([0.3, 0.5, 0.4, 0.41], False), ([0.3, 0.28, 0.2, 0.2], False), ([0.3, 0.3], True)],
)
def test_a_run_is_stable_if_its_accuracy_has_not_fallen(accuracies, stable):
    assert stability.is_stable(accuracies) is stable


@pytest.mark.parametrize("limit", [2e-5, 1e-4, 3e-4, 1.0, 1e-9])
def test_the_search_finds_the_greatest_stable_learning_rate(monkeypatch, limit):
    def tried(row, lag, rate, results):
        results[rate] = [0.3, 0.4] if rate <= limit else [0.3, 0.1]
        return stability.is_stable(results[rate])

    monkeypatch.setattr(stability, "_try", tried)
    found = stability.greatest_rate(stability.ROWS[0], 4)
    assert found["rate"] == max((rate for rate in stability.RATES if rate <= limit), default=None)


def result_of(task):
    if isinstance(task, stability.Response):
        # the tenfold rate moves the drift to 0.5 for three updates, and once more after ten
        drift = [0.1] * response.NUM_BEFORE + [0.5] * 3 + [0.1] * 7 + [1.5] + [0.1] * (response.NUM_AFTER - 11)
        return {key: drift for key in ("drift", "allowed", "lr_scale", "reward")}
    if task.as_shipped:
        return {"greedy": 0.81, "sampled": 0.62, "ess_lowest": 0.4}
    return {"rate": 1e-4, "tried": {"0.0001": [0.3, 0.4], "0.0002": [0.3, 0.11]}}


def test_the_page_and_the_line_have_the_results():
    results = {task.key: result_of(task) for task in stability.tasks()}
    text = "\n".join(stability.page(results, "Written by hand."))
    assert "0.0001 (0.40 -> 0.11)" in text
    assert "0.810 / 0.620, ESS 0.40" in text
    assert "| sums | 0.10 | 0.38 | 10 | 0.10 | 0.1, 0.1 | 0.10 | 0.10, 0.10 |" in text
    rates = {f"rate_lag{lag}": 1e-4 for lag in stability.LAGS}
    assert stability.line(results)["oapl"] == {**rates, "accuracy_lag64": 0.81}
