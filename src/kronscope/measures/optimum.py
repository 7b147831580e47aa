r"""The optimal product of a matrix that is known from random columns only.

The power iteration :math:`U \leftarrow \hat H \hat H^\top U` of an estimated :math:`\hat H` runs after its noise: the
square contains every random column's product with itself. Of two independent estimates,
:math:`\tfrac12(\hat H_1 \hat H_2^\top + \hat H_2 \hat H_1^\top)` has the right mean. What the iteration goes on with is
the factor that the columns determine better, such as that of a layer's inputs; the other one may be mostly noise and
still have the right mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kronscope.curvature import SecondMoment
from kronscope.kron import KroneckerProduct
from kronscope.measures.position_iteration import PositionIteration

__all__ = ["independent_optimum"]

_MOST_ROUNDS = 100
# Changes that shrink more slowly than this are not told from those that do not shrink.
_SLOWEST = 0.98


def independent_optimum(parts: Sequence[SecondMoment], start: Tensor, side: int, tolerance: float) -> KroneckerProduct:
    """Search the optimal product of a matrix from two independent estimates of it.

    Args:
        parts: The two estimates.
        start: A factor to start from, such as Shampoo's.
        side: Which factor ``start`` is and the iteration goes on with: 0 for the left one, 1 for the right one.
        tolerance: What stopping may change in the cosine.
    """
    start = _unit(start)
    shared = PositionIteration.of(parts, side)
    kept, other = (
        _by_contractions(parts, start, side, tolerance) if shared is None else _by_positions(shared, start, tolerance)
    )
    return KroneckerProduct(kept, other) if side == 0 else KroneckerProduct(other, kept)


def _by_contractions(parts: Sequence[SecondMoment], kept: Tensor, side: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """The plain iteration, which any gradients can have; both factors."""
    one, two = parts
    there = [part.right if side == 0 else part.left for part in parts]
    last = 1.0
    for _ in range(_MOST_ROUNDS):
        others = [contract(kept) for contract in there]
        back = (one.left(others[1]), two.left(others[0])) if side == 0 else (one.right(others[1]), two.right(others[0]))
        crossed = _unit(back[0] + back[1])
        change = float((crossed - kept).norm())
        kept = crossed
        if _near(change, last, tolerance):
            break
        last = change
    return kept, _symmetric(there[0](kept) + there[1](kept)) / 2


def _by_positions(shared: PositionIteration, start: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """The same iteration, in terms of products over positions."""
    state, last = shared.round(shared.begin(start)), 1.0
    for _ in range(_MOST_ROUNDS):
        crossed = shared.round(state)
        change = crossed.distance(state)
        state = crossed
        if _near(change, last, tolerance):
            break
        last = change
    return shared.factors(state)


def _near(change: float, last: float, tolerance: float) -> bool:
    """Whether stopping changes the cosine by less than the tolerance.

    Changes that shrink by a factor ρ leave an error of change · ρ/(1−ρ), and the cosine a square of it times 1−ρ.
    """
    shrinking = min(change / last, _SLOWEST) if last > 0 else 0.0
    return change**2 / (2 * (1 - shrinking)) <= tolerance


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def _unit(matrix: Tensor) -> Tensor:
    matrix = _symmetric(matrix)
    norm = matrix.norm()
    return matrix / norm if float(norm) > 0 else matrix
