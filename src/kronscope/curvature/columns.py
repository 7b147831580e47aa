r"""Contractions of a stream column by column, instead of summed up: what error bars are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.curvature.chunk_pairs import over_pairs
from kronscope.curvature.chunks import chunks_from
from kronscope.curvature.middles import Matrix, Spanned
from kronscope.gradients.atoms import Atoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron.workspace import work_bytes

__all__ = ["PairSums", "all_column_pairs", "column_forms", "column_pair_sums", "inner_products"]

# Bytes of the largest intermediate of one tile, of doubles.
_TILE_BYTES = 128 << 20
# Multiply-adds of a product below which float64 costs nothing worth saving.
_SMALL_PRODUCT = 1e9


def column_forms(atoms: Atoms, rows: Tensor, cols: Tensor, left: Matrix | None, right: Matrix | None) -> Tensor:
    r"""Return :math:`\langle G_{ic}, A\, G_{ic} B\rangle` (k, c), in float64.

    Args:
        atoms: A chunk.
        rows: For factored atoms the products of the row factors over positions, with :math:`A` between them.
        cols: The same of the column factors, with :math:`B`.
        left: Symmetric :math:`A` (m, m), for whole gradients; None is the identity.
        right: Symmetric :math:`B` (n, n).
    """
    if isinstance(atoms, FactoredAtoms):
        # broadcasting brings in the side whose columns are shared
        return (rows * cols).sum((-1, -2), dtype=torch.float64)
    grads = atoms.grads
    whole = [each.matrix() if isinstance(each, Spanned) else each for each in (left, right)]
    moved = grads if whole[0] is None else whole[0].to(grads) @ grads
    other = grads if whole[1] is None else grads @ whole[1].to(grads)
    return (moved * other).sum((-1, -2), dtype=torch.float64)


@dataclass(frozen=True)
class PairSums:
    r"""Sums of squared inner products between the columns of two chunks.

    Attributes:
        first: :math:`\sum_{jd} w_j \langle G_{ic}, G_{jd}\rangle^2` (k, c) for the columns of the first chunk.
        second: The same for the columns of the second chunk.
        own: The squares (k, c, c) between the columns of each sample, where both are one chunk.
    """

    first: Tensor
    second: Tensor
    own: Tensor


def column_pair_sums(first: Atoms, second: Atoms, *, same: bool = False, narrow: bool = False) -> PairSums:
    """Square the inner products between the columns of two chunks, and add them up.

    Args:
        first: A chunk of k samples with c columns each.
        second: Another one, or the same.
        same: Whether both are one chunk.
        narrow: Whether float32 products are good enough, and safe.
    """
    rows = torch.zeros(len(first.weights), first.columns, dtype=torch.float64, device=first.weights.device)
    cols = torch.zeros(len(second.weights), second.columns, dtype=torch.float64, device=first.weights.device)
    own = torch.zeros(len(first.weights) if same else 0, first.columns, first.columns).to(rows)
    positions = 1
    if isinstance(first, FactoredAtoms) and isinstance(second, FactoredAtoms):
        positions = first.positions * second.positions
    width = max(1, int((work_bytes(_TILE_BYTES) / 8 / positions) ** 0.5))
    for at in _cuts(first, width):
        for to in _cuts(second, width):
            one, two = first.part(at.start, at.stop), second.part(to.start, to.stop)
            squares = inner_products(one, two, narrow).double().square_()  # (k, c, j, d)
            rows[at] += torch.einsum("kcjd,j->kc", squares, two.weights)
            cols[to] += torch.einsum("kcjd,k->jd", squares, one.weights)
            if same and at == to:
                own[at] = squares.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return PairSums(rows, cols, own)


def all_column_pairs(stream: GradientStream, *, factored: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    """Square the inner products of all pairs of a stream's columns; see :meth:`SecondMoment.column_pairs`.

    Args:
        stream: The atoms.
        factored: Whether products are taken of factors, instead of whole gradients.
        narrow: Whether float32 products are good enough, and safe.
    """
    samples, columns = stream.num_samples, stream.columns

    def local() -> tuple[Tensor, Tensor]:
        sums = torch.zeros(samples, columns, dtype=torch.float64)
        own = torch.zeros(samples, columns, columns, dtype=torch.float64)

        def add(first: Atoms, second: Atoms, on_diagonal: bool) -> None:
            pairs = column_pair_sums(first, second, same=on_diagonal, narrow=narrow)
            sums[first.samples.cpu(), : first.columns] += pairs.first.cpu()
            if on_diagonal:
                own[first.samples.cpu(), : first.columns, : first.columns] = pairs.own.cpu()
            else:
                sums[second.samples.cpu(), : second.columns] += pairs.second.cpu()

        over_pairs(lambda: chunks_from(stream, factored=factored), add, stream.processes)
        return sums, own

    found, own = stream.sums(local, [(samples, columns), (samples, columns, columns)])
    return found, own


def _cuts(atoms: Atoms, width: int) -> list[slice]:
    step = max(1, width // max(1, atoms.columns))
    count = len(atoms.weights)
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def inner_products(first: Atoms, second: Atoms, narrow: bool) -> Tensor:
    """Inner products (k, c, j, d) between all columns of two chunks."""
    shape = (len(first.weights), first.columns, len(second.weights), second.columns)
    if isinstance(first, FactoredAtoms) and isinstance(second, FactoredAtoms):
        one, two = (first, second) if narrow else (first.wide(), second.wide())
        by_rows = torch.einsum("kctm,jdsm->kcjdts", one.row_factors, two.row_factors)
        by_cols = torch.einsum("kctn,jdsn->kcjdts", one.col_factors, two.col_factors)
        return (by_rows * by_cols).sum((-1, -2)).expand(shape)
    left, right = first.dense().grads.flatten(2).flatten(0, 1), second.dense().grads.flatten(2).flatten(0, 1)
    if narrow:
        return (left @ right.T).view(shape)
    common = torch.promote_types(left.dtype, right.dtype)
    if left.shape[0] * right.numel() < _SMALL_PRODUCT or common == torch.float64:
        return (left.double() @ right.double().T).view(shape)
    # float32 rounds an entry at 1e-7 of its gradients' norms; scaled, so that small gradients do not underflow
    scales = [float(part.abs().max().clamp_min(torch.finfo(common).tiny)) for part in (left, right)]
    products = (left / scales[0]) @ (right / scales[1]).T
    return products.double().mul_(scales[0] * scales[1]).view(shape)
