"""A learner of two shards that is killed between them: `python shard_learner_process.py ADDRESS ADDRESS STEP`.

It prints the records of every step that it drew, and at STEP those of shard 0 alone; then it kills itself
before shard 1 has heard of the step.
"""

import asyncio
import json
import os
import signal
import sys

from buffer import client as client_module
from buffer.sharding.client import open_client
from buffer.sharding.shards import Shard
from tests.faults.service_process import CONFIG, REQUEST_TIMEOUT_S


def main() -> None:
    addresses, last = sys.argv[1:3], int(sys.argv[3])
    heard = asyncio.Event()
    draw = Shard.draw

    async def draw_or_die(self, step, *rest):
        if step == last and self.number == 1:
            await heard.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        part = await draw(self, step, *rest)
        if step == last:
            print(json.dumps(part.record_ids), flush=True)
            heard.set()
        return part

    Shard.draw = draw_or_die
    client_module.REQUEST_TIMEOUT_S = REQUEST_TIMEOUT_S
    learner = open_client(addresses, run_id="killed", role="learner", name="learner", config=CONFIG)
    learner.connect()
    incarnation = learner.begin_incarnation(0, 0).result(60).incarnation
    learner.published(incarnation, 0).result(60)
    for step in range(1, last + 1):
        while not (batch := learner.draw(step, step - 1, incarnation, 8, 1.0).result(60)).ready:
            continue
        print(json.dumps(batch.record_ids), flush=True)
        learner.step_finished(step, step).result(60)
        learner.published(incarnation, step).result(60)


if __name__ == "__main__":
    main()
