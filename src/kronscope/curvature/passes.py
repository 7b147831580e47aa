r"""Passes over a stream's gradients: the form and type they are taken in, what is remembered, and contractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kronscope.curvature.chunks import bounded, formed
from kronscope.curvature.forms import CONTRACTIONS, FormPlan, plan_form
from kronscope.curvature.middles import Matrix, Middles, Spanned
from kronscope.curvature.pairs import safe_in_float32
from kronscope.errors import DataError
from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import is_symmetric, mode_gram, positions_gram

__all__ = ["Passes"]

# Contractions in float32 are known to about this, relative to the largest of them.
_NARROW_ROUNDING = 1e-6

_T = TypeVar("_T")


class Passes:
    r"""How sums over the gradients of a stream are made, each of them once.

    A pass goes over the chunks of this process, factored or as whole gradients, whichever costs less, in float64 or,
    where random columns leave errors far above rounding, in their own type; processes add up what they find.

    Args:
        stream: The gradients.
        narrow: Whether contractions may be done in float32, the gradients' own type: a search can be, an answer not.

    >>> passes = Passes(GradientStream.from_tensors(torch.eye(2, dtype=torch.float64).view(2, 1, 2)))
    >>> passes.contraction(1, None)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]], dtype=torch.float64)
    """

    def __init__(self, stream: GradientStream, *, narrow: bool = False) -> None:
        self.stream = stream
        self.narrow = narrow

    def once(self, key: object, compute: Callable[[], _T]) -> _T:
        """Return what was computed under this key before, with this stream, or compute it."""
        if self.narrow:
            # not for those who want an answer of the same stream
            key = "narrow", key
        if key not in self.stream.memo:
            self.stream.memo[key] = compute()
        value: _T = self.stream.memo[key]
        return value

    def summed(self, local: Callable[[], Tensor], shape: Sequence[int]) -> Tensor:
        """Sum over processes; the plan is made first, since they make it together."""
        self.plan()
        return self.stream.summed(local, shape)

    # ------------------------------------------------------------------ form and type

    def plan(self) -> FormPlan:
        """Say whether gradients are used as factors or as whole matrices, and which costs decided it."""

        def compute() -> FormPlan:
            positions, columns = self._first_sizes()
            if not positions:
                return FormPlan("dense", "dense", (math.inf, 0.0, math.inf, 0.0))
            return plan_form(self.stream.shape, positions, columns, self.stream.num_samples)

        return self.once("plan", compute)

    def contraction_cost(self) -> float:
        """Estimate the multiply-adds of one contraction with a factor."""
        (m, n), plan = self.stream.shape, self.plan()
        if plan.contraction == "factored":
            return plan.costs[2] / CONTRACTIONS
        return float(self.stream.num_samples * self.stream.columns * m * n * (m + n))

    def in_float32(self) -> bool:
        """Whether products are taken in float32: where columns are random, rounding at 1e-7 is nothing beside them."""

        def compute() -> bool:
            return self.stream.random_columns > 0 and all(safe_in_float32(atoms) for atoms in self.stream)

        return self.narrow or self.once("in float32", compute)

    def rounding(self) -> float:
        """The relative size of what rounding leaves in contractions, where it is far above that of float64; else 0."""
        return _NARROW_ROUNDING if self.in_float32() else 0.0

    def _first_sizes(self) -> tuple[int, int]:
        """Positions (0 for whole gradients) and columns of the first chunk, on whichever process that is."""
        processes = self.stream.processes
        with processes.failing_together():
            first = next(iter(self.stream), None)
        found = None if first is None else (0 if isinstance(first, DenseAtoms) else first.positions, first.columns)
        every = processes.all_gather_object(found)
        sizes = next((sizes for sizes in every if sizes is not None), None)
        if sizes is None:
            raise DataError("the stream has no atoms.")
        return sizes

    # ------------------------------------------------------------------ gradients

    def chunks(self) -> Iterator[Atoms]:
        """Iterate the chunks in the form planned for contractions."""
        return iter(self.stream) if self.plan().contraction == "factored" else formed(self.stream)

    def wide_parts(self) -> Iterator[Atoms]:
        """Iterate bounded parts of the chunks in float64."""
        return (part.wide() for atoms in self.chunks() for part in bounded(atoms))

    def whole_parts(self) -> Iterator[DenseAtoms]:
        """Iterate bounded parts of the chunks as whole gradients in float64."""
        return (part.wide().dense() for atoms in self.chunks() for part in bounded(atoms, forming=True))

    def ready(self) -> Iterator[Atoms]:
        """Iterate bounded chunks in the form and type that contractions are done in."""
        for atoms in self.chunks():
            for part in bounded(atoms):
                yield part if self.in_float32() else part.wide()

    def ready_chunks(self) -> list[Atoms] | None:
        """This process's chunks in the form and type of contractions, if they are in memory; else None."""
        if not self.stream.in_memory:
            return None
        return [atoms if self.in_float32() else atoms.wide() for atoms in self.chunks()]

    def with_middles(self, mode: int, matrix: Matrix | None) -> Iterator[tuple[Atoms, Tensor]]:
        """Iterate the chunks with the products of one side's factors over positions; see :class:`Middles`."""
        return self._middles().of(self.ready, mode, matrix)

    def _middles(self) -> Middles:
        # as much as of formed gradients in all: a quarter for each side's products, the rest for middles
        keep = self.stream.keep_bytes
        return self.once("middles", lambda: Middles(keep // 4 if self.stream.in_memory else 0, keep // 2))

    # ------------------------------------------------------------------ contractions

    def contraction(self, mode: int, other: Matrix | None) -> Tensor:
        r"""Return :math:`\sum w\, G R G^\top` (m, m) for ``mode`` 0, :math:`\sum w\, G^\top L G` (n, n) for 1.

        Args:
            mode: Which side is left.
            other: :math:`R` or :math:`L`; None is the identity.
        """
        size = self.stream.shape[mode]

        def local() -> Tensor:
            total = torch.zeros(size, size, dtype=torch.float64)
            symmetric = isinstance(other, Spanned) or is_symmetric(other)
            for atoms, middle in self.with_middles(1 - mode, other):
                gram = _chunk_contraction(atoms, middle, mode, other, symmetric=symmetric)
                total = total.to(gram.device) + gram
            return total

        return self.summed(local, (size, size))

    def within(self, mode: int, vectors: Tensor, other: Matrix) -> Tensor:
        r"""Return a contraction between vectors: :math:`V^\top (\sum w\, G R G^\top) V` (r, r).

        Args:
            mode: Which side is left, as for :meth:`contraction`.
            vectors: :math:`V` (m or n, r); products with them are shared with those of a :class:`Spanned` matrix.
            other: :math:`R`, or :math:`L` for ``mode`` 1; symmetric.
        """
        count = vectors.shape[1]

        def local() -> Tensor:
            total = torch.zeros(count, count, dtype=torch.float64)
            middles = self._middles()
            pairs = zip(middles.moved(self.ready, mode, vectors), middles.of(self.ready, 1 - mode, other), strict=True)
            for (atoms, moved), (_, middle) in pairs:
                if isinstance(atoms, FactoredAtoms):
                    gram = positions_gram(moved, middle, atoms.weights)
                else:
                    whole = _chunk_contraction(atoms, middle, mode, other, symmetric=True)
                    gram = vectors.T.to(whole) @ whole @ vectors.to(whole)
                total = total.to(gram.device) + gram
            return total

        return self.summed(local, (count, count))


def _chunk_contraction(atoms: Atoms, middle: Tensor, mode: int, other: Matrix | None, *, symmetric: bool) -> Tensor:
    """One chunk's part of a contraction."""
    if isinstance(atoms, FactoredAtoms):
        kept = (atoms.row_factors, atoms.col_factors)[mode]
        return positions_gram(kept, middle, atoms.weights, symmetric=symmetric)
    weights = atoms.weights.repeat_interleave(atoms.columns)
    whole = other.matrix() if isinstance(other, Spanned) else other
    return mode_gram(atoms.grads.flatten(0, 1), weights, mode, None if whole is None else whole.to(atoms.grads))
