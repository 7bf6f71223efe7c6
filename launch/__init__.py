"""The launcher: one command starts, supervises and ends a run.

cli           the `leeway` command and its subcommands (`arguments`: shared arguments; `buffer_cli`: `leeway buffer`)
train         the stages of a run: evaluate, train, export, evaluate, summarise
resume        checks before a run is resumed: changed config keys and changed files
processes     placement, start, supervision, restart and shutdown of the processes of a run
observe       status, metrics and events of an active or ended run, and the sinks that receive them
report        the HTML report of a run
doctor        checks of this machine, and of a config on this machine
reward_check  tests of reward functions before a run
resources     GPU, memory, disk and shared-memory needs of a run; the GPUs of this machine

config        Config: the config of a run, from a TOML file and overrides; each package defines its own section
config_errors one-sentence errors for an invalid config, with suggestions
checks        validation of the whole config before any process starts
offline       training on recorded samples: validation, and filling of the buffer
pools         the worker pools of a run and the resources that each worker reserves

run_folder    RunFolder: the layout of a run folder, its lock and its control channel; the lock of the weights folder
model_folder  the model as a Hugging Face folder: download, validation and export
host          this machine: file modes, role processes, Ray's session folder, limits, reachable addresses
text          formatting of numbers, text and token ids for the terminal
errors        ConfigError, Interrupts and ExitStatus

bootstrap     installs the project (standard library only)
cluster.sh    starts Ray on hosts and trains on them (`cluster_lib.sh`: its functions; `cluster_host.sh`: its commands
              on a host; `cluster_nodes`: lists the hosts); slurm.sbatch and skypilot.yaml call cluster.sh
"""
