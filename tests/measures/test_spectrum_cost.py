"""How many singular values Figure 2 gets where each one is expensive."""

from __future__ import annotations

import pytest
import torch

import kronscope as ks
from kronscope.measures import curves, kronecker_spectrum


@pytest.mark.parametrize(("operations", "asked", "given"), [(0.0, 6, 3), (0.0, 2, 2), (1e12, 6, 6)])
def test_two_values_beyond_the_first_are_there_whatever_they_cost(
    monkeypatch: pytest.MonkeyPatch, operations: float, asked: int, given: int
) -> None:
    monkeypatch.setattr(curves, "_SPECTRUM_OPERATIONS", operations)
    grads = torch.randn(40, 4, 5, dtype=torch.float64)
    values = kronecker_spectrum(ks.GradientStream.from_tensors(grads), asked)
    dense = torch.einsum("kim,kjn->ijmn", grads, grads).reshape(16, 25) / 40
    assert values["sigma"] == pytest.approx(torch.linalg.svdvals(dense)[:given].tolist(), rel=1e-6)
    assert len(values["alpha_left"]) == len(values["alpha_right"]) == given
