"""An operator made of smaller ones that act on disjoint blocks of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.errors import ShapeError
from kronscope.kron.devices import wide
from kronscope.kron.operators import Operator

__all__ = ["BlockDiagonal"]


class BlockDiagonal:
    """Operators on disjoint blocks of (m, n) matrices; entries that belong to no block are mapped to zero.

    Args:
        shape: The (m, n) of the matrices it acts on.
        blocks: Pairs of indices (r, c) into the flattened matrix and an operator of that shape.

    >>> from kronscope.kron.operators import Identity
    >>> first, second = torch.tensor([[0]]), torch.tensor([[1]])
    >>> BlockDiagonal((1, 2), [(first, Identity((1, 1), 2.0)), (second, Identity((1, 1), 3.0))]).trace()
    5.0
    """

    def __init__(self, shape: tuple[int, int], blocks: Sequence[tuple[Tensor, Operator]]) -> None:
        for indices, operator in blocks:
            if tuple(indices.shape) != operator.shape:
                raise ShapeError(
                    f"a block with indices {tuple(indices.shape)} needs an operator of its shape, got {operator.shape}."
                )
        self._shape = (int(shape[0]), int(shape[1]))
        self.blocks = tuple(blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """The (m, n) of the matrices it acts on."""
        return self._shape

    def apply(self, matrix: Tensor) -> Tensor:
        """Map (..., m, n) to the same shape."""
        if matrix.shape[-2:] != self.shape:
            raise ShapeError(
                f"this operator acts on (..., {self.shape[0]}, {self.shape[1]}), got {tuple(matrix.shape)}."
            )
        flat = matrix.flatten(-2)
        out = torch.zeros_like(flat)
        for indices, operator in self.blocks:
            index = indices.to(matrix.device)
            out[..., index] = operator.apply(flat[..., index])
        unflattened: Tensor = out.unflatten(-1, self.shape)
        return unflattened

    def norm(self) -> float:
        """Frobenius norm."""
        return math.sqrt(sum(operator.norm() ** 2 for _, operator in self.blocks))

    def trace(self) -> float:
        """Trace."""
        return sum(operator.trace() for _, operator in self.blocks)

    def power(self, exponent: float) -> BlockDiagonal:
        """Return the operator to a real power, block by block."""
        return BlockDiagonal(self.shape, [(indices, operator.power(exponent)) for indices, operator in self.blocks])

    def inner(self, other: Operator) -> float:
        """Frobenius inner product; with an operator that is not cut alike, through its dense form."""
        if other.shape != self.shape:
            raise ShapeError(f"the operators act on different shapes: {self.shape} and {other.shape}.")
        if isinstance(other, BlockDiagonal) and self._cut_like(other):
            return sum(a.inner(b) for (_, a), (_, b) in zip(self.blocks, other.blocks, strict=True))
        dense = other.to_dense()
        total = 0.0
        for indices, operator in self.blocks:
            index = indices.flatten().to(dense.device)
            part = dense[index[:, None], index]
            total += float((part * operator.to_dense().to(part)).sum())
        return total

    def to_dense(self) -> Tensor:
        """Return the mn x mn matrix in float64, where its blocks are; on the CPU, if these have no float64 there."""
        size = self.shape[0] * self.shape[1]
        parts = [(indices.flatten(), wide(operator.to_dense())) for indices, operator in self.blocks]
        # a block without data, as the identity, makes a dense matrix of the CPU
        place = next((part.device for _, part in parts if part.device.type != "cpu"), torch.device("cpu"))
        dense = torch.zeros(size, size, dtype=torch.float64, device=place)
        for indices, part in parts:
            index = indices.to(place)
            dense[index[:, None], index] = part.to(place)
        return dense

    def _cut_like(self, other: BlockDiagonal) -> bool:
        return len(self.blocks) == len(other.blocks) and all(
            torch.equal(a, b.to(a.device)) for (a, _), (b, _) in zip(self.blocks, other.blocks, strict=True)
        )
