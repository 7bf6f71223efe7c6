"""A dead service is restarted on the same folder and with the same keys, up to a limit.

The tests of each service check that the service reads its port from a file in its folder.
"""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from leeway.launch.checks import check
from leeway.launch.config import load_config
from leeway.launch.processes import services as services_module
from leeway.launch.processes.role_process import MAX_RESTARTS, RunFailed
from leeway.launch.processes.services import BufferHost, WeightsHost

ROOT = Path(__file__).parents[2]


class Service:
    """Fake service role that binds its port, or a port that no earlier process had."""

    def __init__(self, role, log, service, given, host, keys, is_cluster, *, variables, **_: object) -> None:
        self.service, self.folder, self.run_id, self.keys = service, given[-1], given[-2], keys
        self.variables = variables
        self.has_ended = self.is_killed = False
        self.cannot_bind = False
        self.port = 0
        self.bind = SimpleNamespace(remote=lambda: self if self.cannot_bind else f"tcp://127.0.0.1:{self.port}")
        self.serve = SimpleNamespace(remote=lambda: self)
        self.stop = SimpleNamespace(remote=lambda: "stopped")


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """`weights(*overrides)` returns the weight service of a run and all of its processes."""
    made: list[Service] = []
    cannot_bind: set[int] = set()

    def spawn(*arguments, **options) -> Service:
        made.append(Service(*arguments, **options))
        made[-1].cannot_bind = len(made) - 1 in cannot_bind
        made[-1].port = made[-1].port or 4320 + len(made)
        return made[-1]

    def wait(calls, num_returns=1, timeout=None):
        ready = [call for call in calls if not isinstance(call, Service) or call.has_ended or call.cannot_bind]
        return ready, [call for call in calls if call not in ready]

    def get(call, timeout=None):
        if isinstance(call, Service):
            raise RayActorError
        return call

    monkeypatch.setattr(services_module, "spawn", spawn)
    monkeypatch.setattr(services_module, "here", lambda: None)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda service, no_restart: setattr(service, "is_killed", True))

    def make(*overrides: str) -> SimpleNamespace:
        plan = check(load_config(ROOT / "examples" / "demo.toml", overrides), tmp_path / "run")
        events: list[tuple[str, str]] = []
        service = WeightsHost(plan, lambda kind, text: events.append((kind, text)))
        return SimpleNamespace(service=service, made=made, events=events, plan=plan, cannot_bind=cannot_bind)

    return make


def test_the_weight_service_serves_the_runs_folder_and_its_address_is_known(weights):
    run = weights("--launch.env.NCCL_DEBUG", "INFO")
    assert run.service.address == ""
    run.service.start(deadline=1e9)
    run.service.watch()
    assert run.service.address == "tcp://127.0.0.1:4321"
    assert (run.made[0].folder, run.made[0].run_id) == (run.plan.weights_folder, run.plan.run_id)
    assert run.made[0].variables == {"NCCL_DEBUG": "INFO"}
    run.service.kill()
    assert [service.is_killed for service in run.made] == [True]


def test_a_dead_service_is_restarted_on_its_folder_with_its_keys(weights):
    run = weights("--launch.host", "127.0.0.1")
    run.service.start(deadline=1e9)
    run.made[0].has_ended = True
    run.service.watch()
    # a restarted service may report a new address
    assert (len(run.made), run.service.address) == (2, "tcp://127.0.0.1:4322")
    assert [one.folder for one in run.made] == [run.plan.weights_folder] * 2
    assert [one.keys for one in run.made] == [run.plan.service_keys] * 2
    assert run.plan.service_keys is not None
    kind, text = run.events[-1]
    assert kind == "restart"
    assert text.startswith("the weight service exited (")


@pytest.mark.parametrize("which", ["weights", "buffer"])
def test_a_new_launch_takes_any_port_because_the_old_one_may_be_in_use(weights, monkeypatch, which):
    run = weights("--launch.host", "127.0.0.1")
    service, port = run.service, run.plan.weights_folder / "PORT"
    if which == "buffer":
        monkeypatch.setattr(services_module, "BufferClient", lambda *_, **__: SimpleNamespace(connect=lambda _: None))
        service, port = BufferHost(run.plan, run.plan.facts(64), print), run.plan.folder.buffer / "port"
    port.parent.mkdir(parents=True)
    port.write_text("4711")
    service.start(deadline=1e9)
    assert port.read_text() == "0"  # the file is kept, because its existence means that a store was served
    port.write_text("4321")
    run.made[0].has_ended = True
    service.watch()
    assert port.read_text() == "4321"  # clients of this launch use this port


def test_a_service_that_dies_repeatedly_ends_the_run_and_names_its_log(weights):
    run = weights()
    run.service.start(deadline=1e9)
    for _ in range(MAX_RESTARTS):
        run.made[-1].has_ended = True
        run.service.watch()
    run.made[-1].has_ended = True
    with pytest.raises(RunFailed, match=r"exited 4 times in a row, most recently: .*; see .*weights.0.log"):
        run.service.watch()


def test_deaths_that_are_hours_apart_never_end_the_run(weights, monkeypatch):
    run = weights()
    run.service.start(deadline=float("inf"))
    now_s = time.monotonic()
    for hours in range(1, 3 * MAX_RESTARTS):
        monkeypatch.setattr(time, "monotonic", lambda: now_s + hours * 3601.0)  # noqa: B023 -- read before a change
        run.made[-1].has_ended = True
        run.service.watch()
    assert run.service.processes[0].restarts.total == 3 * MAX_RESTARTS - 1


def test_a_failed_restart_of_a_service_counts_and_is_retried(weights):
    run = weights()
    run.service.start(float("inf"))
    run.cannot_bind.add(1)
    run.made[0].has_ended = True
    run.service.watch()
    assert [one.is_killed for one in run.made] == [False, True, False]
    assert "failed and is retried" in run.events[1][1]
    run.cannot_bind |= {3, 4}
    run.made[2].has_ended = True
    with pytest.raises(RunFailed, match="failed"):
        run.service.watch()
    assert len(run.made) == 1 + MAX_RESTARTS


def test_without_network_transport_there_is_no_weight_service(weights):
    run = weights("--weight_sync.transport", "folder")
    run.service.start(deadline=1e9)
    run.service.watch()
    assert (run.made, run.service.address) == ([], "")
    assert run.service.request_stop() == []


@pytest.mark.process
@pytest.mark.parametrize("module", ["leeway.weight_sync.service", "leeway.buffer.service"])
def test_a_service_imports_no_heavy_library(module):
    heavy = ("torch", "vllm", "transformers", "safetensors")
    program = f"import sys, leeway.launch.processes.services, {module}; print([n for n in {heavy} if n in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("host", "is_cluster", "bound"),
    [(None, True, "10.0.0.7"), ("10.1.0.7", True, "10.1.0.7"), (None, False, None), ("::1", False, "::1")],
)
def test_a_service_of_a_cluster_binds_the_address_of_its_host(monkeypatch, tmp_path, host, is_cluster, bound):
    made = []
    monkeypatch.setattr(services_module.Role, "__init__", lambda role, log: None)
    monkeypatch.setattr(services_module, "address_here", lambda: "10.0.0.7")
    monkeypatch.setattr(services_module, "resolve_name", lambda name: lambda *given, **how: made.append((given, how)))
    services_module.ServiceRole(tmp_path / "log", "a:Service", ("run", tmp_path), host, None, is_cluster)
    assert made == [(("run", tmp_path), {"host": bound, "keys": None})]
