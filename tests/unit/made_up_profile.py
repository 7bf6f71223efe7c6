"""Made-up profile of the demo with round numbers for the costs of engines and learner."""

from pathlib import Path

import msgspec
from benchmarks.lib.lengths import lognormal

from leeway.launch.config import load_config
from leeway.planning.plans import settings_of, settings_of_engine
from leeway.planning.profile import EngineCosts, LearnerCosts, Profile, SampleFacts, WeightCosts
from leeway.planning.profiling import local_machine, model_of

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"


def profile(*overrides: str, **changes: object) -> Profile:
    """Return a made-up profile of the demo config with the given overrides."""
    config = load_config(DEMO, overrides)
    engine = EngineCosts(
        terms=(4e-3, 6e-5, 0.0, 1e-6), num_steps=1000, relative_error=0.05, most_running=128, kv_tokens=20_000,
        settings=settings_of_engine(config.actors),
    )  # fmt: skip
    learner = LearnerCosts(
        terms=(0.05, 0.01, 2e-5, 0.0), num_steps=40, relative_error=0.05,
        between_steps_s=0.03,
    )  # fmt: skip
    samples = SampleFacts(prompt_tokens=6.0, quantiles=lognormal(4, 0.3, 8).quantiles, explained=0.3, settled_s=0.02)
    found = Profile(
        taken_s=1.7e9,
        machine=local_machine(),
        model=model_of(load_config(DEMO)) or "llama-made-up",
        engines={"actors": engine},
        learner=learner,
        weights=WeightCosts(behind_s=0.15, pause_s=0.02),
        samples=samples,
        settings=settings_of(config),
    )
    return msgspec.structs.replace(found, **changes)
