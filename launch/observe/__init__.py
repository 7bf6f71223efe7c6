"""Metrics, status and alerts of a run, and the views of them.

status      RunStatus: the status of a run, as stored in status.json; how a run is viewed from other processes
observer    Observer: merges the reports of the roles, and keeps the status up to date (`totals`: sums, rates, overlap)
alerts      Alerts: failing weights or rewards, each reported once and acted on
trace       Trace: spans of each role, as a trace that Perfetto opens
metrics     the registry of metrics; Rows: reads metrics.jsonl while it grows
sinks       actors.jsonl, events.jsonl, Weights & Biases, Prometheus
view        View: the status in any width and height, for `leeway top`
display     Display: the progress line of the launcher
"""
