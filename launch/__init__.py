"""Composes everything: one command starts, watches and ends a run.

cli         the `leeway` command and its verbs (`arguments`: of several verbs; `buffer_cli`: verbs of a buffer)
train       the run itself: evaluate, train, evaluate, export, summarise
resume      going on with a run: what may differ from before, and what may not
processes   the processes of a run: where they are placed, started, watched, started again, ended
observe     what is known of a run, while it lives and after, and where it is shown
report      one page that shows a run
doctor      checks of this machine and of a run on it
reward_check  tries reward functions before a run does
resources   what a run takes of machines: GPUs, memory, disk and shared memory; the GPUs of this one

config      Config: the sections of a run, each of the package that owns it; read from TOML and overrides
mistakes    what is wrong with a config, in one sentence that says what to type instead
checks      what only the whole config can know, checked before any process starts
offline     what a run on recorded samples asks of them, and the buffer that they fill
pools       which workers a run has, and what each reserves

run_folder  RunFolder: where everything of a run lies, which command works on it, and what is asked of that command;
            the folder of its weights
model_folder  the model of a run as a Hugging Face folder: where it comes from, and how it leaves
host        this machine: modes of files, logs by which processes are found, Ray's folders, who answers at an address
text        figures and texts for people, also of token ids
errors      ConfigError, Interrupts and ExitStatus: how a command ends

bootstrap   installs the project (standard library only)
cluster.sh  the same run on a Ray cluster (`cluster_lib.sh`, `cluster_host.sh`: its parts, and what it does on a host;
            `cluster_nodes`: the hosts that the head knows); slurm.sbatch and skypilot.yaml do the same there
"""
