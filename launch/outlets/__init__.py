"""Where the news of a run goes as it comes.

metrics     the registry of metrics
tracking    metrics.jsonl, events.jsonl and Weights & Biases (`wandb_run`)
prometheus  Exporter: the newest figures over HTTP
display     what a terminal shows during a run (`summary_line`: its last words)
"""
