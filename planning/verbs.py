"""The verbs `leeway profile` and `leeway plan`, which `launch.cli` loads when one of them is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.process import uncollected
from launch.arguments import ConfigPath, ConfigVerb, run_names
from launch.errors import ConfigError, ExitStatus, refuse

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ConfigVerb)
def profile(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="Run it twice, and measure.")] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="Read this run instead; may be repeated.", autocompletion=run_names),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write here.")] = Path("profile.json"),
) -> int:
    """Measure what a run costs on this machine.

    It starts two short runs, which take about three minutes in all.
    """
    with uncollected():
        from launch.run_folder import open_run
        from launch.text import progress_line
        from planning.profiling import profile_of, take

        if (config is None) == (not runs):
            raise ConfigError("give either a config, which is run, or finished runs: --from RUN")
        try:
            if config is None:
                found = profile_of([open_run(each) for each in runs or ()])
            else:
                with progress_line() as progress:
                    found = take(config, context.args, lambda text: progress(text, None))
        except KeyboardInterrupt:
            return refuse("interrupted; no profile was written", ExitStatus.INTERRUPTED)
    try:
        found.write(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another place as --out") from None
    print(found.describe())
    print(f"written to {out}")
    return ExitStatus.OK


@app.command(cls=ConfigVerb)
def plan(
    context: typer.Context,
    config: ConfigPath,
    profile: Annotated[Path, typer.Option(metavar="FILE", help="A profile of `leeway profile`.")] = Path(
        "profile.json"
    ),
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hosts, as for launch/cluster.sh; default: this machine.")
    ] = None,
    host_cpus: Annotated[float | None, typer.Option(metavar="N", help="CPUs of each; default: as here.")] = None,
    host_gpus: Annotated[float | None, typer.Option(metavar="N", help="GPUs of each; default: as here.")] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POOL=PER_HOUR", help="Price of one worker; may be repeated. Maximises samples per price."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the plan here.")] = Path("plan.toml"),
) -> int:
    """Find the fastest configuration by a profile.

    It trains most samples per second, or per price. Chosen are the number of actors and their slots, the shape of the
    learner, publish_every, and max_lag up to the config's. A key that is given, as --learner.num_stages 2, is not
    chosen. Then: leeway train CONFIG.toml --plan plan.toml
    """
    with uncollected():
        from launch.text import progress_line
        from planning.planner import Planner
        from planning.plans import host_here, prices_of, read_hosts, show, write_plan
        from planning.profile import Profile
        from planning.profiling import machine_here, model_of

        found, here = Profile.read(profile), host_here()
        places = [here]
        if hosts is not None:
            places = read_hosts(hosts, host_cpus or here.cpus, here.gpus if host_gpus is None else host_gpus)
        planner = Planner(config, context.args, found, places, prices_of(price or []))
        if (model := model_of(planner.config)) is not None:
            found.check_model(model, profile)
        if not found.machine.is_like(machine_here()):
            print(f"note: the profile was taken on another machine ({found.machine}); the rates are those of that one")
        with progress_line() as progress:
            candidates = planner.find(progress)
            as_it_is = planner.as_it_is()
    show(candidates, as_it_is, planner.own)
    write_plan(out, candidates[0], profile)
    print(f"written to {out}; leeway train {config} --plan {out}")
    return ExitStatus.OK
