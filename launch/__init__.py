"""Composes everything: one command starts, watches and ends a run.

cli         the `leeway` command
config      Config: the ten sections of a run, composed from what each package owns
load        TOML and command-line overrides to a Config, with errors that say what to type instead
checks      what only the whole config can know, checked before any process starts
run_folder  RunFolder: where everything of a run lies
roles       the Ray actors that host buffer, stages and actors, one process and one log each
role_process RoleProcess: one process as the supervisor sees it
spawn       Ray, and one process on it
stages      Stages: the processes of the learner, started again as a whole
buffers     Buffers: the buffer services, one per shard, and the launcher's own client of them
supervisor  Supervisor: starts the roles, restarts what may be restarted, ends all of them
evaluation  Evaluation: held-out problems spread over the actors
train       the run itself: evaluate, train, evaluate, export, summarise
overlap     who generated while the learner stepped
metrics     the registry of metrics
logs        one form of log line for every process
exit_status what the command's exit status means
reference   docs/config.md and docs/metrics.md, written from the code
progress    Progress: what is known of a run so far
tracking    metrics.jsonl, events.jsonl and Weights & Biases
display     the live view
buffer_cli  `leeway buffer`: looks at the buffer of a run (`buffer_text`, `buffer_tokens`: what it prints)
bootstrap   installs the project (standard library only)
cluster.sh  the same run on a Ray cluster
"""
