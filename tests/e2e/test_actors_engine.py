"""A real vLLM engine on CPU, one for the whole module: what it generates, and updates under its feet."""

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.config import ActorsConfig
from actors.engine import Completion, Engine, EngineDead, RequestRefused, UpdateRefused
from weight_sync.publisher import Publisher
from weight_sync.puller import Puller
from weight_sync.serving import HEAD, prepare_serving_model
from weight_sync.staleness import PolicyVersion

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # of vLLM's own imports
    pytest.mark.filterwarnings("ignore"),
]

EOS = 2
TEMPERATURE = 0.8
CONFIG = ActorsConfig(
    temperature=TEMPERATURE, max_new_tokens=100, max_prompt_tokens=140, max_running_samples=32, kv_cache_gib=0.1
)
Policies = dict[PolicyVersion, LlamaForCausalLM]


def tiny_llama(seed: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=EOS,
        initializer_range=0.15,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def prompts(num: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [[1, *generator.integers(3, 64, size=int(n)).tolist()] for n in generator.integers(3, 19, size=num)]


def rescored(model: LlamaForCausalLM, prompt: list[int], completion: Completion, temperature: float) -> np.ndarray:
    """Teacher-forced log-probabilities of the completion under plain Transformers."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, dim=-1)
    taken = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    return taken[len(prompt) - 1 :].numpy()


def mean_mismatch(prompts_: list[list[int]], completions: list[Completion], policies: Policies) -> float:
    """Mean absolute difference of every token's log-probability from that of the version that its span names."""
    differences = []
    for prompt, completion in zip(prompts_, completions, strict=True):
        for span in completion.spans:
            truth = rescored(policies[span.version], prompt, completion, TEMPERATURE)
            differences.append(np.abs(truth - completion.logprobs)[span.start : span.end])
    return float(np.concatenate(differences).mean())


def assert_spans_cover(completion: Completion) -> None:
    edges = [(span.start, span.end) for span in completion.spans]
    assert edges[0][0] == 0
    assert edges[-1][1] == len(completion.token_ids) == len(completion.logprobs)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert [span.version for span in completion.spans] == sorted(span.version for span in completion.spans)


class World:
    """The engine, the store that feeds it, and what each version's weights are."""

    def __init__(self, engine: Engine, folder: Path, first: LlamaForCausalLM) -> None:
        self.engine = engine
        self.folder = folder
        self.policies: Policies = {PolicyVersion(0, 0): first}
        self.publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=3)
        self.puller = Puller(folder)

    def publish(self, seed: int, *, tied: bool = True) -> PolicyVersion:
        model = tiny_llama(seed, tied=tied)
        version = PolicyVersion(0, max(self.policies).version + 1)
        tensors = {name: value for name, value in model.state_dict().items() if not (tied and name == HEAD)}
        self.publisher.publish(version, tensors)
        self.publisher.flush(30)
        self.policies[version] = model
        return version


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("engine")
    first = tiny_llama(0, tied=True)
    first.save_pretrained(folder / "model")
    served = prepare_serving_model(folder / "model", folder / "served")
    engine = await Engine.start(served, CONFIG, version=PolicyVersion(0, 0), seed=1)
    yield World(engine, folder / "weights", first)
    await engine.stop()


async def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(world: World):
    asked = prompts(8)
    completions = await asyncio.gather(*[world.engine.generate(prompt) for prompt in asked])
    assert mean_mismatch(asked, list(completions), world.policies) < 1e-5


async def test_a_completion_that_stops_ends_with_the_end_of_sequence_token(world: World):
    completions = await asyncio.gather(*[world.engine.generate(prompt) for prompt in prompts(32)])
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == EOS and EOS not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 100 for c in completions if c.finish_reason == "length")


async def test_temperature_zero_takes_the_likeliest_token(world: World):
    prompt = prompts(1)[0]
    completion = await world.engine.generate(prompt, temperature=0, max_new_tokens=20)
    model = world.policies[world.engine.version]
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        likeliest = model(tokens).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert completion.token_ids.tolist() == likeliest.tolist()


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
async def test_an_update_under_32_running_requests_takes_effect_at_a_span_boundary(world: World, kv_cache):
    asked = prompts(32)
    version = world.publish(seed=10 if kv_cache == "recompute" else 11)
    with world.puller.fetch(version) as staged:
        running = [asyncio.create_task(world.engine.generate(prompt)) for prompt in asked]
        # once the first has ended, the others are in the middle
        await asyncio.wait(running, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert not all(task.done() for task in running)
        timing = await world.engine.apply(staged, kv_cache)
    assert 0 < timing.load_s < timing.pause_s < 5
    completions = await asyncio.gather(*running)
    for completion in completions:
        assert_spans_cover(completion)
    assert any(len(completion.spans) == 2 for completion in completions)
    if kv_cache == "recompute":
        assert mean_mismatch(asked, completions, world.policies) < 1e-5
    else:
        # keys of the old version remain, so only what came before the update is exact
        before = [c for c in completions if len(c.spans) == 1]
        kept = [p for p, c in zip(asked, completions, strict=True) if len(c.spans) == 1]
        assert not before or mean_mismatch(kept, before, world.policies) < 1e-5
    fresh = await asyncio.gather(*[world.engine.generate(prompt) for prompt in asked])
    assert all(completion.spans[0].version == version == world.engine.version for completion in fresh)
    assert mean_mismatch(asked, list(fresh), world.policies) < 1e-5


async def test_a_prefix_cached_under_one_version_is_not_reused_under_the_next(world: World):
    # longer than a cache block (128 tokens), so that the second request would find it
    prompt = [1, *np.random.default_rng(1).integers(3, 64, size=135).tolist()]
    await world.engine.generate(prompt)
    version = world.publish(seed=14)
    with world.puller.fetch(version) as staged:
        await world.engine.apply(staged, "keep")
    completion = await world.engine.generate(prompt)
    assert mean_mismatch([prompt], [completion], world.policies) < 1e-5


async def test_a_published_head_is_used_even_where_the_served_copy_was_tied(world: World):
    version = world.publish(seed=12, tied=False)
    with world.puller.fetch(version) as staged:
        await world.engine.apply(staged, "keep")
    asked = prompts(4)
    completions = await asyncio.gather(*[world.engine.generate(prompt) for prompt in asked])
    assert mean_mismatch(asked, list(completions), world.policies) < 1e-5


async def test_weights_that_change_after_staging_are_refused_and_the_old_ones_still_serve(world: World):
    serving = world.engine.version
    version = world.publish(seed=13)
    with world.puller.fetch(version) as staged:
        part = world.folder / str(version) / "part-0.safetensors"
        data = bytearray(part.read_bytes())
        data[-5] ^= 1
        part.write_bytes(data)
        with pytest.raises(UpdateRefused, match=r"part-0.safetensors: tensor '.*still serving"):
            await world.engine.apply(staged, "keep")
    assert world.engine.version == serving
    asked = prompts(4)
    completions = await asyncio.gather(*[world.engine.generate(prompt) for prompt in asked])
    assert mean_mismatch(asked, list(completions), world.policies) < 1e-5


async def test_a_prompt_that_is_too_long_is_refused_and_others_go_on(world: World):
    too_long, fine = await asyncio.gather(
        world.engine.generate([1] * 500), world.engine.generate(prompts(1)[0]), return_exceptions=True
    )
    assert isinstance(too_long, RequestRefused)
    assert "500 tokens" in str(too_long)
    assert isinstance(fine, Completion)


async def test_the_same_seed_gives_the_same_completion(world: World):
    prompt = prompts(1)[0]
    first, again, other = [await world.engine.generate(prompt, seed=seed) for seed in (7, 7, 8)]
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()


async def test_a_killed_engine_is_reported_as_dead_and_stays_dead(world: World):
    running = asyncio.gather(*[world.engine.generate(prompt) for prompt in prompts(32)])
    await asyncio.sleep(0.02)
    for child in psutil.Process().children(recursive=True):
        if "Engine" in child.name():
            child.kill()
    with pytest.raises(EngineDead, match="log of this process"):
        await asyncio.wait_for(running, 30)
    with pytest.raises(EngineDead):
        await world.engine.generate([1, 5])


OWNER = """
import asyncio, sys, time
from pathlib import Path
import psutil
from actors.config import ActorsConfig
from actors.engine import Engine
from weight_sync.staleness import PolicyVersion

async def main():
    config = ActorsConfig(max_new_tokens=8, max_prompt_tokens=8, max_running_samples=2, kv_cache_gib=0.05)
    engine = await Engine.start(Path(sys.argv[1]), config, version=PolicyVersion(0, 0), seed=1)
    print("pids", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_an_engine_does_not_outlive_an_owner_that_was_killed(tmp_path: Path):
    tiny_llama(0, tied=False).save_pretrained(tmp_path / "model")
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, script, tmp_path / "model"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("pids"))
        pids = [int(pid) for pid in line.split()[1:]]
        assert pids
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        if owner.stdout is not None:
            # not read to its end, which an engine that lives on would never reach
            owner.stdout.close()
    deadline_s = time.monotonic() + 10
    alive = pids
    while alive and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
        alive = [pid for pid in pids if _runs(pid)]
    assert not alive


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
