"""The launcher: one command starts, supervises and ends a run.

cli           the `leeway` command and its subcommands (`arguments`: shared arguments; `buffer_cli`: `leeway buffer`)
train         the stages of a run: evaluate, train, evaluate, export, summarise
resume        resuming a run: checks of changed config keys and files
processes     placement, start, supervision, restart and shutdown of the processes of a run
observe       status, metrics and events of a run during and after it, and their sinks
report        the HTML report of a run
doctor        checks of this machine and of a run on it
reward_check  tests of reward functions before a run
resources     GPU, memory, disk and shared-memory needs of a run; the GPUs of this machine

config        Config: the sections of a run, each owned by the package that reads it; loaded from TOML and overrides
config_errors one-sentence errors for an invalid config, with suggestions
checks        validation that needs the whole config, before any process starts
offline       training on recorded samples: validation, and filling of the buffer
pools         the worker pools of a run and the resources that each worker reserves

run_folder    RunFolder: the layout of a run folder, its lock and its control channel; the lock of the weights folder
model_folder  the model as a Hugging Face folder: download, validation and export
host          this machine: file modes, role processes, Ray's session folder, limits, reachable addresses
text          formatting of numbers, text and token ids for the terminal
errors        ConfigError, Interrupts and ExitStatus

bootstrap     installs the project (standard library only)
cluster.sh    starts Ray on hosts and trains there (`cluster_lib.sh`: its functions; `cluster_host.sh`: its commands on
              a host; `cluster_nodes`: the nodes that the head lists); slurm.sbatch and skypilot.yaml call it
"""
