r"""Operators on a part of a matrix: of an operator on whole matrices, only what it does to some rows and columns.

With P the projection of (m, n) matrices on a block, the restriction of K is :math:`P K P^\top`: the rows and columns of
the matrix K that belong to the block's entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kronscope.errors import OptionError, ShapeError
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.devices import wide
from kronscope.kron.operators import Diagonal, EigenbasisDiagonal, Identity, KroneckerProduct, KroneckerSum, Operator

__all__ = ["CompressedDiagonal", "restricted"]

# The largest number of entries that a dense matrix is formed for.
_MAX_DENSE = 4096


def restricted(operator: Operator, rows: tuple[int, int], cols: tuple[int, int]) -> Operator:
    r"""Return the operator on a block of the matrices that an operator acts on.

    Of a Kronecker product :math:`L \otimes R` that is :math:`L_{II} \otimes R_{JJ}` for rows I and columns J.

    Args:
        operator: The operator on whole (m, n) matrices.
        rows: First row of the block and one past its last.
        cols: First column and one past the last.

    Returns:
        An operator on matrices of the block's shape.

    Raises:
        OptionError: its kind is unknown here, and its dense matrix would be too large; or it is cut into blocks of
            entries that are no ranges of rows and columns.

    >>> K = KroneckerProduct(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.eye(4))
    >>> restricted(K, (1, 3), (0, 2)).trace()
    10.0
    """
    m, n = operator.shape
    (a, b), (c, d) = rows, cols
    shape = (b - a, d - c)
    if (rows, cols) == ((0, m), (0, n)):
        return operator
    if isinstance(operator, Identity):
        return Identity(shape, operator.scale)
    if isinstance(operator, KroneckerProduct):
        left, right = operator.left.matrix[a:b, a:b], operator.right.matrix[c:d, c:d]
        return KroneckerProduct(left.contiguous(), right.contiguous(), operator.scale)
    if isinstance(operator, KroneckerSum):
        return KroneckerSum([(sigma, left[a:b, a:b], right[c:d, c:d]) for sigma, left, right in operator.terms])
    if type(operator) is Diagonal:
        return Diagonal(operator.values[a:b, c:d])
    if type(operator) is EigenbasisDiagonal:
        return CompressedDiagonal(_rows(operator.left, m, a, b), _rows(operator.right, n, c, d), operator.values)
    if isinstance(operator, BlockDiagonal):
        return _restricted_blocks(operator, rows, cols)
    if m * n > _MAX_DENSE:
        raise OptionError(
            f"of a {type(operator).__name__} on {m} x {n} matrices no part can be taken: its dense matrix is too large."
        )
    dense = operator.to_dense()
    index = torch.arange(m * n, device=dense.device).view(m, n)[a:b, c:d].flatten()
    return _of_dense(dense[index[:, None], index], shape)


def _of_dense(matrix: Tensor, shape: tuple[int, int]) -> BlockDiagonal:
    """A dense matrix as an operator: one block that is a single row of all entries."""
    flat = torch.arange(shape[0] * shape[1]).view(1, -1)
    return BlockDiagonal(shape, [(flat, KroneckerProduct(torch.ones_like(matrix[:1, :1]), matrix))])


def _rows(basis: Tensor | None, size: int, start: int, stop: int) -> Tensor:
    whole = torch.eye(size, dtype=torch.float64) if basis is None else basis
    return whole[start:stop]


def _restricted_blocks(operator: BlockDiagonal, rows: tuple[int, int], cols: tuple[int, int]) -> BlockDiagonal:
    n, shape = operator.shape[1], (rows[1] - rows[0], cols[1] - cols[0])
    blocks: list[tuple[Tensor, Operator]] = []
    for indices, one in operator.blocks:
        row, col = indices // n, indices % n
        inside = (row >= rows[0]) & (row < rows[1]) & (col >= cols[0]) & (col < cols[1])
        if not bool(inside.any()):
            continue
        own = [torch.nonzero(inside.any(1 - side)).flatten() for side in (0, 1)]
        (a, b), (c, d) = ((int(part[0]), int(part[-1]) + 1) for part in own)
        if not bool(inside[a:b, c:d].all()):
            raise OptionError("the optimizer's blocks are no ranges of rows and columns, so that no part can be taken.")
        places = (row[a:b, c:d] - rows[0]) * shape[1] + (col[a:b, c:d] - cols[0])
        blocks.append((places, restricted(one, (a, b), (c, d))))
    return BlockDiagonal(shape, blocks)


class CompressedDiagonal:
    r"""An operator :math:`G \mapsto Q_I (\kappa \circ Q_I^\top G\, Q_J) Q_J^\top`, with some rows of two bases.

    It is what an :class:`EigenbasisDiagonal` does to a block with rows I and columns J.

    Args:
        left: Rows I of :math:`Q_L`, as (|I|, m).
        right: Rows J of :math:`Q_R`, as (|J|, n).
        values: The table :math:`\kappa` (m, n).

    >>> half = CompressedDiagonal(torch.eye(2)[:1], torch.eye(3), torch.ones(2, 3))
    >>> half.shape, half.trace()
    ((1, 3), 3.0)
    """

    def __init__(self, left: Tensor, right: Tensor, values: Tensor) -> None:
        if (left.shape[1], right.shape[1]) != tuple(values.shape):
            raise ShapeError(
                f"the bases have {left.shape[1]} and {right.shape[1]} columns, the table is {tuple(values.shape)}."
            )
        self.left, self.right, self.values = left.to(values), right.to(values), values

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrices it acts on."""
        return self.left.shape[0], self.right.shape[0]

    def apply(self, matrix: Tensor) -> Tensor:
        """Map matrices of its shape to the same shape."""
        if matrix.shape[-2:] != self.shape:
            raise ShapeError(
                f"this operator acts on (..., {self.shape[0]}, {self.shape[1]}), got {tuple(matrix.shape)}."
            )
        left, right, values = (tensor.to(matrix) for tensor in (self.left, self.right, self.values))
        return left @ (values * (left.T @ matrix @ right)) @ right.T

    def norm(self) -> float:
        r"""Frobenius norm.

        .. math:: \|K\|^2 = \langle\kappa, (Q_I^\top Q_I)^{\circ 2}\, \kappa\, (Q_J^\top Q_J)^{\circ 2}\rangle
        """
        left, right, values = (wide(tensor) for tensor in (self.left, self.right, self.values))
        turned = (left.T @ left).square() @ values @ (right.T @ right).square()
        return math.sqrt(max(float((values * turned).sum()), 0.0))

    def trace(self) -> float:
        """Trace."""
        left, right = wide(self.left).square().sum(0), wide(self.right).square().sum(0)
        return float(left @ wide(self.values) @ right)

    def power(self, exponent: float) -> Operator:
        """Return the operator to a real power, through its dense matrix.

        Raises:
            OptionError: the block has more than 4096 entries.
        """
        if self.shape[0] * self.shape[1] > _MAX_DENSE:
            raise OptionError(
                f"a power of a part of an eigenbasis needs its dense matrix, which is decomposed for up to "
                f"{_MAX_DENSE} entries, got {self.shape[0]} x {self.shape[1]}."
            )
        return _of_dense(self.to_dense(), self.shape).power(exponent)

    def inner(self, other: Operator) -> float:
        """Frobenius inner product, with operators of other kinds through dense matrices."""
        if other.shape != self.shape:
            raise ShapeError(f"the operators act on different shapes: {self.shape} and {other.shape}.")
        if isinstance(other, KroneckerProduct):
            left, right = (wide(tensor) for tensor in (self.left, self.right))
            rows = (left * (wide(other.left.matrix).to(left.device) @ left)).sum(0)
            cols = (right * (wide(other.right.matrix).to(right.device) @ right)).sum(0)
            return other.scale * float(rows @ wide(self.values) @ cols)
        if isinstance(other, Identity):
            return other.scale * self.trace()
        dense, found = self.to_dense(), wide(other.to_dense())
        return float((dense * found.to(dense.device)).sum())

    def to_dense(self) -> Tensor:
        """Return the matrix of all entries of the block, in float64."""
        basis = torch.kron(wide(self.left).contiguous(), wide(self.right).contiguous())
        return (basis * wide(self.values).flatten()) @ basis.T
