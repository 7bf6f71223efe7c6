"""Run the code of the notebook examples/first_run.ipynb."""

import json
import os
import subprocess
import sys

import pytest

import leeway
from tests.world.live_run import ROOT


@pytest.mark.full
def test_the_notebook_trains_the_demo_and_reads_its_metrics_samples_and_model(tmp_path):
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*cells, "assert len(metrics) == 40 and len(trained) > 0"])],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert (leeway.load_run(folder).model_path / "config.json").is_file()
