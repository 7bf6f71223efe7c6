"""The step compared with an unsplit Transformers model trained by autograd on whole minibatches, in float64."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.online_dpo import OnlineDPOConfig
from leeway.algorithms.registry import loss_for
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.learner.batch import Leaves
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.step import _Clock, minibatches
from tests.full import FULL
from tests.world.learner import (
    NUM_STEPS,
    SEED,
    TEMPERATURE,
    Case,
    build,
    make_models,
    make_rows,
    run_ranks,
    train_cases,
)

ONE = {"learning_rate": 1e-2, "max_grad_norm": 0.05, "warmup_steps": 0, "lr_schedule": "constant"}
SEVERAL = {**ONE, "num_minibatches": 2, "num_epochs": 2, "lr_schedule": "linear", "num_steps": 3}
CASES = {
    "balance": Case("tied", LearnerConfig(**ONE, schedule="1f1b"), TrajectoryBalanceConfig()),
    "dpo": Case("untied", LearnerConfig(**ONE), OnlineDPOConfig()),
    "ppo": Case("tied", LearnerConfig(**ONE), OffPolicyPPOConfig(kl_beta=0.1)),
    "ppo-several": Case("untied", LearnerConfig(**SEVERAL), OffPolicyPPOConfig(corrections=("token_tis",))),
    "interpolated": Case("tied", LearnerConfig(**SEVERAL), OffPolicyPPOConfig(proximal="interpolated")),
    "interpolated-shaped": Case(
        "untied", LearnerConfig(**SEVERAL), OffPolicyPPOConfig(proximal="interpolated", kl_beta=0.1)
    ),
    "ppo-epochs": Case("tied", LearnerConfig(**ONE, num_epochs=3), OffPolicyPPOConfig()),
    "head": Case(
        "tied",
        LearnerConfig(**SEVERAL, critic_learning_rate=3e-2),
        OffPolicyPPOConfig(baseline="value_head", kl_beta=0.1),
    ),
    "head-untied": Case("untied", LearnerConfig(**ONE), OffPolicyPPOConfig(baseline="value_head")),
    "model": Case(
        "untied",
        LearnerConfig(**SEVERAL, schedule="fused", critic_learning_rate=3e-2),
        OffPolicyPPOConfig(baseline="critic"),
    ),
    "model-tied": Case("tied", LearnerConfig(**SEVERAL), OffPolicyPPOConfig(baseline="critic")),
}


SHAPES = [(1, 1), (2, 2), *([(1, 2)] if FULL else ())]
"""(replicas, stages) of each run of the step."""
WITHOUT_STAGES = CASES if FULL else ("balance", "ppo", "ppo-several", "ppo-epochs", "model")
"""Cases that a single process trains: enough that `make test` runs each path through the step once."""
SPLITS = [(name, shape) for shape in SHAPES for name in CASES if shape != (1, 1) or name in WITHOUT_STAGES]
IN_FLOAT32 = {
    f"{kind}-{precision}": Case(
        kind, LearnerConfig(**ONE, schedule="zero_bubble"), TrajectoryBalanceConfig(), precision
    )
    for kind in ("tied", "untied")
    for precision in ("float32", "bfloat16")
}


def one_rank(folder: Path, mesh: Mesh) -> None:
    """Run on each process of the fixture."""
    shape = (mesh.place.num_replicas, mesh.place.num_stages)
    cases = {name: CASES[name] for name, where in SPLITS if where == shape}
    train_cases(cases | IN_FLOAT32, folder, mesh)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Train every case in each of the `SHAPES`: with one process, and with several replicas and stages."""
    folder = tmp_path_factory.mktemp("exactness")
    make_models(folder)
    run_ranks("tests.integration.test_learner_step", folder, SHAPES)
    return folder


class Unsplit:
    """Reference run with plain autograd through the whole loss, and the AdamW and clipping of torch."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.case = case
        self.policy = AutoModelForCausalLM.from_pretrained(folder / case.kind, dtype=torch.float64)
        self.reference = AutoModelForCausalLM.from_pretrained(folder / case.kind, dtype=torch.float64)
        self.critic = None
        self.head = torch.nn.Linear(16, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.kind = case.algorithm.needs.critic
        self.optimizers = [self._adam(list(self.policy.parameters()))]
        if self.kind == "head":
            self.optimizers.append(self._adam(list(self.head.parameters())))
        if self.kind == "model":
            self.critic = AutoModelForCausalLM.from_pretrained(folder / case.kind, dtype=torch.float64).model
            self.optimizers.append(self._adam([*self.critic.parameters(), *self.head.parameters()]))
        self.seen: dict[str, float] = {}

    def _adam(self, parameters) -> torch.optim.AdamW:
        return torch.optim.Adam(parameters, betas=(0.9, 0.99))

    def leaves(self, rows, model=None) -> Leaves:
        logprobs, values = [], []
        for row in rows:
            tokens = torch.from_numpy(row.token_ids).long()
            predicting = slice(row.prompt_length - 1, -1)
            out = (model or self.policy)(tokens[None], output_hidden_states=True)
            scores = (out.logits[0] / TEMPERATURE).log_softmax(-1)
            logprobs.append(scores[predicting].gather(1, tokens[row.prompt_length :, None])[:, 0])
            if self.kind is not None:
                # the last hidden state is the output of the final norm
                states = out.hidden_states[-1] if self.critic is None else self.critic(tokens[None]).last_hidden_state
                values.append(self.head(states[0, predicting])[:, 0])
        return Leaves(torch.cat(logprobs), torch.cat(values) if values else None)

    def train(self) -> None:
        config, version = self.case.config, 0
        for step in range(NUM_STEPS):
            rows = make_rows(step)
            batch = build(rows, version)
            with torch.no_grad():
                old = self.leaves(rows)
                # the buffer stores scores in float32
                reference_T = self.leaves(rows, self.reference).logprobs_T.float().double()
            plan = minibatches(batch.group_B, config.num_minibatches, config.num_epochs, (SEED, step))
            for number, sequences in enumerate(plan):
                where_T = torch.from_numpy(batch.tokens_of(sequences))
                part, chosen = batch.part(sequences, version), [rows[i] for i in sequences]
                self._update(part, chosen, old.of(where_T), reference_T[where_T], (step, number))
                version += 1

    def _update(self, part, rows, old, reference_T, where) -> None:
        leaves = self.leaves(rows)
        inputs = part.loss_inputs(leaves, old, reference_T)
        # backpropagate through the model, not only to its outputs
        graph = {"logprobs_T": leaves.logprobs_T, "values_T": leaves.values_T}
        loss = loss_for(self.case.algorithm)(type(inputs)(**{**vars(inputs), **graph})).loss
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        prefix = f"seen.{where[0]}.{where[1]}."
        self.seen[prefix + "loss"] = loss.item()
        config = self.case.config
        share = 1 - part.version / (config.num_steps * config.updates_per_step)
        rates = [config.learning_rate, config.critic_learning_rate or config.learning_rate]
        for name, optimizer, rate in zip(("grad_norm", "critic_norm"), self.optimizers, rates, strict=False):
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.seen[prefix + name] = torch.nn.utils.clip_grad_norm_(own, config.max_grad_norm).item()
            for group in optimizer.param_groups:
                group["lr"] = rate * (share if config.lr_schedule == "linear" else 1.0)
            optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        found = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        found["lm_head.weight"] = self.policy.lm_head.weight.detach()
        place = {"head": "policy.value_head.", "model": "critic.value_head."}.get(self.kind)
        if place is not None:
            found |= {place + name: parameter.detach() for name, parameter in self.head.named_parameters()}
        if self.critic is not None:
            found |= {f"critic.model.{name}": p.detach() for name, p in self.critic.named_parameters()}
        return found


@pytest.fixture(scope="module")
def unsplit_of(trained):
    """Return `unsplit_of(name)`, which trains a case unsplit, once for all shapes."""

    @cache
    def train(name: str) -> Unsplit:
        unsplit = Unsplit(trained, CASES[name])
        unsplit.train()
        return unsplit

    return train


@pytest.mark.parametrize(("name", "shape"), SPLITS, ids=str)
def test_split_training_equals_unsplit_training_on_the_whole_batch_loss(trained, unsplit_of, name, shape):
    num_replicas, num_stages = shape
    unsplit = unsplit_of(name)
    files = [f"{name}-{num_replicas}x{num_stages}-{rank}.safetensors" for rank in range(num_replicas * num_stages)]
    parts = [load_file(trained / file) for file in files]
    for key, value in unsplit.seen.items():
        assert parts[num_stages - 1][key].item() == pytest.approx(value, rel=1e-12, abs=1e-13), key
    assert unsplit.seen["seen.0.0.grad_norm"] > 0.05, "clipping must be active"
    merged = {key: tensor for part in parts for key, tensor in part.items() if not key.startswith("seen.")}
    weights = unsplit.weights()
    assert merged.keys() == weights.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-12, msg=key)
    if CASES[name].kind == "tied":
        assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def clip_fractions(folder: Path, name: str) -> list[float]:
    found = load_file(folder / f"{name}-1x1-0.safetensors")
    sides = [f"off_policy/clip_frac_{side}" for side in ("low", "high")]
    return [float(found[key]) for key in sorted(found) if any(key.endswith(side) for side in sides)]


def test_several_updates_of_a_step_reach_the_clip_and_one_never_does(trained):
    assert set(clip_fractions(trained, "ppo")) == {0.0}
    assert max(clip_fractions(trained, "ppo-several")) > 0
    assert max(clip_fractions(trained, "ppo-epochs")) > 0


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_float32_training_keeps_tied_copies_equal_and_stays_near_one_process(trained, name):
    one, first, last = (load_file(trained / f"{name}-{where}.safetensors") for where in ("1x1-0", "2x2-0", "2x2-1"))
    case = IN_FLOAT32[name]
    both = first | last
    assert one["seen.0.0.grad_norm"] > case.config.max_grad_norm, "clipping must be active"
    assert torch.equal(both["lm_head.weight"], both["model.embed_tokens.weight"]) == (case.kind == "tied")
    start = load_file(trained / case.kind / "model.safetensors")
    for key, tensor in both.items():
        if not key.startswith("seen."):
            assert tensor.dtype == torch.float32
            initial = start[key if key in start else "model.embed_tokens.weight"]
            # Adam moves every weight by a similar distance for any gradient, so compare directions
            cosine = torch.cosine_similarity((tensor - initial).flatten(), (one[key] - initial).flatten(), dim=0)
            assert cosine > 0.9, key
            if case.precision == "float32":
                torch.testing.assert_close(tensor, one[key], rtol=0, atol=1e-5, msg=key)
    for step in range(NUM_STEPS):
        for number, rel in (("loss", 0.02), ("grad_norm", 0.05)):
            key = f"seen.{step}.0.{number}"
            assert both[key].item() == pytest.approx(one[key].item(), rel=rel), key


def test_a_clock_lap_waits_for_the_kernels_of_its_gpu_and_for_none_on_a_cpu(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        clock = _Clock(device)
        clock.lap("time/forward")
        clock.lap("time/forward")
        assert list(clock.laps_s) == ["time/forward"]
    assert waited == [torch.device("cuda", 1)] * 2
