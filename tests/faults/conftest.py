"""Fixtures of the fault tests, and the table of their results."""

from pathlib import Path

import pytest
from tests.faults import results
from tests.faults.actor_process import ActorProcess
from tests.faults.cluster import Cluster
from tests.faults.disks import Mounts
from tests.faults.service_process import REQUEST_TIMEOUT_S, Load, Service
from tests.full import FULL

from leeway.buffer import client as client_module
from leeway.buffer.client import BufferClient

_RECORDER = pytest.StashKey[results.Recorder]()


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "fault(row, label, control=False, tools=(), root=False, full=False): a row of the fault matrix, or its control",
    )
    config.stash[_RECORDER] = results.Recorder()


def pytest_terminal_summary(terminalreporter):
    missing = results.missing_tools(results.PACKAGES)
    if FULL and missing:
        terminalreporter.write_line(f"Some faults were not injected: {missing}", yellow=True)


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("fault")
    if marker is None:
        return
    shown = item.config.stash[_RECORDER].shown[item.nodeid] = results.parse(marker)
    if reason := results.reason_to_skip(marker):
        shown.outcome = f"skipped: {reason}"
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    shown = item.config.stash[_RECORDER].shown.get(item.nodeid)
    if shown is not None and not report.skipped and (report.when == "call" or report.failed):
        shown.outcome = report.outcome
    return report


def pytest_sessionfinish(session):
    if results.PAGE:
        session.config.stash[_RECORDER].write(Path(results.PAGE))


@pytest.fixture
def show(request):
    """Return `show("50 kills, 0 lost")`, which adds a note to the table; notes are joined by commas."""
    return request.config.stash[_RECORDER].shown[request.node.nodeid].notes.append


@pytest.fixture
def start_service(tmp_path):
    """Return `start_service(folder, **arguments of Service)`; the services are closed after the test."""
    running = []

    def start(folder=None, **arguments) -> Service:
        running.append(Service(folder or tmp_path / "buffer", **arguments))
        return running[-1]

    yield start
    for each in running:
        each.close()


@pytest.fixture(autouse=True)
def quick_clients(monkeypatch):
    """Shorten the request timeout of buffer clients, so that lost requests are sent again sooner."""
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_S", REQUEST_TIMEOUT_S)


@pytest.fixture
def service(start_service):
    """Return a service with the default facts and config of `service_process`."""
    return start_service()


@pytest.fixture
def connect(service):
    """Return `connect(name, role)`, which makes a client of `service`; the clients are closed after the test."""
    clients = []

    def make(name, role="actor"):
        clients.append(BufferClient(service.address, run_id="killed", role=role, name=name))
        clients[-1].connect()
        return clients[-1]

    yield make
    for client in clients:
        client.close(1.0)


@pytest.fixture
def load_on():
    """Return `load_on(service, **arguments of Load)`, which starts a load; its clients are closed after the test."""
    loads = []

    def start(service, **arguments) -> Load:
        loads.append(Load(service.address, **{"facts": service.facts, **arguments}))
        return loads[-1].start()

    yield start
    for each in loads:
        each.close()


@pytest.fixture
def mounts(tmp_path):
    """Yield `Mounts` for small disks, which are unmounted after the processes on them have exited."""
    folder = tmp_path / "disks"
    folder.mkdir()
    made = Mounts(folder)
    yield made
    made.close()


@pytest.fixture
def start_actor(tmp_path):
    """Return `start_actor(service, name, **options)`; the actor processes are killed after the test."""
    started = []

    def start(service, name, **options) -> ActorProcess:
        started.append(ActorProcess(tmp_path, service, name, **options))
        return started[-1]

    yield start
    for actor in started:
        actor.kill()


@pytest.fixture
def cluster(hosts, tmp_path):
    """Yield a cluster on the module's `hosts`, on which nothing runs yet."""
    made = Cluster(hosts, tmp_path)
    yield made
    for host in hosts:
        host.heal()
    made.call("--hosts", str(made.host_file), "down")
