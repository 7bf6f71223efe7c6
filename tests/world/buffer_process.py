"""The buffer service of tests and benchmarks as a process.

`python -m tests.world.buffer_process --folder F --facts JSON --config JSON` serves. Its only output is its address. It
shuts down on SIGTERM or SIGINT, and exits with its parent.

`python -m tests.world.buffer_process --folder F --verify` opens the store of any run without changing it, verifies
every value, recounts the ledger, and prints a JSON report.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from pathlib import Path

from benchmarks.lib.processes import end_with_parent

from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferError
from leeway.buffer.offline.inspect import check_store
from leeway.buffer.service import BufferService, keep_memory
from leeway.buffer.store import Store
from leeway.common.run import RunFacts


def command(folder: Path, *arguments: str) -> list[str]:
    """Return the command line for a folder."""
    return [sys.executable, "-m", "tests.world.buffer_process", "--folder", str(folder), *arguments]


def serving(folder: Path, facts: RunFacts, *arguments: str) -> list[str]:
    """Return the command line of a service."""
    return command(folder, "--facts", facts.model_dump_json(), *arguments)


def main() -> int:
    """Run the service; return 0 after a shutdown, 1 if it cannot run, 2 if --verify finds a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.world.buffer_process", description="The durable replay buffer of a run."
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the store")
    parser.add_argument("--facts", help="RunFacts as JSON; needed to serve")
    parser.add_argument("--config", default="{}", help="the [buffer] section as JSON")
    parser.add_argument("--host", help="address to bind; without it a Unix socket in the folder")
    parser.add_argument("--verify", action="store_true", help="check the store instead of serving it")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.facts is None and not args.verify:
        parser.error("--facts is needed to serve; to check a store, add --verify")
    try:
        if args.verify:
            return _verify(args.folder)
        config = BufferConfig.model_validate_json(args.config)
        facts = RunFacts.model_validate_json(args.facts)
        return _serve(BufferService(config, facts, args.folder, host=args.host))
    except BufferError as error:
        print(f"buffer: {error}", file=sys.stderr)
        return 1


def _verify(folder: Path) -> int:
    store = Store(folder, None)
    try:
        report = check_store(store)
    finally:
        store.close()
    print(json.dumps({"run_id": store.facts.run_id, **report}))
    return 2 if report["faults"] else 0


def _serve(service: BufferService) -> int:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    end_with_parent()
    keep_memory()
    print(service.bind(), flush=True)
    service.serve(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
