"""Reward functions without processes: the product's code, but a thread of this process calls the function."""

import asyncio
import json

import msgspec

from leeway.actors import reward_process
from leeway.actors.rewards import RETRIES, Scorer, ScorerLimits
from leeway.actors.tasks import RewardFunction, TaskError, load_reward
from leeway.actors.tasks.config import ReasoningGymTask
from leeway.actors.tasks.task import SAMPLED
from leeway.common.process import DaemonThreads

TASK = ReasoningGymTask(type="reasoning_gym", name="chain_sum")


class InThisProcess:
    """Replacement of `RewardProcess` that calls a plain function in a thread."""

    def __init__(self, function):
        self._function = function
        self._threads = DaemonThreads("reward", 100)
        self.is_alive, self.logged = True, {}

    @classmethod
    async def load(cls, function, timeout_s):
        """Replace `RewardProcess.start`."""
        try:
            return cls(load_reward(function))
        except TaskError as error:
            raise reward_process.CallFailed("its process did not start", str(error)) from error

    async def call(self, problems, completions, sampled):
        reads = [name for name in SAMPLED if name in getattr(self._function, "named", ())]
        message = json.loads(json.dumps(reward_process._call_message(problems, completions, sampled, reads)))
        outcome = await self._threads.run(self._outcome, message)
        self.logged = outcome.logged
        return outcome.values_or_failure()

    def _outcome(self, message):
        with asyncio.Runner() as runner:
            outcome = reward_process._outcome(self._function, message, runner)
        return msgspec.json.decode(msgspec.json.encode(outcome), type=reward_process._Outcome)

    async def end(self):
        self.is_alive = False


def scorer(*functions, retries=RETRIES, timeout_s=60.0, num_processes=4, start=None, task=TASK, **options):
    """Return a Scorer of plain functions (problems, completions) -> values."""
    by_name = {function.__name__: function for function in functions}

    async def call(function, timeout_s):
        return InThisProcess(by_name[function.name])

    rewards = [RewardFunction(name, task, ()) for name in by_name]
    limits = ScorerLimits(num_processes, timeout_s, start_timeout_s=5.0)
    return Scorer(rewards, limits, retries=retries, start=start or call, **options)
