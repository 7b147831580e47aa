"""Chunks of atoms: cutting them, and what is computed of one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kronscope.gradients.atoms import Atoms, FactoredAtoms

__all__ = ["bounded", "own_gram", "rotated_squares", "split"]

# Bytes of what is made of a chunk in float64 at once.
_WORK_BYTES = 128 << 20


def bounded(atoms: Atoms, *, forming: bool = False) -> Iterator[Atoms]:
    """Cut a chunk so that what is made of it in float64 stays small; ``forming`` says that gradients will be formed."""
    m, n = atoms.shape
    per_sample = 8 * atoms.columns * m * n
    if isinstance(atoms, FactoredAtoms):
        rows, cols = atoms.row_factors, atoms.col_factors
        # without sharing nothing of size mn is formed per sample
        own = 8 * (rows[0].numel() + cols[0].numel() + atoms.columns * atoms.positions**2)
        per_sample = own if atoms.positions == 1 and not forming else own + per_sample
    step = max(1, _WORK_BYTES // max(per_sample, 1))
    for at in range(0, len(atoms.weights), step):
        yield atoms.part(at, at + step)


def split(atoms: Atoms, pieces: int) -> Iterator[Atoms]:
    """Cut a chunk into about equal parts."""
    step = -(-len(atoms.weights) // pieces)
    for at in range(0, len(atoms.weights), step):
        yield atoms.part(at, at + step)


def own_gram(atoms: Atoms) -> Tensor:
    """Inner products (k, c, c) between the columns of each sample."""
    if isinstance(atoms, FactoredAtoms) and atoms.positions == 1:
        rows, cols = atoms.row_factors.double().squeeze(2), atoms.col_factors.double().squeeze(2)
        return (rows @ rows.mT) * (cols @ cols.mT)
    flat = atoms.wide().dense().grads.flatten(2)
    return flat @ flat.mT


def rotated_squares(atoms: Atoms, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Weighted squares of the atoms' entries in a pair of bases."""
    if isinstance(atoms, FactoredAtoms):
        rows = atoms.row_factors if left is None else atoms.row_factors @ left
        cols = atoms.col_factors if right is None else atoms.col_factors @ right
        if atoms.positions == 1:
            rows, cols = rows.squeeze(2).square(), cols.squeeze(2).square()
            if rows.shape[1] == 1 or cols.shape[1] == 1:
                return (rows.sum(1) * atoms.weights[:, None]).T @ cols.sum(1)
            return (rows * atoms.weights.view(-1, 1, 1)).flatten(0, 1).T @ cols.flatten(0, 1)
        grads = rows.mT @ cols
    else:
        grads = atoms.grads if right is None else atoms.grads @ right
        grads = grads if left is None else left.T @ grads
    weighted: Tensor = torch.tensordot(atoms.weights, grads.square().sum(1), 1)
    return weighted
