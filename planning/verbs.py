"""Commands `leeway profile` and `leeway plan`; `leeway.launch.cli` imports this module on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leeway.common.process import fast_imports
from leeway.launch.arguments import ConfigPath, ConfigVerb, run_names
from leeway.launch.errors import ConfigError, ExitStatus, print_error

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ConfigVerb)
def profile(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="Config to run three times.")] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="Profile this run instead; repeatable.", autocompletion=run_names),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file.")] = Path("profile.json"),
) -> int:
    """Measure the costs of a run on this machine.

    Starts three short runs, which take about four minutes in total.
    """
    with fast_imports():
        from leeway.launch.run_folder import open_run
        from leeway.launch.text import progress_line
        from leeway.planning.profiling import profile_of, take

        if (config is None) == (not runs):
            raise ConfigError("pass either CONFIG.toml to start three runs, or --from RUN to profile an existing run")
        try:
            if config is None:
                found = profile_of([open_run(each) for each in runs or ()])
            else:
                with progress_line() as progress:
                    found = take(config, context.args, lambda text: progress(text, None))
        except KeyboardInterrupt:
            return print_error("interrupted: no profile was written", ExitStatus.INTERRUPTED)
    try:
        found.write(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; pass another --out FILE") from None
    print(found.describe())
    print(f"written to {out}")
    return ExitStatus.OK


@app.command(cls=ConfigVerb)
def plan(
    context: typer.Context,
    config: ConfigPath,
    profile: Annotated[Path, typer.Option(metavar="FILE", help="Profile written by `leeway profile`.")] = Path(
        "profile.json"
    ),
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Host file for launch/cluster.sh; default: this machine.")
    ] = None,
    host_cpus: Annotated[float | None, typer.Option(metavar="N", help="CPUs per host; default: this machine.")] = None,
    host_gpus: Annotated[float | None, typer.Option(metavar="N", help="GPUs per host; default: this machine.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="POOL=PER_HOUR", help="Worker price; repeatable. Plans maximize samples per price."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file of the plan.")] = Path("plan.toml"),
) -> int:
    """Find the fastest configuration, using a profile.

    The plan maximizes the samples used for training per second, or per price. The plan sets the number of actors and
    their slots, the shape of the learner, publish_every, and max_lag up to that of the config. Keys set on the command
    line, for example --learner.num_stages 2, stay fixed. Apply the plan with: leeway train CONFIG.toml --plan plan.toml
    """
    with fast_imports():
        from leeway.launch.text import progress_line
        from leeway.planning.planner import Planner
        from leeway.planning.plans import local_host, prices_of, read_hosts, show, write_plan
        from leeway.planning.profile import Profile
        from leeway.planning.profiling import local_machine, model_of

        found, here = Profile.read(profile), local_host()
        machines = [here]
        if hosts is not None:
            machines = read_hosts(hosts, host_cpus or here.cpus, here.gpus if host_gpus is None else host_gpus)
        planner = Planner(config, context.args, found, machines, prices_of(price or []))
        if (model := model_of(planner.config)) is not None:
            found.check_model(model, profile)
        if not found.machine.is_like(local_machine()):
            print(f"note: the profile was measured on another machine ({found.machine}); rates are for that machine")
        with progress_line() as progress:
            candidates = planner.find(progress)
    show(candidates, found.error, planner.changes)
    write_plan(out, candidates[0], profile)
    print(f"written to {out}: apply it with leeway train {config} --plan {out}")
    return ExitStatus.OK
