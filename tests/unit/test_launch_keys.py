"""When the sockets of a run are locked, where its services listen, and that its keys are written nowhere."""

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from launch.checks import check
from launch.config import load_config, to_toml
from launch.errors import ConfigError
from launch.host import private_files
from launch.processes.services import interface
from launch.run_folder import RunIdentity

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
CLUSTER = ("--launch.ray_address", "10.0.0.1:6379")


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """`plan(*overrides)`: of the demo; a cluster answers wherever one is asked for."""
    monkeypatch.setattr("launch.checks.answers", lambda address: True)
    return lambda *overrides: check(load_config(DEMO, overrides), tmp_path / "run")


def test_on_one_machine_services_have_unix_sockets_and_need_no_keys(plan):
    made = plan("--weight_sync.transport", "network")
    assert made.keys is None
    assert made.client_keys is made.service_keys is None
    assert interface(made.config.buffer.host, None, is_cluster=made.is_cluster) is None


@pytest.mark.parametrize(
    "overrides",
    [
        CLUSTER,
        ("--buffer.host", "0.0.0.0"),
        ("--buffer.host", "127.0.0.1"),
        ("--buffer.port", "4321"),
        ("--weight_sync.port", "4321", "--weight_sync.transport", "network"),
        ("--weight_sync.host", "0.0.0.0", "--weight_sync.transport", "network"),
        ("--launch.encryption", "on"),
    ],
)
def test_a_port_is_locked_whoever_reaches_it_and_a_unix_socket_where_it_is_wished(plan, overrides):
    made = plan(*overrides)
    assert made.service_keys.client.reveal() == made.client_keys.public.reveal()


def test_a_weight_service_that_does_not_run_opens_nothing(plan):
    assert plan("--weight_sync.host", "10.0.0.1", "--weight_sync.transport", "folder").keys is None


@pytest.mark.parametrize("key", ["buffer.host", "weight_sync.host"])
def test_an_open_socket_without_a_lock_is_refused_with_its_key(plan, key):
    with pytest.raises(ConfigError, match=rf"launch.encryption = 'off', but {key} = '0.0.0.0' can be reached"):
        plan("--launch.encryption", "off", f"--{key}", "0.0.0.0", "--weight_sync.transport", "network")


@pytest.mark.parametrize(
    ("hosts", "key"),
    [((), "buffer.host"), (("--buffer.host", "127.0.0.1", "--weight_sync.transport", "network"), "weight_sync.host")],
)
def test_a_service_of_a_cluster_is_not_left_open_where_its_host_is_unset(plan, hosts, key):
    with pytest.raises(ConfigError, match=rf"'off', but {key} is unset, which on a cluster .*: use 'auto'$"):
        plan(*CLUSTER, "--launch.encryption", "off", *hosts)


def test_on_a_cluster_a_service_asks_for_its_address_and_refuses_to_open_it_unlocked(plan, monkeypatch):
    made = plan(*CLUSTER)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    with pytest.raises(RuntimeError, match=r"^10.0.0.7 can be reached from other machines, and launch.encryption"):
        interface(None, None, is_cluster=made.is_cluster)
    assert interface(None, made.service_keys, is_cluster=True) == "10.0.0.7"
    assert interface("127.0.0.1", None, is_cluster=True) == "127.0.0.1"


def test_keys_reach_the_processes_of_a_run_and_no_file_or_text_of_it(plan):
    made = plan("--launch.encryption", "on")
    context = made.context(Path("model"), made.model)
    assert context.keys is made.client_keys
    fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
    told = [made, context, fields, made.config, made.config.model_dump(mode="json"), to_toml(made.config)]
    for text in map(str, told):
        for key in (made.keys.clients.secret, made.keys.clients.server, made.keys.services.secret):
            assert key.reveal().decode() not in text


def test_every_start_of_a_run_makes_new_keys(plan, tmp_path):
    config = plan("--launch.encryption", "on").config
    identity = RunIdentity(run_id="r", task_fingerprint="", started_s=())
    first, again = (check(config, tmp_path / "run", resumed=identity).keys for _ in range(2))
    assert first.clients.secret.reveal() != again.clients.secret.reveal()


def test_files_are_private_for_the_length_of_a_block(tmp_path):
    before = os.umask(0o022)
    try:
        with private_files():
            (tmp_path / "private").mkdir()
            (tmp_path / "private" / "file").touch()
        (tmp_path / "open").touch()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"private": 0o700, "file": 0o600, "open": 0o644}
