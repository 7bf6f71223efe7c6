"""The Prometheus endpoint, and the metrics that this endpoint serves."""

import re
import socket
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from leeway.launch.cli import main
from leeway.launch.config import TrackingConfig
from leeway.launch.errors import ConfigError
from leeway.launch.observe import sinks
from leeway.launch.observe.sinks import Exporter
from leeway.launch.observe.status import read_status
from tests.world.ports import free_port

RECORDED = Path(__file__).parents[1] / "data" / "status" / "training.json"
DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
ROW = {
    "step": 20,
    "skipped": False,
    "lag/token_mean": 2.5,
    "mismatch/lag0_abs": None,
    "eval/version": "0.20",
    "buffer/issued": 1,
    "pool/exact/lag_mean": 2.0,
    "pool/fast/lag_mean": 3.0,
    "pool/fast/tokens_per_s": 100.0,
    "reward/part/exact": 0.5,
    "reward/part/a/b": 0.25,
    "not/registered": 1.0,
}


@pytest.fixture
def port():
    return free_port()


def scraped(port: int) -> dict[str, dict[tuple, float]]:
    """Return the values of each metric by their label values, which are in the order of the label names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        family.name: {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_metrics_of_the_newest_step_pools_and_actors_are_served(port):
    snapshot = msgspec.structs.replace(read_status(RECORDED), row=ROW)
    with Exporter(TrackingConfig(prometheus_port=port)) as exporter:
        assert scraped(port) == {}
        exporter.show(snapshot)
        found = scraped(port)
    assert found["leeway_run"] == {("training", snapshot.run, snapshot.run_id): 1.0}
    assert (found["leeway_step"][()], found["leeway_skipped"][()], found["leeway_lag_token_mean"][()]) == (20, 0, 2.5)
    assert found["leeway_pool_lag_mean"] == {("exact",): 2.0, ("fast",): 3.0}
    assert found["leeway_pool_tokens_per_s"] == {("fast",): 100.0}
    assert found["leeway_reward_part"] == {("exact",): 0.5, ("a/b",): 0.25}
    assert set(found["leeway_actor_tokens_per_s"]) == {(actor.name, actor.pool) for actor in snapshot.actors}
    assert found["leeway_trained_tokens"][("3", "exact")] == snapshot.lags["exact"][3]
    assert found["leeway_buffer_issued"][()] == snapshot.buffer.ledger["issued"], (
        "the count is current, not that of the last batch"
    )
    assert not {"leeway_mismatch_lag0_abs", "leeway_eval_version", "leeway_not_registered"} & found.keys()
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        overrides = ["--run.dir", str(tmp_path), "--run.name", "x", "--tracking.prometheus_port", str(port)]
        assert main(["train", str(DEMO), *overrides]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"leeway: tracking\.prometheus_port = \d+: .* cannot be bound .* in use.; choose another port\n", error
    )
    assert list(tmp_path.iterdir()) == []


def test_without_a_port_nothing_listens_and_a_foreign_address_is_an_error(port, monkeypatch):
    with Exporter(TrackingConfig()) as exporter:
        exporter.show(read_status(RECORDED))
    monkeypatch.setattr(sinks, "PROMETHEUS_HOST", "192.0.2.77")
    with pytest.raises(ConfigError, match=r"cannot be bound at 192\.0\.2\.77"):
        Exporter(TrackingConfig(prometheus_port=port))
