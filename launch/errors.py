"""What every verb may have to say before anything is started. Imports nothing, so that a verb starts at once."""


class ConfigError(ValueError):
    """The config is wrong, or the run that was named; the text is one sentence that says where and what to do."""
