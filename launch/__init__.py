"""Composes everything: one command starts, watches and ends a run.

cli         the `leeway` command (`verbs`: what it can do)
train       the run itself: evaluate, train, evaluate, export, summarise
processes   the processes of a run: where they are placed, started, watched, started again, ended
observe     what is known of a run, while it lives and after, and where it is shown
report      one page that shows a run, and a trace of it
doctor      is this machine fit for a run?

config      Config: the sections of a run, composed from what each package owns
errors      ConfigError: what is wrong with a config, or with the run that was named
load        TOML and command-line overrides to a Config, with errors that say what to type instead
checks      what only the whole config can know, checked before any process starts
pools       which workers a run has, and what each reserves
local_ray   Ray as a run starts it here: what it takes, and where its sessions lie
model_source  where the model comes from: a folder, a recipe, or the Hub
reachable   does somebody listen at an address?
weights_folder  can the folder of the weights be used, and who uses it?
reward_check    tries reward functions before a run does

run_folder  RunFolder: where everything of a run lies, which run it is, and which command works on it
resume      going on with a run: what may differ from before, and what may not
exporting   a checkpoint of a run as a Hugging Face folder
control     what is asked of a run while it lives
interrupts  Ctrl-C and SIGTERM
keys        the keys of a run: whether its sockets are locked, and where its services listen
privacy     what a process lets others see: modes of its files, the interface that it listens on
logs        one form of log line for every process
role_processes  the processes of runs on this machine, found by the logs that they write
tokenizer   the text of token ids, where a run has a tokenizer
words       figures and texts for people
exit_status what the command's exit status means
reference   docs/config.md and docs/metrics.md, written from the code
bootstrap   installs the project (standard library only)
cluster.sh  the same run on a Ray cluster (`cluster_lib.sh`, `cluster_host.sh`: its parts, and what it does on a host;
            `cluster_nodes`: the hosts that the head knows); slurm.sbatch and skypilot.yaml do the same there
"""
