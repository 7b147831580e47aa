r"""Gradients to Kronecker factors: the only code that does this.

With atoms :math:`G_i` of shape (m, n) and weights :math:`w_i`, the two contractions everything is built from are

.. math:: \mathrm{left}(R) = \sum_i w_i G_i R G_i^\top, \qquad \mathrm{right}(L) = \sum_i w_i G_i^\top L G_i .

``R`` and ``L`` default to the identity, which gives Shampoo's factors.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kronscope.errors import OptionError, ShapeError

__all__ = ["factored_gram", "is_symmetric", "mode_gram", "position_products", "positions_gram", "symmetric_inner"]

# Below this width one GEMM is as fast as the blocks of its upper half (measured on AVX2 with two threads).
_MIN_BLOCKED_WIDTH = 256
_BLOCKS = 4


def symmetric_inner(x: Tensor, y: Tensor | None = None) -> Tensor:
    r"""Compute :math:`X^\top Y` where the result is known to be symmetric.

    Only the blocks on and above the diagonal are multiplied, 5/8 of the work of a full product. ``y`` defaults to
    ``x``; with another ``y`` the caller promises that :math:`X^\top Y` is symmetric.

    Args:
        x: Matrix (k, d).
        y: Matrix (k, d).

    Returns:
        Symmetric matrix (d, d).

    >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> symmetric_inner(x)
    tensor([[1., 2.],
            [2., 5.]])
    """
    y = x if y is None else y
    width = x.shape[1]
    if width < _MIN_BLOCKED_WIDTH:
        return _symmetrized(x.T @ y)
    out = x.new_empty(width, width)
    edges = [width * b // _BLOCKS for b in range(_BLOCKS + 1)]
    for start, stop in pairwise(edges):
        block = x[:, start:stop].T @ y[:, start:]
        out[start:stop, start:] = block
        out[start:, start:stop] = block.T
        square = out[start:stop, start:stop]
        out[start:stop, start:stop] = _symmetrized(square)
    return out


def mode_gram(grads: Tensor, weights: Tensor | None = None, mode: int = 0, other: Tensor | None = None) -> Tensor:
    r"""Contract weighted gradients with themselves over all modes but one.

    For matrices, with :math:`G_i` (``grads``), :math:`w_i` (``weights``, default one) and :math:`M` (``other``,
    default the identity),

    .. math:: \sum_i w_i G_i M G_i^\top \;(\text{mode } 0), \qquad \sum_i w_i G_i^\top M G_i \;(\text{mode } 1).

    For tensors of higher order ``grads`` is unfolded along ``mode`` and ``other`` must be None.

    Args:
        grads: Gradients (k, d_0, ..., d_q).
        weights: Weights (k,).
        mode: Which dimension of a gradient the result is indexed by.
        other: Matrix that acts on the other mode, symmetric or not; matrices only.

    Returns:
        Matrix (d, d), where d is the size of dimension ``mode``.

    Raises:
        ShapeError: ``grads`` has fewer than two dimensions after the first, or ``other`` does not fit.
        OptionError: ``mode`` is out of range.

    >>> mode_gram(torch.tensor([[[1.0, 2.0]]]), mode=1)
    tensor([[1., 2.],
            [2., 4.]])
    """
    if grads.ndim < 2:
        raise ShapeError(
            f"mode_gram needs gradients (k, d0, d1, ...), got {tuple(grads.shape)}; add a first dimension."
        )
    if not 0 <= mode < grads.ndim - 1:
        raise OptionError(f"mode must be in 0..{grads.ndim - 2} for gradients {tuple(grads.shape)}, got {mode}.")
    if other is not None and (grads.ndim != 3 or other.shape != (grads.shape[2 - mode],) * 2):
        raise ShapeError(
            f"mode_gram with a matrix in the middle needs gradients (k, m, n) and a square matrix on the other mode, "
            f"got {tuple(grads.shape)} and {tuple(other.shape)} for mode {mode}."
        )
    if weights is not None and len(weights) and bool((weights == weights[0]).all()):
        # the usual case, and a copy of all gradients less
        return mode_gram(grads, None, mode, other) * weights[0].to(grads.dtype)
    if mode == 0 and grads.ndim == 3 and grads.shape[1] < _MIN_BLOCKED_WIDTH:
        return _narrow_left(grads, weights, other)
    if other is None:
        # rows of the unfolding along `mode`, scaled so that one symmetric product does the rest
        rows = grads.movedim(mode + 1, -1)
        if weights is not None:
            rows = rows * weights.clamp_min(0).sqrt().to(rows.dtype).view(-1, *[1] * (rows.ndim - 1))
        return symmetric_inner(rows.reshape(-1, rows.shape[-1]))
    rows = grads.transpose(1, 2) if mode == 0 else grads  # (k, contracted, kept)
    # M acts on the second gradient of each pair: Σ G (M Gᵀ) and Σ Gᵀ (M G)
    middle = other @ rows if mode == 1 else (grads @ other.T).transpose(1, 2)
    if weights is not None:
        middle = middle * weights.to(middle.dtype).view(-1, 1, 1)
    return _product(rows.reshape(-1, rows.shape[-1]), middle.reshape(-1, rows.shape[-1]), other)


def factored_gram(
    kept: Tensor, contracted: Tensor, weights: Tensor | None = None, other: Tensor | None = None
) -> Tensor:
    r"""Contract factored gradients :math:`G_{ic} = B_{ic}^\top A_{ic}` without forming them.

    With :math:`B` (``kept``), :math:`A` (``contracted``), :math:`w` (``weights``) and :math:`M` (``other``),

    .. math:: \sum_{i,c} w_i B_{ic}^\top (A_{ic} M A_{ic}^\top) B_{ic} ,

    which is ``left`` when ``kept`` holds the row factors and ``right`` when it holds the column factors.

    Args:
        kept: Factors (k, c or 1, t, p) of the side the result is indexed by.
        contracted: Factors (k, c or 1, t, q) of the other side.
        weights: Weights (k,).
        other: Matrix (q, q), symmetric or not; default the identity.

    Returns:
        Symmetric matrix (p, p).

    >>> b, a = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0]]]])
    >>> factored_gram(b, a)
    tensor([[ 9., 18.],
            [18., 36.]])
    """
    return positions_gram(kept, position_products(contracted, other), weights, symmetric=is_symmetric(other))


def position_products(factors: Tensor, matrix: Tensor | None = None) -> Tensor:
    r"""Multiply the factors of all pairs of positions: :math:`F_{ic} M F_{ic}^\top`.

    Args:
        factors: Factors (k, c, t, q).
        matrix: Matrix :math:`M` (q, q), symmetric or not; default the identity.

    Returns:
        Products (k, c, t, t).

    >>> position_products(torch.tensor([[[[1.0, 2.0]]]])).item()
    5.0
    """
    moved = factors if matrix is None else factors @ matrix.to(factors)
    if factors.shape[2] == 1:
        return (moved * factors).sum(-1, keepdim=True)
    return moved @ factors.mT


def positions_gram(kept: Tensor, products: Tensor, weights: Tensor | None = None, *, symmetric: bool = True) -> Tensor:
    r"""Contract one side's factors, with the products of the other side between them: :math:`\sum w_i B^\top P B`.

    Args:
        kept: Factors :math:`B` (k, c or 1, t, p).
        products: Products :math:`P` (k, c or 1, t, t), from :func:`position_products`.
        weights: Weights (k,).
        symmetric: Whether the products, and therefore the result, are symmetric.

    Returns:
        Matrix (p, p).

    >>> positions_gram(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0]]]]))
    tensor([[ 3.,  6.],
            [ 6., 12.]])
    """
    if weights is not None:
        products = products * weights.to(products.dtype).view(-1, 1, 1, 1)
    if kept.shape[1] == 1 and products.shape[1] > 1:
        products = products.sum(1, keepdim=True)
    if kept.shape[2] == 1:
        flat = kept.reshape(-1, kept.shape[-1])
        return symmetric_inner(flat, flat * products.expand(*kept.shape[:2], 1, 1).reshape(-1, 1))
    middle = products @ kept
    flat = kept.expand_as(middle).reshape(-1, kept.shape[-1])
    moved = middle.reshape(-1, kept.shape[-1])
    return symmetric_inner(flat, moved) if symmetric else flat.T @ moved


def is_symmetric(matrix: Tensor | None) -> bool:
    """Say whether a matrix is symmetric to the last bit.

    Args:
        matrix: The matrix; None stands for the identity.

    Returns:
        True if it equals its transpose.

    >>> is_symmetric(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    True
    """
    return matrix is None or torch.equal(matrix, matrix.T)


def _narrow_left(grads: Tensor, weights: Tensor | None, other: Tensor | None) -> Tensor:
    """Σ w G M Gᵀ for few rows, as a sum of small products: no transposed copy of the gradients."""
    m = grads.shape[1]
    moved = grads if other is None else grads @ other
    if weights is not None:
        moved = moved * weights.to(moved.dtype).view(-1, 1, 1)
    total = torch.addbmm(grads.new_zeros(m, m), moved, grads.mT)
    return _symmetrized(total) if is_symmetric(other) else total


def _product(x: Tensor, y: Tensor, middle: Tensor | None) -> Tensor:
    """XᵀY, by halves when the matrix between the gradients was symmetric and the result therefore is."""
    if is_symmetric(middle):
        return symmetric_inner(x, y)
    return x.T @ y


def _symmetrized(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
