"""Measure memory and seconds of an actor that loads a large file of prompts. Prints one JSON line last.

    python benchmarks/prompts_load.py [--quick] [--page [FILE]]

The file is JSONL with 500,000 rows and questions of 300 characters. The reward is `exact`; the tokenizer is that of the
demo's model, which encodes each character as a token. A separate process measures:

    memory        growth of resident memory after loading, and peak growth during loading, over the size of the data:
                  four bytes per token, and the bytes of the column that the reward reads
    reading       seconds to read, check and split the rows, without tokenization
    tokenising    rows per second, over those of plain `encode_batch` on all cores for 20,000 of these texts

`--quick` uses 20,000 rows; `--page` writes docs/results/prompts_load.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, ROOT, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, table, write_page
from benchmarks.lib.processes import call_in_processes

PAGE = RESULTS / "prompts_load.md"
NUM_ROWS = 500_000
NUM_BARE = 20_000
MODEL = ROOT / "examples" / "demo_model"
LIMIT_S = 3600.0
AT_MOST = {"settled_over_read": 1.2, "most_over_read": 1.2, "reading_s": 20.0}
AT_LEAST = {"tokenising_over_bare": 0.8}

Figures = dict[str, Any]


def question(number: int) -> str:
    """Return a text of 300 characters."""
    return f"{number} {'12+34 ' * 50}"[:300]


def load(path: str, num_rows: int) -> Figures:
    """Load the libraries, then load the file like an actor and measure memory and time."""
    from leeway.actors.tasks import load_encoded
    from leeway.actors.tasks.chat import PromptCodec
    from leeway.actors.tasks.config import FileTask

    PromptCodec(MODEL, chat=False, system_prompt=None).encode([question(0)])
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of resident memory
    before, began_s = _resident(), time.perf_counter()
    config = FileTask(type="file", path=path, rewards=("exact",))
    task, _ = load_encoded(config, MODEL, 400)
    took_s, after = time.perf_counter() - began_s, _resident()
    assert task.store is not None
    read = 4 * len(task.store.ids) + sum(len(str(number)) for number in range(num_rows))
    return {
        "num_prompts": len(task.train) + len(task.heldout),
        "num_tokens": len(task.store.ids),
        "read_mib": read / 2**20,
        "settled_over_read": (after["VmRSS"] - before["VmRSS"]) / read,
        "most_over_read": (after["VmHWM"] - before["VmRSS"]) / read,
        "reading_s": took_s - task.store.tokenising_s,
        "tokenising_s": task.store.tokenising_s,
    }


def bare() -> float:
    """Return the rows per second of `encode_batch` on all cores."""
    from transformers import AutoTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    backend = AutoTokenizer.from_pretrained(MODEL).backend_tokenizer
    texts = [question(number) for number in range(NUM_BARE)]
    backend.encode_batch(texts[:100])
    began_s = time.perf_counter()
    for first in range(0, len(texts), 1000):
        backend.encode_batch(texts[first : first + 1000])
    return len(texts) / (time.perf_counter() - began_s)


def _resident() -> dict[str, int]:
    """Return the current and the peak resident bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="load 20,000 rows, for development")
    args = parsed(parser, PAGE)
    machine, num_rows = describe_machine(), 20_000 if args.quick else NUM_ROWS
    here = "benchmarks.prompts_load"
    with tempfile.TemporaryDirectory(prefix="benchmark-prompts-") as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number in range(num_rows):
                file.write(json.dumps({"question": question(number), "answer": str(number)}) + "\n")
        rates = call_in_processes("encode_batch", f"{here}:bare", [{}], limit_s=LIMIT_S)
        calls = [{"path": str(path), "num_rows": num_rows}]
        (result,) = call_in_processes("loading", f"{here}:load", calls, limit_s=LIMIT_S)
        rates += call_in_processes("encode_batch", f"{here}:bare", [{}], limit_s=LIMIT_S)
    result["rows_per_s"] = result["num_prompts"] / result["tokenising_s"]
    result["bare_rows_per_s"] = sum(rates) / len(rates)
    result["tokenising_over_bare"] = result["rows_per_s"] / result["bare_rows_per_s"]
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=not args.quick)
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=not args.quick)
    result |= {"quick": args.quick, "machine": machine}
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    machine = result["machine"]
    rows = [
        ["prompts", f"{result['num_prompts']:,}"],
        ["tokens", f"{result['num_tokens']:,}"],
        ["tokens as int32, plus the column of the reward", f"{result['read_mib']:,.0f} MiB"],
        ["reading, checking and splitting", f"{result['reading_s']:.1f} s"],
        ["tokenising", f"{result['tokenising_s']:.1f} s, {result['rows_per_s']:,.0f} rows/s"],
        ["bare `encode_batch`, all cores", f"{result['bare_rows_per_s']:,.0f} rows/s"],
    ]
    return [
        "# Loading prompts",
        f"{origin('python benchmarks/prompts_load.py --page', machine, machine['commit'])} A process loads a JSONL "
        "file with rows of 300 characters, like an actor; a token is a character. Memory is the growth of the process, "
        "over the bytes of the tokens and of the column that the reward reads.",
        bars_table(result["wanted_at_most"], "at most"),
        bars_table(result["wanted_at_least"], "at least"),
        table(["quantity", "measured"], rows),
    ]


if __name__ == "__main__":
    main()
