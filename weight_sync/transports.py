"""Which way weights take between this process and the store: through its folder, or over the network."""

from __future__ import annotations

import logging
from pathlib import Path

from common.rpc.auth import ClientKeys
from weight_sync.client import WeightClient
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import TransferFailed
from weight_sync.store import store_id_of

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0

CHUNK_BYTES = 2**20
"""Of a message of weights: it takes milliseconds on a slow network, and to send it again costs as little."""


def client_of(
    address: str, run_id: str, name: str, *, at_most_s: float, keys: ClientKeys | None = None
) -> WeightClient:
    """A client that waits for a silent service long enough for it to be started again, and at most `at_most_s`."""
    timeout_s = min(_TIMEOUT_S, at_most_s)
    return WeightClient(address, run_id, name, timeout_s=timeout_s, chunk_bytes=CHUNK_BYTES, keys=keys)


def is_folder_of(
    config: WeightSyncConfig, *, folder: Path, address: str, run_id: str, name: str, keys: ClientKeys | None = None
) -> bool:
    """Does this process take the store's folder (True), or the service?

    Args:
        config: of the run.
        folder: where the store would lie, seen from here.
        address: of the service; "" where none runs.
        run_id: of the run.
        name: of this process.
        keys: as in `client_of`.

    Raises:
        TransferFailed: there is no service to ask; or it does not answer.
    """
    if config.transport == "network" and not address:
        raise TransferFailed(f"{name}: [weight_sync] transport = 'network', but no weight service runs")
    if config.transport in ("folder", "network") or not address:
        return config.transport != "network"
    client = client_of(address, run_id, name, at_most_s=config.update_timeout_s, keys=keys)
    try:
        served = client.store()
    finally:
        client.close()
    try:
        is_same = store_id_of(folder) == served.store_id
    except OSError as error:
        log.warning("%s: %s cannot be read (%s); weights are taken from %s", name, folder, error, address)
        return False
    if not is_same:
        log.info("%s: %s is not before us; weights are taken from %s", name, served.folder, address)
    return is_same
