"""How many singular values Figure 2 gets where each one is expensive."""

from __future__ import annotations

import pytest
import torch

import kronscope as ks
from kronscope.measures import curves, kronecker_spectrum

# how many values the allowed operations pay for, how many are asked for, how many there are
CASES = [(0.5, 6, 3), (0.5, 2, 2), (1e6, 6, 6), (4.0, 6, 4), (0.1, 6, 1), (0.0, 2, 1)]


@pytest.mark.parametrize(("paid", "asked", "given"), CASES)
def test_two_values_beyond_the_first_are_there_unless_each_costs_several_times_too_much(
    monkeypatch: pytest.MonkeyPatch, paid: float, asked: int, given: int
) -> None:
    grads = torch.randn(40, 4, 5, dtype=torch.float64)
    stream = ks.GradientStream.from_tensors(grads)
    each = curves._USUAL_PASSES * ks.SecondMoment(stream).passes.contraction_cost()
    monkeypatch.setattr(curves, "_SPECTRUM_OPERATIONS", paid * each)
    values = kronecker_spectrum(stream, asked)
    dense = torch.einsum("kim,kjn->ijmn", grads, grads).reshape(16, 25) / 40
    assert values["sigma"] == pytest.approx(torch.linalg.svdvals(dense)[:given].tolist(), rel=1e-6)
    assert len(values["alpha_left"]) == len(values["alpha_right"]) == given
