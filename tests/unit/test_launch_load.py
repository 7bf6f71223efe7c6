"""Loading a config: overrides, paths, and errors with suggestions."""

import tomllib
from pathlib import Path

import pytest

from leeway.launch.config import load_config, to_toml
from leeway.launch.errors import ConfigError
from leeway.launch.run_folder import RunFolder, choose_root

EXAMPLES = Path(__file__).parents[2] / "examples"
MINIMAL = """
[model]
path = "model"
[task]
type = "reasoning_gym"
name = "chain_sum"
[algorithm]
type = "trajectory_balance"
"""


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_loads(path):
    load_config(path)


def test_paths_in_a_config_are_relative_to_its_folder_and_overrides_to_the_cwd(minimal, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_config(minimal).model.path == str(tmp_path / "model")
    assert load_config(minimal, ["--model.path", "model"]).model.path == str(elsewhere / "model")


def test_a_path_through_a_symlink_is_kept_as_written(minimal, tmp_path, monkeypatch):
    (tmp_path / "mnt" / "a" / "data").mkdir(parents=True)
    data = tmp_path / "data"
    data.symlink_to(tmp_path / "mnt" / "a" / "data")
    config = load_config(minimal, ["--weight_sync.folder", f"{data}/weights", "--model.path", f"{data}/../model"])
    assert (config.weight_sync.folder, config.model.path) == (f"{data}/weights", f"{data}/../model")
    (data / "run.toml").write_text(MINIMAL.replace('"model"', '"./models//first"'))
    assert load_config(data / "run.toml").model.path == f"{data}/models/first"
    monkeypatch.chdir(data)
    monkeypatch.setenv("PWD", str(data))
    assert load_config(Path("run.toml"), ["--model.reference_path", "other"]).model.reference_path == f"{data}/other"
    assert load_config(Path("run.toml")).model.path == f"{data}/models/first"
    monkeypatch.setenv("PWD", str(tmp_path))
    assert load_config(Path("run.toml")).model.path == f"{data.resolve()}/models/first", (
        "PWD is ignored because its value is another folder"
    )
    assert str(config.model.path) in to_toml(config)
    config = load_config(minimal, ["--run.dir", f"{data}/runs", "--run.name", "first"])
    assert str(RunFolder(choose_root(config, minimal)).root) == f"{data}/runs/first"


@pytest.mark.parametrize("name", ["org/model", "org/model@v1.2", "Org-1/model_2.5@refs/pr/1"])
def test_a_model_path_is_a_hub_name_unless_a_folder_has_the_organisations_name(minimal, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = load_config(minimal, ["--model.path", name]).model
    assert (found.folder, found.path) == (None, name)
    (tmp_path / "resolved.toml").write_text(to_toml(load_config(minimal, ["--model.path", name])))
    assert load_config(tmp_path / "resolved.toml").model == found
    (tmp_path / name).parent.mkdir(parents=True)
    assert load_config(minimal, ["--model.path", name]).model.folder == tmp_path / name, (
        "the name may be a misspelt path"
    )
    (tmp_path / name).mkdir()
    assert load_config(minimal, ["--model.path", name]).model.folder == tmp_path / name


@pytest.mark.parametrize("name", ["model", "./org/model", "../org/model", "/org/model", "a/b/c", "org/"])
def test_other_paths_are_folders_whether_they_exist_or_not(minimal, name):
    assert load_config(minimal, ["--model.path", name]).model.folder is not None


def test_overrides_are_toml_values_or_plain_text(minimal):
    config = load_config(
        minimal, ["--learner.num_steps", "7", "--weight_sync.max_lag=unbounded", "--run.name", "first try"]
    )
    assert (config.learner.num_steps, config.weight_sync.max_lag, config.run.name) == (7, "unbounded", "first try")


def test_a_run_name_may_be_a_number(minimal):
    config = load_config(minimal, ["--run.name", "7", "--run.seed", "7"])
    assert (config.run.name, config.run.seed) == ("7", 7)


@pytest.mark.parametrize("text", ["3e-4", "1e-5", "1_000", "12.50", "2026-11-26"])
def test_a_name_that_looks_like_a_number_or_a_date_is_kept_as_typed(minimal, text):
    config = load_config(minimal, ["--run.name", text, "--model.path", f'"{text}"', "--learner.warmup_steps", "1_0"])
    assert (config.run.name, Path(config.model.path).name, config.learner.warmup_steps) == (text, text, 10)


@pytest.mark.parametrize("text", ["0x10", "1e3", "3e-4", "1_000", "true", "2026-11-26", "on"])
def test_an_environment_variable_is_kept_as_typed(minimal, text):
    assert load_config(minimal, ["--launch.env.NAME", text]).launch.env == {"NAME": text}
    assert load_config(minimal, ["--launch.env", f'{{NAME = "{text}"}}']).launch.env == {"NAME": text}


def test_a_resolved_config_loads_as_the_same_config(minimal, tmp_path):
    params = "{min_terms = 2, deep = {a = [1, 2]}, '\N{GRINNING FACE}' = 1}"
    config = load_config(minimal, ["--task.params", params, "--run.name", 'a "b" \\ c \x7f'])
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert tomllib.loads(again.read_text())
    assert load_config(again) == config


PPO = ["--algorithm", "{type = 'off_policy_ppo'}"]


def test_reward_models_round_trip_and_their_paths_are_relative_to_the_file(minimal, tmp_path):
    judge = "{type = 'judge', endpoint = 'http://x/v1', model = 'm', prompt = '{completion}', request = {seed = 1}}"
    named = ["--task.rewards", "['good', 'kind']", "--task.reward_models.good", judge]
    minimal.write_text(MINIMAL + '[task.reward_models.kind]\ntype = "classifier"\npath = "rm"\n')
    config = load_config(minimal, named)
    assert config.task.reward_models["kind"].path == str(tmp_path / "rm")
    again = tmp_path / "sub" / "again.toml"
    again.parent.mkdir()
    again.write_text(to_toml(config))
    assert load_config(again) == config


def test_a_resolved_config_with_corrections_loads_as_the_same_config(minimal, tmp_path):
    corrections = "['icepop', {type = 'token_tis', cap = 3.0}]"
    config = load_config(minimal, ["--algorithm", "{type = 'off_policy_ppo', corrections = " + corrections + "}"])
    stale = load_config(minimal, ["--algorithm", "{type = 'off_policy_ppo', proximal = 'behaviour', mean_over = 64}"])
    again = tmp_path / "again.toml"
    for each in (config, stale):
        again.write_text(to_toml(each))
        assert load_config(again) == each
    assert [each.type for each in config.algorithm.corrections] == ["icepop", "token_tis"]
    assert (stale.algorithm.corrections, stale.algorithm.mean_over) == ((), 64.0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [*PPO, "--algorithm.corrections", "[{type = 'icepop', hi = 3}]"],
            "unknown key algorithm.corrections.0.hi; did you mean algorithm.corrections.0.high?",
        ),
        ([*PPO, "--algorithm.corrections", "['icepopp']"], "did you mean 'icepop'?"),
        ([*PPO, "--algorithm.corrections", "['icepop', 'icepop']"], "contains 'icepop' twice"),
        (["--learner.num_stage", "2"], "unknown key learner.num_stage; did you mean learner.num_stages?"),
        (["--learnr.num_stages", "2"], "unknown key learnr; did you mean learner?"),
        (["--learner.max_lag", "2"], "unknown key learner.max_lag; did you mean weight_sync.max_lag?"),
        (["--actors.top_p", "0.9"], "actors.top_p is not supported: training samples use temperature only"),
        (["--algorithm.type", "trajectory_balanse"], "did you mean 'trajectory_balance'?"),
        (["--learner.num_steps", "many"], "learner.num_steps = 'many'"),
        (["--weight_sync.max_lag", "0", "--weight_sync.publish_every", "2"], "can never be met"),
        (["--weight_sync.max_lag", "0", "--weight_sync.max_actor_lag", "1"], "contradicts max_actor_lag"),
        (["--weight_sync.max_lag", "unbound"], "weight_sync.max_lag = 'unbound': input should be a valid integer"),
        (["--weight_sync.max_lag", "unbound"], "or input should be 'unbounded'"),
        (["--learner.num_steps"], "has no value"),
        (["learner.num_steps", "3"], "is not an override"),
        (["--task.name.deep", "3"], "'name' is a value, not a section"),
    ],
)
def test_an_error_names_the_key_and_suggests_a_fix(minimal, overrides, expected):
    with pytest.raises(ConfigError) as error:
        load_config(minimal, overrides)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_config_suggests_a_similar_file(minimal):
    with pytest.raises(ConfigError, match=r"did you mean .*run\.toml"):
        load_config(minimal.with_name("runn.toml"))
