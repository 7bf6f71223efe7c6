"""Which metric each count of the buffer's ledger is. Imports nothing: whoever shows a run needs it too."""

LEDGER_METRICS = {
    "buffer/issued": "issued",
    "buffer/in_flight": "in_flight",
    "buffer/committed": "committed",
    "buffer/failed": "failed",
    "buffer/waiting": "waiting",
    "buffer/trained": "trained",
    "buffer/dropped_stale": "dropped_stale",
    "buffer/filtered": "filtered",
    "buffer/filtered_too_long": "filtered_too_long",
    "buffer/evicted_unused": "evicted_unused",
    "buffer/quarantined": "quarantined",
    "buffer/duplicate": "duplicates",
    "buffer/late": "late",
    "buffer/ledger_gap": "gap",
}
"""Metric -> its name in the buffer's ledger."""
