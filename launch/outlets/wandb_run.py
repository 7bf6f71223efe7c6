"""Weights & Biases: is there a login, and the run there, with every wait bounded.

Its default workspace makes a section of panels of each prefix of the metrics; docs/watching.md says what to look for.
"""

from __future__ import annotations

import contextlib
from typing import Any

from launch.config import Config, TrackingConfig
from launch.errors import ConfigError
from launch.run_folder import RunFolder

INIT_TIMEOUT_S = 30.0
"""How long the server may take to answer at the start."""
FINISH_TIMEOUT_S = 60.0
"""How long the last rows may take to arrive there at the end; they are on disk for `wandb sync` in any case."""
HIDDEN = ("started_s", "finished_s")
"""Metrics that no panel is made of."""
SUMMARIES = {
    "lag/token_max": "max",
    "buffer/ledger_gap": "max",
    "eval/accuracy_greedy": "last",
    "eval/accuracy_sampled": "last",
}
"""What stands for a run in the table of runs, where the last value is not it."""


def check_wandb(config: TrackingConfig) -> None:
    """Look for a login where one is needed; asks nobody, neither the server nor the keyboard.

    Raises:
        ConfigError: there is none.
    """
    if config.wandb != "online":
        return
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    try:
        is_known = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        wandb.teardown()
        raise _no_wandb(error) from error
    if not is_known:
        wandb.teardown()
        raise ConfigError(
            "tracking.wandb = 'online' needs a login of Weights & Biases, and there is none: run 'wandb login', set "
            "WANDB_API_KEY, or use tracking.wandb = 'offline' and 'wandb sync' later"
        )


def start_wandb(config: Config, folder: RunFolder, run_id: str) -> Any:  # noqa: ANN401 -- wandb's Run
    """Begin the run at Weights & Biases, or go on with it.

    Args:
        config: of the run.
        folder: of the run; what is not sent is in its folder wandb/.
        run_id: by which it is known there; '': it chooses one.

    Raises:
        ConfigError: the server does not answer in time, or refuses the login. No process is left behind.
    """
    import wandb

    tracking = config.tracking
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        x_disable_stats=True,
    )
    try:
        run = wandb.init(
            project=tracking.project,
            name=folder.name,
            dir=str(folder.root),
            mode=tracking.wandb,
            id=run_id or None,
            resume="allow" if run_id and tracking.wandb == "online" else None,  # offline knows no earlier part
            config=config.model_dump(mode="json"),
            settings=settings,
        )
    except wandb.errors.Error as error:
        wandb.teardown()
        raise _no_wandb(error) from error
    run.define_metric("*", step_metric="step")
    for name in HIDDEN:
        run.define_metric(name, hidden=True)
    for name, summary in SUMMARIES.items():
        run.define_metric(name, step_metric="step", summary=summary)
    return run


def forget_wandb() -> None:
    """Its process died: nothing speaks to it any more, neither now nor when this process ends."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it says once more that there is nobody, or why its process ended
        wandb.teardown()


def _no_wandb(error: Exception) -> ConfigError:
    said = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return ConfigError(
        f"tracking.wandb = 'online' does not work: {said}; check the network and 'wandb login', or use "
        "tracking.wandb = 'offline' and 'wandb sync' later"
    )
