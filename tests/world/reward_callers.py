"""Reward functions without processes: their whole path is the product's, but a thread of this process calls them."""

import asyncio
import json

import msgspec

from actors import reward_process
from actors.rewards import RETRIES, Scorer, ScorerLimits
from actors.tasks import RewardFunction, TaskError, load_reward
from actors.tasks.config import ReasoningGymTask
from common.process import DaemonThreads

TASK = ReasoningGymTask(type="reasoning_gym", name="chain_sum")


class InThisProcess:
    """A caller of a plain function."""

    def __init__(self, function):
        self._function = function
        self._threads = DaemonThreads("reward", 100)
        self.is_alive = True

    @classmethod
    async def load(cls, function, timeout_s):
        """Instead of `RewardProcess.start`."""
        try:
            return cls(load_reward(function))
        except TaskError as error:
            raise reward_process.CallFailed("its process did not start", str(error)) from error

    async def call(self, problems, completions):
        asked = json.loads(json.dumps(reward_process._asked(problems, completions)))
        return (await self._threads.run(self._outcome, asked)).values_or_failure()

    def _outcome(self, asked):
        with asyncio.Runner() as runner:
            outcome = reward_process._outcome(self._function, asked, runner)
        return msgspec.json.decode(msgspec.json.encode(outcome), type=reward_process._Outcome)

    async def end(self):
        self.is_alive = False


def scorer(*functions, retries=RETRIES, timeout_s=60.0, num_processes=4, start=None, **options):
    """A Scorer of plain functions (problems, completions) -> values."""
    by_name = {function.__name__: function for function in functions}

    async def call(function, timeout_s):
        return InThisProcess(by_name[function.name])

    rewards = [RewardFunction(name, TASK, ()) for name in by_name]
    limits = ScorerLimits(num_processes, timeout_s, start_timeout_s=5.0)
    return Scorer(rewards, limits, retries=retries, start=start or call, **options)
