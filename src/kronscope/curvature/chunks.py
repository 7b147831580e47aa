"""Chunks of atoms: how a stream gives them, how they are cut, and what is computed from one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron.workspace import work_bytes

__all__ = [
    "FORMED",
    "ChunksFrom",
    "bounded",
    "bounded_factors",
    "chunks_from",
    "combined",
    "formed",
    "own_gram",
    "products",
    "rotated_squares",
    "split",
]

# Bytes that the float64 copy of a part of a chunk may take, and gradients formed from one if they are not kept.
_WORK_BYTES = 128 << 20
_FORMED_BYTES = 512 << 20
# Under this name a stream remembers its chunks as whole gradients.
FORMED = "formed chunks"
ChunksFrom = Callable[[int], Iterator[Atoms]]


def bounded(atoms: Atoms, *, forming: bool = False) -> Iterator[Atoms]:
    """Cut a chunk into parts that take little memory in float64.

    Args:
        atoms: The chunk.
        forming: Whether whole gradients will be formed from its factors.
    """
    m, n = atoms.shape
    per_sample = 8 * atoms.columns * m * n
    if isinstance(atoms, FactoredAtoms):
        rows, cols = atoms.row_factors, atoms.col_factors
        # where no weight is shared over positions, a sample's whole gradient is never formed
        own = 8 * (rows[0].numel() + cols[0].numel() + atoms.columns * atoms.positions**2)
        per_sample = own if atoms.positions == 1 and not forming else own + per_sample
    yield from (atoms.part(*at) for at in _cuts(len(atoms.weights), per_sample))


def bounded_factors(atoms: FactoredAtoms) -> Iterator[FactoredAtoms]:
    """Cut a chunk into parts whose factors take little memory in float64, with a temporary as large as they are."""
    count = len(atoms.weights)
    return (atoms.part(*at) for at in _cuts(count, 16 * atoms.numel // max(1, count)))


def _cuts(count: int, per_sample: int) -> Iterator[tuple[int, int]]:
    step = max(1, work_bytes(_WORK_BYTES) // max(per_sample, 1))
    return ((at, at + step) for at in range(0, count, step))


def split(atoms: Atoms, parts: int) -> Iterator[Atoms]:
    """Cut a chunk into about equal parts."""
    step = -(-len(atoms.weights) // parts)
    for at in range(0, len(atoms.weights), step):
        yield atoms.part(at, at + step)


def formed(stream: GradientStream) -> Iterator[Atoms]:
    """Iterate a stream's chunks as whole gradients, which are kept between passes while they fit."""
    kept: list[Atoms] | None = stream.memo.get(FORMED)
    if kept is not None:
        yield from kept
        return
    whole: list[Atoms] = []
    keep = False
    for number, atoms in enumerate(stream):
        keep = keep if number else _keeps_formed(stream, atoms)
        for part in (atoms,) if keep else _to_form(atoms):
            dense = part.dense()
            if keep:
                whole.append(dense)
            yield dense
    if keep:
        stream.memo[FORMED] = whole


def _keeps_formed(stream: GradientStream, first: Atoms) -> bool:
    """Whether gradients formed of a stream's chunks may be kept; whole ones only where they are in memory anyway."""
    (m, n), size = stream.shape, first.nbytes // max(1, first.numel)
    fits = size * stream.own_samples * stream.columns * m * n <= stream.keep_bytes
    return fits and (stream.in_memory or isinstance(first, FactoredAtoms))


def _to_form(atoms: Atoms) -> Iterator[Atoms]:
    """Cut a chunk so that the gradients of a part fit into the memory of a temporary."""
    m, n = atoms.shape
    step = max(1, work_bytes(_FORMED_BYTES) // max(4 * atoms.columns * m * n, 1))
    if isinstance(atoms, FactoredAtoms) and step < len(atoms.weights):
        yield from (atoms.part(at, at + step) for at in range(0, len(atoms.weights), step))
    else:
        yield atoms


def chunks_from(stream: GradientStream, *, factored: bool) -> ChunksFrom:
    """Return what iterates this process's chunks from a given number on, factored or as whole gradients.

    A stream of one chunk is cut into several, so that pairs of chunks save the symmetric half here too.
    """
    lone = next(iter(stream), None)
    if lone is not None:
        keep = not factored and _keeps_formed(stream, lone)
        if len(lone.weights) == stream.own_samples > 1 and (factored or isinstance(lone, DenseAtoms) or keep):
            parts = list(split(lone if factored else next(formed(stream)), 8))
            return lambda start: iter(parts[start:])
        if keep:
            # formed once and for all: the pass over the first chunks of pairs ends after those over the second ones
            deque(formed(stream), maxlen=0)
    del lone

    def chunks(start: int) -> Iterator[Atoms]:
        if factored:
            return islice(iter(stream), start, None)
        if start == 0:
            return formed(stream)
        kept: list[Atoms] | None = stream.memo.get(FORMED)
        if kept is not None:
            return iter(kept[start:])
        # earlier ones are passed over before anything is formed of them
        return (atoms.dense() for atoms in islice((part for each in stream for part in _to_form(each)), start, None))

    return chunks


def own_gram(atoms: Atoms) -> Tensor:
    """Return the inner products (k, c, c) between the columns of each of the k samples."""
    if isinstance(atoms, FactoredAtoms) and atoms.positions == 1:
        rows, cols = atoms.row_factors.double().squeeze(2), atoms.col_factors.double().squeeze(2)
        return (rows @ rows.mT) * (cols @ cols.mT)
    flat = atoms.wide().dense().grads.flatten(2)
    return flat @ flat.mT


def rotated_squares(atoms: Atoms, left: Tensor | None, right: Tensor | None) -> Tensor:
    r"""Return :math:`\sum_i w_i \sum_c (Q_L^\top G_{ic} Q_R)^2`, entry by entry; None stands for the identity."""
    if isinstance(atoms, FactoredAtoms):
        rows = atoms.row_factors if left is None else atoms.row_factors @ left
        cols = atoms.col_factors if right is None else atoms.col_factors @ right
        if atoms.positions == 1:
            rows, cols = rows.squeeze(2).square(), cols.squeeze(2).square()
            if rows.shape[1] == 1 or cols.shape[1] == 1:
                return (rows.sum(1) * atoms.weights[:, None]).T @ cols.sum(1)
            return (rows * atoms.weights.view(-1, 1, 1)).flatten(0, 1).T @ cols.flatten(0, 1)
        squares = (rows.mT @ cols).square_()
    else:
        grads = atoms.grads if right is None else atoms.grads @ right
        grads = grads if left is None else left.T @ grads
        squares = grads.square() if grads is atoms.grads else grads.square_()
    weighted: Tensor = torch.tensordot(atoms.weights, squares.sum(1), 1)
    return weighted


def products(atoms: Atoms, vectors: Tensor) -> Tensor:
    r"""Return :math:`\sum_i w_i \sum_c \langle G_{ic}, V\rangle G_{ic}` for each of several V (v, m, n)."""
    if isinstance(atoms, DenseAtoms):
        forms = (vectors.flatten(1) @ atoms.grads.flatten(2).flatten(0, 1).T).view(len(vectors), *atoms.grads.shape[:2])
        return combined(atoms, forms * atoms.weights[:, None].to(forms))
    rows, cols = atoms.row_factors, atoms.col_factors
    # ⟨BᵀA, V⟩ = ⟨B, A Vᵀ⟩ = ⟨A, B V⟩: the side that all columns share comes first
    if cols.shape[1] == 1:
        forms = torch.einsum("kctm,vktm->vkc", rows, cols.squeeze(1) @ vectors.mT.unsqueeze(1))
    elif rows.shape[1] == 1:
        forms = torch.einsum("kctn,vktn->vkc", cols, rows.squeeze(1) @ vectors.unsqueeze(1))
    else:
        forms = torch.einsum("kctm,vkctm->vkc", rows, cols @ vectors.mT[:, None, None])
    return combined(atoms, forms * atoms.weights[:, None].to(forms))


def combined(atoms: Atoms, weights: Tensor) -> Tensor:
    r"""Return :math:`\sum_{ic} x_{ic} G_{ic}` for each of several tables x (v, k, c) of numbers."""
    if isinstance(atoms, DenseAtoms):
        return (weights.flatten(1) @ atoms.grads.flatten(2).flatten(0, 1)).view(len(weights), *atoms.shape)
    rows, cols = atoms.row_factors, atoms.col_factors
    # the columns are added up before they meet the side that they share
    if cols.shape[1] == 1:
        summed = torch.einsum("vkc,kctm->vktm", weights, rows)
        return summed.flatten(1, 2).mT @ cols.flatten(0, 2)
    if rows.shape[1] == 1:
        summed = torch.einsum("vkc,kctn->vktn", weights, cols)
        return rows.flatten(0, 2).T @ summed.flatten(1, 2)
    return (weights[..., None, None] * rows).flatten(1, 3).mT @ cols.flatten(0, 2)
