"""A learner is repeatedly killed and resumed; its result is bit-identical to the result of an uninterrupted learner.

The batches of all steps are recorded beforehand, so no actor is needed and only the learner affects the result.
"""

import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.faults.disks import fill
from tests.faults.learner_run import LearnerRun, RandomActor, record
from tests.faults.results import as_text
from tests.full import FULL, pick
from tests.world.waiting import bound

NUM_STEPS = 12
BALANCE = "trajectory balance"
DECAYING = "trajectory balance, beta decays"
CRITIC = "PPO with a critic, 4 updates a step"
KINDS = {
    BALANCE: (None, {}, 1),
    DECAYING: ({"type": "trajectory_balance", "beta_final": 0.02}, {}, 1),
    CRITIC: (
        {"type": "off_policy_ppo", "baseline": "critic"},
        {"num_minibatches": 2, "num_epochs": 2},
        4,
    ),
}
"""Name -> algorithm, config, updates per step."""


class Recorded:
    """A recorded buffer, and the result of training on its samples."""

    def __init__(self, folder: Path, kind: str, **config) -> None:
        self.algorithm, options, self.updates_per_step = KINDS[kind]
        # a redone step may batch other samples for scoring, and in float32 their packing changes the last bits
        exact = {"precision": "float64"}
        # a decaying learning rate would depend on the number of steps, which differs between the tests below
        constant = {"lr_schedule": "constant"}
        self.config = {"num_steps": NUM_STEPS, "checkpoint_every": 2, **exact, **constant, **options, **config}
        self.folder = folder
        record(folder / "recorded", NUM_STEPS, self.updates_per_step)
        run = self.run("never-killed")
        try:
            run.train(self.algorithm, **self.config)
            self.state = run.newest_state()
            self.losses, self.counts = losses_of(run), counts_of(run)
        finally:
            run.close()

    def run(self, name: str) -> LearnerRun:
        recorded = {"recorded": self.folder / "recorded", "updates_per_step": self.updates_per_step}
        return LearnerRun(self.folder / name, **recorded, tied=True, num_layers=4)

    def start(self, run: LearnerRun, hooks=None, **config) -> None:
        run.start(self.algorithm, hooks, **{**self.config, **config})

    def finish(self, run: LearnerRun, hooks=None, **config) -> None:
        run.train(self.algorithm, hooks, **{**self.config, **config})

    def check(self, run: LearnerRun) -> None:
        """Assert bit-identical losses, weights and moments, and that each sample is used exactly once."""
        assert losses_of(run) == self.losses
        assert counts_of(run) == self.counts
        different = differences(run.newest_state(), self.state, 0)
        assert not different, f"{len(different)} of {len(self.state)} tensors differ, {different[0]} first"


def losses_of(run: LearnerRun) -> dict[int, tuple[float, int]]:
    """Return the loss and version of every step; assert that a redone step has the same values as before."""
    first: dict[int, dict] = {}
    unlike: list[dict] = []
    for report in run.reports():
        step = report["step"]
        before = first.setdefault(step, report)
        unlike.append({name: (before.get(name), value) for name, value in report.items() if before.get(name) != value})
        assert not unlike[-1].keys() & {"loss", "version"}, (
            f"step {step} differs when redone; differences of each report from the first one of its step: {unlike}"
        )
    assert sorted(first) == list(range(1, max(first) + 1)), "a step was skipped"
    return {step: (report["loss"], report["version"]) for step, report in first.items()}


def counts_of(run: LearnerRun) -> dict[str, int]:
    """Return the ledger, without the uses in redone steps."""
    ledger = run.ledger()
    ledger["uses"] -= ledger.pop("redone_uses")
    return ledger


def differences(state: dict, expected: dict, tolerance: float) -> list[str]:
    assert state.keys() == expected.keys()
    return [name for name in state if not torch.allclose(state[name], expected[name], rtol=0, atol=tolerance)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    made: dict[tuple, Recorded] = {}

    def record_once(kind: str, **config) -> Recorded:
        key = (kind, *config.items())
        if key not in made:
            made[key] = Recorded(tmp_path_factory.mktemp("recording"), kind, **config)
        return made[key]

    return record_once


@pytest.fixture
def run_of(tmp_path):
    """`run_of(recorded)` makes a run on a copy of the recording; the run is closed after the test."""
    runs = []

    def start(recorded: Recorded) -> LearnerRun:
        runs.append(recorded.run(f"killed-{tmp_path.name}-{len(runs)}"))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def kill_at_random(run: LearnerRun, chance: random.Random) -> str:
    """Let the ranks train for some steps, then kill all ranks, the coordinator, or another rank; return the choice."""
    target = run.step + chance.randint(1, 3)
    run.wait_until(lambda: run.step >= target or run.ranks[-1].exit_code is not None, f"step {target}")
    time.sleep(chance.uniform(0, 0.04))
    victim = chance.choice(["all", "the coordinator", "another rank"])
    for rank in {"all": run.ranks, "the coordinator": run.ranks[1:], "another rank": run.ranks[:1]}[victim]:
        rank.kill()
    for rank in run.ranks:
        assert rank.wait(60) is not None, f"rank {rank.number} did not exit; {run.logs()}"
    return victim


@pytest.mark.fault(15, "kill -9 of the learner at random steps, all ranks or one")
@pytest.mark.parametrize("kind", [DECAYING, pytest.param(CRITIC, marks=pytest.mark.full)])
def test_a_learner_killed_at_random_reaches_a_bit_identical_result(recording, run_of, show, kind):
    # learning rate and beta depend on the step number
    recorded = recording(kind, lr_schedule="cosine", warmup_steps=3)
    run, chance, victims = run_of(recorded), random.Random(kind), Counter()
    for _ in range(pick(3, 12)):
        recorded.start(run)
        victims[kill_at_random(run, chance)] += 1
        if run.step == NUM_STEPS:
            break
    recorded.finish(run)
    recorded.check(run)
    redone = len(run.reports()) - NUM_STEPS
    show(f"{kind}: killed {as_text(victims)}; {redone} steps redone, losses, weights and moments of {NUM_STEPS} equal")


FEW_POINTS = [(0, 3), (1, 1), (1, 6), (1, 16)]
ALL_POINTS = [*((0, at) for at in range(1, 5)), *((1, at) for at in range(1, 25))]
"""(rank, ordinal of the fsync or rename of checkpoint files); the third checkpoint also removes the first."""


@pytest.mark.fault(15, "kill -9 inside a checkpoint write, before every fsync and rename")
def test_a_learner_killed_inside_a_checkpoint_write_resumes_bit_identically(recording, run_of, show):
    recorded = recording(BALANCE)
    run, num_kills, num_torn = run_of(recorded), 0, 0
    for victim, at in ALL_POINTS if FULL else FEW_POINTS:
        recorded.start(run, {"kill_in_checkpoint": {"rank": victim, "at": at}})
        codes = run.finish(run.ranks)
        assert None not in codes, run.logs()
        num_kills += codes[victim] == -9
        num_torn += bool(list(run.checkpoints.glob(".step-*")))
        if codes == [0, 0]:
            recorded.check(run)
            run = run_of(recorded)
    recorded.finish(run)
    recorded.check(run)
    assert num_torn >= len(FEW_POINTS) // 2
    assert not list(run.checkpoints.glob(".step-*")), "leftovers are removed"
    show(f"{num_kills} kills, {num_torn} left a checkpoint half written or half removed: bit-identical result")


@pytest.mark.fault(15, "the disk of the checkpoints is full, then freed", root=True, full=True)
def test_a_full_disk_ends_the_learner_and_its_last_checkpoint_stays_usable(recording, run_of, show, mounts):
    recorded = recording(BALANCE)
    run = run_of(recorded)
    disk = mounts.tmpfs("checkpoints", 8)
    run.checkpoints.symlink_to(disk)
    recorded.finish(run, num_steps=4)
    ballast = fill(disk, leave_bytes=100_000)
    recorded.start(run)
    assert all(run.finish(run.ranks)), run.logs()
    errors = [re.search(r"CheckpointFailed: rank \d could not .*No space left on device", run.log(n)) for n in (0, 1)]
    assert any(errors), run.logs()
    assert run.steps_saved() == [2, 4]
    assert not list(run.checkpoints.glob(".step-*")), "partial files are removed"
    ballast.unlink()
    recorded.finish(run)
    recorded.check(run)
    show("all ranks report it and exit, no partial files stay; once freed, resumed from step 4 to the same result")


@pytest.mark.fault(15, "the optimizer's moments are not restored", control=True)
def test_a_learner_that_does_not_restore_its_moments_is_detected(recording, run_of, show):
    recorded = recording(BALANCE)
    run = run_of(recorded)
    recorded.finish(run, num_steps=6)
    recorded.finish(run, {"without_moments": True})
    state = run.newest_state()
    wrong = differences(state, recorded.state, 0)
    assert wrong
    show(f"{len(wrong)} of {len(state)} tensors differ")


def test_a_killed_run_resumes_with_other_numbers_of_stages_replicas_and_chunks(recording, run_of):
    recorded = recording(BALANCE, precision="float64")
    run = run_of(recorded)
    chunks = {"num_stages": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}
    shapes = [{}, {"num_stages": 1}, {"num_stages": 4}, {"num_stages": 2, "num_replicas": 2}, chunks]
    for number, shape in enumerate(shapes):
        saved = 2 * (number + 1)
        recorded.start(run, **shape)
        if number < len(shapes) - 1:
            run.wait_until(lambda: run.steps_saved()[-1:] >= [saved], f"the checkpoint of step {saved}")  # noqa: B023
            run.kill()
    assert not any(run.finish(run.ranks)), run.logs()
    different = differences(run.newest_state(), recorded.state, 1e-6)
    assert not different, different


EXIT_WITHIN_S = 10.0


def seconds_to_exit(run: LearnerRun, victim: int) -> float:
    """Kill a rank; return the seconds until all other ranks have exited."""
    run.ranks[victim].kill()
    killed_s = time.monotonic()
    for rank in run.ranks:
        code = rank.wait(killed_s + bound(EXIT_WITHIN_S) - time.monotonic())
        assert code, f"rank {rank.number} exited with {code}; {run.logs()}"
    return time.monotonic() - killed_s


@pytest.mark.fault(16, "one stage killed: at random steps, then while all wait for a batch")
@pytest.mark.parametrize(
    ("num_replicas", "as_script"),
    [pytest.param(1, True, id="2 stages"), pytest.param(2, False, id="2 replicas of 2 stages", marks=pytest.mark.full)],
)
def test_all_ranks_exit_after_one_is_killed_and_a_restart_gives_the_same_result(
    recording, run_of, show, num_replicas, as_script
):
    recorded = recording(BALANCE, num_replicas=num_replicas)
    run, chance, exited_s = run_of(recorded), random.Random(num_replicas), []
    for attempt in range(pick(1, 8)):
        recorded.start(run, as_script=as_script and attempt == 0, num_steps=NUM_STEPS + 1)
        target = run.step + chance.randint(1, 3)
        # if a rank dies before the rendezvous, the other ranks time out after COLLECTIVE_TIMEOUT_S
        run.wait_until(lambda: len(list(run.folder.glob("ready-*"))) == len(run.ranks), "the end of set-up", 180)
        run.wait_until(lambda: run.step >= min(target, NUM_STEPS), f"step {target}")  # noqa: B023
        time.sleep(chance.uniform(0, 0.04))
        exited_s.append(seconds_to_exit(run, chance.randrange(2 * num_replicas)))
    for victim in (0, 1):
        recorded.start(run, num_steps=NUM_STEPS + 1)
        run.wait_until_ready()
        # no batch is recorded for the step after NUM_STEPS, so all ranks wait
        run.wait_until(lambda: run.step == NUM_STEPS, f"step {NUM_STEPS}")
        time.sleep(0.3)
        exited_s.append(seconds_to_exit(run, victim))
        assert any("StageLost" in run.log(rank.number) for rank in run.ranks)
    recorded.finish(run)
    recorded.check(run)
    kills = f"{num_replicas} x 2 ranks, {len(exited_s)} kills"
    show(f"{kills}: the others exited within {max(exited_s):.1f} s; bit-identical result")


@pytest.mark.fault(16, "the coordinator sends no heartbeats while it waits for a batch", control=True)
def test_without_heartbeats_a_rank_does_not_detect_that_another_died(recording, run_of, show):
    recorded = recording(BALANCE)
    run = run_of(recorded)
    recorded.start(run, {"without_heartbeats": True}, num_steps=NUM_STEPS + 1)
    run.wait_until(lambda: run.step == NUM_STEPS, f"step {NUM_STEPS}")
    time.sleep(0.3)
    run.ranks[0].kill()
    assert run.ranks[1].wait(EXIT_WITHIN_S) is None
    show(f"the coordinator is still waiting after {EXIT_WITHIN_S:g} s")


@pytest.mark.fault(17, "newest checkpoint corrupt: a byte flipped")
def test_a_flipped_byte_is_detected_and_the_previous_checkpoint_is_used(tmp_path, show):
    run = LearnerRun(tmp_path / "run")
    try:
        with RandomActor(run.address):
            run.train(num_steps=6, checkpoint_every=2)
            file = flip_a_byte(run.checkpoints / "step-00000006")
            run.train(num_steps=6, checkpoint_every=2)
        for rank in (0, 1):
            assert f"{file} is damaged: checksum mismatch" in run.log(rank)
            assert "Falling back to the previous checkpoint" in run.log(rank)
        assert [report["step"] for report in run.reports()] == [1, 2, 3, 4, 5, 6, 5, 6]
        assert run.steps_saved() == [4, 6]
        assert (run.checkpoints / "damaged-step-00000006").exists()
    finally:
        run.close()
    show("detected at startup; the log of every rank names the file; resumed from step 4, steps 5 and 6 are redone")


@pytest.mark.fault(17, "newest checkpoint corrupt: the result of the run", full=True)
def test_a_run_that_falls_back_to_the_previous_checkpoint_reaches_the_same_weights(recording, run_of, show):
    recorded = recording(BALANCE)
    run = run_of(recorded)
    recorded.finish(run, num_steps=6)
    flip_a_byte(run.checkpoints / "step-00000006")
    recorded.finish(run)
    recorded.check(run)
    show("the draws since the previous checkpoint were still held; bit-identical weights, moments and ledger")


@pytest.mark.fault(17, "files of a checkpoint are not compared with their checksums", control=True)
def test_without_checksums_a_learner_resumes_from_a_corrupt_checkpoint(recording, run_of, show):
    recorded = recording(BALANCE)
    run = run_of(recorded)
    recorded.finish(run, num_steps=6)
    file = flip_a_byte(run.checkpoints / "step-00000006")
    recorded.finish(run, {"without_checksums": True})
    assert str(file) not in run.log(0) + run.log(1)
    wrong = differences(run.newest_state(), recorded.state, 0)
    assert wrong
    show(f"nothing is logged, and {len(wrong)} of {len(recorded.state)} tensors differ")


def flip_a_byte(checkpoint: Path) -> Path:
    """Flip the lowest bit of a byte in the middle of a tensor of rank 0; return the file."""
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    # the longest range without a zero byte holds numbers, not padding of the container
    start = max(content.split(b"\0"), key=len)
    content[content.index(start) + len(start) // 2] ^= 0x01  # a float32 stays finite, whichever byte is changed
    file.write_bytes(content)
    return file
