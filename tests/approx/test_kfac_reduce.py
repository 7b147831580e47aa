"""K-FAC reduce where the positions' gradients cancel: there is nothing to fit, and rounding must not be reported."""

from __future__ import annotations

import math

import torch

import kronscope as ks


def test_gradients_that_cancel_over_positions_give_no_reduced_factor() -> None:
    rows = torch.randn(20, 6, 3, dtype=torch.float64)
    rows -= rows.mean(1, keepdim=True)
    cols = torch.randn(20, 6, 4, dtype=torch.float64)
    stream = ks.GradientStream.from_factors(rows, cols)
    fitted = ks.approx.get("kfac-reduce").fit(stream)
    assert fitted.norm() == 0
    assert math.isnan(ks.cosine(ks.SecondMoment(stream), fitted))


def test_small_sums_that_are_not_rounding_are_kept() -> None:
    rows = torch.randn(20, 6, 3, dtype=torch.float64)
    rows -= rows.mean(1, keepdim=True) - 1e-6 * torch.randn(20, 1, 3, dtype=torch.float64)
    stream = ks.GradientStream.from_factors(rows, torch.randn(20, 6, 4, dtype=torch.float64))
    fitted = ks.approx.get("kfac-reduce").fit(stream)
    summed = rows.sum(1)
    expected = torch.linalg.matrix_norm(summed.T @ summed) / 20
    assert math.isclose(fitted.norm(), float(expected * _right_norm(stream)), rel_tol=1e-9)


def _right_norm(stream: ks.GradientStream) -> float:
    (chunk,) = stream
    summed = chunk.col_factors.sum((1, 2))  # type: ignore[union-attr]
    return float(torch.linalg.matrix_norm(summed.T @ summed)) / 20
