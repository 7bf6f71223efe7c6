"""Keys of a run: which sockets require keys, and that no text of the run contains a key."""

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from leeway.launch.checks import check
from leeway.launch.config import load_config, to_toml
from leeway.launch.host import private_files
from leeway.launch.run_folder import RunIdentity

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
CLUSTER = ("--launch.ray_address", "10.0.0.1:6379")


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """`plan(*overrides)` plans the demo as if every cluster address were reachable."""
    monkeypatch.setattr("leeway.launch.checks.is_reachable", lambda address: True)
    return lambda *overrides: check(load_config(DEMO, overrides), tmp_path / "run")


def test_on_one_machine_services_have_unix_sockets_and_need_no_keys(plan):
    made = plan("--weight_sync.transport", "network")
    assert made.keys is None
    assert made.client_keys is made.service_keys is None


@pytest.mark.parametrize("overrides", [CLUSTER, ("--launch.host", "0.0.0.0"), ("--launch.host", "127.0.0.1")])
def test_every_port_requires_keys(plan, overrides):
    made = plan(*overrides)
    assert made.service_keys.client.reveal() == made.client_keys.public.reveal()


def test_keys_reach_the_processes_of_a_run_but_none_of_its_texts(plan):
    made = plan("--launch.host", "127.0.0.1")
    context = made.context(Path("model"), made.model)
    assert context.keys is made.client_keys
    fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
    objects = [made, context, fields, made.config, made.config.model_dump(mode="json"), to_toml(made.config)]
    for text in map(str, objects):
        for key in (made.keys.clients.secret, made.keys.clients.server, made.keys.services.secret):
            assert key.reveal().decode() not in text


def test_every_start_of_a_run_makes_new_keys(plan, tmp_path):
    config = plan("--launch.host", "127.0.0.1").config
    identity = RunIdentity(run_id="r", task_fingerprint="", started_s=())
    first, again = (check(config, tmp_path / "run", resumed=identity).keys for _ in range(2))
    assert first.clients.secret.reveal() != again.clients.secret.reveal()


def test_files_created_within_the_block_are_private(tmp_path):
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
