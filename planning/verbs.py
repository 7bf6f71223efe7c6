"""The verbs `leeway profile` and `leeway plan`, which `launch.cli` loads when one of them is used."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.process import uncollected
from launch.errors import ConfigError, ExitStatus, as_config_error, refuse
from launch.looking import arg, verb


@verb(
    "measure what a run costs on this machine",
    arg("config", nargs="?", type=Path, metavar="CONFIG.toml"),
    arg("--from", nargs="+", type=Path, metavar="RUN", dest="runs", help="of these runs, in place of two short ones"),
    arg("--out", type=Path, default=Path("profile.json"), help="where it goes; default: profile.json"),
    takes_overrides=True,
)
def profile(parsed: argparse.Namespace) -> int:
    """Measure what the parts of a run cost on this machine: two short real runs, about three minutes in all.

    Any key can be overridden, as with train. Runs that there are already say the same: --from RUN.
    """
    with uncollected():
        from launch.run_folder import open_run
        from launch.text import progress_line
        from planning.profiling import profile_of, take

        if (parsed.config is None) == (not parsed.runs):
            raise ConfigError("give either a config, which is run for it, or runs that there are: --from RUN")
        if parsed.runs:
            if parsed.overrides:
                raise ConfigError(f"{parsed.overrides[0]} changes nothing of runs that there are: leave it out")
            found = profile_of([open_run(each) for each in parsed.runs])
        else:
            try:
                with progress_line() as progress:
                    found = take(parsed.config, parsed.overrides, lambda text: progress(text, None))
            except KeyboardInterrupt:
                return refuse("interrupted; no profile was written", ExitStatus.INTERRUPTED)
    try:
        found.write(parsed.out)
    except OSError as error:
        raise ConfigError(f"{parsed.out} cannot be written: {error.strerror}; give another place as --out") from None
    print(found.describe())
    print(f"written to {parsed.out}")
    return ExitStatus.OK


@verb(
    "choose actors, learner and bound for a config, and predict what it will do",
    arg("config", type=Path, metavar="CONFIG.toml"),
    arg("--profile", type=Path, default=Path("profile.json"), help="of `leeway profile`; default: profile.json"),
    arg("--hosts", type=Path, metavar="FILE", help="as launch/cluster.sh takes it; default: this machine alone"),
    arg("--host-cpus", type=float, metavar="N", help="that each of them has; default: as many as this machine"),
    arg("--host-gpus", type=float, metavar="N", help="likewise"),
    arg("--price", nargs="+", default=[], metavar="POOL=PER_HOUR", help="of one worker: samples per price are sought"),
    arg("--out", type=Path, default=Path("plan.toml"), help="where the plan goes; default: plan.toml"),
    epilog="Then: leeway train CONFIG.toml --plan plan.toml",
    takes_overrides=True,
)
def plan(parsed: argparse.Namespace) -> int:
    """Search for the plan of CONFIG that trains most samples per second, or per price, by what a profile says.

    Chosen are the number of actors and their slots, the shape of the learner, publish_every, and max_lag up to the
    config's own. A key that is given here, as --learner.num_stages 2, is not chosen.
    """
    with uncollected():
        from launch.text import progress_line
        from planning.planner import Planner
        from planning.plans import host_here, prices_of, read_hosts, show, write_plan
        from planning.profile import Profile, ProfileError
        from planning.profiling import machine_here, model_of

        with as_config_error(kind=ProfileError):
            found = Profile.read(parsed.profile)
        here = host_here()
        hosts = [here]
        if parsed.hosts is not None:
            cpus, gpus = parsed.host_cpus or here.cpus, here.gpus if parsed.host_gpus is None else parsed.host_gpus
            hosts = read_hosts(parsed.hosts, cpus, gpus)
        planner = Planner(parsed.config, parsed.overrides, found, hosts, prices_of(parsed.price))
        if (model := model_of(planner.config)) is not None:
            with as_config_error(kind=ProfileError):
                found.check_model(model, parsed.profile)
        if not found.machine.is_like(machine_here()):
            print(f"note: the profile was taken on another machine ({found.machine}); the rates are those of that one")
        with progress_line() as progress:
            candidates = planner.find(progress)
            as_it_is = planner.as_it_is()
    show(candidates, as_it_is, planner.own)
    write_plan(parsed.out, candidates[0], parsed.profile)
    print(f"written to {parsed.out}; leeway train {parsed.config} --plan {parsed.out}")
    return ExitStatus.OK
