"""A model of the Hugging Face Hub: its download, and the use of its cache by later launches."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from leeway.launch.config import ModelConfig
from leeway.launch.errors import ConfigError
from leeway.launch.model_folder import fetch_model


def test_a_failed_download_is_one_sentence_with_the_reason(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"'no/such-model' is not a folder and cannot be down.*Error: .*; give"):
        fetch_model(ModelConfig(path="no/such-model"))


@pytest.mark.parametrize(("path", "revision"), [("org/model", "main"), ("org/model@v1.2", "v1.2")])
def test_a_hub_model_is_fetched_at_main_or_at_the_named_revision(monkeypatch, path, revision):
    arguments = []

    def run(command, **_):
        arguments.extend(command[3:])
        return SimpleNamespace(returncode=0, stdout="/cache/model\n")

    monkeypatch.setattr("leeway.launch.model_folder.subprocess.run", run)
    assert fetch_model(ModelConfig(path=path)) == Path("/cache/model")
    assert arguments == ["org/model", revision, "hub"]


def test_a_resumed_run_takes_its_model_from_the_cache_without_the_hub(monkeypatch, tmp_path):
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
