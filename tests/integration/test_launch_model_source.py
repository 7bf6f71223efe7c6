"""A model of the Hub: how it is fetched, and where it is looked for later."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.config import ModelConfig
from launch.errors import ConfigError
from launch.model_folder import fetch_model


def test_a_model_that_the_hub_does_not_give_is_a_sentence_with_the_reason(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"'no/such-model' is not a folder, and cannot be fetched .*Error: .*; give"):
        fetch_model(ModelConfig(path="no/such-model"))


@pytest.mark.parametrize(("path", "revision"), [("org/model", "main"), ("org/model@v1.2", "v1.2")])
def test_a_model_of_the_hub_is_that_of_main_or_of_the_revision_that_is_named(monkeypatch, path, revision):
    asked = []

    def run(command, **_):
        asked.extend(command[3:])
        return SimpleNamespace(returncode=0, stdout="/cache/model\n")

    monkeypatch.setattr("launch.model_folder.subprocess.run", run)
    assert fetch_model(ModelConfig(path=path)) == Path("/cache/model")
    assert asked == ["org/model", revision, "hub"]


def test_a_run_that_was_here_takes_its_model_from_the_cache_without_asking_the_hub(monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0.0)
        monkeypatch.setenv("HF_ENDPOINT", "http://{}:{}".format(*hub.getsockname()))
        assert fetch_model(ModelConfig(path=f"org/model@{commit}"), was_here=True) == snapshot
        with pytest.raises(BlockingIOError):
            hub.accept()
