"""One learner stage as a process: `python learner_stage_process.py ORDERS.json RANK`."""

import json
import signal
import sys
from pathlib import Path

from pydantic import TypeAdapter

from algorithms.registry import AlgorithmConfig
from buffer.config import BufferConfig
from learner.config import LearnerConfig
from learner.spec import LearnerSpec
from learner.stage import Stage
from weight_sync.config import WeightSyncConfig


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    folder = Path(orders["run_folder"])
    config = LearnerConfig(**orders["config"])
    stage = Stage(
        LearnerSpec(
            rank=rank,
            num_stages=config.num_stages,
            rendezvous=orders["rendezvous"],
            model_path=Path(orders["model_path"]),
            reference_path=Path(orders["model_path"]),
            temperature=1.0,
            max_tokens=16,
            run_id="test",
            seed=0,
            buffer_addresses=(orders["buffer_address"],),
            run_folder=folder,
            config=config,
            algorithm=TypeAdapter(AlgorithmConfig).validate_python(orders["algorithm"]),
            weight_sync=WeightSyncConfig(),
            buffer=BufferConfig(give_up_after_s=10, request_timeout_s=2),
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: stage.request_stop())
    stage.setup()
    (folder / f"ready-{rank}").touch()
    try:
        stage.run()
        stage.export(folder / "export")
    finally:
        with (folder / f"reports-{rank}.jsonl").open("a") as file:
            for report in stage.poll():
                file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
