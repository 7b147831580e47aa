"""An optimizer's state as operators, to be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.operators import Diagonal, EigenbasisDiagonal, KroneckerProduct, Operator
from kronscope.kron.triangles import unpack
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper
from kronscope.optim.pieces import Tensors
from kronscope.optim.stacks import block_key

__all__ = ["live_operator"]


def live_operator(param: Tensor, state: Tensors, layout: Layout, hyper: Hyper) -> Operator:
    """Return the curvature matrix a parameter's state stands for, in float64, on matrices (first dimension, rest).

    Parameters of fewer than two dimensions count as one row.
    """
    step = int(state["step"])
    rows = param.shape[0] if param.ndim > 1 else 1
    shape = (rows, param.numel() // max(rows, 1))
    if layout.is_elementwise:
        return Diagonal((_wide(state["exp_avg_sq"]) / hyper.correction2(step)).reshape(shape))
    blocks = []
    for index, tile in enumerate(layout.tiles):
        tensors = {name: state[block_key(index, name)] for name in _names(tile, hyper)}
        tensors = {name: unpack(tensor) if "factor" in name else tensor for name, tensor in tensors.items()}
        for place in range(tile.count):
            one = {name: _wide(tensor[place]) for name, tensor in tensors.items()}
            blocks.append((_indices(tile, place, layout.view, shape), _block_operator(one, tile, hyper, step)))
    if len(blocks) == 1:
        return blocks[0][1]
    return BlockDiagonal(shape, blocks)


def _names(tile: Tile, hyper: Hyper) -> list[str]:
    if hyper.family == "soap":
        return ["exp_avg_sq", *(f"basis{mode}" for mode in tile.modes)]
    return [f"factor{mode}" for mode in tile.modes]


def _block_operator(state: Tensors, tile: Tile, hyper: Hyper, step: int) -> Operator:
    block = tile.block if len(tile.block) > 1 else (1, *tile.block)
    columns = math.prod(block[1:])
    if hyper.family == "soap":
        values = state["exp_avg_sq"] / hyper.correction2(max(step - int(hyper.published), 1))
        bases = [state.get(f"basis{mode}") for mode in range(len(tile.block))]
        bases = bases if len(tile.block) > 1 else [None, *bases]
        right = None
        if any(basis is not None for basis in bases[1:]):
            filled = [_eye(size, values) if b is None else b for b, size in zip(bases[1:], block[1:], strict=True)]
            right = _kron(filled)
        return EigenbasisDiagonal(bases[0], right, values.reshape(block[0], columns))
    factors = {mode: state[f"factor{mode}"] / hyper.correction2(step) for mode in tile.modes}
    whole = factors[tile.modes[0]].trace()
    if hyper.family == "kl":
        filled = [factors.get(mode, _eye(size, whole)) for mode, size in enumerate(block)]
        return KroneckerProduct(filled[0], _kron(filled[1:]))
    # a side without a factor stands for (tr/d) I; each side beyond the first is divided by the trace
    filled = [
        factors[mode] if mode in factors else _eye(size, whole) * (whole / size) for mode, size in enumerate(block)
    ]
    scale = float(whole) ** -(len(block) - 1) if float(whole) > 0 else 0.0
    return KroneckerProduct(filled[0], _kron(filled[1:]), scale)


def _indices(tile: Tile, place: int, view: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Return the flat indices (rows, columns) of a block, as its operator orders them."""
    flat = torch.arange(math.prod(view)).reshape(tuple(view))
    block = tile.extract(flat)[place]
    return block.reshape(block.shape[0] if block.ndim > 1 else 1, -1)


def _kron(matrices: Sequence[Tensor]) -> Tensor:
    out = matrices[0]
    for matrix in matrices[1:]:
        out = torch.kron(out.contiguous(), matrix.contiguous())
    return out


def _eye(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64).clone()
