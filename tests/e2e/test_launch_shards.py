"""A real run whose buffer has two shards, one of which is killed: it trains on, and the sum of both is right."""

import json

import pytest

from buffer.offline.inspect import Inspection
from buffer.offline.verify import verify
from tests.world.live_run import LIMIT_S, command_of, descendants, start, wait_for_steps


@pytest.mark.full
def test_a_run_with_two_shards_survives_the_death_of_one(tmp_path):
    process = start(tmp_path, "--buffer.shards", "2", "--learner.num_steps", "60", "--actors.eval_every", "0")
    wait_for_steps(process, tmp_path, 3, timeout_s=LIMIT_S)
    services = [each for each in descendants(process) if "ray::BufferRole" in command_of(each)]
    assert len(services) == 2
    services[1].kill()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    run = tmp_path / "run"
    events = [json.loads(line)["text"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("the buffer service of shard" in text and "is started again" in text for text in events), events
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert {row["buffer/ledger_gap"] for row in steps} == {0}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["trained_trajectories"] == 60 * 8 * 8
    assert summary["lag_max"] <= summary["max_lag"]
    with Inspection.open(run) as buffer:
        assert len(buffer.stores) == 2
        reports = [store.read(verify) for store in buffer.stores]
    assert [report["faults"] for report in reports] == [[], []]
    assert sum(report["ledger"]["trained"] for report in reports) == 60 * 8 * 8
    assert all(report["ledger"]["trained"] > 0 for report in reports)
