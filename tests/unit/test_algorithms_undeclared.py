"""A loss that reads an undeclared input raises an error at once."""

from dataclasses import replace

import pytest
import torch

from leeway.algorithms.base import Algorithm, AlgorithmSection, LossOutput, Needs
from leeway.algorithms.registry import ALGORITHMS, UndeclaredInput, loss_for, only_declared
from tests.unit.loss_batches import make_inputs

FIELDS = {"reference": "reference_logprobs_T", "behaviour": "behaviour_logprobs_T", "proximal": "proximal_logprobs_T"}
READS = {
    "difference": lambda inputs, field: inputs.logprobs_T - getattr(inputs, field),
    "difference from": lambda inputs, field: getattr(inputs, field) - inputs.logprobs_T,
    "method": lambda inputs, field: getattr(inputs, field).detach(),
    "attribute": lambda inputs, field: getattr(inputs, field).dtype,
    "index": lambda inputs, field: getattr(inputs, field)[0],
    "function": lambda inputs, field: torch.where(inputs.finished_B[inputs.sequence_T], getattr(inputs, field), 0.0),
    "sum": lambda inputs, field: inputs.sum_per_sequence(getattr(inputs, field)),
    "batch by prompt": lambda inputs, field: inputs.by_prompt().logprobs_T + getattr(inputs.by_prompt(), field),
}


class Careless(AlgorithmSection):
    """Config section whose declared inputs are set by the test."""

    type: str = "careless"
    declared: tuple[str, ...] = ()

    @property
    def needs(self) -> Needs:
        return Needs(**dict.fromkeys(self.declared, True))


@pytest.mark.parametrize("need", FIELDS)
@pytest.mark.parametrize("read", READS)
def test_reading_an_undeclared_input_raises_an_error_that_names_the_missing_need(monkeypatch, need, read):
    def loss(config, inputs):
        READS[read](inputs, FIELDS[need])
        return LossOutput(inputs.logprobs_T.sum())

    monkeypatch.setitem(ALGORITHMS, "careless", Algorithm(Careless, loss))
    inputs = make_inputs()
    with pytest.raises(UndeclaredInput, match=rf"reads inputs\.{FIELDS[need]}, .* return Needs\({need}=True"):
        loss_for(Careless())(inputs)
    loss_for(Careless(declared=(need,)))(inputs)


def test_an_undeclared_input_can_be_copied_and_printed():
    inputs = make_inputs()
    given = only_declared(inputs, Needs(behaviour=True))
    assert given.behaviour_logprobs_T is inputs.behaviour_logprobs_T
    assert "<reference_logprobs_T: not declared>" in repr(replace(given, num_groups=1))
    declared = only_declared(inputs, Needs(behaviour=True, reference=True))
    assert declared.reference_logprobs_T is inputs.reference_logprobs_T
