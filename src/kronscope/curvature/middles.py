r"""What stands in the middle of a contraction of factored gradients: products of one side's factors over positions.

With :math:`G = B^\top A`, the contraction :math:`G R G^\top = B^\top (A R A^\top) B` and the form
:math:`\langle G, L G R\rangle = \langle B L B^\top, A R A^\top\rangle` have the middle :math:`A R A^\top` in common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.gradients.atoms import Atoms, FactoredAtoms
from kronscope.kron import position_products

__all__ = ["Matrix", "Middles", "Spanned", "content_key"]

# Bytes of one matrix's middles that are kept, and of how many matrices.
_BYTES = 16 << 20
_MATRICES = 6

Chunks = Callable[[], Iterator[Atoms]]


@dataclass(frozen=True, eq=False)
class Spanned:
    r"""A symmetric matrix :math:`V \operatorname{diag}(v) V^\top` that need not be formed.

    The powers of a factor share their vectors, and so what is made of the gradients with these. A factor of few vectors
    costs as few products.

    Attributes:
        vectors: :math:`V` (d, r), one vector per column.
        values: :math:`v` (r,).

    >>> Spanned(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0])).matrix()
    tensor([[ 3.,  6.],
            [ 6., 12.]])
    """

    vectors: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (d, d) of the matrix."""
        return len(self.vectors), len(self.vectors)

    def matrix(self) -> Tensor:
        """Form the matrix."""
        product = (self.vectors * self.values.to(self.vectors)) @ self.vectors.T
        return (product + product.T) / 2

    def products(self, moved: Tensor) -> Tensor:
        """The products over positions (k, c, t, t) of factors that are multiplied with the vectors already."""
        weighted = moved * self.values.to(moved)
        if moved.shape[2] == 1:
            return (weighted * moved).sum(-1, keepdim=True)
        return weighted @ moved.mT


Matrix = Tensor | Spanned


class Middles:
    """The middles of a stream's chunks; those with the last few matrices are kept, as far as they are small.

    Args:
        keep_bytes: How much of the factors' products with one set of vectors may be kept, for each side.
        most_bytes: How much of all middles together may be kept.
    """

    def __init__(self, keep_bytes: int = 0, most_bytes: int = _MATRICES * _BYTES) -> None:
        # a matrix is kept with its middles, so that its id stays its own
        self._kept: OrderedDict[tuple[object, ...], tuple[Matrix | None, list[Tensor]]] = OrderedDict()
        self._keep_bytes = keep_bytes
        self._each_bytes = min(_BYTES, most_bytes // _MATRICES)
        self._moved: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def of(self, chunks: Chunks, mode: int, matrix: Matrix | None) -> Iterator[tuple[Atoms, Tensor]]:
        """Iterate chunks with their middles (k, c or 1, t, t); whole gradients have empty ones.

        Args:
            chunks: Starts a pass over the chunks, the same ones each time.
            mode: Whose factors stand in the middle: 0 for the rows', 1 for the columns'.
            matrix: What stands between them; None is the identity.
        """
        key = _key(mode, matrix)
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            yield from zip(chunks(), known[1], strict=True)
            return
        made: list[Tensor] = []
        size = 0
        for atoms, middle in self._made(chunks, mode, matrix):
            size += middle.numel() * middle.element_size()
            if size <= self._each_bytes:
                made.append(middle)
            yield atoms, middle
        if 0 < size <= self._each_bytes:
            self._kept[key] = (matrix, made)
            while len(self._kept) > _MATRICES:
                self._kept.popitem(last=False)

    def _made(self, chunks: Chunks, mode: int, matrix: Matrix | None) -> Iterator[tuple[Atoms, Tensor]]:
        if isinstance(matrix, Spanned):
            for atoms, moved in self.moved(chunks, mode, matrix.vectors):
                yield atoms, matrix.products(moved) if isinstance(atoms, FactoredAtoms) else moved
            return
        for atoms in chunks():
            middle = torch.empty(0)
            if isinstance(atoms, FactoredAtoms):
                middle = position_products((atoms.row_factors, atoms.col_factors)[mode], matrix)
            yield atoms, middle

    def moved(self, chunks: Chunks, mode: int, vectors: Tensor) -> Iterator[tuple[Atoms, Tensor]]:
        """Iterate chunks with one side's factors times some vectors (k, c or 1, t, r); for whole gradients empty.

        Args:
            chunks: Starts a pass over the chunks.
            mode: Whose factors: 0 for the rows', 1 for the columns'.
            vectors: The vectors (d, r).
        """
        known = self._moved.get(mode)
        if known is not None and known[0] is vectors:
            yield from zip(chunks(), known[1], strict=True)
            return
        self._moved.pop(mode, None)
        made: list[Tensor] = []
        size = 0
        for atoms in chunks():
            moved = torch.empty(0)
            if isinstance(atoms, FactoredAtoms):
                factors = (atoms.row_factors, atoms.col_factors)[mode]
                moved = factors @ vectors.to(factors)
            size += moved.numel() * moved.element_size()
            if size <= self._keep_bytes:
                made.append(moved)
            yield atoms, moved
        if 0 < size <= self._keep_bytes:
            self._moved[mode] = (vectors, made)


def _key(mode: int, matrix: Matrix | None) -> tuple[object, ...]:
    return mode, id(matrix) if isinstance(matrix, Spanned) else content_key(matrix)


def content_key(matrix: Tensor | None) -> object:
    """Equal for a tensor, while it lives, and itself; one that was changed in place is another one.

    In inference mode changes cannot be seen, so that nothing is equal there.
    """
    return None if matrix is None else (id(matrix), object() if matrix.is_inference() else matrix._version)
