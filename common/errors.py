"""Base class of all errors that Leeway raises about its input, files and services.

LeewayError
├── ConfigError        launch.errors: a config, an override, or the named run
│   └── StatusError    launch.observe.status: the status of a run
├── UserFileError      common.user_input: a Python file that the config names
├── TaskError          actors.tasks: prompts, rewards and their columns
├── ModelFolderError   common.hf_folder: a model folder
├── BufferError        buffer.errors: the buffer and its store
└── WeightsError       weight_sync.manifest: published weights
"""


class LeewayError(Exception):
    """Base class; the message of an error states what happened, where, and how to fix it."""
