"""Writes a complete run folder in less than a second, for tests of reports."""

import json
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models

from leeway.actors.report import WeightUpdate
from leeway.launch.observe.status import (
    Accuracy,
    ActorStatus,
    BufferStatus,
    Ended,
    PollResult,
    ProcessStatus,
    RunStatus,
    write_status,
)
from leeway.launch.observe.trace import Trace
from leeway.launch.run_folder import RunFolder
from tests.unit import made_up_run
from tests.world.buffer import Actor, InProcessBuffer, facts

START_S = 1_800_000_000.0
NASTY = '<script>document.title="owned"</script>'
"""Markup that a model may generate."""
WORDS = [*"abcdefghijklm", NASTY, "\x1b[2J", "\u202e"]
CONFIG = """
[run]
name = "sums"
[model]
path = "demo_model"
[task]
type = "reasoning_gym"
name = "chain_sum"
[algorithm]
type = "trajectory_balance"
[actors]
dtype = "float32"
[weight_sync]
max_lag = 4
[learner]
learning_rate = 0.0001
"""


def report(name: str, *, num_tokens: int = 0, busy=(), updates=(), running: int = 0, pool: str = "actors"):
    counts = {"num_tokens": num_tokens, "num_samples": num_tokens // 4, "num_running": running}
    return made_up_run.report(name, pool, **counts, busy_intervals=list(busy), updates=list(updates))


def status(*, ready: int = 3, version: int = 0) -> SimpleNamespace:
    ledger = {"in_flight": 8, "waiting": 12, "drawn": 4, "trained": 16, "committed": 32}
    return SimpleNamespace(
        ledger=ledger, num_ready_groups=ready, num_drawn_groups=1, version=version, newest=(0, version), size_bytes=9
    )


def process(name: str, state: str = "working", pool: str = "") -> ProcessStatus:
    role, number = name.split("-")
    facts = {"pool": pool, "state": state, "host": "", "pid": 0, "log": f"{name}.log", "restarts": 0}
    return ProcessStatus(name=f"{role}.{number}", role=role, number=int(number), **facts)


def row(step: int, at_s: float, **changes) -> dict:
    """Return a row of metrics.jsonl for a step that takes 0.6 s after a wait of 0.4 s."""
    values = {"step": step, "version": step, "restarts": 0, "skipped": False, "started_s": at_s + 0.4}
    values |= {"finished_s": at_s + 1.0, "time/wait_for_batch": 0.4, "time/step": 0.6, "time/forward": 0.2}
    values |= {"time/backward": 0.3, "time/weight_pause": 0.1, "time/wait_for_policy": 0.05}
    values |= {"batch/completion_tokens": 1000, "batch/trajectories": 16}
    values |= {
        "reward/mean": step / 50,
        "loss": 2 - step / 50,
        "grad_norm": 3.0,
        "policy/entropy": 0.1,
        "policy/nll": 0.1,
        "policy/kl_reference": 0.2,
        "length/trained_mean": 4.0,
        "length/fidelity_ks": 0.1,
    }
    values |= {"lag/token_mean": 1.5, "lag/token_max": 3.0, "mismatch/lag0_abs": 1e-6, "mismatch/k3": 1e-3}
    values |= {"off_policy/ess_token": 1.0000001, "off_policy/ess_sequence": 0.97, "buffer/ledger_gap": 0}
    values |= {
        "buffer/uninformative_frac": 0.25,
        "buffer/issued": step + 1,
        "buffer/failed": 1,
        "buffer/failed_reward": 1,
        "buffer/failed_lease": 0,
    }
    values |= {"perf/generated_tokens_per_s": 1200.0, "perf/trained_tokens_per_s": 1000.0, "overlap/frac": 0.7}
    values |= {"pool/actors/lag_mean": 1.5, "pool/actors/mismatch_lag0_abs": 1e-6, "pool/actors/tokens_per_s": 1200.0}
    return values | changes


def make_run(folder: Path, *, num_steps: int = 40, config: str = CONFIG) -> RunFolder:
    """Write a run with two actors and `num_steps` steps of one second."""
    run = RunFolder(folder)
    for part in (run.root, run.buffer):
        part.mkdir(parents=True, exist_ok=True)
    run.config.write_text(config)
    rows = [row(step, START_S + 10 + step) for step in range(1, num_steps + 1)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    write_events(run, num_steps)
    write_timeline(run.timeline, rows)
    write_end(run, num_steps)
    write_buffer(run)
    return run


def write_end(run: RunFolder, num_steps: int) -> None:
    """Write the final status.json of a finished run."""
    ledger = {"issued": 41, "in_flight": 0, "committed": 40, "failed": 1, "waiting": 24, "trained": 16, "gap": 0}
    buffer = BufferStatus(
        ready_groups=0,
        drawn_groups=0,
        groups_per_step=4,
        ledger=ledger,
        failed_by_reason={NASTY: 1},
        fidelity_ks=0.0,
        is_draining=True,
    )
    facts = {"run": run.name, "run_id": "1", "folder": str(run.root), "pid": 1, "host": "here", "started_s": START_S}
    figures = {
        "step": num_steps,
        "num_steps": num_steps,
        "max_lag": 4,
        "lag_mean": 1.5,
        "lag_max": 3,
        "trained_tokens": 1000 * num_steps,
        "lags": {"actors": {0: 100, 1: 300, 3: 100}},
        "actors": [ActorStatus(name="actor-0", state="working", restarts=0, host="", pid=0, log="")],
    }
    figures["evaluations"] = [
        Accuracy(versions=str(version), policy_version=version, greedy=greedy, sampled=sampled, num_problems=64)
        for version, greedy, sampled in ((0, 0.4, 0.3), (num_steps, 0.9, 0.8))
    ]
    ended = Ended(at_s=START_S + 60, text="done", exit_status=0)
    write_status(run.status, RunStatus(**facts, **figures, wall_s=60.0, buffer=buffer, ended=ended))


def write_events(run: RunFolder, num_steps: int) -> None:
    events = [
        {"time_s": START_S + 9, "kind": "evaluated", "text": "at version 0"},
        {"time_s": START_S + 20, "kind": "restart", "text": f"actor.1 died of {NASTY}"},
        {"time_s": START_S + 50, "kind": "evaluated", "text": "at the end"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def write_timeline(path: Path, rows: list[dict]) -> None:
    """Write a timeline with one poll per second.

    In each second, both actors generate for 0.7 s and apply the weights of the previous step.
    """
    now_s = [START_S]
    with Trace(path, lambda: now_s[0]) as timeline:
        timeline.phase("starting")
        now_s[0] = START_S + 9
        timeline.phase("evaluating version 0")
        timeline.evaluating()
        now_s[0] = START_S + 10
        timeline.evaluated("0.0")
        timeline.phase("training")
        for number, each in enumerate(rows):
            at_s = each["finished_s"]
            now_s[0] = at_s + 0.1
            actors = []
            for name, late_s in (("actor-0", 0.0), ("actor-1", 0.25)):
                update = WeightUpdate(at_s - 0.9 + late_s, at_s - 0.8 + late_s, 0.05, (0, number))
                busy = [(at_s - 0.8 + late_s, at_s - 0.1 + late_s)]
                tokens = 400 * (number + 1)
                actors.append(report(name, num_tokens=tokens, busy=busy, updates=[update], running=64))
            state = "starting" if 10 <= number < 14 else "working"
            processes = (process("buffer-0"), process("stage-0"), process("actor-1", state, "actors"))
            poll = PollResult(steps=[each], actors=actors, processes=processes)
            poll.status = status(ready=number % 5, version=number)
            timeline.ingest(poll, poll.steps)
        timeline.event("restart", f"actor.1 died of {NASTY}")


def write_buffer(run: RunFolder) -> None:
    """Write a buffer with some groups, one trained step, and text that a page must escape."""
    buffer = InProcessBuffer(run.buffer, facts())
    buffer.begin()
    actor = Actor(buffer)
    for number, lease in enumerate(actor.lease()):
        actor.work(lease, reward=number / 4, num_completion_tokens=3 + number)
    buffer.draw(1, 0)
    buffer.finish(1, 1)
    buffer.close()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    run.export.mkdir(exist_ok=True)
    tokenizer.save(str(run.export / "tokenizer.json"))
