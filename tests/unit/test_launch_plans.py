"""Plans: which keys are chosen, which plans fit, what is refused, and the plan file."""

import contextlib
import math
import subprocess
import tomllib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
from benchmarks.lib.lengths import lognormal

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.launch.cli import main
from leeway.launch.config import load_config
from leeway.launch.errors import ConfigError
from leeway.launch.pools import actor_pools
from leeway.launch.resources import Gpu, MachineNeeds, missing_resources
from leeway.launch.run_folder import RunFolder
from leeway.learner.packing import CostModel, pack
from leeway.planning import planner as planning
from leeway.planning import plans, profiling
from leeway.planning.costs import LearnerTime, LeastSquares
from leeway.planning.lengths import PromptStream
from leeway.planning.planner import Planner
from leeway.planning.plans import Host, predict, read_hosts, read_plan, settings_of, shape_of, world_of
from leeway.planning.profile import Profile
from leeway.planning.profiling import _score_token_s
from tests.unit.made_up_profile import DEMO, profile

LEARNED_FROM = (
    "group_size",
    "groups_per_step",
    "num_minibatches",
    "num_epochs",
    "algorithm",
    "max_new_tokens",
    "dtype",
)
BIG = [Host("big", frozenset(), 64.0, 0.0, is_here=True)]


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch):
    """Shorten the simulations, because other tests cover their results."""
    monkeypatch.setattr(planning, "NUM_SIMULATED", 4)
    monkeypatch.setattr(planning, "NUM_CLOSER", 2)
    monkeypatch.setattr(planning, "FEW_SAMPLES", 500)
    monkeypatch.setattr(planning, "SAMPLES", 1000)
    monkeypatch.setattr(profiling, "predict", partial(predict, samples=1000))


def ignore(phase, share):
    """Accept a progress report without displaying the report."""


def made(*overrides, hosts=BIG, prices=None, measured=None):
    return Planner(DEMO, overrides, measured or profile(*overrides), hosts, prices or {})


def test_a_plan_is_faster_than_the_config_and_can_be_loaded(tmp_path):
    planner = made()
    best, *others = planner.find(ignore)
    unchanged = next(each for each in others if not planner.changes(each.keys))
    assert best.prediction.samples_per_s > 1.2 * unchanged.prediction.samples_per_s
    plans.write_plan(tmp_path / "plan.toml", best, tmp_path / "profile.json")
    overrides = read_plan(tmp_path / "plan.toml")
    config = load_config(DEMO, overrides)
    assert config.actors.num_actors == best.keys["actors.num_actors"]
    assert (config.learner.num_stages, config.learner.schedule) == (
        best.keys["learner.num_stages"],
        best.keys["learner.schedule"],
    )
    again = world_of(config, profile())
    assert [pool.count for pool in again.pools] == [best.keys["actors.num_actors"]]


def test_a_plan_changes_no_learning_key_and_does_not_raise_max_lag():
    space = made().space
    assert not [key for key in made().own if key.rpartition(".")[2] in LEARNED_FROM]
    assert max(space.dimensions["weight_sync.max_lag"]) == load_config(DEMO).weight_sync.max_lag
    unbounded = made("--weight_sync.max_lag", "unbounded").space
    assert list(unbounded.dimensions["weight_sync.max_lag"]) == ["unbounded"]


def test_keys_on_the_command_line_are_not_chosen():
    planner = made("--actors.num_actors", "3", "--learner.num_stages", "2", "--weight_sync.max_lag", "2")
    for candidate in planner.find(ignore):
        assert not {"actors.num_actors", "learner.num_stages", "weight_sync.max_lag"} & candidate.keys.keys()
    assert {shape.num_stages for shape in planner.space.dimensions["learner"]} == {2}
    assert list(planner.space.dimensions["actors.num_actors"]) == [3]


def test_no_plan_shares_cores_among_more_workers_than_the_config():
    planner = made(hosts=[Host("small", frozenset(), 2.0, 0.0)])  # the demo has two engines and two stages
    few, many = 0, 0
    for plan in planner.space.all():
        choices = planner.space.choices(plan)
        shape = choices["learner"]
        workers = choices["actors.num_actors"] + shape.num_stages * shape.num_replicas
        fits = planner.score(plan) > -math.inf
        assert not fits or workers <= 4
        few, many = few + (fits and workers < 4), many + (fits and workers == 4)
    assert few
    assert many


def test_pools_may_have_their_own_hosts_and_prices(tmp_path):
    config = tmp_path / "pools.toml"
    config.write_text(
        DEMO.read_text()
        .replace('path = "demo_model"', f'path = "{DEMO.parent / "demo_model"}"')
        .replace("num_actors = 2\n", "")
        + '\n[pools.fast]\nrole = "actors"\ncount = 1\n[pools.slow]\nrole = "actors"\ncount = 1\n'
        + '[pools.back]\nrole = "learner"\n'
    )
    measured = profile()
    engine = measured.engines["actors"]
    slow = msgspec.structs.replace(engine, terms=tuple(4 * each for each in engine.terms))
    measured = msgspec.structs.replace(measured, engines={"fast": engine, "slow": slow})
    (tmp_path / "hosts.txt").write_text("h1 fast 10.0.0.1\nh2 slow,back # both\n\nh3 back\nh4 - 10.0.0.4\n")
    hosts = read_hosts(tmp_path / "hosts.txt", 4.0, 0.0)
    assert hosts[1] == Host("h2", frozenset({"slow", "back"}), 4.0, 0.0)
    assert hosts[3].pools == frozenset(), "launch/cluster.sh writes - for a host without a pool"
    planner = Planner(config, [], measured, hosts, {"fast": 1.0, "slow": 1.0, "back": 0.1})
    best, *others = planner.find(ignore)
    unchanged = next(each for each in others if not planner.changes(each.keys))
    assert best.prediction.price_per_1000 < unchanged.prediction.price_per_1000
    pools = {pool.name: pool.count for pool in actor_pools(load_config(config, plans.as_overrides(best.keys)))}
    assert pools["fast"] <= 4
    assert len(planner.space.dimensions["pools.fast.count"]) == 4, "h1 has four cores"


def test_a_plan_sets_the_sum_of_the_pools_if_the_config_has_it(tmp_path):
    config = tmp_path / "pools.toml"
    text = DEMO.read_text().replace('path = "demo_model"', f'path = "{DEMO.parent / "demo_model"}"')
    config.write_text(text + '\n[pools.fast]\nrole = "actors"\ncount = 1\n[pools.slow]\nrole = "actors"\ncount = 1\n')
    engine = profile().engines["actors"]
    measured = msgspec.structs.replace(profile(), engines={"fast": engine, "slow": engine})
    known = ["--learner.num_stages", "1", "--weight_sync.max_lag", "4"]
    best = Planner(config, [*known, "--actors.max_running_samples", "4"], measured, BIG, {}).find(ignore)[0].keys
    assert best["actors.num_actors"] == best["pools.fast.count"] + best["pools.slow.count"] > 2
    actor_pools(load_config(config, plans.as_overrides(best)))
    fixed = Planner(config, [*known, "--actors.num_actors", "2"], measured, BIG, {})
    assert {each.keys["pools.fast.count"] for each in fixed.find(ignore)} == {1}


def pool(name, **keys):
    """Return the overrides of a pool; its role is actors by default."""
    return [word for key, value in {"role": "actors", **keys}.items() for word in (f"--pools.{name}.{key}", str(value))]


def possible(planner):
    """Return the choices of every feasible plan."""
    return [planner.space.choices(plan) for plan in planner.space.all() if planner.score(plan) > -math.inf]


def test_a_config_that_train_refuses_is_no_plan_and_has_none():
    one = ("--actors.num_actors", "1", "--learner.num_replicas", "1", "--learner.token_budget", "1536")
    again = ("--learner.activation_checkpointing", "true")
    with pytest.raises(ConfigError, match="would recompute every layer"):
        made(*again, "--learner.schedule", "zero_bubble")
    assert {each["learner"].schedule for each in possible(made(*one, *again))} == {"1f1b"}
    lags = possible(made(*one, "--buffer.capacity_trajectories", "800"))
    assert {each["weight_sync.max_lag"] for each in lags if each["weight_sync.publish_every"] == 1} == {0, 1, 2}


def test_no_plan_reserves_more_of_this_machine_than_train_allows(short_simulations, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    overrides = ["--learner.cpus", "1.5", "--learner.num_stages", "1", "--actors.num_actors", "1"]
    candidates = made(*overrides, hosts=[Host("here", frozenset(), 4.0, 0.0, is_here=True)]).find(ignore)
    assert candidates
    for each in candidates:
        assert missing_resources(load_config(DEMO, [*plans.as_overrides(each.keys), *overrides])) == ""
    best = max(each.keys["learner.num_replicas"] for each in candidates)
    assert best == 2, "a scorer's optional reservation leaves room for both replicas"


def test_every_worker_has_its_reservation_on_one_host():
    overrides = ["--learner.num_stages", "1", "--learner.num_replicas", "1", "--weight_sync.max_lag", "0"]
    here, small = Host("here", frozenset(), 64.0, 2.0, is_here=True), Host("h0", frozenset(), 4.0, 0.0)
    hosts = [small._replace(name=f"h{number}") for number in range(4)]
    for keys, there, most in (("--actors.gpus=1", [here], 2), ("--actors.cpus=3", hosts, 4)):
        assert max(each["actors.num_actors"] for each in possible(made(keys, *overrides, hosts=there))) == most


def test_an_actor_colocated_with_the_learner_stays_alone_in_a_plan(tmp_path):
    config = tmp_path / "colocated.toml"
    text = DEMO.read_text().replace('path = "demo_model"', f'path = "{DEMO.parent / "demo_model"}"')
    config.write_text(text.replace("num_actors = 2\n", "num_actors = 1\ngpus = 1\ngpu_memory_share = 0.4\n"))
    one = ["--launch.colocate=true", "--learner.gpus=1", "--learner.num_stages=1", "--learner.num_replicas=1"]
    engines = profile("--actors.gpus=1", "--actors.gpu_memory_share=0.4")
    hosts = [Host("here", frozenset(), 64.0, 4.0, is_here=True)]
    planner = Planner(config, one, engines, hosts, {})
    assert {each["actors.num_actors"] for each in possible(planner)} == {1}


def test_reservations_are_counted_like_train_and_cores_are_shared_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    here = plans.local_host()
    assert here == Host("this machine", frozenset(), 2.0, here.gpus, is_here=True, cores=2.0)
    overrides = ["--actors.cpus", "2.5", "--learner.num_stages", "1", "--weight_sync.max_lag", "0"]
    found = possible(made(*overrides, hosts=[here._replace(cpus=8.0)]))
    assert {each["actors.num_actors"] for each in found} == {1, 2}, "two engines of two threads fit beside a stage"


def test_gpus_are_not_shared_like_cores():
    host = Host("h", frozenset(), 2.0, 1.0)
    planner = made("--learner.gpus", "1", "--learner.num_stages", "1", "--actors.num_actors", "6", hosts=[host])
    assert {shape.num_replicas for shape in planner.space.dimensions["learner"]} == {1}


def test_memory_is_estimated_like_the_doctor_also_with_overrides_and_pools(monkeypatch):
    overrides = ["--actors.num_actors", "1", "--learner.num_replicas", "2"]
    needs = MachineNeeds.of(load_config(DEMO, [*overrides, "--learner.num_stages", "2"])).memory.size_bytes
    pools = ["--learner.num_stages", "2", *pool("front", role="learner", count=1), *pool("back", role="learner")]
    for has_bytes, stages, counted in ((needs, {1, 2}, {2}), (needs - 1, {1}, set())):
        monkeypatch.setattr(psutil, "virtual_memory", lambda has_bytes=has_bytes: SimpleNamespace(total=has_bytes))
        assert {each["learner"].num_stages for each in possible(made(*overrides))} == stages
        assert {each["learner"].num_stages for each in possible(made(*overrides, *pools))} == counted
        elsewhere = possible(made(*overrides, hosts=[BIG[0]._replace(is_here=False)]))
        assert {each["learner"].num_stages for each in elsewhere} == {1, 2}, (
            "the memory of this machine does not limit another host"
        )


def test_gpus_of_this_machine_do_not_limit_the_hosts_of_a_file(monkeypatch):
    monkeypatch.setattr(planning, "list_gpus", lambda: [Gpu(0, "GPU-aa", "H100", "580", 2**20, 0, 9.0)])
    for is_here in (True, False):
        hosts = [Host("h1", frozenset(), 64.0, 8.0, is_here=is_here)]
        overrides = ("--learner.gpus", "1", "--learner.num_replicas", "1", "--learner.token_budget", "1536")
        shapes = made(*overrides, hosts=hosts).space.dimensions["learner"]
        assert (len(shapes) > 1) != is_here, "on this machine, only the shape of the config is allowed"


def test_a_host_runs_only_its_own_pools():
    hosts = [Host("h1", frozenset({"exact"}), 2.0, 0.0), Host("h2", frozenset(), 6.0, 0.0)]
    overrides = ["--learner.num_stages", "1", "--learner.num_replicas", "1", "--weight_sync.max_lag", "0"]
    for pools, most in ((frozenset(), 0), (frozenset({"fast"}), 6)):
        both = [hosts[0], hosts[1]._replace(pools=pools)]
        found = possible(made(*overrides, *pool("exact", count=1), *pool("fast"), hosts=both))
        assert max((each["pools.fast.count"] for each in found), default=0) == most
    hosts += [Host("h3", frozenset({"exact", "fast"}), 2.0, 0.0), Host("h4", frozenset({"fast"}), 2.0, 0.0)]
    both = possible(made(*overrides, *pool("exact"), *pool("fast"), hosts=hosts))
    assert max(each["pools.exact.count"] + each["pools.fast.count"] for each in both) == 6, "h3 is counted once"


def test_the_time_of_a_step_is_averaged_over_simulated_groups():
    samples = msgspec.structs.replace(profile().samples, quantiles=lognormal(40, 0.6, 200).quantiles, explained=0.4)
    costs = msgspec.structs.replace(profile().learner, terms=(0.0, 0.01, 1e-4, 0.0))
    planner = made(measured=profile(samples=samples, learner=costs))
    law, own, stream = costs.law, shape_of(planner.config), PromptStream(samples.lengths, 4096, 8, 0)
    for budget in (512, 1024):
        shape = replace(own, token_budget=budget)
        steps = [[6 + n for _ in range(32) for n in map(int, stream.lengths(stream.next()))] for _ in range(30)]
        expected_s = np.mean([law.seconds(each, 6, 8, shape) for each in steps])
        assert planner._mean_step_s(shape) == pytest.approx(expected_s, rel=0.1)


def test_the_unchanged_config_is_simulated_so_that_no_plan_is_slower(monkeypatch):
    planner = made("--weight_sync.max_lag", "4", "--learner.num_stages", "1")
    slow = min((plan for plan in planner.space.all() if planner.score(plan) > -math.inf), key=planner.score)
    monkeypatch.setattr(planning, "search", lambda *_: [(slow, 1.0)])
    monkeypatch.setattr(planning, "NUM_CLOSER", 1)

    def deceptive(world, samples, error):  # a short simulation may rank the slower plan first
        found = predict(world, samples=samples)
        return msgspec.structs.replace(found, samples_per_s=found.samples_per_s ** (-1 if samples == 500 else 1))

    monkeypatch.setattr(planning, "predict", deceptive)
    best = planner.find(ignore)
    assert best[0].keys == {key: value for key, value in planner.own.items() if key not in planner._fixed}
    assert best[0].prediction.samples_per_s > 1.2 * best[-1].prediction.samples_per_s


def test_a_hub_model_is_identified_by_name_and_split_no_further_than_the_config(tmp_path, capsys):
    path, measured = tmp_path / "hub.toml", tmp_path / "profile.json"
    path.write_text(DEMO.read_text().replace('path = "demo_model"', 'path = "o/small"'))
    assert profiling.model_of(load_config(path)) == "o/small@main"
    profile(model="o/large@main").write(measured)
    assert main(["plan", str(path), "--profile", str(measured)]) == 2
    assert "is a profile of model o/large@main, but the config has o/small@main" in capsys.readouterr().err
    shapes = Planner(path, [], profile(), BIG, {}).space.dimensions["learner"]
    assert {(each.num_stages, each.num_chunks) for each in shapes} == {(1, 1), (2, 1)}


def refused(capsys, *arguments):
    assert main(["plan", str(DEMO), *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def test_invalid_input_is_one_sentence_and_exit_status_2(tmp_path, capsys):
    path, other = tmp_path / "profile.json", tmp_path / "other.json"
    profile().write(path)
    profile(model="qwen2-0123").write(other)
    (tmp_path / "hosts.txt").write_text("# no host\n")
    assert "none.json is not a profile (No such file" in refused(capsys, "--profile", tmp_path / "none.json")
    assert "is a profile of model qwen2-0123" in refused(capsys, "--profile", other)
    assert "has no hosts" in refused(capsys, "--profile", path, "--hosts", tmp_path / "hosts.txt")
    assert "no price for learner: pass --price" in refused(capsys, "--profile", path, "--price", "actors=2")
    assert "--price x: unknown pool" in refused(
        capsys, "--profile", path, *(f"--price={each}" for each in ("actors=2", "learner=1", "x=1"))
    )
    assert "expected POOL=PER_HOUR" in refused(capsys, "--profile", path, "--price", "actors:2")
    (tmp_path / "hosts.txt").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in refused(capsys, "--profile", path, "--hosts", tmp_path / "hosts.txt")
    assert main(["train", str(DEMO), "--plan", str(tmp_path / "hosts.txt"), "--dry-run"]) == 2
    assert "is not a plan ('utf-8' codec" in capsys.readouterr().err
    other.write_text("{}")
    assert "other.json is not a profile (" in refused(capsys, "--profile", other)
    for key, there, here in (
        ("learner.precision", "'float32'", "bfloat16"),
        ("learner.num_epochs", "1", "2"),
        ("learner.num_minibatches", "1", "4"),
        ("learner.activation_checkpointing", "False", "true"),
        ("actors.max_new_tokens", "8", "16"),
    ):
        error = refused(capsys, "--profile", path, f"--{key}", here)
        assert f"measured with {key} = {there}, but the config has " in error
    for key, there, here in (
        ("dtype", "'float32'", "bfloat16"),
        ("kv_cache_gib", "None", "1.5"),
        ("engine_args", "{}", "{enforce_eager = true}"),
    ):
        error = refused(capsys, "--profile", path, f"--actors.{key}", here)
        assert f"no matching engine for pool 'actors': {key} = {there} in the profile, but " in error
    assert "buffer.source = '" in refused(capsys, "--profile", path, "--buffer.source", "a", "--actors.num_actors", "0")
    assert "num_actors = 0 generates no samples" in refused(capsys, "--profile", path, "--actors.num_actors", "0")


def with_ppo(*overrides, **keys):
    """Return the config of the demo with PPO."""
    return load_config(DEMO, overrides).model_copy(update={"algorithm": OffPolicyPPOConfig(**keys)})


def test_a_profile_without_a_critic_does_not_apply_to_a_config_with_one():
    found = profile(settings=settings_of(with_ppo()))
    world_of(with_ppo(), found)
    with pytest.raises(ConfigError, match="measured with the algorithm's critic = None, but the config has 'head'"):
        world_of(with_ppo(baseline="value_head"), found)


def run_of(tmp_path, name, *overrides):
    """Return a run with made-up measurements instead of files."""
    config = load_config(DEMO, overrides)
    moments = LeastSquares(4)
    for b in range(1, 101):
        moments.add((1.0, b, 50.0 * b * (b % 3), b % 7), 0.01 + 1e-4 * b + 1e-6 * b * (b % 3) + 1e-5 * (b % 7))
    engines = SimpleNamespace(moments=moments.as_list(), kv_tokens=1000, settled_s=0.1)
    samples = {"prompt_tokens": 6.0, "completions": [3, 4], "prompts": [0, 1], "squares": {}, "repeated": {}}
    run = profiling._Run.__new__(profiling._Run)
    run.folder, run.config, run.model = RunFolder(tmp_path / name), config, "llama-1"
    run.status = SimpleNamespace(pools=[SimpleNamespace(name="actors", engines=engines)])
    run.trained = SimpleNamespace(**samples, finished_s={})
    run.steps = [
        {"step": n, "batch/tokens": 1000 + 500 * (n % 2), "batch/micro_batches": 2 + n % 3, "time/step": 1.0 + n / 100,
         "finished_s": 1.1 * n, "batch/trajectories": 64}
        for n in range(20)
    ]  # fmt: skip
    run.weights_s = lambda: ([], [])
    return run


def test_a_profile_records_its_settings_and_refuses_runs_that_differ(tmp_path):
    first = run_of(tmp_path, "a")
    found = profiling._profile_of([first, run_of(tmp_path, "b", "--learner.token_budget", "3072")])
    world_of(load_config(DEMO), msgspec.json.decode(msgspec.json.encode(found), type=Profile))
    with pytest.raises(ConfigError, match=r"measured with learner\.num_epochs = 1, but the config has 2"):
        world_of(load_config(DEMO, ["--learner.num_epochs", "2"]), found)
    for key, here, there in (
        ("algorithm.type", "'oapl'", "'trajectory_balance'"),
        ("learner.precision", "'bfloat16'", "'float32'"),
        ("actors.dtype", "'float16'", "'float32'"),
    ):
        overrides = ["--algorithm", "{type = 'oapl'}"] if key == "algorithm.type" else [f"--{key}", here]
        words = "dtype of pool 'actors'" if key == "actors.dtype" else key
        error = rf"{words} = {here} in \S+/b, but {there} in \S+/a: profile each run separately"
        with pytest.raises(ConfigError, match=error):
            profiling._profile_of([first, run_of(tmp_path, "b", *overrides)])


def test_a_profile_is_refused_if_its_runs_do_not_separate_the_costs(tmp_path):
    alike, words = run_of(tmp_path, "a"), "a: loads are too alike to predict the time of "
    for row in alike.steps:
        row["batch/micro_batches"] = 2
    with pytest.raises(ConfigError, match=rf"{words}a learner step with twice as many micro-batches\. Run `leeway"):
        profiling._profile_of([alike])
    profiling._profile_of([alike, run_of(tmp_path, "b")])
    alike, moments = run_of(tmp_path, "a"), LeastSquares(4)
    for n in range(100):
        moments.add((1.0, 8.0, 800.0 + n % 3, 1.0), 0.01)
    alike.status.pools[0].engines.moments = moments.as_list()
    with pytest.raises(ConfigError, match=rf"{words}an engine step of pool 'actors' with twice the running samples"):
        profiling._profile_of([alike])


def test_the_third_run_of_a_profile_has_another_number_of_micro_batches(tmp_path):
    run = run_of(tmp_path, "a")
    for micro_batches, budget in ((8, 3072), (2, 1250 // (4 * 2))):
        for row in run.steps:
            row["batch/micro_batches"] = micro_batches
        words = profiling._variant(3, [run])
        assert int(words[words.index("--learner.token_budget") + 1]) == max(budget, run.config.actors.max_model_tokens)


def test_the_error_of_a_profile_widens_intervals_and_keeps_the_config(tmp_path, capsys):
    fast, slow = run_of(tmp_path, "a"), run_of(tmp_path, "b")
    for row in slow.steps:
        row["finished_s"] *= 4
    first, both = profiling._profile_of([fast]), profiling._profile_of([fast, slow])
    assert first.error > 1.0, "the made-up run is slower than its costs"
    assert both.error == pytest.approx(4.0 * (1.0 + first.error) - 1.0, rel=0.05)
    sure, unsure = made(), made(measured=profile(error=5.0))
    assert sure.changes(sure.find(ignore)[0].keys)
    best = unsure.find(ignore)[0]
    assert not unsure.changes(best.keys)
    assert best.prediction.high > 5.9 * best.prediction.samples_per_s
    assert best.prediction.low == 0.0
    plans.show([best], 5.0, unsure.changes)
    assert "best: no changes; no plan is faster by more than 500%" in capsys.readouterr().out


def test_a_config_that_exceeds_the_memory_has_no_plan(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"total": 2**30})())
    with pytest.raises(ConfigError, match=r"no plan fits: .* with 1\.0 GiB of memory"):
        made().find(ignore)


def test_a_config_that_exceeds_the_hosts_has_no_plan():
    with pytest.raises(ConfigError, match="exceed the resources of h1"):
        made(*pool("a", count=2), hosts=[Host("h1", frozenset({"other"}), 4.0, 0.0)]).find(ignore)


def test_a_profile_round_trips_and_another_machine_is_noted(tmp_path, capsys, monkeypatch):
    path = tmp_path / "profile.json"
    measured = profile()
    measured.write(path)
    assert Profile.read(path) == measured
    assert "engines of 'actors': step = 4.00 ms" in measured.describe()
    msgspec.structs.replace(measured, format=0).write(path)
    with pytest.raises(ConfigError, match="has format 0"):
        Profile.read(path)
    elsewhere = msgspec.structs.replace(measured.machine, processor="another", cores=64)
    msgspec.structs.replace(measured, machine=elsewhere).write(path)
    arguments = ["plan", str(DEMO), "--profile", str(path), "--out", str(tmp_path / "plan.toml")]
    assert main([*arguments, "--actors.num_actors", "2", "--learner.num_stages", "2"]) == 0
    output = capsys.readouterr().out
    assert "measured on another machine (another, 64 cores, no GPU)" in output
    assert "unchanged" in output
    assert tomllib.loads((tmp_path / "plan.toml").read_text())["plan"]["samples_per_s"] > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "is not a plan"),
        ("[actors]\nnum_actors = 1\n", r"is not a plan \(the file has no section \[plan\]\): pass a file written by"),
        ("plan = 3\n", "is not a plan"),
        ("[plan]\nx = 1\n", "is not a plan"),
        ('{"a": 1}', "is not a plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, message):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.toml")


def test_the_cost_of_scoring_a_token_is_stored_for_a_single_stage():
    rows = [{"batch/tokens": 1000, "time/reference": 0.2}, {"batch/tokens": 2000, "time/reference": 0.4}]

    def run(rows):
        return SimpleNamespace(config=load_config(DEMO, ["--learner.num_stages", "2"]), steps=rows)

    assert _score_token_s([run(rows)]) == pytest.approx(4e-4), "two stages share each token"
    assert _score_token_s([run([{"batch/tokens": 1000, "time/reference": None}])]) == 0.0


def test_scores_are_shared_by_the_stages_and_cost_nothing_without_a_reference():
    found = profile()
    assert world_of(load_config(DEMO), found).score_token_s == 0.0
    learner = msgspec.structs.replace(found.learner, score_token_s=4e-4)
    found = msgspec.structs.replace(found, learner=learner)
    assert world_of(load_config(DEMO, ["--learner.num_stages", "2"]), found).score_token_s == 2e-4


class SlowRun:
    """A fake run whose clock advances during waits; a step takes `step_s` seconds."""

    def __init__(self, step_s):
        self.now_s, self.step_s = 0.0, step_s

    def poll(self):
        return None

    def wait(self, timeout_s):
        self.now_s += timeout_s
        raise subprocess.TimeoutExpired("leeway", timeout_s)

    def status(self, path):
        return SimpleNamespace(step=int(self.now_s / self.step_s), phase="training")


@pytest.mark.parametrize(("step_s", "has_enough"), [(0.1, True), (20.0, True), (90.0, True), (1000.0, False)])
def test_a_profiled_run_lasts_until_it_has_enough_steps_within_a_bound(tmp_path, monkeypatch, step_s, has_enough):
    run = SlowRun(step_s)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(monotonic=lambda: run.now_s))
    monkeypatch.setattr(profiling, "read_status", run.status)
    profiling._follow(run, RunFolder(tmp_path), lambda text: None)
    assert (run.status(tmp_path).step >= profiling.WARM_UP + profiling.LEAST_STEPS) == has_enough
    assert run.now_s <= step_s + profiling.AT_MOST_S + 1


def test_a_first_run_with_too_few_steps_is_refused_before_the_second(monkeypatch):
    begun = []
    monkeypatch.setattr(profiling, "_run", lambda *arguments: begun.append(arguments))

    def too_short(folder):
        raise ConfigError("3 steps")

    monkeypatch.setattr(profiling, "_Run", too_short)
    with pytest.raises(ConfigError, match="3 steps"):
        profiling.take(DEMO, [], lambda text: None)
    assert len(begun) == 1


def test_a_run_on_recorded_samples_cannot_be_profiled():
    with pytest.raises(ConfigError, match=r"buffer\.source = '.*runs/a' generates no samples"):
        profiling.take(DEMO, ["--buffer.source", "runs/a"], lambda text: None)


def test_profiled_runs_have_their_own_weight_folders(tmp_path, monkeypatch):
    used = []

    def run(config, arguments, folder, log, progress):
        used.append(load_config(config, arguments).weight_sync.folder)
        if used[-1] is not None:
            (tmp_path / used[-1] / "0.1").mkdir(parents=True)

    monkeypatch.setattr(profiling, "_run", run)
    made_up = run_of(tmp_path, "a")
    monkeypatch.setattr(profiling, "_Run", lambda folder: made_up)
    monkeypatch.setattr(profiling, "_profile_of", tuple)
    assert profiling.take(DEMO, ["--weight_sync.folder", str(tmp_path / "w")], lambda text: None)
    assert len({*used, str(tmp_path / "w")}) == 4
    assert list((tmp_path / "w").iterdir()) == []
    profiling.take(DEMO, [], lambda text: None)
    assert used[3:] == [None] * 3


def test_a_forward_pass_is_saved_only_without_a_pass_over_the_batch():
    shaped, twice = {"kl_beta": 0.1, "kl_in": "reward"}, ["--learner.num_epochs", "2"]
    saving = [load_config(DEMO), load_config(DEMO, twice), with_ppo(**shaped)]
    others = [with_ppo(*twice, **shaped), with_ppo(baseline="value_head")]
    assert [shape_of(each).saves_pass for each in (*saving, *others)] == [True] * 3 + [False] * 2
    assert shape_of(load_config(DEMO, ["--learner.num_minibatches", "4"])).num_minibatches == 4
    rows = [{"step": 1, "batch/tokens": 100, "batch/micro_batches": 2, "time/step": 1.0, **more}
            for more in ({}, {"time/forward": 0.2})]  # fmt: skip
    found = []
    trained = SimpleNamespace(squares={}, repeated={})
    law = SimpleNamespace(add=lambda terms, seconds: found.append(terms))
    profiling._Run.add_steps(SimpleNamespace(config=load_config(DEMO), steps=rows, trained=trained), law)
    assert found[1][2] == pytest.approx(4 / 3 * found[0][2])


@pytest.mark.parametrize("prompt_tokens", [20, 200, 1000])
def test_savings_on_shared_prompts_affect_the_steps_but_not_the_fitted_costs(monkeypatch, prompt_tokens):
    random, price, group_size = np.random.default_rng(3), LearnerTime(0.05, 0.004, 2e-5, 3e-8), 8
    found = LeastSquares(4)
    for budget, num_groups in ((12_288, 8), (24_576, 4)):
        config = load_config(DEMO, ["--learner.token_budget", str(budget), "--learner.num_stages", "1"])
        shape, steps, groups = shape_of(config), [], []
        for step in range(1, 21):
            own = random.integers(50, 400, (num_groups, group_size))
            lengths = (prompt_tokens + own).reshape(-1).tolist()
            for each in own.tolist():
                facts = {"lengths": [prompt_tokens + n for n in each], "completion_lengths": each, "prompt_id": step}
                stored = SimpleNamespace(**facts, trained_at=[SimpleNamespace(step=step)])
                groups.append(SimpleNamespace(row=stored, samples=[]))
            prompts = np.arange(len(lengths)) // group_size
            sequences = [
                np.r_[np.full(prompt_tokens, i), np.zeros(n - prompt_tokens, np.int64)]
                for i, n in zip(prompts, lengths, strict=True)
            ]
            rule = shape.rule(CostModel(price.token, price.token_squared))
            packed = pack(sequences, [prompt_tokens] * len(lengths), rule, prompts)
            row = {"step": step, "time/step": price.seconds(lengths, prompt_tokens, group_size, shape)}
            row |= {"batch/tokens": packed.num_tokens, "batch/shared_frac": packed.shared_frac}
            steps.append(row | {"batch/micro_batches": packed.num_micro_batches})
        inspection = SimpleNamespace(groups=lambda *_, listed=groups, **__: listed)
        monkeypatch.setattr(profiling.Inspection, "open", lambda _, opened=inspection: contextlib.nullcontext(opened))
        run = SimpleNamespace(config=config, steps=steps, trained=profiling._trained(SimpleNamespace(root="run")))
        profiling._Run.add_steps(run, found)
    again = LearnerTime(*found.fit().coefficients)
    assert again.token_squared == pytest.approx(price.token_squared, rel=0.01)
    assert again.seconds(lengths, prompt_tokens, group_size, shape) == pytest.approx(row["time/step"], rel=0.01)
