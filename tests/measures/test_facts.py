"""Trace, norm, effective rank and largest eigenvalue of the truth, in every row, against the dense matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import nn

import kronscope as ks
from kronscope.curvature.leading import largest_eigenvalue
from kronscope.errors import ConvergenceError
from kronscope.testing import oracle
from kronscope.testing.strategies import streams
from tests.gradients.zoo import Attention, ResidualConvnet, images
from tests.measures.small import mlp

LOSS = nn.CrossEntropyLoss()


@given(streams(max_dim=5))
def test_the_largest_eigenvalue_is_that_of_the_dense_matrix(stream: ks.GradientStream) -> None:
    H = oracle.second_moment(stream)
    expected = float(torch.linalg.eigvalsh(H)[-1])
    assert ks.SecondMoment(stream).leading_eigenvalue() == pytest.approx(expected, rel=1e-4, abs=1e-300)
    assert ks.SecondMoment(stream).leading_eigenvalue(1e-10) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_an_eigenvalue_that_is_hard_to_find_is_an_error_not_a_number() -> None:
    values = torch.linspace(0.0, 1.0, 20000, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="more than 200 products"):
        largest_eigenvalue(lambda vector: values * vector, torch.ones_like(values), 1e-12)


@pytest.mark.parametrize("truth", ["gauss_newton", "empirical_fisher"])
@pytest.mark.parametrize(("model", "shape"), [(Attention(True), (4, 3, 5)), (ResidualConvnet(), (4, 2, 4, 4))])
def test_rows_describe_the_dense_matrix(model: nn.Module, shape: tuple[int, ...], truth: str) -> None:
    model = model.double()
    data = [(images(*shape), torch.randint(3, (4,)))]
    results = ks.measure(
        model, LOSS, data, truth=truth, leading_eigenvalue=True, approximations=["shampoo2", "diagonal"]
    )
    for row in results:
        if truth == "gauss_newton":
            H = oracle.gauss_newton(model, LOSS, *data[0], row.layer)
        else:
            H = oracle.empirical_fisher(model, LOSS, *data[0], row.layer)
        assert row.trace == pytest.approx(float(H.trace()), rel=1e-9)
        assert row.norm == pytest.approx(float(H.norm()), rel=1e-9)
        assert row.effective_rank == pytest.approx(float(H.trace() ** 2 / H.norm() ** 2), rel=1e-9)
        assert row.leading_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-4)
    frame = results.to_pandas()
    assert list(frame.columns[-4:]) == ["trace", "norm", "effective_rank", "leading_eigenvalue"]


def test_an_eigenvalue_has_to_be_asked_for() -> None:
    model, data = mlp()
    results = ks.measure(model, LOSS, data, progress=False)
    assert all(math.isnan(row.leading_eigenvalue) and row.trace > 0 for row in results)
    assert "leading_eigenvalue" not in results.to_pandas().columns


def test_estimated_matrices_have_unbiased_numbers_and_no_eigenvalue() -> None:
    found = []
    wide = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 40)).double()
    points = [(torch.randn(12, 6, dtype=torch.float64), torch.randint(40, (12,)))]
    exact = ks.measure(wide, LOSS, points, "0.weight", approximations=["shampoo2"], max_columns=39).rows[0]
    for seed in range(30):
        results = ks.measure(
            wide,
            LOSS,
            points,
            "0.weight",
            approximations=["shampoo2"],
            max_columns=4,
            accuracy=1.0,
            seed=seed,
            leading_eigenvalue=True,
        )
        found.append(results.rows[0])
    assert "random columns" in results.settings["leading eigenvalue"]["0.weight"]
    assert all(math.isnan(row.leading_eigenvalue) for row in found)
    for name in ("trace", "norm"):
        values = torch.tensor([getattr(row, name) for row in found])
        error = float(values.std()) / math.sqrt(len(found))
        assert abs(float(values.mean()) - getattr(exact, name)) < 3 * error + 0.01 * getattr(exact, name)


def test_a_population_has_its_own_norm_and_no_eigenvalue() -> None:
    model, data = mlp()
    row = ks.measure(model, LOSS, data, "0.weight", approximations=["shampoo2"], population=True).rows[0]
    plain = ks.measure(model, LOSS, data, "0.weight", approximations=["shampoo2"]).rows[0]
    assert row.trace == pytest.approx(plain.trace)
    # pairs of a sample with itself make the plain norm too large
    assert row.norm < plain.norm
    assert row.effective_rank == pytest.approx(row.trace**2 / row.norm**2)


def test_adagrads_matrix_has_them_too() -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = ks.GradientHistory.attach(optimizer, model, layers=["weight"])
    H = torch.zeros(6, 6, dtype=torch.float64)
    for _ in range(4):
        model.weight.grad = torch.randn(2, 3, dtype=torch.float64)
        H += torch.outer(model.weight.grad.flatten(), model.weight.grad.flatten())
        optimizer.step()
    history.detach()
    row = ks.measure_history(history, approximations=["shampoo2"]).rows[0]
    assert row.trace == pytest.approx(float(H.trace()))
    assert row.norm == pytest.approx(float(H.norm()))
