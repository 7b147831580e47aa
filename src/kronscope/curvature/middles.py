r"""What stands in the middle of a contraction of factored gradients: products of one side's factors over positions.

With :math:`G = B^\top A`, the contraction :math:`G R G^\top = B^\top (A R A^\top) B` and the form
:math:`\langle G, L G R\rangle = \langle B L B^\top, A R A^\top\rangle` have the middle :math:`A R A^\top` in common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kronscope.gradients.atoms import Atoms, FactoredAtoms
from kronscope.kron import position_products

__all__ = ["Middles"]

# Bytes of one matrix's middles that are kept, and of how many matrices.
_BYTES = 16 << 20
_MATRICES = 6


class Middles:
    """The middles of a stream's chunks; those with the last few matrices are kept, as far as they are small."""

    def __init__(self) -> None:
        # a matrix is kept with its middles, so that its id stays its own
        self._kept: OrderedDict[tuple[object, ...], tuple[Tensor | None, list[Tensor]]] = OrderedDict()

    def of(
        self, chunks: Callable[[], Iterator[Atoms]], mode: int, matrix: Tensor | None
    ) -> Iterator[tuple[Atoms, Tensor]]:
        """Iterate chunks with their middles (k, c or 1, t, t); whole gradients have empty ones.

        Args:
            chunks: Starts a pass over the chunks, the same ones each time.
            mode: Whose factors stand in the middle: 0 for the rows', 1 for the columns'.
            matrix: What stands between them; None is the identity.
        """
        key: tuple[object, ...] = (mode, None)
        if matrix is not None:
            # a matrix that was changed in place is another one; in inference mode that cannot be seen
            key = (mode, id(matrix), object() if matrix.is_inference() else matrix._version)
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            yield from zip(chunks(), known[1], strict=True)
            return
        made: list[Tensor] = []
        size = 0
        for atoms in chunks():
            middle = torch.empty(0)
            if isinstance(atoms, FactoredAtoms):
                middle = position_products((atoms.row_factors, atoms.col_factors)[mode], matrix)
            size += middle.numel() * middle.element_size()
            if size <= _BYTES:
                made.append(middle)
            yield atoms, middle
        if 0 < size <= _BYTES:
            self._kept[key] = (matrix, made)
            while len(self._kept) > _MATRICES:
                self._kept.popitem(last=False)
