"""What a step costs: multiply-adds, and an estimate that counts memory-bound work too."""

from __future__ import annotations

import math

from kronscope.kron.triangles import is_packed
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper

__all__ = [
    "BASIS_COST",
    "ELEMENT_COST",
    "ROOT_COST",
    "block_work",
    "first_work",
    "layout_work",
    "refresh_cost",
    "step_cost",
]

# An eigendecomposition with vectors and the two products that form a root take about as long as this many d³
# multiply-adds of a matrix product (measured at d = 256 ... 1024 with one thread).
ROOT_COST = 30.0
# A power step with its orthonormalisation, in the same unit.
BASIS_COST = 8.0
# Elementwise work is bound by memory: one entry costs about as much as this many multiply-adds.
ELEMENT_COST = 60.0


def refresh_cost(tile: Tile, mode: int, hyper: Hyper) -> float:
    """Return what it costs to refresh one factor of one block, in multiply-adds of a matrix product."""
    return hyper.rule.refresh_cost(tile.block, mode, hyper)


def step_cost(tile: Tile, hyper: Hyper) -> float:
    """Return the cost of a step of one block without roots, in multiply-adds of a matrix product."""
    return _products(tile, hyper) + 1.5 * ELEMENT_COST * math.prod(tile.block)


def block_work(tile: Tile, hyper: Hyper) -> tuple[float, float]:
    """Return multiply-adds of a step of one block, roots spread over their period, and its cost in the same unit."""
    roots = sum(refresh_cost(tile, mode, hyper) for mode in tile.modes) / hyper.refresh.period
    return _products(tile, hyper) + roots + 15.0 * math.prod(tile.block), step_cost(tile, hyper) + roots


def _products(tile: Tile, hyper: Hyper) -> float:
    passes, entries = hyper.rule.passes(hyper), math.prod(tile.block)
    # of a Gram matrix that is kept as a triangle only the lower panels are formed
    saves = hyper.rule.packs and hyper.power_rounds == 1
    sizes = [tile.block[mode] for mode in tile.modes]
    return sum((passes - 0.4 * (saves and is_packed(size))) * entries * float(size) for size in sizes)


def layout_work(layout: Layout, hyper: Hyper, numel: int) -> tuple[float, float]:
    """Return multiply-adds of a step of one parameter, and its cost in the same unit."""
    if layout.is_elementwise:
        return 10.0 * numel, ELEMENT_COST * numel
    parts = [(tile.total, block_work(tile, hyper)) for tile in layout.tiles]
    return sum(count * work[0] for count, work in parts), sum(count * work[1] for count, work in parts)


def first_work(layout: Layout, hyper: Hyper, numel: int) -> float:
    """Return the cost of a step that takes every root of one parameter, as the first ones do."""
    if layout.is_elementwise:
        return ELEMENT_COST * numel
    return sum(
        tile.total * (step_cost(tile, hyper) + sum(refresh_cost(tile, mode, hyper) for mode in tile.modes))
        for tile in layout.tiles
    )
