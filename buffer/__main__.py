"""The buffer as a process.

`python -m buffer --folder F --facts JSON --config JSON` serves. It prints its address as its only line
of output, and ends on SIGTERM or SIGINT, and with its parent.

`python -m buffer --folder F --verify` opens the store of any run, changes nothing, checks every value,
recounts the ledger, and reports as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import pyarrow as pa

from buffer.config import BufferConfig, RunFacts
from buffer.errors import BufferError
from buffer.service import BufferService
from buffer.store import Store
from buffer.verify import verify

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3): above so many free bytes memory is given back; so large a block is mapped on its own."""


def main() -> int:
    """Run the service; 0 where it ended in order, 1 where it could not run, 2 where --verify found a fault."""
    parser = argparse.ArgumentParser(prog="python -m buffer", description="The durable replay buffer of a run.")
    parser.add_argument("--folder", type=Path, required=True, help="where the store lies")
    parser.add_argument("--facts", help="RunFacts as JSON; needed to serve")
    parser.add_argument("--config", default="{}", help="the [buffer] section as JSON")
    parser.add_argument("--verify", action="store_true", help="check the store instead of serving it")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.facts is None and not args.verify:
        parser.error("--facts is needed to serve; to check a store, add --verify")
    try:
        if args.verify:
            return _verify(args.folder)
        config = BufferConfig.model_validate_json(args.config)
        return _serve(BufferService(config, RunFacts.model_validate_json(args.facts), args.folder))
    except BufferError as error:
        print(f"buffer: {error}", file=sys.stderr)
        return 1


def _verify(folder: Path) -> int:
    store = Store(folder, None)
    try:
        report = store.read(verify)
        report["faults"] += store.structure_faults()
    finally:
        store.close()
    print(json.dumps({"run_id": store.run_id, **report}))
    return 2 if report["faults"] else 0


def _serve(service: BufferService) -> int:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _end_with_parent(stop)
    _keep_memory()
    print(service.bind(), flush=True)
    service.serve(stop)
    return 0


def _keep_memory() -> None:
    """Spare a busy service what is sensible elsewhere: looking for cycles, and giving memory back after every turn.

    A turn makes some ten thousand small objects and some buffers of megabytes. All of them are gone
    after it, none in a cycle, and the next turn needs the same again.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    pa.set_memory_pool(pa.system_memory_pool())
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, 64 * 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def _end_with_parent(stop: threading.Event) -> None:
    """Have the kernel send SIGTERM when the parent dies; elsewhere than on Linux, look for it."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            stop.set()
        return

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != parent:
                stop.set()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
