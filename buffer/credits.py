"""How much each client may have unacknowledged: one budget, divided among those that send."""

from __future__ import annotations

from buffer.protocol import Credit

_FORGET_S = 60.0
_MAX_ROWS = 3072
_MIN_ROWS = 64
_MIN_BYTES = 2**20


class Credits:
    """Divides the memory that the service has for messages on their way into the store."""

    def __init__(self, budget_bytes: int) -> None:
        """Args:
        budget_bytes: what all clients together may have sent without an acknowledgement.
        """
        self._budget_bytes = budget_bytes
        self._heard_at: dict[str, float] = {}

    def grant(self, name: str, now_s: float) -> Credit:
        """The share of a client that was heard now; those that were silent for a minute have none.

        Everyone may have at least 64 trajectories and 1 MiB under way: with very many clients the
        budget is exceeded rather than anyone stopped.
        """
        self._heard_at.pop(name, None)
        self._heard_at[name] = now_s
        while now_s - next(iter(self._heard_at.values())) > _FORGET_S:
            del self._heard_at[next(iter(self._heard_at))]
        share = len(self._heard_at)
        return Credit(max(_MIN_ROWS, _MAX_ROWS // share), max(_MIN_BYTES, self._budget_bytes // share))
