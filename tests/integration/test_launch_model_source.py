"""A model of the Hub: how it is fetched, and where it is looked for later."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.config import ModelConfig
from launch.errors import ConfigError
from launch.model_folder import fetch_model


def test_a_model_that_the_hub_does_not_give_is_a_sentence_with_the_reason(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"'no/such-model' is no folder, and cannot be fetched .*Error: .*; give"):
        fetch_model(ModelConfig(path="no/such-model"))


@pytest.mark.parametrize(("path", "revision"), [("org/model", "main"), ("org/model@v1.2", "v1.2")])
def test_a_model_of_the_hub_is_that_of_main_or_of_the_revision_that_is_named(monkeypatch, path, revision):
    asked = []

    def run(command, **_):
        asked.extend(command[-2:])
        return SimpleNamespace(returncode=0, stdout="/cache/model\n")

    monkeypatch.setattr("launch.model_folder.subprocess.run", run)
    assert fetch_model(ModelConfig(path=path)) == Path("/cache/model")
    assert asked == ["org/model", revision]
