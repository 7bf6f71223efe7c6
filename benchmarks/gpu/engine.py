"""An engine without a training run: startup, rate, log-probabilities, and weight updates of running requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from benchmarks.gpu.place import Place
from benchmarks.gpu.shapes import EOS
from benchmarks.lib.learner import Learner, sample

from leeway.actors.config import ActorsConfig
from leeway.buffer.schema import VersionSpan
from leeway.common.serving_model import prepare_serving_model
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import WeightStore

if TYPE_CHECKING:
    from leeway.actors.engine import Engine
    from leeway.actors.engine_core import Generation

DTYPE: Literal["bfloat16"] = "bfloat16"
FIRST = PolicyVersion(0, 0)
PROMPT = 64
NUM_ROUNDS = 3
"""Number of rounds. The requests of a round start at the same time; the first round includes the warm-up."""
NUM_UPDATES, NUM_RUNNING = 20, 64
SHARE = 0.35
"""Fraction of the card's memory for the engine. The learner, which scores the engine's tokens, uses the rest."""
CHANGE = 0.02
"""Standard deviation of weight changes in an update, as a fraction of the standard deviation of the weights."""
NUM_BETWEEN = 8
"""Minimum number of engine steps between two updates, so that every version samples tokens on a busy machine too."""
POLL_S = 0.01
DRAIN_S = 60.0
"""Seconds to wait for the last running requests, and for the steps between two updates."""
ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}


class Completion(NamedTuple):
    """A request and its result."""

    prompt: list[int]
    generation: Generation


@dataclass(frozen=True)
class Load:
    """Sizes of a round of requests, and the config of an engine for these requests."""

    vocab_size: int
    num_requests: int
    new_tokens: int

    @classmethod
    def of(cls, place: Place, shape: str) -> Load:
        """Return the load for a card, or a small one for the CPU."""
        _, known = place.shape(shape)
        return cls(known["vocab_size"], *((256, 512) if place.on_gpu else (64, 64)))

    def prompts(self, seed: int, num: int | None = None) -> list[list[int]]:
        """Return random prompts without an end-of-sequence token; the seed determines the prompts."""
        random = np.random.default_rng(seed)
        size = (num or self.num_requests, PROMPT)
        prompts: list[list[int]] = random.integers(self.vocab_size // 2, self.vocab_size, size).tolist()
        return prompts

    def config(self, place: Place) -> ActorsConfig:
        """Return the config of an engine that shares its card with the learner."""
        return ActorsConfig(
            gpus=0.5 if place.on_gpu else 0.0,
            gpu_memory_share=SHARE,
            dtype=DTYPE,
            max_prompt_tokens=PROMPT,
            max_new_tokens=self.new_tokens,
            max_running_samples=self.num_requests,
            engine_args=place.engine_args,
        )


# --- the same requests to two engines -----------------------------------------------------------------


def leeway(place: Place, shape: str = "0.6B") -> None:
    """Measure Leeway's engine: startup, rate, mismatch at lag 0 with a float32 head, and updates during requests."""
    asyncio.run(_measure(place, shape))


async def _measure(place: Place, shape: str) -> None:
    from leeway.actors.engine import Engine

    load = Load.of(place, shape)
    served = prepare_serving_model(place.model(shape), place.folder / "serving")
    start_s = time.perf_counter()
    # in separate processes, as on a GPU; an engine in this process would use the process group of the learner
    engine = await Engine.start(served, load.config(place), version=FIRST, seed=1, in_process=False)
    cache = engine.stats.cache._asdict() if engine.stats.cache else None
    place.report("start", start_s=time.perf_counter() - start_s, shape=place.shape(shape)[0], cache=cache)
    try:
        for number in range(NUM_ROUNDS):
            prompts, start_s = load.prompts(seed=number), time.perf_counter()
            generations = await asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
            _report_rate(place, number, generations, time.perf_counter() - start_s)
        learner = place.learner(shape)
        completions = [Completion(*each) for each in zip(prompts, generations, strict=True)]
        place.report("lag 0, head in float32", **mismatch(learner, completions, FIRST))
        await _update_in_flight(place, engine, learner, load)
    finally:
        await engine.stop()
    place.report("memory of the learner", **place.peak())


def vllm(place: Place, shape: str = "0.6B") -> None:
    """Measure the requests of `leeway` with the defaults of vLLM's `LLM`, which computes the head in bfloat16."""
    from leeway.actors.engine_core import Generation
    from leeway.actors.engine_setup import set_environment

    load = Load.of(place, shape)
    served = prepare_serving_model(place.model(shape), place.folder / "serving")
    set_environment(load.config(place))
    from vllm import LLM, SamplingParams
    from vllm.inputs.engine import tokens_input

    start_s = time.perf_counter()
    placement = {"gpu_memory_utilization": SHARE} if place.on_gpu else ON_CPU
    llm = LLM(
        model=str(served),
        skip_tokenizer_init=True,
        dtype=DTYPE,
        seed=1,
        max_model_len=PROMPT + load.new_tokens,
        max_num_seqs=load.num_requests,
        **{**placement, **place.engine_args},
    )
    place.report("start", start_s=time.perf_counter() - start_s, shape=place.shape(shape)[0])
    params = SamplingParams(
        temperature=1.0,
        max_tokens=load.new_tokens,
        stop_token_ids=[EOS],
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    for number in range(NUM_ROUNDS):
        prompts = load.prompts(seed=number)
        requests, start_s = [tokens_input(prompt) for prompt in prompts], time.perf_counter()
        outputs = [each.outputs[0] for each in llm.generate(requests, params, use_tqdm=False)]
        taken_s = time.perf_counter() - start_s
        generations = [
            Generation(
                np.asarray(each.token_ids, np.int32),
                np.asarray(each.logprobs.logprobs, np.float32),
                (VersionSpan(FIRST, 0, len(each.token_ids)),),
                "length",
            )
            for each in outputs
        ]
        _report_rate(place, number, generations, taken_s)
    llm.llm_engine.engine_core.shutdown()
    completions = [Completion(*each) for each in zip(prompts, generations, strict=True)]
    place.report("lag 0, head in bfloat16", **mismatch(place.learner(shape), completions, FIRST))


def _report_rate(place: Place, number: int, generations: Sequence[Generation], seconds: float) -> None:
    num_tokens = sum(len(each.token_ids) for each in generations)
    case = f"round {number + 1} of {NUM_ROUNDS}"
    place.report(case, requests=len(generations), tokens=num_tokens, seconds=seconds, tokens_per_s=num_tokens / seconds)


def mismatch(learner: Learner, completions: Sequence[Completion], version: PolicyVersion) -> dict[str, Any]:
    """Compare the log-probabilities of engine and learner, in nats, for the tokens that a policy version sampled."""
    sampled = [each for each in completions if any(span.version == version for span in each.generation.spans)]
    if not sampled:
        return {"tokens": 0, "mean_nats": None, "max_nats": None}
    rows = [
        sample(number, np.array([*prompt, *each.token_ids], np.int32), each.logprobs, float(number % 2), "length")
        for number, (prompt, each) in enumerate(sampled)
    ]
    chosen = np.concatenate([_sampled_by(version, each) for _, each in sampled])
    networks = learner.networks
    leaves = networks.forward_only(networks.on_device(learner.batch(rows).packed))
    assert leaves is not None, "the only rank is the last stage"
    difference = leaves.logprobs_T.float().cpu().numpy() - np.concatenate([row.logprobs for row in rows])
    nats = np.abs(difference)[chosen]
    return {"tokens": int(nats.size), "mean_nats": float(nats.mean()), "max_nats": float(nats.max())}


def _sampled_by(version: PolicyVersion, generation: Generation) -> np.ndarray[Any, np.dtype[np.bool_]]:
    chosen = np.zeros(len(generation.token_ids), bool)
    for span in generation.spans:
        chosen[span.start : span.end] = span.version == version
    return chosen


# --- updates of running requests -------------------------------------------------------------------


class Traffic:
    """A constant number of running requests with different end times. A new request replaces each that ends."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> None:
        """Start one request per prompt in the running event loop; first requests have lower token limits."""
        self._engine = engine
        self._open = True
        self._ended: list[Completion] = []
        first = [max(1, new_tokens * (number + 1) // len(prompts)) for number in range(len(prompts))]
        self._tasks = [asyncio.create_task(self._repeat(*each)) for each in zip(prompts, first, strict=True)]

    async def _repeat(self, prompt: list[int], max_new_tokens: int | None) -> None:
        while self._open:
            generation = await self._engine.generate(prompt, max_new_tokens=max_new_tokens)
            self._ended.append(Completion(prompt, generation))
            max_new_tokens = None

    async def drain(self) -> list[Completion]:
        """Stop starting requests, wait for the running ones, and return all completed requests.

        Raises:
            TimeoutError: the running requests did not end in time.
        """
        self._open = False
        try:
            async with asyncio.timeout(DRAIN_S):
                await asyncio.gather(*self._tasks)
        except TimeoutError as error:
            num = sum(not task.done() for task in self._tasks)
            raise TimeoutError(f"{num} of {len(self._tasks)} requests did not end within {DRAIN_S:g} s") from error
        return self._ended

    async def cancel(self) -> None:
        """Cancel the running requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Resume:
    """Timer of vLLM's resume call in an update. The engine reports only the times of the whole pause and the load."""

    def __init__(self, engine: Engine) -> None:
        core: Any = engine._alive()
        self._utility = core._utility
        self.seconds = 0.0
        core._utility = self._timed

    def _timed(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 -- a method of vLLM's EngineCore
        start_s = time.perf_counter()
        result = self._utility(method, *arguments)
        if method == "resume_scheduler":
            self.seconds = time.perf_counter() - start_s
        return result


async def _update_in_flight(place: Place, engine: Engine, learner: Learner, load: Load) -> None:
    """Measure weight updates during requests. Half of the updates recompute the KV cache; the others keep it."""
    folder = place.folder / "engine-weights"
    publisher = Publisher(WeightStore(folder), 0, 1, [DTYPE], keep_versions=2)
    puller, resume = Puller.of_folder(folder, DTYPE), _Resume(engine)
    half = NUM_UPDATES // 2
    caches: tuple[tuple[Literal["recompute", "keep"], range], ...] = (
        ("recompute", range(1, half + 1)),
        ("keep", range(half + 1, NUM_UPDATES + 1)),
    )
    try:
        for kv_cache, numbers in caches:
            traffic = Traffic(engine, load.prompts(seed=100 + numbers.start, num=NUM_RUNNING), load.new_tokens)
            try:
                for number in numbers:
                    await _wait_for_steps(engine)
                    version = PolicyVersion(0, number)
                    published = await asyncio.to_thread(_publish, publisher, learner, version)
                    updated = await _update(engine, puller, resume, version, kv_cache)
                    place.report(f"update {number}, {kv_cache}", **published, **updated)
                await _wait_for_steps(engine)
                completions = await traffic.drain()
            finally:
                await traffic.cancel()
            fewest = check_spans((each.generation for each in completions), numbers)
            nats = mismatch(learner, completions, version)
            place.report(f"after updates, {kv_cache}", requests=len(completions), fewest_in_flight=fewest, **nats)
    finally:
        publisher.close()
        puller.close()


async def _wait_for_steps(engine: Engine) -> None:
    target, deadline_s = engine.stats.num_steps + NUM_BETWEEN, time.monotonic() + DRAIN_S
    while engine.stats.num_steps < target:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the engine took fewer than {NUM_BETWEEN} steps within {DRAIN_S:g} s after an update")
        await asyncio.sleep(POLL_S)


def _publish(publisher: Publisher, learner: Learner, version: PolicyVersion) -> dict[str, float]:
    """Change all weights slightly, like many training steps, and publish the weights as a version."""
    torch.manual_seed(version.version)
    (optimizer,) = learner.policy.optimizers
    with torch.no_grad():
        for weight in optimizer.parameters.values():
            if weight.numel() > 1:
                weight.add_(torch.randn_like(weight), alpha=CHANGE * float(weight.std()))
    optimizer.round()
    start_s = time.perf_counter()
    publisher.publish(version, learner.policy.published_tensors(rounded=True))
    publisher.flush(DRAIN_S)
    return {"publish_s": time.perf_counter() - start_s}


async def _update(
    engine: Engine, puller: Puller, resume: _Resume, version: PolicyVersion, kv_cache: Literal["recompute", "keep"]
) -> dict[str, float]:
    """Update the engine to a version; return the seconds of each part. Generation continues during fetch and verify."""
    start_s = time.perf_counter()
    with await asyncio.to_thread(puller.fetch, version) as staged:
        fetched_s = time.perf_counter()
        await engine.prepare(staged)
        verified_s = time.perf_counter()
        pause_s, load_s = await engine.apply(staged, kv_cache)
    return {
        "fetch_s": fetched_s - start_s,
        "verify_s": verified_s - fetched_s,
        "pause_s": pause_s,
        "wait_s": max(0.0, pause_s - load_s - resume.seconds),
        "copy_s": load_s,
        "resume_s": resume.seconds,
    }


def check_spans(generations: Iterable[Generation], updates: Iterable[int]) -> int:
    """Check the version spans of requests; return the minimum over the updates of the number of running requests.

    Raises:
        RuntimeError: spans of a request have a gap or are out of order, or no request was running during an update.
    """
    in_flight: Counter[int] = Counter()
    for each in generations:
        ends = [0, *(span.end for span in each.spans)]
        versions = [span.version for span in each.spans]
        if [span.start for span in each.spans] != ends[:-1] or ends[-1] != len(each.token_ids):
            raise RuntimeError(f"spans do not cover the {len(each.token_ids)} tokens of a request: {each.spans}")
        if versions != sorted(set(versions)):
            raise RuntimeError(f"spans of a request are not in the order of their versions: {each.spans}")
        in_flight.update(version.version for version in versions[1:])
    missing = [number for number in updates if not in_flight[number]]
    if missing:
        raise RuntimeError(f"no request has tokens from before and after update {', '.join(map(str, missing))}")
    return min((in_flight[number] for number in updates), default=0)
