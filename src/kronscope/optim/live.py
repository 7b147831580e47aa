"""An optimizer's state as operators, to be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.kron.devices import wide
from kronscope.kron.operators import Diagonal, Operator
from kronscope.kron.triangles import unpack
from kronscope.optim.block_state import Tensors
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper
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
        tensors = {name: state[block_key(index, name)] for name in hyper.rule.operator_tensors(tile.modes)}
        tensors = {name: unpack(tensor) if "factor" in name else tensor for name, tensor in tensors.items()}
        for place in range(tile.count):
            one = {name: _wide(tensor[place]) for name, tensor in tensors.items()}
            blocks.append((_indices(tile, place, layout.view, shape), hyper.rule.operator(one, tile, hyper, step)))
    if len(blocks) == 1:
        return blocks[0][1]
    return BlockDiagonal(shape, blocks)


def _indices(tile: Tile, place: int, view: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Return the flat indices (rows, columns) of a block, as its operator orders them."""
    flat = torch.arange(math.prod(view)).reshape(tuple(view))
    block = tile.extract(flat)[place]
    return block.reshape(block.shape[0] if block.ndim > 1 else 1, -1)


def _wide(tensor: Tensor) -> Tensor:
    return wide(tensor.detach()).clone()
