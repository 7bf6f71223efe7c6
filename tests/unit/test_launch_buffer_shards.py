"""`leeway buffer` over a buffer of two shards: one buffer to whoever looks at it."""

import shutil

import pyarrow.parquet as pq
import pytest

from buffer import protocol as p
from buffer.offline.inspect import Inspection, Selection
from tests.unit.test_launch_buffer_cli import columns, damage
from tests.world.buffer import InProcessBuffer, facts, make_trajectory


@pytest.fixture
def run(tmp_path):
    """A run of two shards that is over: rewards interleave, step 1 is trained, the second shard quarantined a row."""
    for shard in range(2):
        buffer = InProcessBuffer(
            tmp_path / "buffer" / f"shard-{shard}", facts(num_prompts=40, shard=shard, num_shards=2)
        )
        buffer.begin()
        buffer.ask(p.Hello("actor", "actor-0", "1", shard=shard, num_shards=2), p.Welcome)
        leases = buffer.lease("actor-0", 4)
        assert len(leases) == 4
        for number, lease in enumerate(leases):
            reward = number / 2 + shard / 4
            for index in range(2):
                row = make_trajectory(lease, index, seq=2 * number + index, reward=reward)
                assert buffer.push([row]) == ["committed"]
        if shard:
            stray = make_trajectory(leases[0], 0, seq=100, reward=float("nan"))
            assert buffer.push([stray]) == ["quarantined"]
        request = p.DrawRequest(1, 0, 0, 1, 0.0, {0: 1, 1: 1})
        assert buffer.store.write(lambda tx, b=buffer, r=request: b.core.try_draw(tx, r)) is not None
        buffer.finish(1, 1)
        buffer.close()
    return tmp_path


def test_the_order_of_an_index_is_that_of_all_shards_together(run, leeway):
    rewards = [f"{number / 4:.3f}" for number in range(8)]
    status, lines, _ = leeway("ls", run, "--by", "reward")
    assert (status, columns(lines, 3)) == (0, rewards)
    assert lines[0].endswith(" in 2 shards, 1 quarantined")
    best = leeway("ls", run, "--by", "reward", "--reverse", "--limit", 3)[1]
    assert columns(best, 3) == rewards[:-4:-1]
    by_length = list(map(int, columns(leeway("ls", run, "--by", "length")[1], 0)))
    assert by_length == sorted(by_length)
    assert leeway("ls", run, "--by", "length", "--reverse")[1][2].split()[0] == str(max(by_length))


def test_groups_and_records_are_found_whichever_shard_has_them(run, leeway):
    listed = leeway("ls", run)[1]
    assert len(columns(listed, 0)) == 8
    for group in columns(listed, 0):
        status, lines, _ = leeway("show", run, group)
        assert (status, lines[0].split(":")[0]) == (0, f"group {group}")
    for record in (4, 5):
        status, lines, _ = leeway("show", run, "--record", record)
        assert (status, any(f"record {record}," in line for line in lines)) == (0, True)


def test_an_export_holds_every_shard_and_says_which(run, leeway):
    status, lines, _ = leeway("export", run, run / "out.parquet")
    assert (status, lines[0].split(" in ")[0]) == (0, "16 trajectories of 8 groups")
    table = pq.read_table(run / "out.parquet")
    assert table["shard"].to_pylist() == [0] * 8 + [1] * 8
    assert [record % 2 for record in table["record_id"].to_pylist()] == table["shard"].to_pylist()
    assert table["lag"].null_count == 12


def test_verify_adds_the_shards_up_and_names_the_one_with_a_fault(run, leeway):
    status, lines, _ = leeway("verify", run)
    assert (status, lines[-1]) == (0, "16 records, their groups and the ledger checked: no fault")
    assert "trained 4" in lines[1]
    damage(run / "buffer" / "shard-1", "records", 5)
    status, lines, said = leeway("verify", run)
    assert (status, lines[2].startswith("FAULT    shard 1: ")) == (2, True)
    status, _, said = leeway("export", run, run / "out.parquet")
    assert (status, str(run / "buffer" / "shard-1") in said) == (1, True)
    assert pq.read_table(run / "out.parquet").num_rows == 15


def test_the_quarantine_of_a_shard_is_shown_by_its_number(run, leeway):
    assert leeway("ls", run, "--quarantine")[1][2].split()[0] == "1:1"
    status, lines, _ = leeway("show", run, "--quarantined", 1, "--shard", 1)
    assert (status, lines[0].split(";")[0]) == (0, "quarantined 1: reward not finite, from actor-0")
    for options in ([], ["--shard", 0], ["--shard", 7]):
        assert leeway("show", run, "--quarantined", 1, *options)[0] == 1


def test_a_missing_shard_is_an_error_and_those_that_are_there_can_be_looked_at_alone(run, leeway):
    shutil.rmtree(run / "buffer" / "shard-0")
    status, lines, said = leeway("ls", run)
    assert (status, lines) == (1, [])
    assert "has 2 shards, and shard-0 is missing" in said
    with Inspection.open(run / "buffer" / "shard-1") as inspection:
        assert {group.shard for group in inspection.groups(Selection())} == {1}
    assert leeway("export", run / "buffer" / "shard-1", run / "out.parquet")[0] == 0
    assert set(pq.read_table(run / "out.parquet")["shard"].to_pylist()) == {1}


def test_both_shards_are_compacted(run, leeway):
    status, lines, _ = leeway("compact", run)
    assert (status, len(lines)) == (0, 2)
    assert leeway("verify", run)[0] == 0
