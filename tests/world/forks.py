"""The fork server for the ranks of a learner in tests; it has their imports preloaded.

With it, a rank starts in a tenth of a second. Every rank has the preloaded modules, so they must not change the
product; modules that do, such as `tests.world.learner`, are imported by the ranks that need them.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.faults.learner_stage_process",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gemma2")),
    ]
)
