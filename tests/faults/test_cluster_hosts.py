"""`launch/cluster.sh` over three hosts: what it starts, refuses and leaves behind, and how a lost host rejoins."""

import re
import subprocess

import pytest
from tests.faults import hosts as machines
from tests.faults.cluster import POOLS, PORT
from tests.full import pick

pytestmark = [pytest.mark.timeout(600)]
HEAD, EXACT, FAST = range(3)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := machines.missing():
        pytest.skip(reason)
    with machines.Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def raylets(hosts) -> list[list[str]]:
    """Return the pids of the raylets, host by host."""
    return [[line.split()[0] for line in host.inside("pgrep", "-x", "raylet").splitlines()] for host in hosts]


def wait_until_connected(hosts) -> None:
    """Wait until the head is connected to the raylet of host FAST; before the connection, losses are reported late."""
    raylet = rf"{re.escape(hosts[FAST].address)}\]?:{PORT + 12}\b"
    established = ("ss", "-Htn", "state", "established")
    machines.wait_until("the head to connect", lambda: re.search(raylet, hosts[HEAD].inside(*established)), 30)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the only line of the error of a failed call."""
    assert done.returncode == 1, (done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    return line


def assert_nothing_is_left(hosts) -> None:
    for host in hosts:
        assert (host.processes(), host.listening(), host.files()) == ([], [], [])


@pytest.mark.full  # behaviour on one host is tested in tests/integration
def test_up_starts_ray_on_every_host_is_idempotent_and_down_removes_everything(cluster, hosts):
    output = cluster.up()
    for host, pool in zip(hosts, POOLS, strict=True):
        assert f"{host.address}: up, in {pool}" in output
    before = raylets(hosts)
    assert [len(each) for each in before] == [1, 1, 1]
    # Ray takes some seconds to report a host that has just joined
    machines.wait_until("all hosts to be shown", lambda: cluster.call("status").stdout.count("node_") == 3, 30)
    shown = cluster.call("status")
    assert shown.returncode == 0
    for pool in POOLS:
        assert f"/1000.0 pool_{pool}" in shown.stdout
    assert cluster.up().count("up already") == 3
    assert raylets(hosts) == before
    check_token(cluster, hosts)
    check_ports(hosts)
    done = cluster.call("down")
    assert (done.returncode, done.stderr) == (0, "")
    assert_nothing_is_left(hosts)
    assert sorted(path.name for path in cluster.home.rglob("*")) == [".cache", ".ray", "auth_token"]
    assert cluster.call("down").returncode == 0, "down succeeds if nothing is up"


def check_token(cluster, hosts) -> None:
    """Check that the token is required, is on no command line, and is in a file of mode 0600."""
    token = (cluster.home / ".ray" / "auth_token").read_text()
    for host in hosts:
        assert token not in host.inside("ps", "-eo", "args")
        assert host.inside("find", "/tmp/leeway-0", "-name", "auth_token", "-printf", "%m").strip() == "600"
    python = str(machines.CHECKOUT / ".venv" / "bin" / "python")
    command = [python, "-m", "leeway.launch.cluster_nodes", f"{hosts[HEAD].address}:{PORT}"]
    environment = {**cluster.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    refused = subprocess.run(
        command, cwd=machines.CHECKOUT, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Unauthenticated" in refused.stderr


def check_ports(hosts) -> None:
    """Check that only the ports that docs/cluster.md lists are open."""
    documented = {PORT, *range(PORT + 12, PORT + 18), *range(20002, 21000)}
    for host in hosts:
        ports = {int(each.rsplit(":", 1)[1]) for each in host.listening() if not each.startswith("127.")}
        assert ports
        assert ports <= documented


@pytest.mark.fault("cluster", "a host loses power and boots again, then `up`", root=True, full=True)
def test_up_rejoins_a_host_that_lost_power(cluster, hosts):
    cluster.up()
    before = raylets(hosts)
    hosts[FAST].power_off()
    hosts[FAST].power_on()
    output = cluster.up()
    assert f"{hosts[FAST].address}: up, in fast" in output
    after = raylets(hosts)
    assert after[:FAST] == before[:FAST], "raylets of other hosts were restarted"
    assert len(after[FAST]) == 1
    assert cluster.states() == {host.address: "up" for host in hosts}


@pytest.mark.fault(
    "cluster", "a host is removed from the host file, another gets one more pool, then `up`", root=True, full=True
)
def test_up_stops_a_removed_host_and_restarts_one_whose_pools_changed(cluster, hosts):
    cluster.up()
    before = raylets(hosts)
    cluster.write_hosts(f"{hosts[HEAD].address} learner", f"{hosts[EXACT].address} exact,more")
    output = cluster.up()
    assert f"{hosts[FAST].address}: down" in output
    assert hosts[FAST].processes() == []
    assert raylets(hosts[:1]) == before[:1]
    machines.wait_until("the new pool to be shown", lambda: "pool_more" in cluster.call("status").stdout, 30)


@pytest.mark.fault("cluster", "a host is cut off, then `down`", root=True, full=True)
def test_down_stops_the_other_hosts_if_one_is_unreachable(cluster, hosts):
    cluster.up()
    hosts[EXACT].cut()
    done = cluster.call("down")
    assert done.returncode == 1
    assert f"{hosts[EXACT].address} cannot be reached: ssh: connect to host" in done.stderr
    for host in (hosts[HEAD], hosts[FAST]):
        assert host.processes() == []
    hosts[EXACT].heal()
    assert cluster.call("--hosts", str(cluster.host_file), "down").returncode == 0
    assert_nothing_is_left(hosts)


def test_up_fails_before_starting_anything_if_a_host_is_unreachable(cluster, hosts):
    hosts[FAST].cut()
    address = hosts[FAST].address
    assert one_line(cluster.call("up", str(cluster.host_file))) == (
        f"cluster.sh: {address} cannot be reached: ssh: connect to host {address} port 22: No route to host; "
        f"try '{hosts.ssh} {address} true'"
    )
    assert [host.processes() for host in hosts] == [[], [], []]


def test_up_names_a_port_in_use_and_the_process_that_uses_it(cluster, hosts):
    address = hosts[HEAD].address
    other = subprocess.Popen([*hosts[HEAD].tied_prefix(), "python3", "-m", "http.server", str(PORT), "--bind", address])
    try:
        machines.wait_until("it to listen", hosts[HEAD].listening, 60, every_s=0.1)
        line = one_line(cluster.call("up", str(cluster.host_file)))
        taken = rf"port {PORT} is used by python3[.\d]*, process \d+; end that process, or set LEEWAY_RAY_PORT"
        assert re.fullmatch(rf"cluster\.sh: {address}: {taken}", line)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_up_reports_another_ray_and_leaves_it_running(cluster, hosts):
    name = "open('/proc/self/comm', 'w').write('raylet'); import time; time.sleep(600)"
    other = subprocess.Popen([*hosts[EXACT].tied_prefix(), "python3", "-c", name, "--session_dir=/tmp/ray/other"])
    try:
        machines.wait_until("it to be called raylet", lambda: "raylet" in names_on(hosts[EXACT]), 60, every_s=0.1)
        line = one_line(cluster.call("up", str(cluster.host_file)))
        assert re.fullmatch(
            rf"cluster\.sh: {hosts[EXACT].address}: another Ray is running \(process \d+, session /tmp/ray/other\); "
            "end it, or set LEEWAY_SHARE_HOSTS=1",
            line,
        )
        cluster.call("down")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def names_on(host) -> list[str]:
    return host.inside("ps", "-eo", "comm=").split()


def test_up_names_hosts_without_leeway(cluster, hosts, tmp_path):
    done = cluster.call("up", str(cluster.host_file), LEEWAY_DIR="/tmp/nowhere")
    assert done.returncode == 1
    advice = "has no Leeway in /tmp/nowhere; put the same checkout there, or set LEEWAY_DIR"
    assert done.stderr.splitlines() == [f"cluster.sh: {host.address} {advice}" for host in hosts]


@pytest.mark.fault("cluster", "a host loses power", root=True, full=True)
def test_a_dead_host_is_detected_within_100_s(cluster, hosts, show):
    cluster.up()
    wait_until_connected(hosts)
    hosts[FAST].power_off()
    took_s = cluster.lost_after_s(hosts[FAST].address, 100)
    hosts[FAST].power_on()
    cluster.up()
    assert took_s > 51, "too soon: a cut of 30 s would lose the host, as the next TCP retry comes after 51 s"
    show(f"reported as lost after {took_s:.0f} s, back after `up`")


@pytest.mark.fault("cluster", "a host is cut off for 30 s, nothing runs", root=True, full=True)
def test_a_network_cut_of_30_s_loses_no_host(cluster, hosts, show):
    cluster.up()
    wait_until_connected(hosts)
    before = raylets(hosts)
    for _ in range(pick(1, 3)):
        hosts[FAST].cut()
        with pytest.raises(TimeoutError):
            cluster.lost_after_s(hosts[FAST].address, 30)
        assert hosts[FAST].num_dropped() > 0
        hosts[FAST].heal()
        with pytest.raises(TimeoutError):
            cluster.lost_after_s(hosts[FAST].address, 60)
    assert raylets(hosts) == before
    show(f"{pick(1, 3)} cuts: no host lost, the same processes after each")
