r"""Rounds of the iteration for the optimal product that never leave the positions of the samples.

Take gradients :math:`G_{ic} = B_{ic}^\top A_i` over t positions, where all columns of a sample share one side, such as
a layer's inputs (which of the two sides that is does not matter; it is called A here, and R is its factor). What the
iteration goes on with is then always of the form :math:`R = \sum_i A_i^\top S_i A_i` with t × t matrices
:math:`S_i`, and all that is ever asked of it is :math:`P_i = A_i R A_i^\top`. With two independent estimates 1 and 2,

.. math:: S_i \leftarrow w_i \sum_c B_{1ic} \Big( \sum_{jd} w_j B_{2jd}^\top P_j B_{2jd} \Big) B_{1ic}^\top
          + (1 \leftrightarrow 2), \qquad P_i = \sum_j A_i A_j^\top S_j A_j A_i^\top , \qquad
          \|R\|_F^2 = \sum_i \langle S_i, P_i\rangle .

Both sums may be taken through the matrices in the layer's dimensions, or through the products
:math:`B_{1ic}B_{2jd}^\top` and :math:`A_iA_j^\top` over pairs of samples, formed once: where there are few positions
beside the dimensions, that is far less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.curvature import SecondMoment
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.kron import position_products, positions_gram

__all__ = ["PositionIteration", "State"]

# What the products over pairs of samples are compared for: so many rounds are usual.
_ROUNDS = 4
# A symmetric product takes this share of a full one.
_SYMMETRIC = 0.625


@dataclass(frozen=True)
class State:
    """Where the iteration is.

    Attributes:
        inner: :math:`S` (N, t, t); None at the start, which need not have that form.
        products: :math:`P` (N, t, t).
    """

    inner: Tensor | None
    products: Tensor

    def distance(self, other: State) -> float:
        """The distance between the factors of two states."""
        assert self.inner is not None
        assert other.inner is not None
        square = ((self.inner - other.inner) * (self.products - other.products)).sum(dtype=torch.float64)
        return math.sqrt(max(float(square), 0.0))


@dataclass(frozen=True)
class _Chunk:
    """Some samples: factors (k, 1, t, n) of the shared side, (k, c, t, m) of both estimates' other side, weights."""

    shared: Tensor
    sides: tuple[Tensor, Tensor]
    weights: Tensor


class PositionIteration:
    """The iteration for two independent estimates from the same samples.

    Args:
        chunks: The gradients.
        pair_bytes: How much memory products over pairs of samples may take.
    """

    def __init__(self, chunks: Sequence[_Chunk], pair_bytes: int) -> None:
        self._chunks = chunks
        self._weights = torch.cat([chunk.weights for chunk in chunks]).to(chunks[0].shared.dtype)
        samples, t = len(self._weights), chunks[0].shared.shape[2]
        n, m = chunks[0].shared.shape[3], chunks[0].sides[0].shape[3]
        self._counts = [chunks[0].sides[part].shape[1] for part in (0, 1)]
        rows = [samples * count for count in self._counts]
        size = t * t * chunks[0].shared.element_size()
        pairs, direct = samples * samples, samples * t * n * n * (1 + _SYMMETRIC)
        self._between: Tensor | None = None
        if pairs * t * t * n + _ROUNDS * 2 * pairs * t**3 < _ROUNDS * direct and pairs * size <= pair_bytes:
            inputs = [chunk.shared for chunk in chunks]
            self._between = _pair_products(inputs, inputs)
        pairs, direct = rows[0] * rows[1], sum(rows) * t * m * m * (1 + _SYMMETRIC)
        self._across: Tensor | None = None
        if pairs * t * t * m + _ROUNDS * 4 * pairs * t**3 < _ROUNDS * direct and pairs * size <= pair_bytes:
            self._across = _pair_products([chunk.sides[0] for chunk in chunks], [chunk.sides[1] for chunk in chunks])

    @classmethod
    def of(cls, parts: Sequence[SecondMoment], side: int) -> PositionIteration | None:
        """Take the gradients of two estimates, or return None where they have not the form.

        Args:
            parts: The estimates.
            side: Which side's factor the iteration goes on with; it must be the one that columns share.
        """
        both = [part.passes.ready_chunks() for part in parts]
        if parts[0].stream.processes.world_size > 1 or both[0] is None or both[1] is None:
            return None
        chunks = []
        for one, two in zip(both[0], both[1], strict=True):
            if not isinstance(one, FactoredAtoms) or not isinstance(two, FactoredAtoms):
                return None
            shared = (one.row_factors, one.col_factors)[side]
            sides = tuple((atoms.row_factors, atoms.col_factors)[1 - side] for atoms in (one, two))
            if shared.shape[1] > 1 or shared.dtype != sides[0].dtype or one.row_inputs:
                return None
            chunks.append(_Chunk(shared, (sides[0], sides[1]), one.weights))
        if len({(chunk.shared.shape[2], chunk.sides[0].shape[1], chunk.sides[1].shape[1]) for chunk in chunks}) != 1:
            return None  # sequences of several lengths
        return cls(chunks, parts[0].stream.keep_bytes // 4)

    def begin(self, factor: Tensor) -> State:
        """Start from a matrix of the shared side."""
        return State(None, torch.cat([position_products(chunk.shared, factor).squeeze(1) for chunk in self._chunks]))

    def round(self, state: State) -> State:
        """One round; the factor that it gives has norm one."""
        inner = self._through_sides(state.products)
        inner = (inner + inner.mT) / 2
        # float32 would not hold the squares of small numbers
        inner = inner / (inner.abs().max().clamp_min(torch.finfo(inner.dtype).tiny))
        products = self._through_shared(inner)
        size = math.sqrt(max(float((inner * products).sum(dtype=torch.float64)), 0.0)) or 1.0
        return State(inner / size, products / size)

    def factors(self, state: State) -> tuple[Tensor, Tensor]:
        """The shared side's factor and the other one's, which both estimates give together."""
        assert state.inner is not None
        kept = self._expanded(state.inner)
        other = _summed(
            positions_gram(side, state.products[at, None], chunk.weights).double() / 2
            for chunk, at in self._located()
            for side in chunk.sides
        )
        return kept, other

    def _located(self) -> list[tuple[_Chunk, slice]]:
        starts = [0]
        for chunk in self._chunks:
            starts.append(starts[-1] + len(chunk.weights))
        return [(chunk, slice(starts[i], starts[i + 1])) for i, chunk in enumerate(self._chunks)]

    def _expanded(self, inner: Tensor) -> Tensor:
        """R from S."""
        return _summed(positions_gram(chunk.shared, inner[at, None]).double() for chunk, at in self._located())

    def _through_shared(self, inner: Tensor) -> Tensor:
        """P from S."""
        if self._between is None:
            return self.begin(self._expanded(inner)).products
        samples, t, _ = inner.shape
        out = torch.empty_like(inner)
        for i in range(samples):
            pairs = self._between[i * t : (i + 1) * t]  # (t, N·t)
            moved = _times_each(pairs, inner)
            out[i] = moved @ pairs.T
        return out

    def _through_sides(self, products: Tensor) -> Tensor:
        """S from P."""
        if self._across is None:
            return self._through_matrices(products)
        samples, t, _ = products.shape
        one, two = self._counts
        weighted = products * self._weights[:, None, None]
        for_two = weighted.repeat_interleave(two, 0)
        out = torch.zeros_like(products)
        back = products.new_zeros(samples * two, t, t)
        for i in range(samples * one):
            pairs = self._across[i * t : (i + 1) * t]  # (t, N·c·t)
            sample = i // one
            out[sample] += _times_each(pairs, for_two) @ pairs.T
            moved = weighted[sample] @ pairs
            back += pairs.view(t, -1, t).permute(1, 2, 0) @ moved.view(t, -1, t).permute(1, 0, 2)
        out += back.view(samples, two, t, t).sum(1)
        return out * self._weights[:, None, None]

    def _through_matrices(self, products: Tensor) -> Tensor:
        matrices = []
        for part in (1, 0):
            grams = (
                positions_gram(chunk.sides[part], products[at, None], chunk.weights) for chunk, at in self._located()
            )
            matrices.append(_summed(grams))
        found = []
        for chunk, _ in self._located():
            both = [position_products(chunk.sides[part], matrices[part]).sum(1) for part in (0, 1)]
            found.append((both[0] + both[1]) * chunk.weights.to(both[0])[:, None, None])
        return torch.cat(found)


def _summed(matrices: Iterator[Tensor]) -> Tensor:
    """Add up, one after the other."""
    total = next(matrices)
    for matrix in matrices:
        total = total + matrix
    return total


def _pair_products(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Products of all rows of (k, c, t, d) factors: (k·c·t, j·d·t)."""
    left = [part.reshape(-1, part.shape[-1]) for part in first]
    right = [part.reshape(-1, part.shape[-1]) for part in second]
    out = left[0].new_empty(sum(map(len, left)), sum(map(len, right)))
    row = 0
    for one in left:
        col = 0
        for two in right:
            torch.mm(one, two.T, out=out[row : row + len(one), col : col + len(two)])
            col += len(two)
        row += len(one)
    return out


def _times_each(pairs: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each block of (t, j·t) with its own matrix (j, t, t)."""
    t = len(pairs)
    moved = pairs.view(t, -1, t).permute(1, 0, 2) @ matrices
    return moved.permute(1, 0, 2).reshape(t, -1)
