"""Two actors generate, the learner trains and publishes every step: what an update costs them.

Both sides of `pause_over_step` come from the same engine in the same run under the same load: after every update, and a
second of plain generation, vLLM's bare reload of tensors that lie ready in memory is timed, then the time between
tokens until the next version comes. The other engine and the learner do meanwhile what they always do.
"""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.weights_parts.figures import learner_figures, pause_figures
from benchmarks.weights_parts.peers import Figures, Peer, say
from benchmarks.weights_parts.setting import DTYPE, SMALL_RATE, Setting
from weight_sync.serving import check_model_folder, prepare_serving_model

NUM_ACTORS = 2
NUM_RUNNING = 24
START_LIMIT_S = 300.0
STEP_LIMIT_S = 120.0


def measure(setting: Setting) -> Figures:
    """Updates of both engines, the first of which warms up; and the learner's steps."""
    num_rounds = 3 if setting.quick else 9
    model = setting.model()
    samples = setting.samples()
    served = prepare_serving_model(model, setting.scratch / "served")
    folder = setting.new_folder("update-weights")
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(
            Peer(
                "learner",
                model=str(model),
                samples=str(samples),
                scratch=str(setting.scratch),
                learning_rate=SMALL_RATE,
                groups_per_step=setting.groups_per_step,
                folder=str(folder),
                dtypes=[DTYPE],
            )
        )
        engines = [
            stack.enter_context(
                Peer(
                    "engine",
                    name=f"actor-{i}",
                    model=str(served),
                    folder=str(folder),
                    dtype=DTYPE,
                    num_running=NUM_RUNNING,
                    vocab_size=check_model_folder(model).vocab_size,
                    seed=i,
                )
            )
            for i in range(NUM_ACTORS)
        ]
        say("update: starting two engines")
        for engine in engines:
            engine.begin("start")
        for engine in engines:
            engine.result("start", limit_s=START_LIMIT_S)
        steps = _train_until_all_have_followed(learner, engines, num_rounds)
        rounds = [engine.result("follow") for engine in engines]
    return {
        **pause_figures([each[1:] for each in rounds]),
        **learner_figures(steps[1:]),
        "update_num_running": NUM_RUNNING,
        "update_num_actors": NUM_ACTORS,
    }


def _train_until_all_have_followed(learner: Peer, engines: list[Peer], num_rounds: int) -> list[dict[str, Any]]:
    """The learner's steps. Engines skip what is published while they are busy, as actors do."""
    limit_s = STEP_LIMIT_S * (num_rounds + 2)
    for engine in engines:
        engine.begin("follow", num_updates=num_rounds, limit_s=limit_s)
    num_steps = 0
    while not all(engine.has_answered() for engine in engines):
        learner.call("train", num_steps=1, limit_s=STEP_LIMIT_S)
        num_steps += 1
        say(f"update: step {num_steps}")
        if num_steps > 4 * num_rounds:
            break  # the engines' own limit says why
    steps: list[dict[str, Any]] = learner.call("finish")
    return steps
