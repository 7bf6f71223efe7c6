"""Every split of a step gives the loss and gradients of the unsplit, unpacked model, in float64.

The cases combine every schedule with 1, 2 and 4 stages, 1 and 2 replicas, several budgets, three model families and all
algorithms. A case takes one step and records the gradients just before the optimizer uses them. `make test` runs each
schedule with every second algorithm or budget, and each algorithm with every second schedule.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from leeway.algorithms.oapl import OAPLConfig
from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.online_dpo import OnlineDPOConfig
from leeway.algorithms.registry import AlgorithmConfig, loss_for
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.learner.batch import Leaves
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.networks import Networks
from leeway.learner.packing import micro_batches_required
from leeway.learner.step import TrainStep
from tests.full import pick
from tests.world.learner import SEED, TEMPERATURE, VOCABULARY, build, make_networks, make_rows, run_ranks

NUM_LAYERS = 8
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    # adds soft caps, windows shorter than the sequences, and scaled embeddings
    "gemma2": Gemma2Config(**SHAPE, sliding_window=8, query_pre_attn_scalar=4),
}
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved_1f1b", "num_chunks": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
    "zero_bubble_chunks": {"schedule": "zero_bubble", "num_chunks": 2},
    "fused": {"schedule": "fused"},
    "fused_held_3": {"schedule": "fused"},
    "fused_held_2": {"schedule": "fused"},
}
MOST_HELD = {"fused_held_3": 3, "fused_held_2": 2}
"""Maximum number of micro-batches that a stage of fused passes holds, if lower than the default."""
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "balance": TrajectoryBalanceConfig(),
    "dpo": OnlineDPOConfig(),
    "ppo": OffPolicyPPOConfig(corrections=("token_tis",), kl_beta=0.1, kl_in="loss"),
    "oapl": OAPLConfig(),
    "ppo_critic": OffPolicyPPOConfig(baseline="value_head"),
    "ppo_critic_model": OffPolicyPPOConfig(baseline="critic"),
}
BUDGETS = (30, 64, 300)
FUSED_BUDGETS = (30, 48, 100, 300)
SHAPES = [(replicas, stages) for replicas in (1, 2) for stages in (1, 2, 4)]
SHORT_SHAPE = (2, 2)
"""Shape that `make test` runs; tests/faults/test_learner_resume.py also trains on four stages."""


@dataclass(frozen=True)
class Split:
    """One way to run the step. The result depends only on the family and the algorithm."""

    family: str
    schedule: str
    algorithm: str
    token_budget: int
    one_pass: bool

    @property
    def name(self) -> str:
        """Name of the result file."""
        return f"{self.family}-{self.schedule}-{self.algorithm}-{self.token_budget}-{self.one_pass}"


def splits(num_stages: int) -> list[Split]:
    """Return every schedule with every algorithm; families and budgets alternate so that all their pairs occur."""
    found = []
    every = pick(2, 1)
    for i, (schedule, knobs) in enumerate(SCHEDULES.items()):
        if num_stages == 1 and ("num_chunks" in knobs or knobs["schedule"] == "fused"):
            continue
        if knobs["schedule"] == "fused":
            for j, budget in list(enumerate(FUSED_BUDGETS))[i % every :: every]:
                family = list(FAMILIES)[(i + j) % len(FAMILIES)]
                found.append(Split(family, schedule, "ppo_critic_model", budget, one_pass=False))
            continue
        for j, algorithm in list(enumerate(ALGORITHMS))[i % every :: every]:
            family = list(FAMILIES)[(i + j) % len(FAMILIES)]
            budget = BUDGETS[(i + 2 * j + i // len(BUDGETS)) % len(BUDGETS)]
            found.append(Split(family, schedule, algorithm, budget, one_pass=False))
            if ALGORITHMS[algorithm].needs.separable:
                found.append(Split(family, schedule, algorithm, budget, one_pass=True))
    return found


def one_rank(folder: Path, mesh: Mesh) -> None:
    """Run every split on one process of a test."""
    place = mesh.place
    num_whole = 0
    for split in splits(place.num_stages):
        config = LearnerConfig(**SCHEDULES[split.schedule])
        algorithm = ALGORITHMS[split.algorithm]
        with pytest.MonkeyPatch.context() as patched:
            if split.schedule in MOST_HELD:
                patched.setattr(
                    "leeway.planning.fused.default_most_held", lambda _, most=MOST_HELD[split.schedule]: most
                )
            networks, reference = make_networks(folder / split.family, config, algorithm, mesh)
        for module in (module for network in networks.all for module in network.modules if module.share.is_last):
            if module.heads != "token":
                set_nonzero(module.value_head)
        gradients = record_gradients(networks)
        least, multiple = micro_batches_required(config.schedule, place.num_stages)
        rule = {"num_replicas": place.num_replicas, "min_micro_batches": least, "multiple": multiple}
        if split.one_pass:
            rule["unit"] = algorithm.needs.separable
        step = TrainStep(networks, reference, algorithm, config, SEED, one_pass=split.one_pass)
        batch = build(make_rows(0), 0, split.token_budget, **rule)
        result = step.run(batch, 0)
        assert result.updates[0].result.taken
        assert ("time/forward" not in result.metrics) == (split.one_pass and batch.packed.unit == rule["unit"]), split
        num_whole += batch.packed.unit == "group"
        numbers = dict(zip(("grad_norm", "critic_norm"), result.updates[0].result.grad_norms, strict=False))
        if place.is_coordinator:
            numbers["loss"] = result.updates[0].metrics["loss"]
        seen = {f"seen.{name}": torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        save_file({**gradients, **seen}, folder / f"{split.name}-{place.num_replicas}x{place.num_stages}-{place.rank}")
    assert num_whole, "no loss over groups ran in one pass"


@torch.no_grad()
def set_nonzero(value_head: torch.nn.Linear) -> None:
    """Set nonzero weights, because the initial zeros pass no gradient to the layers below."""
    value_head.weight.copy_(torch.linspace(-0.5, 0.5, value_head.weight.numel(), dtype=torch.float64)[None])
    value_head.bias.fill_(0.1)


def norm_of(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def record_gradients(networks: Networks) -> dict[str, torch.Tensor]:
    """Return a dictionary that is filled with copies of the gradients when the optimizer applies them."""
    found: dict[str, torch.Tensor] = {}
    of_critic = [] if networks.critic is None else networks.critic.optimizers
    for optimizer in networks.optimizers:
        place = "critic." if optimizer in of_critic else ""

        def recording(norm: float, rate: float, optimizer=optimizer, apply=optimizer.apply, place=place) -> None:
            found.update({f"{place}{name}": weight.grad.clone() for name, weight in optimizer.parameters.items()})
            apply(norm, rate)

        optimizer.apply = recording
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model of each family."""
    folder = tmp_path_factory.mktemp("splits")
    for family, config in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).double().save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def unsplit(folder):
    """Return a function that computes the unsplit model's loss and gradients by autograd, sequence by sequence."""
    known: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def compute(family: str, algorithm: str) -> dict[str, torch.Tensor]:
        if (family, algorithm) not in known:
            known[family, algorithm] = gradients_of(folder / family, ALGORITHMS[algorithm])
        return known[family, algorithm]

    return compute


def gradients_of(path: Path, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    softmax = F.softmax
    with pytest.MonkeyPatch.context() as patched:
        # eager attention computes the softmax in float32 for every model dtype
        patched.setattr(F, "softmax", lambda scores, dim, dtype: softmax(scores, dim))
        model, critic = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager") for _ in "12"
        )
        return gradients_of_plain(model, critic if algorithm.needs.critic == "model" else None, algorithm)


def gradients_of_plain(
    model: PreTrainedModel, critic: PreTrainedModel | None, algorithm: AlgorithmConfig
) -> dict[str, torch.Tensor]:
    head = torch.nn.Linear(SHAPE["hidden_size"], 1, dtype=torch.float64)
    set_nonzero(head)
    rows = make_rows(0)
    batch = build(rows, 0, 300)
    logprobs, values = [], []
    for row in rows:
        tokens = torch.from_numpy(row.token_ids).long()
        out = model(tokens[None], output_hidden_states=True)
        predicting = slice(row.prompt_length - 1, -1)
        scores = (out.logits[0] / TEMPERATURE).log_softmax(-1)
        logprobs.append(scores[predicting].gather(1, tokens[row.prompt_length :, None])[:, 0])
        states = out.hidden_states[-1] if critic is None else critic.model(tokens[None]).last_hidden_state
        values.append(head(states[0, predicting])[:, 0])
    leaves = Leaves(torch.cat(logprobs), torch.cat(values) if algorithm.needs.critic else None)
    reference_T = leaves.logprobs_T.detach().float().double()  # the buffer stores float32
    inputs = batch.loss_inputs(leaves, leaves, reference_T)
    graph = {"logprobs_T": leaves.logprobs_T, "values_T": leaves.values_T}
    loss = loss_for(algorithm)(type(inputs)(**{**vars(inputs), **graph})).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    place = "" if critic is None else "critic."
    of_critic = {f"{place}value_head.{name}": parameter.grad for name, parameter in head.named_parameters()}
    if critic is not None:
        of_critic |= {f"critic.model.{name}": parameter.grad for name, parameter in critic.model.named_parameters()}
    norms = {"seen.grad_norm": norm_of(found)}
    if algorithm.needs.critic:
        norms["seen.critic_norm"] = norm_of(of_critic)
        found |= of_critic
    return found | norms | {"seen.loss": loss.detach()}


@pytest.mark.parametrize(
    ("num_replicas", "num_stages"),
    [pytest.param(r, p, id=f"{r}x{p}", marks=() if (r, p) == SHORT_SHAPE else pytest.mark.full) for r, p in SHAPES],
)
def test_loss_and_gradients_of_every_split_equal_those_of_the_unsplit_model(folder, unsplit, num_replicas, num_stages):
    run_ranks("tests.integration.test_learner_exactness", folder, [(num_replicas, num_stages)])
    worst = 0.0
    for split in splits(num_stages):
        expected = unsplit(split.family, split.algorithm)
        found: dict[str, torch.Tensor] = {}
        for rank in range(num_replicas * num_stages):
            for name, gradient in load_file(folder / f"{split.name}-{num_replicas}x{num_stages}-{rank}").items():
                if name in found:
                    assert torch.equal(found[name], gradient), f"{split}: {name} differs between replicas"
                found[name] = gradient
        if FAMILIES[split.family].tie_word_embeddings and num_stages > 1:
            assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"]), split
        assert found.keys() == expected.keys(), split
        for name, gradient in found.items():
            scale = max(1.0, float(expected[name].abs().max()))
            worst = max(worst, float((gradient - expected[name]).abs().max()) / scale)
            assert worst <= 1e-10, f"{split}: {name}"
        assert expected["seen.grad_norm"] > 1e-3, "the gradients are not zero"
    print(f"{num_replicas} x {num_stages}: {len(splits(num_stages))} splits, largest difference {worst:.1e}")
