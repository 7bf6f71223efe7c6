"""Print the hosts that a cluster's head knows for launch/cluster.sh, as ADDRESS up|lost CPUS GPUS POOL[,POOL...].

It asks the head's table of nodes, as `ray status` does: a driver would make Ray start a worker process per CPU.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from typing import Any

TIMEOUT_S = 15.0
KNOCK_S = 5.0
"""Ray itself would wait 40 s where nobody listens."""


def lines(nodes: Iterable[Any], head: str) -> list[str]:
    """Return one line per address; a host, which has a GcsNodeInfo for every time that it joined, is up if one is.

    A head on loopback is the only host, and Ray gives it the address of an interface.
    """
    is_alone = head.startswith("127.")
    told: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: bool(node.state)):  # 0 is alive
        have = node.resources_total
        pools = sorted(name.removeprefix("pool_") for name in have if name.startswith("pool_"))
        state = "lost" if node.state else "up"
        address = head if is_alone else node.node_manager_address
        line = f"{address} {state} {have.get('CPU', 0):g} {have.get('GPU', 0):g} {','.join(pools)}"
        told.setdefault(address, line.strip())
    return sorted(told.values())


def main() -> int:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, and not in its stub

    address = sys.argv[1]
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
        nodes = GcsClient(address=address).get_all_node_info(timeout=TIMEOUT_S)
    except Exception as error:  # Ray's own kinds, which are not public; each means that the head does not answer
        print(f"no Ray of ours answers at {address}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    print("\n".join(lines(nodes.values(), host)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
