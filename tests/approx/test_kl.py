"""Facts: the KL-optimal factors solve both fixed-point equations, and where there are none that is an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kronscope.approx import KlOptimal
from kronscope.errors import ConvergenceError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct
from kronscope.testing import StreamRecipe, oracle
from kronscope.testing.strategies import streams


def check_fixed_point(stream: GradientStream, op: KroneckerProduct) -> None:
    H, shape = oracle.second_moment(stream), stream.shape
    L, R = op.scale * op.left.matrix, op.right.matrix
    ranks = [int((torch.linalg.eigvalsh(f) > 1e-9 * f.norm()).sum()) for f in (L, R)]
    back = oracle.left(H, shape, oracle.power(R, -1)) / ranks[1]
    torch.testing.assert_close(back, L, rtol=0, atol=1e-7 * float(L.norm()))
    forth = oracle.right(H, shape, oracle.power(L, -1)) / ranks[0]
    torch.testing.assert_close(forth, R, rtol=0, atol=1e-7 * float(R.norm()))


@pytest.mark.parametrize("kind", ["dense", "factored", "shared"])
@pytest.mark.parametrize("ranks", [(3, 4), (2, 4), (3, 2)])
def test_both_fixed_point_equations_hold_on_the_ranges(kind: str, ranks: tuple[int, int]) -> None:
    stream = StreamRecipe(
        kind, (3, 4), samples=40, positions=2, row_rank=ranks[0], col_rank=ranks[1], weights="random"
    ).build()
    check_fixed_point(stream, KlOptimal().fit(stream))


@settings(max_examples=25)
@given(streams(max_dim=3, max_samples=6, badly_scaled=False))
def test_an_answer_is_a_fixed_point_or_an_error(stream: GradientStream) -> None:
    try:
        op = KlOptimal().fit(stream)
    except ConvergenceError:
        return
    check_fixed_point(stream, op)


def divergence(H: torch.Tensor, K: torch.Tensor) -> float:
    """Twice the Kullback–Leibler divergence of centred Gaussians, up to what does not depend on K."""
    return float(torch.trace(torch.linalg.solve(K, H)) + torch.logdet(K))


def test_no_nearby_kronecker_product_is_closer_in_divergence() -> None:
    stream = StreamRecipe("dense", (3, 4), samples=60).build()
    H = oracle.second_moment(stream)
    op = KlOptimal().fit(stream)
    best = divergence(H, op.to_dense())
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        factors = []
        for factor in (op.left.matrix, op.right.matrix):
            noise = 0.03 * torch.randn(factor.shape, dtype=torch.float64, generator=generator)
            move = torch.eye(len(factor)).double() + noise
            factors.append(move @ factor @ move.T)
        assert divergence(H, torch.kron(*factors)) > best


def test_an_exact_kronecker_product_is_its_own_answer() -> None:
    # all pairs of the columns of two square roots, as outer products: H is A ⊗ B exactly
    a, b = torch.randn(3, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    grads = torch.einsum("im,jn->ijmn", a, b).reshape(-1, 3, 4)
    stream = GradientStream.from_tensors(grads)
    torch.testing.assert_close(KlOptimal().fit(stream).to_dense(), oracle.second_moment(stream), rtol=1e-8, atol=1e-8)


def test_without_a_fixed_point_there_is_no_answer() -> None:
    # all gradients send one input direction to a single output direction: with m > n the likelihood is unbounded
    grads = torch.randn(50, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads[:, 1:, 1] = 0
    with pytest.raises(ConvergenceError, match="gradients"):
        KlOptimal().fit(GradientStream.from_tensors(grads))


def test_not_reaching_the_tolerance_is_an_error() -> None:
    stream = StreamRecipe("dense", (3, 4), samples=40).build()
    with pytest.raises(ConvergenceError, match="raise max_rounds"):
        KlOptimal(max_rounds=2).fit(stream)
