"""vLLM's own reload of tensors that lie ready in memory: what an update costs if weights come from nowhere.

Runs in the engine's process (`collective_rpc`). No file is read, nothing is verified, nobody is asked.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

_ready: dict[str, torch.Tensor] = {}
"""The served checkpoint in the engine's dtype, read once."""


def bare_reload(worker: Any) -> float:  # noqa: ANN401 -- vLLM's types are unknown here
    """Reload the model with the weights that it was started with; returns the seconds of the reload alone."""
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    if not _ready:
        for path in sorted(Path(runner.model_config.model).glob("*.safetensors")):
            found = load_file(path)
            _ready.update({name: tensor.to(runner.model_config.dtype).clone() for name, tensor in found.items()})
    start = time.perf_counter()
    with torch.inference_mode():
        initialize_layerwise_reload(runner.model)
        runner.model.load_weights(_ready.items())
        finalize_layerwise_reload(runner.model, runner.model_config)
    return time.perf_counter() - start
