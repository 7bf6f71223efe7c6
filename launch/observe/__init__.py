"""What is known of a run, while it lives and after, and where it is shown.

status      RunStatus: the one description of a run, as status.json holds it; how a run is looked at from outside
observer    Observer: takes in what the roles report, and keeps the status new (`totals`: sums, rates, overlap)
tripwires   Tripwires: weights or rewards that go wrong, told once and acted on
trace       Trace: what each role did and when, as a trace that Perfetto opens
metrics     the registry of metrics; Rows: metrics.jsonl as it grows
sinks       actors.jsonl, events.jsonl, Weights & Biases, Prometheus
view        what a terminal shows: View, the status in any width and height; Display, of the launcher
"""
