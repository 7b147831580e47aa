r"""Squared inner products between all pairs of samples: what the norm of a second-moment matrix is made of.

.. math:: S_{ij} = \sum_{c,d} \langle G_{ic}, G_{jd} \rangle^2, \qquad \|H\|_F^2 = \sum_{ij} w_i w_j S_{ij} .
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronscope.gradients.atoms import Atoms, DenseAtoms, FactoredAtoms
from kronscope.kron.workspace import work_bytes

__all__ = ["assembled_kernels", "factor_kernels", "pair_squares", "safe_in_float32"]

# Bytes of the largest intermediate of one tile, of doubles.
_TILE_BYTES = 256 << 20
# Multiply-adds of a tile below which float64 costs nothing worth saving.
_SMALL_TILE = 1e9
_LARGE_KERNEL = 2e10


def pair_squares(first: Atoms, second: Atoms) -> Tensor:
    """Return S (k, k') between the samples of two chunks, in float64."""
    if isinstance(first, FactoredAtoms) and isinstance(second, FactoredAtoms):
        if first.positions == 1 and second.positions == 1:
            kernels = factor_kernels(first.wide(), second.wide())
            if kernels is not None:
                return kernels[0] * kernels[1]
        return _shared_pairs(first, second)
    return _dense_pairs(first.dense(), second.dense())


def factor_kernels(first: FactoredAtoms, second: FactoredAtoms) -> tuple[Tensor, Tensor] | None:
    r"""Return the row and column kernels whose product is S, when the atoms are :math:`b_{ic} a_i^\top`.

    The side with columns gives :math:`\|B_i B_j^\top\|_F^2`, the other :math:`(a_i \cdot a_j)^2`. None where both
    sides have several columns, since S is then not such a product.
    """
    if any(min(atoms.row_factors.shape[1], atoms.col_factors.shape[1]) > 1 for atoms in (first, second)):
        return None
    return _side_kernel(first.row_factors, second.row_factors), _side_kernel(first.col_factors, second.col_factors)


def _side_kernel(first: Tensor, second: Tensor) -> Tensor:
    """Squares of all inner products of (k, c, 1, d) factors, summed over the columns of each pair."""
    k, c, _, width = first.shape
    j, d = second.shape[:2]
    out = first.new_empty(k, j, dtype=torch.float64)
    right = second.reshape(j * d, width)
    step = max(1, work_bytes(_TILE_BYTES) // 8 // max(1, c * j * d))
    for at in range(0, k, step):
        left = first[at : at + step].reshape(-1, width)
        products = (left @ right.T).double().square_()
        out[at : at + step] = _block_sums(products, c, d)
    return out


def _block_sums(values: Tensor, c: int, d: int) -> Tensor:
    """Sum (k·c, j·d) over blocks of c x d, in float64; rows first, which runs along memory."""
    by_rows = values.view(-1, c, values.shape[1]).sum(1, dtype=torch.float64) if c > 1 else values.double()
    return by_rows.view(len(by_rows), -1, d).sum(2) if d > 1 else by_rows


def _dense_pairs(first: DenseAtoms, second: DenseAtoms) -> Tensor:
    c, d = first.columns, second.columns
    one, two = first.grads.flatten(2).flatten(0, 1), second.grads.flatten(2).flatten(0, 1)
    common = torch.promote_types(one.dtype, two.dtype)
    if one.shape[0] * two.numel() < _SMALL_TILE or common == torch.float64:
        return _block_sums((one.double() @ two.double().T).square_(), c, d)
    # in large tiles float32 gradients are multiplied in float32, at twice the speed: an entry's rounding is 1e-7 of its
    # samples' norms, and squares are taken and summed in float64. Gradients are copied only where they must be scaled
    # for their products to stay in float32's range.
    if not (safe_in_float32(first) and safe_in_float32(second)):
        scales = [float(part.abs().max().clamp_min(torch.finfo(common).tiny)) for part in (one, two)]
        products = (one / scales[0]) @ (two / scales[1]).T
        return _block_sums(products.double().square_(), c, d) * (scales[0] * scales[1]) ** 2
    return _block_sums((one @ two.T).double().square_(), c, d)


def _shared_pairs(first: FactoredAtoms, second: FactoredAtoms) -> Tensor:
    """Inner products over positions, Σ_ts (b_t·b_s)(a_t·a_s), a few samples at a time."""
    out = torch.empty(len(first.weights), len(second.weights), dtype=torch.float64, device=first.weights.device)
    rows_two, cols_two = second.row_factors.double(), second.col_factors.double()
    per_pair = first.columns * second.columns * first.positions * second.positions
    step = max(1, work_bytes(_TILE_BYTES) // 8 // max(1, per_pair * len(second.weights)))
    for at in range(0, len(first.weights), step):
        part = first.part(at, at + step)
        row_products = torch.einsum("kctm,jdsm->kjcdts", part.row_factors.double(), rows_two)
        col_products = torch.einsum("kctn,jdsn->kjcdts", part.col_factors.double(), cols_two)
        # broadcasting brings in the side whose columns are shared
        inner = (row_products * col_products).sum((-1, -2))
        out[at : at + step] = inner.square().sum((2, 3))
    return out


def assembled_kernels(chunks: list[Atoms]) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the two N x N kernels tile by tile, the upper half only."""
    parts: list[FactoredAtoms] = []
    # float32 products round at 1e-7 of the samples' norms, which averages out over as many pairs as make them worth it
    count = sum(len(chunk.weights) * chunk.columns for chunk in chunks)
    large = count * count * max(chunks[0].shape) > _LARGE_KERNEL and all(map(safe_in_float32, chunks))
    for chunk in chunks:
        assert isinstance(chunk, FactoredAtoms)
        step = max(1, 1024 // max(chunk.columns, 1))
        parts.extend(chunk.part(at, at + step) for at in range(0, len(chunk.weights), step))
    weights = torch.cat([part.weights for part in parts])
    count = len(weights)
    rows, cols = weights.new_empty(count, count), weights.new_empty(count, count)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.weights))
    for i, part in enumerate(parts):
        first = part if large else part.wide()
        for j in range(i, len(parts)):
            tile = factor_kernels(first, parts[j] if large else first if j == i else parts[j].wide())
            assert tile is not None
            at, to = slice(starts[i], starts[i + 1]), slice(starts[j], starts[j + 1])
            for kernel, block in zip((rows, cols), tile, strict=True):
                kernel[at, to] = block
                kernel[to, at] = block.T
    return rows, cols, weights


def safe_in_float32(atoms: Atoms) -> bool:
    """Whether the gradients are float32 and their inner products stay well inside its range."""
    parts = (atoms.grads,) if isinstance(atoms, DenseAtoms) else (atoms.row_factors, atoms.col_factors)
    if parts[0].dtype != torch.float32:
        return False
    # the extremes in one pass, without a copy of the sizes
    sizes = [max(abs(float(end)) for end in part.aminmax()) for part in parts if part.numel()]
    return all(1e-12 < size < 1e12 for size in sizes)
