"""A service that requires client keys, in its own process. The keys are in a file; in a run, Ray delivers the keys.

`python -m tests.faults.locked_service KEYS buffer ...`, followed by the arguments of `tests.world.buffer_process`, or
`python -m tests.faults.locked_service KEYS weights FOLDER`. The names `unlisted-buffer` and `unlisted-weights` start
services that accept every key.
"""

import contextlib
import functools
import pickle
import sys
import threading
from pathlib import Path
from unittest import mock

from tests.weights_by_hand import RUN
from tests.world import buffer_process as program

from leeway.buffer.service import BufferService
from leeway.common.rpc.auth import LOOPBACK, Key, RunKeys
from leeway.weight_sync.service import WeightService


def write_keys(file: Path) -> RunKeys:
    """Create keys and write them to a file of mode 0600."""
    keys = RunKeys.make()
    file.touch(mode=0o600)
    file.write_bytes(pickle.dumps(keys))
    return keys


def main(file: str, name: str) -> int:
    keys = pickle.loads(Path(file).read_bytes()).services
    unlisted = mock.patch.object(Key, "is_same", return_value=True)
    with unlisted if name.startswith("unlisted-") else contextlib.nullcontext():
        if name.endswith("buffer"):
            with mock.patch.object(program, "BufferService", functools.partial(BufferService, keys=keys)):
                return program.main()
        service = WeightService(RUN, Path(sys.argv[1]), host=LOOPBACK, keys=keys)
        print(service.bind(), flush=True)
        service.serve(threading.Event())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1), sys.argv.pop(1)))
