"""Several teachers: each scores its own prompts, and a mixed batch has the scores and gradient of the unsplit models.

The tests run in float64 on one and on two stages, with one pass and with two passes, which use offloaded teachers.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from leeway.algorithms.distillation import DistillationConfig
from leeway.algorithms.registry import loss_for
from leeway.learner.batch import Leaves
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.packing import micro_batches_required
from leeway.learner.step import TrainStep
from tests.integration.test_learner_exactness import SHAPE, record_gradients
from tests.world.learner import SEED, TEMPERATURE, build, make_networks, make_rows, run_ranks

ALGORITHM = DistillationConfig()
MODELS = {
    "student": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    # the teachers differ from the student in family, width or depth
    "math": Qwen3Config(**{**SHAPE, "hidden_size": 24, "num_hidden_layers": 3}, tie_word_embeddings=False),
    "code": Gemma2Config(**{**SHAPE, "num_hidden_layers": 2}, sliding_window=8, query_pre_attn_scalar=4),
}
TEACHERS = ("math", "code")
TEACHER_OF_PROMPT = bytes([1, 0, 0, 1])
BUDGET = 30


def one_rank(folder: Path, mesh: Mesh) -> None:
    """Run on each process of a test."""
    place = mesh.place
    fewest, multiple = micro_batches_required("1f1b", place.num_stages)
    rule = {"min_micro_batches": fewest, "multiple": multiple}
    for name, one_pass, offload in (("once", True, "none"), ("twice", False, "cpu")):
        config = LearnerConfig(reference_offload=offload)
        networks, reference = make_networks(
            folder / "student",
            config,
            ALGORITHM,
            mesh,
            reference_paths=tuple(folder / teacher for teacher in TEACHERS),
            teacher_of_prompt=TEACHER_OF_PROMPT,
        )
        gradients = record_gradients(networks)
        result = TrainStep(networks, reference, ALGORITHM, config, SEED, one_pass=one_pass).run(
            build(make_rows(0), 0, BUDGET, **rule), 0
        )
        assert result.updates[0].result.taken
        assert ("time/forward" in result.metrics) == (not one_pass)
        found = dict(gradients)
        if place.is_last:
            assert len(result.new_scores) == len(make_rows(0))
            found["scores"] = torch.cat([torch.from_numpy(result.new_scores[i]) for i in sorted(result.new_scores)])
        save_file(found, folder / f"{name}-{place.num_stages}-{place.rank}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a student and its teachers."""
    folder = tmp_path_factory.mktemp("teachers")
    for number, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        AutoModelForCausalLM.from_config(config).double().save_pretrained(folder / name)
    return folder


def logprobs_of(model: PreTrainedModel, row) -> torch.Tensor:
    tokens = torch.from_numpy(row.token_ids).long()
    scores = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return scores[row.prompt_length - 1 : -1].gather(1, tokens[row.prompt_length :, None])[:, 0]


@pytest.fixture(scope="module")
def unsplit(folder) -> dict[str, torch.Tensor]:
    """Return scores by the unsplit teacher of each prompt, and the unsplit student's gradient by plain autograd."""
    softmax = F.softmax
    with pytest.MonkeyPatch.context() as patched:
        # eager attention computes the softmax in float32 for every model dtype
        patched.setattr(F, "softmax", lambda scores, dim, dtype: softmax(scores, dim))
        models = {
            name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager")
            for name in MODELS
        }
        rows = make_rows(0)
        assert {row.prompt_id for row in rows} == set(range(len(TEACHER_OF_PROMPT)))
        with torch.no_grad():
            by_teacher = [torch.cat([logprobs_of(models[name], row) for row in rows]) for name in TEACHERS]
            own = [logprobs_of(models[TEACHERS[TEACHER_OF_PROMPT[row.prompt_id]]], row) for row in rows]
        reference_T = torch.cat(own).float()
        assert all((reference_T - each).abs().max() > 1 for each in by_teacher), "a single teacher gives all scores"
        leaves = Leaves(torch.cat([logprobs_of(models["student"], row) for row in rows]))
        inputs = build(rows, 0, 300).loss_inputs(leaves, leaves, reference_T.double())
        loss_for(ALGORITHM)(type(inputs)(**{**vars(inputs), "logprobs_T": leaves.logprobs_T})).loss.backward()
    return {"scores": reference_T, **{name: weight.grad for name, weight in models["student"].named_parameters()}}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_scores_and_gradient_of_a_mixed_batch_equal_those_of_the_unsplit_models(folder, unsplit, num_stages):
    run_ranks("tests.integration.test_learner_teachers", folder, [(1, num_stages)])
    for name in ("once", "twice"):
        found: dict[str, torch.Tensor] = {}
        for rank in range(num_stages):
            found |= load_file(folder / f"{name}-{num_stages}-{rank}")
        assert torch.equal(found["scores"], unsplit["scores"]), "scores are stored in float32"
        if num_stages > 1:
            assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
        assert found.keys() == unsplit.keys()
        for key in unsplit.keys() - {"scores"}:
            torch.testing.assert_close(found[key], unsplit[key], rtol=0, atol=1e-10)
        assert max(float(unsplit[key].abs().max()) for key in unsplit.keys() - {"scores"}) > 1e-2
