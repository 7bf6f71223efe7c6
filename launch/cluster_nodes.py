"""Print the hosts of a Ray cluster for launch/cluster.sh, as ADDRESS up|lost CPUS GPUS POOL[,POOL...].

The script reads the node table of the GCS, as `ray status` does. A Ray driver would start a worker process per CPU.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from typing import Any

TIMEOUT_S = 15.0
CONNECT_S = 5.0
"""Connection timeout in seconds; Ray itself would wait 40 s if the port is closed."""


def lines(nodes: Iterable[Any], head: str) -> list[str]:
    """Return one line per address. A host has one entry per join; it is up if one entry is alive.

    A head on a loopback address is the only host; Ray reports the address of another interface for this host.
    """
    is_alone = head.startswith("127.")
    by_address: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: bool(node.state)):  # state 0 means alive
        total = node.resources_total
        pools = sorted(name.removeprefix("pool_") for name in total if name.startswith("pool_"))
        state = "lost" if node.state else "up"
        address = head if is_alone else node.node_manager_address
        line = f"{address} {state} {total.get('CPU', 0):g} {total.get('GPU', 0):g} {','.join(pools)}"
        by_address.setdefault(address, line.strip())
    return sorted(by_address.values())


def main() -> int:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled code that Ray's stub lacks

    address = sys.argv[1]
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
        nodes = GcsClient(address=address).get_all_node_info(timeout=TIMEOUT_S)
    except Exception as error:  # Ray raises private types; each means that the head does not answer
        print(f"Ray GCS at {address} unreachable: {error}".splitlines()[0], file=sys.stderr)
        return 1
    print("\n".join(lines(nodes.values(), host)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
