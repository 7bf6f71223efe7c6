"""What all measurements share: the model, its samples, the size of everything, and a folder for it all."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.weights_parts.peers import ROOT, MeasurementFailed, Peer, say

MODEL = ROOT / "examples" / "smollm2_model"
RECIPE = ROOT / "examples" / "smollm2_model.py"
RECIPE_LIMIT_S = 300.0
SAMPLING_LIMIT_S = 240.0
TRAINING_LIMIT_S = 300.0
MEMORY_FOLDER = Path("/dev/shm")
DTYPE = "bfloat16"
SMALL_RATE, LARGE_RATE = 1e-6, 1e-5


@dataclass(frozen=True)
class Setting:
    """Of one run of the benchmark."""

    scratch: Path
    """On disk, beside where runs lie; removed afterwards."""
    memory: Path
    """The same in memory."""
    quick: bool

    @property
    def num_groups(self) -> int:
        """Prompts with samples: so many over `groups_per_step` are the steps before they come again."""
        return 4 if self.quick else 20

    @property
    def groups_per_step(self) -> int:
        """Prompts of an optimizer step."""
        return 1 if self.quick else 4

    def model(self) -> Path:
        """SmolLM2-135M, which the recipe of the examples makes once."""
        if not (MODEL / "model.safetensors").exists():
            subprocess.run([sys.executable, str(RECIPE), str(MODEL)], check=True, timeout=RECIPE_LIMIT_S)
        return MODEL

    def samples(self) -> Path:
        """What the learner trains on; sampled once."""
        path = self.scratch / "samples.npz"
        if not path.exists():
            say("sampling what the learner trains on")
            with Peer("samples", model=str(self.model())) as peer:
                peer.call("make", path=str(path), num_groups=self.num_groups, limit_s=SAMPLING_LIMIT_S)
        return path

    def snapshots(self) -> list[Path]:
        """Weights of two versions, one optimizer step apart: what is handed over. Trained once."""
        paths = [self.scratch / f"{name}.safetensors" for name in ("before", "after")]
        if not all(path.exists() for path in paths):
            say("training two versions to hand over")
            with self.trainer(SMALL_RATE, snapshots=self.scratch) as peer:
                peer.call("steps", num_steps=3, limit_s=TRAINING_LIMIT_S)
        return paths

    def trainer(self, learning_rate: float, *, snapshots: Path | None = None, spread: bool = False) -> Peer:
        """A peer of `delta_role`."""
        return Peer(
            "delta",
            model=str(self.model()),
            samples=str(self.samples()),
            scratch=str(self.scratch),
            learning_rate=learning_rate,
            groups_per_step=self.groups_per_step,
            snapshots=str(snapshots) if snapshots else "",
            spread=spread,
        )

    def new_folder(self, name: str, *, in_memory: bool = False) -> Path:
        """An empty folder that no other measurement uses."""
        folder = (self.memory if in_memory else self.scratch) / name
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise MeasurementFailed(f"{folder} exists: two measurements have one name") from error
        return folder
