"""Facts: the leading singular triples of the rearrangement are those of a full SVD, whatever the spectrum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kronscope import approx
from kronscope.approx import Optimal, singular_triples, svd
from kronscope.curvature import SecondMoment
from kronscope.errors import ConvergenceError
from kronscope.gradients.stream import GradientStream
from kronscope.testing import StreamRecipe, oracle
from kronscope.testing.strategies import streams
from tests.curvature.lazy import lazy


def check_triples(stream: GradientStream, rank: int, tolerance: float = 1e-10) -> None:
    H = oracle.second_moment(stream)
    rearranged = oracle.rearrange(H, stream.shape)
    sigma = torch.linalg.svdvals(rearranged)
    largest = float(sigma[0])
    found = singular_triples(SecondMoment(stream), rank, tolerance=tolerance, max_rounds=500)
    count = len(found.sigma)
    # fewer than asked for only where the others are zero
    assert 1 <= count <= rank
    assert count == min(rank, len(sigma)) or float(sigma[count]) <= 1e-9 * largest
    torch.testing.assert_close(found.sigma, sigma[:count], rtol=0, atol=1e-9 * largest)
    lefts, rights = found.left.flatten(1), found.right.flatten(1)
    for vectors in (lefts, rights):
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(count).double(), rtol=0, atol=1e-7)
    # every pair is one, not only the values: both sides of the definition, and the stated residual is honest
    wrong = (rights @ rearranged.T - found.sigma[:, None] * lefts).norm(dim=1)
    back = (lefts @ rearranged - found.sigma[:, None] * rights).norm(dim=1)
    assert float(torch.maximum(wrong, back).max()) <= 20 * tolerance * largest
    assert found.residual <= 10 * tolerance
    assert bool((found.right.diagonal(dim1=1, dim2=2).sum(1) >= -1e-9).all())


@given(streams(max_dim=4), st.integers(1, 6))
def test_triples_are_those_of_a_full_svd(stream: GradientStream, rank: int) -> None:
    check_triples(stream, rank)
    check_triples(lazy(stream), rank)


def pairs_of_rotations() -> GradientStream:
    """Gradients whose second singular value belongs to two antisymmetric factors."""
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    reflect = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.5, 0.05], dtype=torch.float64)
    return GradientStream.from_tensors(torch.stack([torch.eye(2).double(), turn, reflect]), weights)


def test_antisymmetric_factors_are_found() -> None:
    stream = pairs_of_rotations()
    sigma = oracle.rearranged_singular_values(stream)
    found = singular_triples(SecondMoment(stream), 2, tolerance=1e-10, max_rounds=100)
    torch.testing.assert_close(found.sigma, sigma[:2])
    left, right = found.left[1], found.right[1]
    torch.testing.assert_close(left, -left.T)
    torch.testing.assert_close(right, -right.T)
    cosine = oracle.cosine(oracle.second_moment(stream), approx.get("kronecker-sum", rank=2).fit(stream).to_dense())
    assert math.isclose(cosine, float(sigma[:2].norm() / sigma.norm()), abs_tol=1e-12)
    # the symmetric subspace alone would miss it
    only = singular_triples(SecondMoment(stream), 2, tolerance=1e-10, max_rounds=100, symmetric_only=True)
    assert float(only.sigma[1]) < float(sigma[1]) - 0.1


def spectrum_stream(values: Tensor, shape: tuple[int, int], seed: int = 0) -> GradientStream:
    """A stream whose rearrangement has these singular values in its diagonal-by-diagonal corner: G = √s e_i e_jᵀ."""
    m, n = shape
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    grads = [torch.outer(left[:, i], right[:, i]) for i in range(len(values))]
    return GradientStream.from_tensors(torch.stack(grads), values)


@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("rank", [1, 3])
def test_small_gaps_and_equal_singular_values(gap: float, rank: int) -> None:
    # G = u vᵀ with orthonormal u, v: the singular values of the rearrangement are the weights
    values = 1.0 - gap * torch.arange(6, dtype=torch.float64)
    stream = spectrum_stream(values, (6, 7))
    found = singular_triples(SecondMoment(stream), rank, tolerance=1e-10, max_rounds=2000)
    torch.testing.assert_close(found.sigma, values[:rank], rtol=0, atol=1e-9)


def test_restarts_go_on_from_the_best_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamRecipe("shared", (6, 7), samples=40, columns=2, positions=3).build()
    whole = singular_triples(SecondMoment(stream), 3, tolerance=1e-10, max_rounds=1000)
    # two rounds of a block of three fill this basis, so that every second round restarts
    monkeypatch.setattr(svd, "_MAX_BASIS", 6)
    restarted = singular_triples(SecondMoment(stream), 3, tolerance=1e-10, max_rounds=1000)
    assert restarted.rounds > whole.rounds
    torch.testing.assert_close(restarted.sigma, whole.sigma, rtol=1e-9, atol=0)
    check_triples(stream, 3)


def test_not_having_converged_is_an_error_that_says_what_to_do() -> None:
    stream = StreamRecipe("dense", (6, 7), samples=40).build()
    for approximation in (Optimal(max_rounds=1), approx.get("kronecker-sum", rank=3, max_rounds=1)):
        with pytest.raises(ConvergenceError, match="raise max_rounds or tolerance"):
            approximation.fit(stream)


@pytest.mark.parametrize("kind", ["dense", "factored", "shared"])
def test_the_optimal_product_is_certified(kind: str) -> None:
    stream = StreamRecipe(kind, (4, 5), samples=12, columns=2, positions=2).build()
    fit = Optimal().solve(stream)
    assert fit.residual <= 1e-9
    assert fit.rounds >= 2
    H = oracle.rearrange(oracle.second_moment(stream), (4, 5))
    U, V = fit.operator.left.matrix.flatten(), fit.operator.right.matrix.flatten()
    torch.testing.assert_close(H @ V, fit.sigma * U, rtol=0, atol=1e-9 * fit.sigma)
    torch.testing.assert_close(H.T @ U, fit.sigma * V, rtol=0, atol=1e-9 * fit.sigma)
    assert Optimal().solve(stream) is fit


def test_a_given_start_is_used() -> None:
    stream = StreamRecipe("dense", (3, 4), samples=9).build()
    best = singular_triples(SecondMoment(stream), 1, tolerance=1e-10, max_rounds=100)
    again = singular_triples(SecondMoment(stream), 1, tolerance=1e-9, max_rounds=100, start=best.right[0])
    assert again.rounds == 2
    torch.testing.assert_close(again.sigma, best.sigma)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2, 2), (3, 2), (2, 5)])
@pytest.mark.parametrize("samples", [1, 3, 40])
def test_kernels_of_dependent_samples_hold_too_few_digits_and_matrices_take_over(
    shape: tuple[int, int], samples: int
) -> None:
    # more samples than a factor has entries: their kernel is singular, and inner products cancel to rounding
    for seed in range(4):
        stream = StreamRecipe("factored", shape, samples=samples, columns=2, weights="random", seed=seed).build()
        assert SecondMoment(stream).kernels() is not None
        check_triples(stream, 1)


def test_nothing_has_no_singular_values() -> None:
    for kind in ("dense", "factored", "shared"):
        stream = StreamRecipe(kind, (2, 3), positions=2, scale=0.0).build()
        for rank in (1, 3):
            found = singular_triples(SecondMoment(stream), rank, tolerance=1e-10, max_rounds=10)
            assert found.sigma.tolist() == [0.0]
            assert found.residual == 0.0
