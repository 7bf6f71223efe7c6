"""The plugin that every vLLM process loads (entry point group `vllm.general_plugins`).

It registers our weight transfer, which `WeightTransferConfig(backend=BACKEND)` then selects. It ties the process to its
owner: an engine ends with the process that `OWNER_ENV` names, even if that was killed. It restores what the actor's
process runs without: the garbage collector and SIGTERM. And it asks for AMX.

Importing this module costs nothing and needs no vLLM.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import threading

BACKEND = "leeway"
WORKER_CALLS = "weight_sync.vllm_transfer.WorkerCalls"
"""What vLLM adds to its workers (`worker_extension_cls`)."""
OWNER_ENV = "LEEWAY_ENGINE_OWNER"
"""Process id of the actor that an engine belongs to; set by the actor before it starts the engine."""
REFUSED = "weights refused:"
"""An update that failed with this text left the model as it was; any other failure did not."""


def register() -> None:
    """Called by vLLM in each of its processes; may be called again."""
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    torch.cpu._init_amx()  # bf16 attention on a CPU that has it would end in SIGILL: vLLM asks no leave of the kernel
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weight_sync.vllm_transfer", "StoreWeightTransfer")
    owner = os.environ.get(OWNER_ENV, "")
    if owner.isdigit() and int(owner) != os.getpid():
        # by this one vLLM ends it; all else below a run is deaf to it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        gc.enable()
        _die_with(int(owner))


def _die_with(owner: int) -> None:
    """Kill this process once `owner` has ended. vLLM's own clean-up runs only if the owner lives to ask for it."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        # readable when the owner has ended
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
