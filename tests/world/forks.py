"""The server that all tests fork ranks of a learner from: what they need is imported there already.

So a rank starts in a tenth of a second. What is imported there is in every rank and may change nothing: a module that
does, as `tests.world.learner`, is imported by the ranks that want it.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.faults.learner_stage_process",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gemma2")),
    ]
)
