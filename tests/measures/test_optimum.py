"""The search for the optimal product of two independent estimates, among positions and in the layer's dimensions."""

from __future__ import annotations

import pytest
import torch

from kronscope.curvature import FormPlan, SecondMoment
from kronscope.curvature.middles import Spanned
from kronscope.gradients import GradientStream
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.measures.optimum import _by_contractions, _by_positions, _unit
from kronscope.measures.position_iteration import PositionIteration, _pair_products

# samples, columns of both estimates, positions, dimensions of the other side and of the shared one
SIZES = [(7, 2, 3, 4, 9, 6), (5, 1, 1, 1, 4, 8), (6, 2, 2, 3, 40, 30)]


def estimate(shared: torch.Tensor, weights: torch.Tensor, columns: int, wide: int, side: int) -> SecondMoment:
    """Gradients in two chunks, used as factors."""
    other = torch.randn(len(shared), columns, shared.shape[2], wide, dtype=shared.dtype)
    rows, cols = (other, shared) if side == 1 else (shared, other)
    atoms = FactoredAtoms(rows, cols, weights, torch.arange(len(shared)))
    parts = [atoms.part(0, 3), atoms.part(3, len(shared))]
    stream = GradientStream(lambda: parts, atoms.shape, len(shared), columns, random_columns=columns, in_memory=True)
    stream.memo["plan"] = FormPlan("factored", "factored", (0.0, 0.0, 0.0, 0.0))
    return SecondMoment(stream)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rounds_among_positions_are_those_in_the_layers_dimensions(
    dtype: torch.dtype, tolerance: float, sizes: tuple[int, ...], side: int
) -> None:
    torch.manual_seed(0)
    samples, one, two, positions, wide, narrow = sizes
    shared = torch.randn(samples, 1, positions, narrow, dtype=dtype)
    weights = torch.rand(samples, dtype=torch.float64)
    parts = [estimate(shared, weights, columns, wide, side) for columns in (one, two)]
    start = _unit(parts[0].right() if side else parts[0].left())
    expected = _by_contractions(parts, start, side, 1e-14)
    for pairs in (False, True):  # through matrices, and through products over pairs of samples
        iteration = PositionIteration.of(parts, side)
        assert iteration is not None
        chunks = iteration._chunks
        iteration._between = _pair_products([c.shared for c in chunks], [c.shared for c in chunks]) if pairs else None
        iteration._across = (
            _pair_products([c.sides[0] for c in chunks], [c.sides[1] for c in chunks]) if pairs else None
        )
        for found, wanted in zip(_by_positions(iteration, start, 1e-14), expected, strict=True):
            assert float((found - wanted).norm() / wanted.norm()) < tolerance


def test_positions_are_left_where_columns_share_nothing() -> None:
    torch.manual_seed(0)
    shared, weights = torch.randn(4, 1, 3, 5, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    parts = [estimate(shared, weights, 2, 6, 1) for _ in range(2)]
    assert PositionIteration.of(parts, 1) is not None
    assert PositionIteration.of(parts, 0) is None


@pytest.mark.parametrize("factored", [False, True])
def test_a_matrix_known_by_its_vectors_gives_what_the_matrix_gives(factored: bool) -> None:
    torch.manual_seed(0)
    shared, weights = torch.randn(6, 1, 3, 5, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    moment = estimate(shared, weights, 2, 7, 1)
    if not factored:
        moment.stream.memo["plan"] = FormPlan("dense", "dense", (0.0, 0.0, 0.0, 0.0))
    left = Spanned(torch.randn(7, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64))
    right = Spanned(torch.randn(5, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64))
    whole = left.matrix(), right.matrix()
    for _ in range(2):  # products with the vectors are kept, and used again
        torch.testing.assert_close(moment.column_forms(left, right), moment.column_forms(*whole))
        torch.testing.assert_close(moment.left(right), moment.left(whole[1]))
        torch.testing.assert_close(moment.right(left), moment.right(whole[0]))
        between = left.vectors.T @ moment.left(whole[1]) @ left.vectors
        torch.testing.assert_close(moment.within(0, left.vectors, right), between)
        between = right.vectors.T @ moment.right(whole[0]) @ right.vectors
        torch.testing.assert_close(moment.within(1, right.vectors, whole[0]), between)
