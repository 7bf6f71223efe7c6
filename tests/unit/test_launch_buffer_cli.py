"""`leeway buffer`: output for finished and live runs, and errors."""

import subprocess
import sys
import threading
import time

import lmdb
import pyarrow.parquet as pq
import pytest

from leeway.buffer.client import BufferClient
from leeway.buffer.offline import inspect as inspecting
from tests.world.buffer import Actor, InProcessBuffer, facts, make_trajectory
from tests.world.buffer_process import command, serving


@pytest.fixture
def run(tmp_path):
    """A finished run of one training step, with eight groups of two samples, one quarantined row and one open group."""
    folder = tmp_path / "runs" / "sums"
    buffer = InProcessBuffer(folder / "buffer", facts())
    buffer.begin()
    actor = Actor(buffer)
    *complete, still_open = actor.lease()
    for number, lease in enumerate(complete):
        actor.work(lease, reward=number / 4, num_completion_tokens=2 + number)
    actor.work(still_open, [0])
    assert actor.work(still_open, [1], reward=float("nan")) == ["quarantined"]
    buffer.draw(1, 0)
    buffer.finish(1, 1)
    buffer.close()
    return folder


def damage(folder, table, number):
    """Flip the last bit of a stored row."""
    with lmdb.open(str(folder), max_dbs=64, map_size=2**26) as env:
        rows, key = env.open_db(table.encode(), create=False), number.to_bytes(8, "big")
        with env.begin(write=True) as txn:
            value = bytearray(txn.get(key, db=rows))
            value[-1] ^= 1
            txn.put(key, bytes(value), db=rows)


def columns(lines, number):
    """Return one column of the groups listed by `ls`."""
    return [line.split()[number] for line in lines[2:-1]]


def save_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models

    words = [*"abcdefghijklmno", "\x1b"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_ls_lists_every_group_and_the_totals(run, leeway):
    status, lines, _ = leeway("ls", run)
    assert status == 0
    assert "run r, schema version 10, learner at version 1: 8 groups, 15 trajectories" in lines[0]
    assert columns(lines, 2) == ["closed"] * 2 + ["ready"] * 5 + ["closed"]
    assert columns(lines, 3)[:7] == [f"{number / 4:.3f}" for number in range(7)]
    assert lines[3].endswith("2 trained")
    assert lines[-1].startswith("8 groups, 16 samples (")


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--phase", "ready"], [3, 4, 5, 6, 7]),
        (["--phase", "closed"], [1, 2, 8]),
        (["--phase", "drawn"], []),
        (["--prompt", 8], [1]),
        (["--prompt", 8, "--phase", "ready"], []),
    ],
)
def test_ls_filters_groups_by_phase_and_prompt(run, leeway, filters, found):
    status, lines, _ = leeway("ls", run, *filters)
    assert (status, list(map(int, columns(lines, 0)))) == (0, found)
    assert lines[-1].startswith(f"{len(found)} groups, ")


def test_ls_lists_open_groups_and_filters_them_by_prompt(tmp_path, leeway):
    buffer = InProcessBuffer(tmp_path, facts())
    buffer.begin()
    actor = Actor(buffer)
    done, still_open, *_ = actor.lease(3)
    actor.work(done)
    actor.work(still_open, [0])
    buffer.close()
    assert columns(leeway("ls", tmp_path)[1], 2) == ["ready", "open", "open"]
    lines = leeway("ls", tmp_path, "--prompt", still_open.prompt_id)[1]
    assert (columns(lines, 2), columns(lines, 4)) == (["open"], ["0"])


def test_show_prints_a_group_with_the_text_of_its_samples(run, leeway):
    status, lines, _ = leeway("show", run, 2)
    assert status == 0
    assert lines[0].startswith("group 2: prompt ")
    assert "  used for training at step 1, version 0" in lines
    assert any(line.startswith("sample 1: record 4, trained, reward 0.250 (exact 0.250), stop") for line in lines)
    assert not any("'abc'" in line for line in lines)
    save_tokenizer(run / "model")
    lines = leeway("show", run / "buffer", 2)[1]
    assert lines.count("  'abc'") == lines.count("  -> 'def'") == 2


def test_a_model_of_the_hub_decodes_samples(run, leeway, tmp_path, monkeypatch):
    hub = tmp_path / "hub"
    snapshot = hub / "models--some--model" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    save_tokenizer(snapshot)
    (hub / "models--some--model" / "refs").mkdir()
    (hub / "models--some--model" / "refs" / "v2").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    (run / "config.toml").write_text('[model]\npath = "some/model"\n')
    assert not any("'abc'" in line for line in leeway("show", run, 2)[1])
    (run / "config.toml").write_text('[model]\npath = "some/model@v2"\n')
    assert leeway("show", run, 2)[1].count("  'abc'") == 2


def test_a_missing_group_is_an_error_that_refers_to_ls(run, leeway):
    status, lines, error = leeway("show", run, "99")
    assert (status, lines) == (1, [])
    assert f"the buffer in {run / 'buffer'} holds no group 99" in error
    assert "leeway buffer ls" in error


def test_verify_reports_its_checks_and_finds_damage(run, leeway):
    status, lines, _ = leeway("verify", run)
    assert (status, lines[-1]) == (0, "checked 15 records, their groups and the ledger: no fault")
    damage(run / "buffer", "records", 3)
    status, lines, _ = leeway("verify", run)
    assert (status, lines[-1]) == (2, "checked 15 records, their groups and the ledger: 1 fault")
    assert lines[-2].startswith("FAULT ")
    status, _, error = leeway("export", run, run / "out.parquet")
    assert (status, error.startswith("leeway: left out: record 3 of group 2: ")) == (1, True)
    assert pq.read_table(run / "out.parquet").num_rows == 13, "the damaged block holds two samples"


@pytest.mark.process
def test_verify_checks_the_pages_of_the_file_like_the_service(tmp_path, leeway):
    buffer = InProcessBuffer(tmp_path / "buffer", facts(max_tokens=20_000, vocab_size=20_000))
    buffer.begin()
    actor = Actor(buffer)
    for lease in actor.lease(2):
        actor.work(lease, num_completion_tokens=3000)
    buffer.close()
    data = tmp_path / "buffer" / "data.mdb"
    pages = bytearray(data.read_bytes())
    long_values = [at for at in range(0, len(pages), 4096) if pages[at + 10 : at + 12] == b"\x04\0"]
    pages[long_values[0] + 12] += 1  # the page count of this value now covers a page of another value
    data.write_bytes(pages)
    status, lines, error = leeway("verify", tmp_path)
    assert (status, lines[-1][-7:]) == (2, "1 fault")
    assert "long pages, entries] = [0, 1, 25, 2], not [0, 1, 24, 2]" in lines[-2]
    assert f"{tmp_path / 'buffer'} is damaged: restore it from a copy" in error
    assert subprocess.run(command(data.parent, "--verify"), capture_output=True, timeout=60).returncode == 2


def test_an_error_about_damage_names_the_row_the_folder_and_the_fix(run, leeway):
    damage(run / "buffer", "records", 3)
    damage(run / "buffer", "groups", 5)
    for verb, named in (
        (["ls"], "left out: group 5: "),
        (["show", 2], "left out: record 3 of group 2: "),
        (["export", run / "out.parquet"], "left out: group 5: "),
    ):
        status, _, error = leeway(verb[0], run, *verb[1:])
        assert status == 1
        assert named in error
        assert str(run / "buffer") in error
        assert "estore it from a copy" in error
        assert "`leeway buffer verify" in error


def test_damaged_draws_do_not_affect_show_and_export(run, leeway):
    damage(run / "buffer", "draws", 1)
    for verb in (["show", 1], ["export", run / "out.parquet"]):
        assert leeway(verb[0], run, *verb[1:])[::2] == (0, "")


@pytest.mark.parametrize(
    "options",
    [
        *(["show", 2**63], ["show", 0], ["show", "9" * 5000]),
        *(["ls", "--prompt", 10**400], ["ls", "--prompt", -1], ["ls", "--prompt", "x"]),
    ],
)
def test_a_number_out_of_range_is_refused(run, leeway, options):
    status, lines, error = leeway(options[0], run, *options[1:])
    assert (status, lines, error.count("\n")) == (2, [], 1)
    assert "expected an integer between" in error
    assert len(error) < 200


def test_the_largest_number_in_range_is_accepted(run, leeway):
    assert leeway("show", run, 2**63 - 1)[0] == 1
    assert leeway("ls", run, "--prompt", 2**63 - 1)[0] == 0


def test_a_folder_is_refused_as_export_file(run, leeway, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path, ".", "/", tmp_path / "file" / "out.parquet"):
        status, _, error = leeway("export", run, out)
        assert (status, error.startswith("leeway: ")) == (1, True)


def test_export_reports_the_number_of_rows(run, leeway):
    status, lines, _ = leeway("export", run, run / "out.parquet")
    assert (status, lines[0].split(" in ")[0]) == (0, "15 trajectories of 8 groups")
    assert pq.read_table(run / "out.parquet").num_rows == 15


def test_a_run_is_found_by_its_name_and_an_unknown_name_is_reported(run, leeway, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert leeway("ls", "sums")[0] == 0
    for verb in (["ls"], ["verify"], ["export", "out.parquet"]):
        status, _, error = leeway(verb[0], "summs", *verb[1:])
        assert (status, "no buffer found in summs" in error) == (1, True)
    assert not (tmp_path / "out.parquet").exists()


def test_a_mistyped_option_or_subcommand_is_refused_with_a_suggestion(run, leeway):
    status, lines, error = leeway("ls", run, "--phse", "open")
    assert (status, lines) == (2, [])
    assert "No such option: --phse (Possible options: --help, --phase)" in error
    status, lines, error = leeway("verfy", run)
    assert (status, lines) == (2, [])
    assert "No such command 'verfy'. Did you mean 'verify'? See `leeway buffer --help`" in error


@pytest.mark.process
def test_a_closed_output_pipe_is_no_error(run):
    command = f"{sys.executable} -m leeway buffer show {run} 1 | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


class Live:
    """A buffer service in its own process, and a thread that pushes samples to the service."""

    def __init__(self, folder):
        self.facts = facts(num_prompts=1000, group_size=4, groups_per_step=64, max_lag="unbounded")
        self.process = subprocess.Popen(
            serving(folder, self.facts), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        address = self.process.stdout.readline().strip()
        self.clients = [BufferClient(address, run_id="r", role=role, name=role) for role in ("learner", "actor")]
        for client in self.clients:
            client.connect()
        learner, self.actor = self.clients
        learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
        self.num_committed = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.push)
        self.thread.start()

    def push(self):
        while not self.ended.is_set() and (leases := self.actor.lease(1).result(60).leases):
            rows = [make_trajectory(leases[0], index, seq=0) for index in range(4)]
            for future in [self.actor.push(row) for row in rows]:
                assert future.result(60).outcome in ("committed", "duplicate")  # the client sends a slow push twice
                self.num_committed += 1
            self.ended.wait(0.005)

    def close(self):
        self.ended.set()
        self.thread.join(60)
        for client in self.clients:
            client.close(1.0)
        self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.mark.process
def test_a_live_run_is_read_while_its_service_writes(tmp_path, leeway, monkeypatch):
    # With READ_S = 0, the reader opens one transaction per group, and the service commits between two transactions.
    monkeypatch.setattr(inspecting, "READ_S", 0.0)
    live = Live(tmp_path / "buffer")
    try:
        while live.num_committed < 40:
            assert live.thread.is_alive()
            time.sleep(0.01)
        for _ in range(5):
            before = live.num_committed
            for verb in (["ls"], ["show", 1], ["verify"]):
                status, _, error = leeway(verb[0], tmp_path, *verb[1:])
                assert (status, error) == (0, "")
            status, _, error = leeway("export", tmp_path, tmp_path / "live.parquet")
            assert (status, error) == (0, "")
            exported = pq.read_table(tmp_path / "live.parquet", columns=["record_id"])
            assert before <= exported.num_rows == len(set(exported["record_id"].to_pylist()))
        assert live.num_committed > 40
    finally:
        live.close()
    assert leeway("verify", tmp_path)[0] == 0
