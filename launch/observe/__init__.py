"""Metrics, status and alerts of a run, and the views of them.

status      RunStatus: the status of a run, as stored in status.json; StatusView: a run viewed from another process
observer    Observer: merges the reports of the roles, and keeps the status up to date (`totals`: sums, rates, overlap)
alerts      Alerts: detects faults that raise no error, such as wrong weights, failing rewards or a run that cannot
            learn (`learning`: signs of that, and the verdict on a run)
trace       Trace: a timeline of the spans of each role, for Perfetto
metrics     the registry of metrics; Rows: reads metrics.jsonl while it grows
sinks       write actors.jsonl and events.jsonl, and send metrics to trackers and Prometheus
trackers    the process of an external tracker: Weights & Biases, TensorBoard, MLflow or Trackio
view        View: shows the status on a terminal of any size, for `leeway top`
display     Display: the progress line of the launcher
"""
