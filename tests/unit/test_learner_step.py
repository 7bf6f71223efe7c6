"""The two-pass step against an unsplit Transformers model trained on the whole-batch loss, in float64.

Run as a script, this file is one rank of the pipeline: `python FILE FOLDER RANK NUM_STAGES`.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from algorithms.off_policy_ppo import OffPolicyPPOConfig
from algorithms.online_dpo import OnlineDPOConfig
from algorithms.registry import loss_for, needs_reference
from algorithms.trajectory_balance import TrajectoryBalanceConfig
from buffer.trajectory import Trajectory, VersionSpan
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.model import load_stage
from learner.optimizer import StageOptimizer, tied_group
from learner.pipeline import Pipeline
from learner.step import TrainStep
from weight_sync.staleness import PolicyVersion

VOCABULARY, TEMPERATURE, TOKEN_BUDGET, NUM_STEPS = 40, 0.8, 48, 2
CONFIG = LearnerConfig(learning_rate=1e-2, max_grad_norm=0.05, weight_decay=0.1)
CASES = {
    ("tied", "1f1b"): TrajectoryBalanceConfig(),
    ("untied", "gpipe"): OnlineDPOConfig(),
    ("tied", "gpipe"): OffPolicyPPOConfig(kl_beta=0.1),
}


def make_rows(seed: int) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    rows = []
    for group in range(4):
        for index in range(3):
            prompt, length = int(random.integers(1, 7)), int(random.integers(1, 20))
            rows.append(
                Trajectory(
                    lease_id=0,
                    attempt=0,
                    group_id=group,
                    sample_index=index,
                    prompt_id=group,
                    token_ids=random.integers(0, VOCABULARY, prompt + length).astype(np.int32),
                    prompt_length=prompt,
                    logprobs=-random.random(length).astype(np.float32) * 5,
                    spans=(VersionSpan(PolicyVersion(0, 0), 0, length),),
                    reward=float(random.random()),
                    finish_reason="stop",
                )
            )
    return rows


def train_one_rank() -> None:
    """What each subprocess of the fixture runs."""
    folder, rank, num_stages = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_stages}",
        rank=rank,
        world_size=num_stages,
        timeout=timedelta(seconds=60),
    )
    for (kind, schedule), algorithm in CASES.items():

        def load(kind=kind):
            return load_stage(
                folder / kind,
                rank,
                num_stages,
                temperature=TEMPERATURE,
                device=torch.device("cpu"),
                dtype=torch.float64,
            )

        module = load()
        reference = Pipeline(load().requires_grad_(False), schedule, None) if needs_reference(algorithm) else None
        optimizer = StageOptimizer(module, CONFIG, None, tied_group(module))
        train_step = TrainStep(Pipeline(module, schedule, None), reference, optimizer, algorithm)
        tensors = {}
        for step in range(NUM_STEPS):
            # the second step fits one micro-batch: it is spread over the stages, and one more stays empty
            budget, least = (TOKEN_BUDGET, 1) if step == 0 else (4096, 12)
            batch = StepBatch.build(make_rows(step), step, {0: 0}, budget, least)
            assert batch.packed.num_micro_batches > num_stages
            result = train_step.run(batch, step, step, budget)
            assert not result.skipped
            tensors[f"grad_norm.{step}"] = torch.tensor(result.metrics["grad_norm"], dtype=torch.float64)
            if module.share.is_last:
                tensors[f"loss.{step}"] = torch.tensor(result.metrics["loss"], dtype=torch.float64)
                truncated = [f"off_policy/ess_{of}_truncated" in result.metrics for of in ("token", "sequence")]
                assert truncated == [algorithm.type == "off_policy_ppo"] * 2, "logged where, and only where, truncated"
        # copies: a file refuses two names for one memory
        tensors |= {name: tensor.clone() for name, tensor in module.published_tensors().items()}
        save_file(tensors, folder / f"{kind}-{schedule}-{num_stages}-{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Every case trained at one stage and at two."""
    folder = tmp_path_factory.mktemp("exactness")
    for kind in ("tied", "untied"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            tie_word_embeddings=kind == "tied",
        )
        LlamaForCausalLM(config).double().save_pretrained(folder / kind)
    ranks = [(1, 0), (2, 0), (2, 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(folder), str(rank), str(num_stages)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for num_stages, rank in ranks
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return folder


def token_logprobs(model, row) -> torch.Tensor:
    tokens = torch.from_numpy(row.token_ids).long()
    scores = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return scores[row.prompt_length - 1 : -1].gather(1, tokens[row.prompt_length :, None])[:, 0]


def train_unsplit(folder: Path, kind: str, algorithm) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The same two steps with plain autograd through the whole loss and torch's own AdamW and clipping."""
    model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=CONFIG.learning_rate, betas=(CONFIG.adam_beta1, CONFIG.adam_beta2))
    seen = {}
    for step in range(NUM_STEPS):
        rows = make_rows(step)
        batch = StepBatch.build(rows, step, {0: 0}, TOKEN_BUDGET)
        logprobs_T = torch.cat([token_logprobs(model, row) for row in rows])
        with torch.no_grad():
            reference_T = torch.cat([token_logprobs(reference, row) for row in rows])
        inputs = batch.loss_inputs(logprobs_T, reference_T, step)
        # put the model's graph back in place of the leaf
        loss = loss_for(algorithm)(type(inputs)(**{**vars(inputs), "logprobs_T": logprobs_T})).loss
        adam.zero_grad()
        loss.backward()
        seen[f"loss.{step}"] = loss.item()
        seen[f"grad_norm.{step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.max_grad_norm).item()
        adam.step()
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    weights["lm_head.weight"] = model.lm_head.weight.detach()
    return weights, seen


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_split_training_equals_unsplit_training_on_the_whole_batch_loss(trained, kind, schedule, num_stages):
    weights, seen = train_unsplit(trained, kind, CASES[kind, schedule])
    parts = [load_file(trained / f"{kind}-{schedule}-{num_stages}-{rank}.safetensors") for rank in range(num_stages)]
    for name, value in seen.items():
        assert parts[-1][name].item() == pytest.approx(value, rel=1e-10, abs=1e-12), name
    assert seen["grad_norm.0"] > CONFIG.max_grad_norm, "clipping must be at work"
    merged = {name: tensor for part in parts for name, tensor in part.items() if name not in seen}
    assert merged.keys() == weights.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9, msg=name)
    if kind == "tied":
        assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


if __name__ == "__main__":
    train_one_rank()
