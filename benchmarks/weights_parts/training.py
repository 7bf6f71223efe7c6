"""Training of SmolLM2-135M with the learner's step on samples of the model itself, and uses of the weights.

The learner has AdamW, float32 weights, bf16 autocast, and one stage of one thread. Samples of the model itself give
gradients of realistic size and noise. Transformers generates the samples once into a file, so that every measurement
trains on the same samples.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.lib.learner import GROUP_SIZE, Learner, sample
from benchmarks.weights_parts.handover import RUN_ID
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from leeway.buffer.schema import Trajectory
from leeway.common.staleness import PolicyVersion
from leeway.learner.batch import StepBatch
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh, MeshPlace
from leeway.weight_sync.client import StoreAccess
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.delta import decode_delta, encode_delta
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.store import KEPT_VERSIONS
from leeway.weight_sync.tensors import host_bytes

NEW_TOKENS = 24
TEMPLATE = "3 + 4 = 7\n{} + {} ="
_NUMBER = re.compile(r"-?\d+")
TOKEN_BUDGET = 512
ITEM_BYTES = 2
LEARNER_FLUSH_S, SENDER_FLUSH_S = 120.0, 60.0


class Sampling:
    """Generator of the learner's training samples."""

    def __init__(self, *, model: str) -> None:
        """Load the model of a checkpoint folder."""
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def make(self, *, path: str, num_groups: int) -> None:
        """Sample K = GROUP_SIZE completions for each of several sums of two numbers, and write them as .npz."""
        random = np.random.default_rng(11)
        torch.manual_seed(11)
        sums = random.integers(10, 90, (num_groups, 2))
        prompts = [self._tokenizer(TEMPLATE.format(a, b))["input_ids"] for a, b in sums]
        length = max(len(prompt) for prompt in prompts)
        # prompts get equal lengths by a longer example instead of padding, which would need masks
        prompts = [[*prompt[: length - len(prompt)], *prompt] for prompt in prompts]
        tokens = torch.tensor(prompts).repeat_interleave(GROUP_SIZE, 0)
        logprobs = []
        cache, new = None, tokens
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                output = self._model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                chances = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
                new = torch.multinomial(chances.exp(), 1)
                logprobs.append(chances.gather(1, new)[:, 0])
                tokens = torch.cat([tokens, new], 1)
        texts = self._tokenizer.batch_decode(tokens[:, length:])
        rewards = [closeness(text, int(sums[i // GROUP_SIZE].sum())) for i, text in enumerate(texts)]
        np.savez(
            path,
            tokens=tokens.numpy().astype(np.int32),
            logprobs=torch.stack(logprobs, 1).numpy().astype(np.float32),
            rewards=np.asarray(rewards, np.float64),
        )

    def close(self) -> None:
        """Do nothing, because this object has no open resources."""


def trajectories(path: Path) -> list[Trajectory]:
    """Return the samples written by `make`, ordered by group."""
    with np.load(path) as saved:
        tokens, logprobs, rewards = saved["tokens"], saved["logprobs"], saved["rewards"]
    return [sample(i, tokens[i], logprobs[i], float(rewards[i]), "length") for i in range(len(tokens))]


def closeness(text: str, right: int) -> float:
    """Return 1 if the first number of a text is correct, up to 0.5 if it is close, and 0 for a text without numbers."""
    found = _NUMBER.search(text)
    if found is None:
        return 0.0
    distance = abs(int(found.group()[:12]) - right)
    return 1.0 if distance == 0 else 0.5 / (1.0 + distance / 5.0)


class Trainer:
    """Learner that trains on stored samples in repeated passes, with a few groups per step."""

    def __init__(self, *, model: str, samples: str, scratch: str, learning_rate: float, groups_per_step: int) -> None:
        """Load the model; `scratch` is a folder for temporary files, and the learning rate is constant."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        rendezvous = Path(scratch) / f"group-{os.getpid()}"
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
        config = LearnerConfig(
            num_stages=1, learning_rate=learning_rate, token_budget=TOKEN_BUDGET, precision="bfloat16"
        )
        self._learner = Learner(Path(model), Mesh.build(MeshPlace(0)), config)
        self._batches = self._in_turn(Path(samples), groups_per_step)
        self.version = 0

    def step(self) -> float:
        """Take one optimizer step; return the gradient norm before clipping."""
        norm = self._learner.step(next(self._batches), self.version)
        self.version += 1
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return name in the checkpoint -> tensor that a stage publishes. The tensors are the weights, not copies."""
        return self._learner.policy.published_tensors()

    def boundary_share(self) -> float:
        """Return the fraction of weights halfway between two bfloat16 values, whose rounding changes with any step."""
        bits = [tensor.view(torch.int32) & 0xFFFF for tensor in self.tensors().values()]
        return sum(int((each == 0x8000).sum()) for each in bits) / sum(each.numel() for each in bits)

    @torch.no_grad()
    def spread(self) -> None:
        """Move every weight to a random value that rounds to the same bfloat16.

        Trained weights are distributed like these values; this checkpoint was made from four-bit weights and has few
        distinct values.
        """
        generator = torch.Generator().manual_seed(1)
        for _, parameter in self._learner.policy.named_weights():
            rounded = parameter.to(torch.bfloat16).float()
            bits = torch.randint(-0x7FFF, 0x7FFF, rounded.shape, generator=generator, dtype=torch.int32)
            moved = (rounded.view(torch.int32) + bits).view(torch.float32)
            parameter.copy_(torch.where(rounded == 0, rounded, moved))
        for optimizer in self._learner.policy.optimizers:
            optimizer.round()

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def _in_turn(self, samples: Path, groups_per_step: int) -> Iterator[StepBatch]:
        rows = trajectories(samples)
        size = groups_per_step * GROUP_SIZE
        starts = range(0, len(rows) - size + 1, size)
        return (self._learner.batch(rows[start : start + size]) for start in itertools.cycle(starts))


class DeltaLearner:
    """Learner that encodes the changes of each step as a delta in bfloat16."""

    def __init__(self, *, snapshots: str, spread: bool, **training: Any) -> None:  # noqa: ANN401 -- JSON
        """Load the model.

        Args:
            snapshots: folder for the weights of the last two versions, which other measurements send; "" saves none.
            spread: whether to call `Trainer.spread` first.
            training: arguments of the Trainer.
        """
        self._trainer = Trainer(**training)
        self._snapshots = snapshots
        if spread:
            self._trainer.spread()

    def boundary_share(self) -> float:
        """Return the result of `Trainer.boundary_share`."""
        return self._trainer.boundary_share()

    def steps(self, *, num_steps: int) -> list[dict[str, float]]:
        """Take steps and measure the delta of each.

        Returns:
            For each step: `unchanged` (fraction of values that are the same in bfloat16), `delta_bytes`, `full_bytes`,
            `encode_s`, `decode_s`, `step_s` and `norm` of the gradient.
        """
        old = self._rounded()
        rounds: list[dict[str, float]] = []
        for number in range(num_steps):
            if self._snapshots and number == num_steps - 1:
                self._save("before")
            start = time.perf_counter()
            norm = self._trainer.step()
            step_s = time.perf_counter() - start
            new = self._rounded()
            rounds.append({**differences(new, old), "step_s": step_s, "norm": norm})
            old = new
        if self._snapshots:
            self._save("after")
        return rounds

    def close(self) -> None:
        """Destroy the process group."""
        self._trainer.close()

    def _rounded(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(torch.bfloat16) for name, tensor in self._trainer.tensors().items()}

    def _save(self, name: str) -> None:
        """Save the weights as float32; a `Sender` rounds them to its own dtype."""
        tensors = {key: tensor.clone() for key, tensor in self._trainer.tensors().items()}
        save_file(tensors, Path(self._snapshots) / f"{name}.safetensors")


def differences(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> dict[str, float]:
    """Measure the delta of all tensors, and check that decoding restores the new bytes.

    Args:
        new: tensors of the version, bfloat16.
        old: tensors of its parent.
    """
    found = dict.fromkeys(("delta_bytes", "full_bytes", "encode_s", "decode_s"), 0.0)
    num_same = num_values = 0
    for name, tensor in new.items():
        num_same += int((tensor == old[name]).sum())
        num_values += tensor.numel()
        ours, theirs = host_bytes(tensor), host_bytes(old[name])
        start = time.perf_counter()
        encoding, blob = encode_delta(ours, theirs, ITEM_BYTES)
        encoded = time.perf_counter()
        back = decode_delta(encoding, memoryview(blob), theirs, ITEM_BYTES)
        found["decode_s"] += time.perf_counter() - encoded
        found["encode_s"] += encoded - start
        found["delta_bytes"] += len(blob)
        found["full_bytes"] += len(ours)
        if bytes(back) != bytes(ours):
            raise RuntimeError(f"decoding the delta of {name} does not restore its bytes")
    return {**found, "unchanged": num_same / num_values}


class PublishingLearner:
    """Learner that takes real optimizer steps, and publishes the weights after each step."""

    def __init__(self, *, folder: str, dtypes: list[str], **training: Any) -> None:  # noqa: ANN401 -- JSON
        """Load the model.

        Args:
            folder: folder of the weight store.
            dtypes: dtypes to publish.
            training: arguments of the Trainer.
        """
        self._trainer = Trainer(**training)
        knobs = WeightSyncConfig(transport="folder")
        sink = StoreAccess(knobs, Path(folder), "", RUN_ID).open_sink("learner")
        self._publisher = Publisher(sink, 0, 1, dtypes, keep_versions=KEPT_VERSIONS, full_every=1)
        self._rounds: list[dict[str, float]] = []

    def train(self, *, num_steps: int) -> None:
        """Take steps and publish after each; the last version may still be incomplete on return."""
        for _ in range(num_steps):
            start = time.perf_counter()
            norm = self._trainer.step()
            stepped = time.perf_counter()
            found = {"step": stepped - start, "norm": norm}
            self._rounds.append(found)
            version = PolicyVersion(0, self._trainer.version)
            self._publisher.publish(version, self._trainer.tensors(), functools.partial(_note_commit, found, stepped))
            found["publish"] = time.perf_counter() - stepped

    def finish(self) -> list[dict[str, float]]:
        """Wait until all versions are published.

        Returns:
            For each step, `norm` is the gradient norm. Times are in seconds: `step` without publishing, `publish` for
            the call of the publisher, and `committed` from the start of this call until the version is available.
        """
        self._publisher.flush(LEARNER_FLUSH_S)
        return self._rounds

    def close(self) -> None:
        """Close the publisher and destroy the process group."""
        self._publisher.close()
        self._trainer.close()


def _note_commit(found: dict[str, float], began_s: float, version: PolicyVersion) -> None:
    found["committed"] = time.perf_counter() - began_s


class Sender:
    """Sender that alternates between two versions of the weights, one optimizer step apart.

    A version is sent through a Publisher or with torch.save, from the same tensors in memory.
    """

    def __init__(
        self, *, snapshots: list[str], dtype: str, folder: str, full_every: int = 1, num_values: int | None = None
    ) -> None:
        """Load the tensors into memory, in the dtype to send.

        Args:
            snapshots: safetensors files of the versions.
            dtype: dtype to send.
            folder: folder of the weight store.
            full_every: interval of full versions; 1 disables deltas.
            num_values: maximum number of values of a version, which then has only some tensors; None sends all.
        """
        torch.set_num_threads(1)
        self._versions = [
            {name: tensor.to(getattr(torch, dtype)).clone() for name, tensor in load_file(path).items()}
            for path in snapshots
        ]
        if num_values is not None:
            self._versions = [_first(tensors, num_values) for tensors in self._versions]
        self._turn = 0
        knobs = WeightSyncConfig(transport="folder")
        sink = StoreAccess(knobs, Path(folder), "", RUN_ID).open_sink("sender")
        self._publisher = Publisher(sink, 0, 1, [dtype], keep_versions=KEPT_VERSIONS, full_every=full_every)

    def num_bytes(self) -> int:
        """Return the bytes of a full version."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._versions[0].values())

    def publish(self, *, version: int) -> dict[str, float]:
        """Publish the next version, and wait until the version is complete.

        Returns:
            `began` is a time of the clock that all processes share. `call` is the number of seconds that the call
            blocked.
        """
        tensors = self._next()
        began = time.perf_counter()
        self._publisher.publish(PolicyVersion(0, version), tensors)
        call_s = time.perf_counter() - began
        self._publisher.flush(SENDER_FLUSH_S)
        return {"began": began, "call": call_s}

    def save(self, *, path: str) -> float:
        """Save the next version with torch.save; return the seconds."""
        tensors = self._next()
        began = time.perf_counter()
        torch.save(tensors, path)
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()

    def _next(self) -> dict[str, torch.Tensor]:
        self._turn += 1
        return self._versions[self._turn % len(self._versions)]


def _first(tensors: dict[str, torch.Tensor], num_values: int) -> dict[str, torch.Tensor]:
    """Return the first tensors by name that have at most `num_values` values together."""
    chosen: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.numel() <= num_values:
            chosen[name] = tensor
            num_values -= tensor.numel()
    return chosen
