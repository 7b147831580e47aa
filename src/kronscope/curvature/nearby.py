r"""A matrix that differs from another one by rounding and costs far less: what a search can be done with.

The gradient of a batch of few samples or tokens has few singular values that are not rounding, so that it is a product
of two thin factors. Where it is not, float32 products still take half the time of float64 ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.curvature.chunks import bounded, chunks_from
from kronscope.curvature.pairs import safe_in_float32
from kronscope.curvature.second_moment import SecondMoment
from kronscope.gradients.atoms import DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream

__all__ = ["Nearby", "Refined", "nearby"]

# Multiply-adds of a contraction below which there is nothing worth saving (about a second).
_WORTH = 3e10
# A gradient's rank, at most this share of its smaller side, and how many gradients are looked at to guess it.
_THIN_SHARE = 0.25
_LOOKED_AT = 4
# Singular values below this share of the largest are rounding of float32, and what thin factors may leave out.
_ROUNDING, _LEFT_OUT = 1e-6, 1e-5
# More directions than the guess, so that a gradient of a somewhat higher rank is still caught.
_EXTRA = 8


@dataclass(frozen=True)
class Nearby:
    """What a search for the optimum can be done with.

    Attributes:
        matrix: The matrix that is close; only its contractions are, not what depends on its columns one by one.
        refined: The contractions of the matrix itself for less, where there are thin factors.
    """

    matrix: SecondMoment
    refined: Refined | None = None


class Refined:
    r"""Contractions of gradients that are nearly products of thin factors, wrong only by the square of what is missing.

    With :math:`G = P + E`, where :math:`P = B^\top A` is thin,
    :math:`G R G^\top = P R G^\top + G R P^\top - P R P^\top + E R E^\top`. All terms but the last one have a thin
    factor, and the last one is left out.

    Args:
        stream: The gradients.
        chunks: Their thin factors, chunk by chunk.
        left_out: :math:`\sum w \|E\|_F^2`, which bounds the norm of what is left out for R of unit norm.
    """

    def __init__(self, stream: GradientStream, chunks: list[FactoredAtoms], left_out: float) -> None:
        self._stream, self._thin, self.left_out = stream, chunks, left_out

    def left(self, R: Tensor) -> Tensor:
        r"""Return :math:`\sum w\, G R G^\top` (m, m) for a symmetric R."""
        return self._contract(0, R)

    def right(self, L: Tensor) -> Tensor:
        r"""Return :math:`\sum w\, G^\top L G` (n, n) for a symmetric L."""
        return self._contract(1, L)

    def _contract(self, mode: int, other: Tensor) -> Tensor:
        size = self._stream.shape[mode]
        half = torch.zeros(size, size, dtype=torch.float64, device=other.device)
        for whole, thin in self._parts():
            factors = thin.row_factors.double(), thin.col_factors.double()
            kept, contracted = factors[mode], factors[1 - mode]
            moved = contracted @ other
            grads = whole.grads.double()
            rest = moved @ (grads.mT if mode == 0 else grads)  # A R Gᵀ or B L G
            rest = rest - (moved @ contracted.mT) @ kept / 2
            weighted = kept * thin.weights.view(-1, 1, 1, 1)
            half += weighted.flatten(0, 2).T @ rest.flatten(0, 2)
        return half + half.T

    def _parts(self) -> Iterator[tuple[DenseAtoms, FactoredAtoms]]:
        """Bounded parts of the gradients, beside their thin factors."""
        for atoms, thin in zip(chunks_from(self._stream, factored=False)(0), self._thin, strict=True):
            at = 0
            for part in bounded(atoms):
                count = len(part.weights)
                yield part.dense(), thin.part(at, at + count)
                at += count


def nearby(moment: SecondMoment) -> Nearby | None:
    """Return a matrix close to another one whose contractions are much cheaper, or None where there is none.

    Args:
        moment: The matrix.
    """
    stream = moment.stream
    if stream.processes.world_size > 1 or stream.random_columns or moment.passes.contraction_cost() < _WORTH:
        return None
    if not all(safe_in_float32(atoms) for atoms in stream):
        return None
    if moment.plan().contraction == "dense":
        refined = _thin(stream)
        if refined is not None:
            return refined
    return Nearby(SecondMoment(_again(stream), narrow=True))


def _again(stream: GradientStream) -> GradientStream:
    """The same gradients, of which nothing is remembered."""
    other = GradientStream(
        lambda: iter(stream), stream.shape, stream.num_samples, stream.columns, in_memory=stream.in_memory
    )
    other.keep_bytes = stream.keep_bytes
    return other


def _thin(stream: GradientStream) -> Nearby | None:
    """The gradients as products of thin factors; None where one of them is not."""
    chunks: list[FactoredAtoms] = []
    rank, left_out = 0, 0.0
    for atoms in chunks_from(stream, factored=False)(0):
        assert isinstance(atoms, DenseAtoms)
        if not rank:
            rank = _rank(atoms)
            if rank > _THIN_SHARE * min(stream.shape):
                return None
        found = _factored(atoms, rank)
        if found is None:
            return None
        chunks.append(found[0])
        left_out += found[1]
    if not chunks:
        return None
    return Nearby(SecondMoment(GradientStream.of_chunks(*chunks)), Refined(stream, chunks, left_out))


def _rank(atoms: DenseAtoms) -> int:
    """The largest rank of a few gradients, and some more."""
    flat = atoms.grads.flatten(0, 1)
    some = flat[torch.linspace(0, len(flat) - 1, min(_LOOKED_AT, len(flat))).long()]
    values = torch.linalg.svdvals(some.double())
    return int((values > _ROUNDING * values[:, :1]).sum(1).max()) + _EXTRA


def _factored(atoms: DenseAtoms, rank: int) -> tuple[FactoredAtoms, float] | None:
    """Factors of a rank, from products with random vectors, and the weighted squared norms of what they leave out.

    None where that is too much of one of the gradients.
    """
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(atoms.shape[1], rank, generator=generator).double().to(atoms.grads.device)
    rows, cols, total = [], [], 0.0
    for part in bounded(atoms):
        # in float64, since the rounding of float32 products hides the smaller directions
        grads = part.dense().grads.double()
        seen = torch.linalg.qr(grads @ probes).Q
        basis = torch.linalg.qr(grads @ (grads.mT @ seen)).Q.to(atoms.grads)  # (k, c, m, r)
        rest = (basis.double().mT @ grads).to(atoms.grads)
        missing = (grads - basis.double() @ rest.double()).square().sum((2, 3))
        if not bool((missing <= _LEFT_OUT**2 * grads.square().sum((2, 3))).all()):
            return None
        total += float(part.weights @ missing.sum(1))
        rows.append(basis.mT.contiguous())
        cols.append(rest)
    return FactoredAtoms(torch.cat(rows), torch.cat(cols), atoms.weights, atoms.samples), total
