"""Made-up reports of a run's roles, for tests of code that observes a run. No process is started."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import msgspec

from leeway.actors.report import ActorReport, EngineReport
from leeway.buffer.lengths import LengthFidelity
from leeway.common.run import RunContext
from leeway.launch.checks import Plan, check
from leeway.launch.config import load_config
from leeway.launch.observe.status import ProcessStatus
from leeway.launch.observe.trace import Event
from leeway.launch.run_folder import RunFolder

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"


def plan(folder: Path, *overrides: str) -> Plan:
    return check(load_config(DEMO, ["--tracking.to", "[]", *overrides]), folder)


def context(made: Plan) -> RunContext:
    """Return the context that every process of the run receives."""
    return made.context(made.folder.root / "model", made.model)


def report(name: str, pool: str = "actors", **fields: object) -> ActorReport:
    empty = dict.fromkeys((field.name for field in dataclasses.fields(ActorReport)), 0)
    lists = {"busy_intervals": [], "num_outcomes": {}, "failing": [], "updates": [], "rewards": {}, "answers": []}
    texts = {"waiting": "", "refused": "", "engine": EngineReport()}
    return ActorReport(**{**empty, **lists, **texts, "name": name, "pool": pool, "version": (0, 0), **fields})


def process(name: str, pool: str = "", state: str = "working", **fields: object) -> ProcessStatus:
    role, number = name.split(".")
    empty = {"host": "10.0.0.1", "pid": 100, "log": f"/runs/x/logs/{name}.log", "restarts": 0}
    return ProcessStatus(name=name, role=role, number=int(number), pool=pool, state=state, **{**empty, **fields})


def status(**fields: object) -> SimpleNamespace:
    ledger = {"issued": 100, "in_flight": 40, "committed": 60, "waiting": 10, "trained": 50, "gap": 0}
    values = {
        "ledger": ledger,
        "failed_by_reason": {},
        "quarantined_by_reason": {},
        "invalid_messages": {},
        "num_damaged": 0,
        "num_ready_groups": 2,
        "num_drawn_groups": 4,
        "newest": (0, 7),
        "version": 7,
        "draining": False,
        "fidelity": LengthFidelity(0.01),
        "fidelity_alarm": False,
    }
    return SimpleNamespace(**{**values, **fields})


def step_row(step: int, num_tokens: int, lag: float, **fields: object) -> dict:
    row = {"step": step, "version": step, "started_s": 10.0 * step, "finished_s": 10.0 * step + 4}
    return row | {
        "skipped": False,
        "batch/completion_tokens": num_tokens,
        "lag/token_mean": lag,
        "lag/token_max": lag,
        "buffer/ledger_gap": 0,
        **fields,
    }


def write_rows(folder: RunFolder, *rows: dict) -> None:
    """Write metrics.jsonl in the format of the learner's coordinator."""
    folder.metrics.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def write_generation(folder: Path, spans: list[tuple[str, float, float, dict]]) -> None:
    """Write a trace with only generation spans: (actor, start, end, arguments)."""
    with (folder / "timeline.json").open("wb") as file:
        for actor, start_s, end_s, args in spans:
            times = {"ts": round(1e6 * start_s), "dur": round(1e6 * (end_s - start_s))}
            event = Event(ph="X", name="generate", pid=1000, tid=4, cat="generate", args=args, who=actor, **times)
            file.write(msgspec.json.encode(event) + b",\n")
