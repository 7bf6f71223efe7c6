"""The gradient over micro-batches equals the gradient of the loss over the whole batch, for any split and loss."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.loss_batches import CONFIGS, make_inputs
from torch import nn

from leeway.algorithms.registry import loss_for

VOCABULARY = 5


class Model(nn.Module):
    """A tiny model with shared parameters, which predicts log-probability and value from the previous token."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 3, dtype=torch.float64)
        self.head = nn.Linear(3, VOCABULARY, dtype=torch.float64)
        self.value_head = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, previous_T, token_T):
        hidden_TH = torch.tanh(self.embedding(previous_T))
        scores_TV = self.head(hidden_TH).log_softmax(-1)
        return scores_TV.gather(1, token_T[:, None])[:, 0], self.value_head(hidden_TH)[:, 0]

    def take_gradients(self):
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters()]
        self.zero_grad()
        return found


@st.composite
def splits(draw):
    """Draw a batch, the previous and the current token of each index, the micro-batch of each sequence, and a model."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=2, max_size=8).filter(any))
    groups = [draw(st.integers(0, max(0, len(lengths) // 2 - 1))) for _ in lengths]
    groups = [sorted(set(groups)).index(group) for group in groups]
    part_B = torch.tensor([draw(st.integers(0, 3)) for _ in lengths])
    seed = draw(st.integers(0, 10_000))
    inputs = make_inputs(seed, groups=groups, lengths=lengths, prompts=[group // 2 for group in groups])
    tokens = torch.randint(VOCABULARY, (2, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return inputs, tokens, part_B, Model(seed)


@settings(max_examples=25)
@given(splits())
def test_any_split_into_micro_batches_has_the_gradient_of_the_whole_batch(split):
    inputs, (previous_T, token_T), part_B, model = split
    for name, config in CONFIGS.items():
        # compute the loss of the whole batch through the graph of the model
        logprobs_T, values_T = model(previous_T, token_T)
        loss_for(config)(replace(inputs, logprobs_T=logprobs_T, values_T=values_T)).loss.backward()
        whole = model.take_gradients()
        # run pass 1, and compute the gradient of the loss with respect to its inputs
        with torch.no_grad():
            leaves = [each.requires_grad_() for each in model(previous_T, token_T)]
        loss = loss_for(config)(replace(inputs, logprobs_T=leaves[0], values_T=leaves[1])).loss
        coefficients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        # run pass 2 on one micro-batch after the other
        for part in range(4):
            mine_T = part_B[inputs.sequence_T] == part
            outputs = model(previous_T[mine_T], token_T[mine_T])
            sum((g_T[mine_T] * out_T).sum() for g_T, out_T in zip(coefficients, outputs, strict=True)).backward()
        for summed, expected in zip(model.take_gradients(), whole, strict=True):
            torch.testing.assert_close(summed, expected, rtol=0, atol=1e-12, msg=name)
