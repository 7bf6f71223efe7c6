"""EngineSockets: vLLM's own sockets between its processes, which lie in a folder that goes with the engine.

vLLM puts them into the temporary folder, by random names, where a killed engine's stay for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from actors.threads import DaemonThreads
from weight_sync.errors import TransferFailed
from weight_sync.host_folder import HostFolder

if TYPE_CHECKING:
    import zmq

_ENVIRONMENT = "VLLM_RPC_BASE_PATH"
_END_S = 10.0
_MAX_PATH_BYTES = 107
"""Of a Unix socket."""
_NAME_BYTES = 37
"""Of those that vLLM makes: a slash and a UUID."""
_KIN = r"leeway-{user}-vllm-\d+-\d{{1,9}}"
"""Names of such folders alone: those of fetched weights beside them, of which the next actor goes on with what a killed
one fetched, end in the twelve characters of a store's name."""
_numbers = itertools.count()


class EngineSockets:
    """A folder for the sockets of one engine, readable by this user alone. The next engine removes a killed one's."""

    def __init__(self) -> None:
        """Make it, and name it in the environment, which the engine's processes inherit.

        Raises:
            OSError: it cannot be made.
        """
        name = f"leeway-{os.geteuid()}-vllm-{os.getpid()}-{next(_numbers)}"
        path = Path(tempfile.gettempdir()) / name
        if len(os.fsencode(path)) + _NAME_BYTES > _MAX_PATH_BYTES:
            path = Path("/tmp") / name
        try:
            self._folder = HostFolder(path, kin=_KIN)
        except TransferFailed as error:
            # the cause is the system's word; without one the folder is somebody else's, and the text says so
            why = error.__cause__ or error
            raise OSError(f"no folder for vLLM's sockets can be made in {path.parent}: {why}") from error
        os.environ[_ENVIRONMENT] = str(path)

    async def end(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """End vLLM's ZeroMQ context, which it leaves to the garbage collector, and remove the folder.

        The context not in this thread: it waits for sockets, which after a crash are closed by this very event loop.
        """
        thread = DaemonThreads("engine-context", max_threads=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await thread.run(context.term)
        thread.close()
        self.remove()

    def remove(self) -> None:
        """Remove the folder. May be called twice."""
        self._folder.close()
