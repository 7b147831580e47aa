r"""The dense oracle: every matrix in full, by its textbook formula, in float64.

Nothing here is fast and nothing is shared with the rest of kronscope: atoms are written out, H is an mn x mn matrix,
powers come from its eigendecomposition and the optimal Kronecker product from a full SVD of the rearrangement. Use it
on small shapes, to hold the fast path (or your own approximation) to it.

>>> from kronscope.gradients.stream import GradientStream
>>> stream = GradientStream.from_tensors(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]))
>>> H = second_moment(stream)
>>> cosine(H, approximation("shampoo2", stream))
0.76...

For a model, :func:`gauss_newton`, :func:`empirical_fisher` and :func:`fisher_of_draws` build H from full Jacobians, one
sample and one output at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kronscope.errors import ConvergenceError, NotFactoredError, OptionError
from kronscope.gradients.atoms import DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.testing.jacobians import (
    ModelAtoms,
    empirical_fisher,
    empirical_fisher_atoms,
    fisher_of_draws,
    fisher_of_draws_atoms,
    gauss_newton,
    gauss_newton_atoms,
    layer_factors,
)

__all__ = [
    "ModelAtoms",
    "approximation",
    "approximation_of_matrix",
    "atoms",
    "cosine",
    "empirical_fisher",
    "empirical_fisher_atoms",
    "fisher_of_draws",
    "fisher_of_draws_atoms",
    "gauss_newton",
    "gauss_newton_atoms",
    "in_eigenbasis",
    "kfac_factors",
    "layer_factors",
    "left",
    "matrix_approximations",
    "power",
    "rearrange",
    "rearranged_singular_values",
    "right",
    "second_moment",
]

# An eigenvalue below this part of the largest is taken for zero. Ten times coarser than the library's own cutoff on the
# small matrices the oracle is for, and still far below any eigenvalue a test means.
_RANK_CUTOFF = 1e-13


def atoms(stream: GradientStream) -> tuple[Tensor, Tensor]:
    """Write out a stream: gradients (M, m, n) of all samples and columns, and a weight (M,) for each."""
    grads, weights = [], []
    for chunk in stream:
        for index in range(len(chunk.weights)):
            for column in range(chunk.columns):
                grads.append(_one_gradient(chunk, index, column))
                weights.append(chunk.weights[index].double().cpu())
    return torch.stack(grads), torch.stack(weights)


def second_moment(stream: GradientStream) -> Tensor:
    r"""Return :math:`H = \sum_i w_i \operatorname{vec}(G_i) \operatorname{vec}(G_i)^\top` (mn, mn)."""
    grads, weights = atoms(stream)
    flat = grads.reshape(len(grads), -1)
    return torch.einsum("i,ia,ib->ab", weights, flat, flat)


def left(H: Tensor, shape: tuple[int, int], R: Tensor | None = None) -> Tensor:
    r"""Return :math:`\sum w\, G R G^\top` (m, m) from the entries of H; ``R`` defaults to the identity."""
    m, n = shape
    middle = torch.eye(n, dtype=H.dtype) if R is None else R.double()
    return torch.einsum("iajb,ab->ij", H.reshape(m, n, m, n), middle)


def right(H: Tensor, shape: tuple[int, int], L: Tensor | None = None) -> Tensor:
    r"""Return :math:`\sum w\, G^\top L G` (n, n) from the entries of H; ``L`` defaults to the identity."""
    m, n = shape
    middle = torch.eye(m, dtype=H.dtype) if L is None else L.double()
    return torch.einsum("iajb,ij->ab", H.reshape(m, n, m, n), middle)


def rearrange(H: Tensor, shape: tuple[int, int]) -> Tensor:
    r"""Return Van Loan's rearrangement :math:`\hat H = \sum w\, G \otimes G` (m², n²), row-major.

    >>> L, R = torch.tensor([[1.0, 2.0], [2.0, 5.0]]), torch.tensor([[3.0]])
    >>> rearrange(torch.kron(L, R), (2, 1)).flatten()
    tensor([ 3.,  6.,  6., 15.])
    """
    m, n = shape
    return H.reshape(m, n, m, n).permute(0, 2, 1, 3).reshape(m * m, n * n)


def rearranged_singular_values(source: GradientStream | Tensor, shape: tuple[int, int] | None = None) -> Tensor:
    """Return the singular values of the rearrangement of a stream's H, or of a matrix with its (m, n), largest first.

    Raises:
        OptionError: a matrix without its shape.
    """
    if isinstance(source, GradientStream):
        return rearranged_singular_values(second_moment(source), source.shape)
    if shape is None:
        raise OptionError("a dense matrix does not say its (m, n); pass shape=(m, n).")
    values: Tensor = torch.linalg.svdvals(rearrange(source, shape))
    return values


def cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine of the angle between two matrices; NaN when one of them is zero."""
    # scaled first, so that squares of very small or large entries do not leave the range of float64
    one, two = (matrix / matrix.abs().max() for matrix in (first.double(), second.double()))
    return float((one * two).sum() / (one.square().sum().sqrt() * two.square().sum().sqrt()))


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Raise a symmetric PSD matrix to a real power by its eigendecomposition, as a pseudo-inverse on its range."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    kept = values > _RANK_CUTOFF * values[-1].clamp_min(0)
    powered = [float(value) ** exponent if keep else 0.0 for value, keep in zip(values, kept, strict=True)]
    out: Tensor = vectors @ torch.diag(torch.tensor(powered, dtype=matrix.dtype)) @ vectors.T
    return out


def in_eigenbasis(H: Tensor, left_factor: Tensor, right_factor: Tensor) -> Tensor:
    r"""Return :math:`Q \operatorname{diag}(Q^\top H Q) Q^\top`, with :math:`Q = Q_L \otimes Q_R` the factors' bases."""
    basis = torch.kron(*(torch.linalg.eigh(factor).eigenvectors.contiguous() for factor in (left_factor, right_factor)))
    return basis @ torch.diag(torch.diagonal(basis.T @ H @ basis)) @ basis.T


def kfac_factors(stream: GradientStream, *, reduce: bool) -> tuple[Tensor, Tensor]:
    """Return K-FAC's two factors of a factored stream; the right one is an average, so that K is of H's degree.

    Raises:
        NotFactoredError: the stream has whole gradients only.
    """
    m, n = stream.shape
    rows, cols = torch.zeros(m, m, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    total = 0.0
    for chunk in stream:
        if not isinstance(chunk, FactoredAtoms):
            raise NotFactoredError("K-FAC is made of factored atoms; this stream has whole gradients.")
        for index, weight in enumerate(chunk.weights.tolist()):
            sides = chunk.row_factors[index].double().cpu(), chunk.col_factors[index].double().cpu()
            rows += weight * _position_moment(sides[0], reduce)
            cols += weight * _position_moment(sides[1], reduce)
            # columns that differ on both sides are samples of their own
            total += weight * (len(sides[0]) if min(len(sides[0]), len(sides[1])) > 1 else 1)
    return rows, cols / total if total > 0 else cols


def matrix_approximations() -> tuple[str, ...]:
    """Return the names that :func:`approximation_of_matrix` knows: all that depend on H alone."""
    return tuple(_OF_MATRIX)


def approximation_of_matrix(name: str, H: Tensor, shape: tuple[int, int], **options: float) -> Tensor:
    """Return an approximation of H as a dense matrix, by name.

    Args:
        name: One of :func:`matrix_approximations`.
        H: The matrix (mn, mn).
        shape: Its (m, n).
        options: Options of that approximation: ``exponent``, ``rank`` or ``rounds``.

    Raises:
        OptionError: no such name; K-FAC is not a function of H.
        ConvergenceError: ``kl`` has no fixed point.
    """
    if name not in _OF_MATRIX:
        raise OptionError(f"the oracle makes these from H alone: {', '.join(_OF_MATRIX)}; got {name!r}.")
    if not bool(H.any()):
        return torch.zeros_like(H)
    return _OF_MATRIX[name](H, shape, **options)


def approximation(name: str, stream: GradientStream, **options: float) -> Tensor:
    """Return an approximation of a stream's H as a dense matrix, by name, K-FAC included.

    Raises:
        NotFactoredError: K-FAC of whole gradients.
        OptionError: no such name.
        ConvergenceError: ``kl`` has no fixed point.
    """
    if name in ("kfac-reduce", "kfac-expand"):
        return torch.kron(*kfac_factors(stream, reduce=name == "kfac-reduce"))
    if name == "ekfac":
        return in_eigenbasis(second_moment(stream), *kfac_factors(stream, reduce=False))
    return approximation_of_matrix(name, second_moment(stream), stream.shape, **options)


def _one_gradient(chunk: DenseAtoms | FactoredAtoms, index: int, column: int) -> Tensor:
    if isinstance(chunk, DenseAtoms):
        return chunk.grads[index, column].double().cpu()
    rows, cols = (
        factor[index, column if factor.shape[1] > 1 else 0].double().cpu()
        for factor in (chunk.row_factors, chunk.col_factors)
    )
    return sum((torch.outer(row, col) for row, col in zip(rows, cols, strict=True)), torch.zeros(chunk.shape).double())


def _position_moment(factor: Tensor, reduce: bool) -> Tensor:
    """Second moment of one side's (c, t, d) vectors, summed over positions before or after the outer product."""
    if reduce:
        summed = factor.sum(1)
        return torch.einsum("cd,ce->de", summed, summed)
    return torch.einsum("ctd,cte->de", factor, factor)


def _optimal(H: Tensor, shape: tuple[int, int]) -> Tensor:
    return _kronecker_sum(H, shape, rank=1)


def _kronecker_sum(H: Tensor, shape: tuple[int, int], rank: float = 2) -> Tensor:
    m, n = shape
    u, sigma, vh = torch.linalg.svd(rearrange(H, shape), full_matrices=False)
    terms = [
        sigma[i] * torch.kron(u[:, i].reshape(m, m).contiguous(), vh[i].reshape(n, n))
        for i in range(min(int(rank), len(sigma)))
    ]
    return torch.stack(terms).sum(0)


def _power_iteration(H: Tensor, shape: tuple[int, int], rounds: float = 5) -> Tensor:
    """Simultaneous rounds from the identity on vectors of the rearrangement, on the best scale."""
    m, n = shape
    rearranged = rearrange(H, shape)
    ell, r = torch.eye(m).double().flatten(), torch.eye(n).double().flatten()
    for _ in range(int(rounds)):
        ell, r = rearranged @ r, rearranged.T @ ell
        ell, r = ell / ell.norm(), r / r.norm()
    K = torch.kron(ell.reshape(m, m), r.reshape(n, n))
    return (H * K).sum() / (K * K).sum() * K


def _shampoo2(H: Tensor, shape: tuple[int, int]) -> Tensor:
    L, R = left(H, shape), right(H, shape)
    return torch.kron(L, R) / torch.trace(L)


def _shampoo(H: Tensor, shape: tuple[int, int], exponent: float = 0.5) -> Tensor:
    return torch.kron(power(left(H, shape), exponent), power(right(H, shape), exponent))


def _soap(H: Tensor, shape: tuple[int, int]) -> Tensor:
    return in_eigenbasis(H, left(H, shape), right(H, shape))


def _caspr(H: Tensor, shape: tuple[int, int]) -> Tensor:
    r"""The fourth inverse power of :math:`(L^{-1/4} \otimes P_R + P_L \otimes R^{-1/4})/2` with projectors P."""
    L, R = left(H, shape), right(H, shape)
    mixed = torch.kron(power(L, -0.25), power(R, 0.0)) + torch.kron(power(L, 0.0), power(R, -0.25))
    return power(mixed / 2, -4.0)


def _kl(H: Tensor, shape: tuple[int, int]) -> Tensor:
    """Flip-flop on the ranges of L and R, from R, until nothing moves any more.

    With few gradients there may be many fixed points; the start then decides which.
    """
    L, R = left(H, shape), right(H, shape)
    bases = [_range(L), _range(R)]
    m, n = (basis.shape[1] for basis in bases)
    basis = torch.kron(*bases)
    inside = basis.T @ H @ basis
    R = bases[1].T @ R @ bases[1]
    R = R / R.norm()
    for _ in range(5_000):
        L = left(inside, (m, n), torch.linalg.inv(R)) / n
        new = right(inside, (m, n), torch.linalg.inv(L)) / m
        new = new / new.norm()
        # relative to R itself: factors that run away to a singular limit slow down in any fixed norm, but not here
        step = float((torch.linalg.solve(R, new) - torch.eye(n).double()).norm())
        R = new
        condition = max(float(torch.linalg.cond(factor)) for factor in (L, R))
        if condition > 1e12:
            break
        if step < max(1e-12, 1e-15 * condition):
            L = left(inside, (m, n), torch.linalg.inv(R)) / n
            return basis @ torch.kron(L, R) @ basis.T
    raise ConvergenceError("the flip-flop has no fixed point here: too few gradients for their shape.")


def _range(factor: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    kept: Tensor = vectors[:, values > _RANK_CUTOFF * values[-1]].contiguous()
    return kept


def _one_sided(H: Tensor, shape: tuple[int, int]) -> Tensor:
    m, n = shape
    if m <= n:
        return torch.kron(left(H, shape), torch.eye(n, dtype=H.dtype)) / n
    return torch.kron(torch.eye(m, dtype=H.dtype), right(H, shape)) / m


def _diagonal(H: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.diag(torch.diagonal(H))


def _identity(H: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.trace(H) / math.prod(shape) * torch.eye(math.prod(shape), dtype=H.dtype)


_OF_MATRIX: dict[str, Callable[..., Tensor]] = {
    "optimal": _optimal,
    "optimal-paper": _power_iteration,
    "kronecker-sum": _kronecker_sum,
    "shampoo2": _shampoo2,
    "tnt": _shampoo2,
    "shampoo": _shampoo,
    "soap": _soap,
    "caspr": _caspr,
    "kl": _kl,
    "one-sided": _one_sided,
    "diagonal": _diagonal,
    "identity": _identity,
}
