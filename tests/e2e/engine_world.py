"""Helpers of the engine tests: small policies, split into the stages of the learner, and their publishers."""

import itertools
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.actors.config import ActorsConfig
from leeway.actors.engine import Engine
from leeway.actors.engine_core import Generation
from leeway.common.staleness import PolicyVersion
from leeway.learner.model import load_stage
from leeway.learner.packing import PackingRule, pack
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import WeightStore
from tests.unit.small_models import run

EOS = 2
TEMPERATURE = 0.8
CONFIG = ActorsConfig(
    temperature=TEMPERATURE, max_new_tokens=100, max_prompt_tokens=140, max_running_samples=48, kv_cache_gib=0.009
)
"""The cache has 73 blocks of 128 tokens: 32 samples fit at any length, and 48 do not."""
DTYPES = ("float32", "bfloat16")
NUM_STAGES = 2
HIDDEN_SIZE = 64
Logprobs = list[np.ndarray]


def tiny_llama(seed: int, *, tied: bool, hidden_size: int = HIDDEN_SIZE) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
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


def make_prompts(num: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [[1, *generator.integers(3, 64, size=int(n)).tolist()] for n in generator.integers(3, 19, size=num)]


def long_prompt(seed: int) -> list[int]:
    """Return a prompt longer than a cache block (128 tokens), so that a second request could reuse the block."""
    return [1, *np.random.default_rng(seed).integers(3, 64, size=135).tolist()]


def transformers_logprobs(model: LlamaForCausalLM, prompt: list[int], completion: Generation) -> np.ndarray:
    """Return teacher-forced log-probabilities of the completion under plain Transformers."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0, :-1] / TEMPERATURE, dim=-1)
    taken = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    return taken[len(prompt) - 1 :].numpy()


class Policy:
    """The weights of one version, as a whole model and split into the stages of the learner."""

    def __init__(self, folder: Path, model: LlamaForCausalLM) -> None:
        self.model = model
        model.save_pretrained(folder)
        cpu = torch.device("cpu")
        self.stages = [
            load_stage(folder, i, NUM_STAGES, temperature=TEMPERATURE, device=cpu) for i in range(NUM_STAGES)
        ]

    def logprobs(self, prompts: list[list[int]], completions: list[Generation]) -> Logprobs:
        """Return the learner's log-probabilities of all completions."""
        sequences = [np.array([*p, *c.token_ids]) for p, c in zip(prompts, completions, strict=True)]
        packed = pack(sequences, [len(prompt) for prompt in prompts], PackingRule(256))
        with torch.no_grad():
            output_T = run(self.stages, packed).flatten()[torch.from_numpy(packed.output_T)].numpy()
        edges = np.cumsum([len(c.token_ids) for c in completions])
        return np.split(output_T, edges[:-1])


def gap(found: list[Generation], truth: Logprobs) -> float:
    """Return the mean absolute difference of the log-probabilities over all tokens."""
    return float(np.concatenate([np.abs(c.logprobs - t) for c, t in zip(found, truth, strict=True)]).mean())


def assert_spans_cover(completion: Generation) -> None:
    edges = [(span.start, span.end) for span in completion.spans]
    assert edges[0][0] == 0
    assert edges[-1][1] == len(completion.token_ids) == len(completion.logprobs)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert [span.version for span in completion.spans] == sorted(span.version for span in completion.spans)


class World:
    """An engine, the weight store that the engine reads, and the weights of each version."""

    def __init__(self, engine: Engine, folder: Path, first: Policy) -> None:
        self.engine = engine
        self.folder = folder / "weights"
        self.policies = {PolicyVersion(0, 0): first}
        self.learner = self._publishers()
        self.puller = Puller.of_folder(self.folder, "float32")

    def _publishers(self) -> list[Publisher]:
        return [
            Publisher(WeightStore(self.folder), rank, NUM_STAGES, DTYPES, keep_versions=3, full_every=1000)
            for rank in range(NUM_STAGES)
        ]

    def publish(self, *, tied: bool = True, hidden_size: int = HIDDEN_SIZE, only: str = "") -> PolicyVersion:
        """Publish the next version from all stages of the learner.

        Args:
            tied: share head and embedding.
            hidden_size: hidden size of the model.
            only: change only the tensors whose names contain this text; "": change all tensors.
        """
        newest = max(self.policies)
        version = PolicyVersion(0, newest.version + 1)
        model = tiny_llama(version.version, tied=tied, hidden_size=hidden_size)
        if only:
            before = self.policies[newest].model.state_dict()
            model.load_state_dict({name: t if only in name else before[name] for name, t in model.state_dict().items()})
        policy = Policy(self.folder.parent / f"hf-{version}", model)
        # a learner never changes the shapes of its tensors, so a second learner publishes other shapes
        publishers = self.learner if hidden_size == HIDDEN_SIZE else self._publishers()
        for publisher, stage in zip(publishers, policy.stages, strict=True):
            publisher.publish(version, stage.published_tensors())
        for publisher in publishers:
            publisher.flush(30)
        if publishers is not self.learner:
            for publisher in publishers:
                publisher.close()
        self.policies[version] = policy
        return version

    def close(self) -> None:
        for publisher in self.learner:
            publisher.close()
        self.puller.close()

    def gaps(self, prompts: list[list[int]], completions: list[Generation]) -> tuple[float, float]:
        """Return the mean absolute difference of log-probabilities from the learner at the version of each span.

        Returns:
            The mean over all first spans, and the mean over all later spans.
        """
        versions = {span.version for completion in completions for span in completion.spans}
        truths = {version: self.policies[version].logprobs(prompts, completions) for version in versions}
        first, later = [np.zeros(0)], [np.zeros(0)]
        for index, completion in enumerate(completions):
            for span in completion.spans:
                difference = np.abs(completion.logprobs - truths[span.version][index])[span.start : span.end]
                (later if span.start else first).append(difference)
        means = [float(values.mean()) if len(values) else 0.0 for values in map(np.concatenate, (first, later))]
        return means[0], means[1]
