"""What a step costs: multiply-adds, and an estimate that counts memory-bound work too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kronscope.kron.triangles import is_packed
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper
from kronscope.optim.stacks import factor_dtype

__all__ = [
    "BASIS_COST",
    "CALL_COST",
    "ELEMENT_COST",
    "MAKING_COST",
    "ROOT_COST",
    "STEP_CALLS",
    "Calls",
    "adamw_calls",
    "block_work",
    "call_counts",
    "counted_cost",
    "first_work",
    "layout_work",
    "making_cost",
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
# A number of a new state, whose memory has to be mapped first: measured where that takes long, and elsewhere some steps
# of the first are only a little shorter for it.
MAKING_COST = 200.0
# What a step takes for its calls alone, whatever the sizes, counted in products of two small matrices (fitted to the
# CPU time of steps of 1 ... 100 layers of 16 x 8 and a little more, of one shape and of many, by the three families).
STEP_CALLS = 250.0
# What a call of a small product costs where nothing is measured, in multiply-adds of a large one.
CALL_COST = 5e4
_MATRIX_CALLS, _VECTOR_CALLS = 45.0, 14.0
_STACK_CALLS, _REFRESH_CALLS, _ROOT_CALLS = 350.0, 450.0, 10.0
_ADAMW_CALLS, _ADAMW_STEP_CALLS = 8.0, 60.0


def refresh_cost(tile: Tile, mode: int, hyper: Hyper) -> float:
    """Return what it costs to refresh one factor of one block, in multiply-adds of a matrix product."""
    return hyper.rule.refresh_cost(tile.block, mode, hyper)


def making_cost(tile: Tile) -> float:
    """Return what it costs to make the state of one block: factors, roots and about three moments."""
    return MAKING_COST * (2.0 * sum(tile.block[mode] ** 2 for mode in tile.modes) + 3.0 * math.prod(tile.block))


def step_cost(tile: Tile, hyper: Hyper, statistics: float | None = None) -> float:
    """Return the cost of a step of one block without roots, in multiply-adds of a matrix product.

    Args:
        tile: The block's tile.
        hyper: Options.
        statistics: Steps for each gradient that is taken into the factors; None as the options have it.
    """
    return _products(tile, hyper, statistics or hyper.statistics) + 1.5 * ELEMENT_COST * math.prod(tile.block)


def block_work(tile: Tile, hyper: Hyper) -> tuple[float, float]:
    """Return multiply-adds of a step of one block, roots spread over their period, and its cost in the same unit."""
    roots = sum(refresh_cost(tile, mode, hyper) for mode in tile.modes) / hyper.refresh.period
    products = _products(tile, hyper, hyper.statistics)
    return products + roots + 15.0 * math.prod(tile.block), step_cost(tile, hyper) + roots


def _products(tile: Tile, hyper: Hyper, statistics: float) -> float:
    (always, gathering), entries = hyper.rule.passes(hyper), math.prod(tile.block)
    # of a Gram matrix that is kept as a triangle only the lower panels are formed
    saves = hyper.rule.packs and hyper.power_rounds == 1
    sizes = [tile.block[mode] for mode in tile.modes]
    grams = [gathering - 0.4 * (saves and is_packed(size)) for size in sizes]
    return sum((always + gram / statistics) * entries * float(size) for gram, size in zip(grams, sizes, strict=True))


def layout_work(layout: Layout, hyper: Hyper, numel: int) -> tuple[float, float]:
    """Return multiply-adds of a step of one parameter, and its cost in the same unit."""
    if layout.is_elementwise:
        return 10.0 * numel, ELEMENT_COST * numel
    parts = [(tile.total, block_work(tile, hyper)) for tile in layout.tiles]
    return sum(count * work[0] for count, work in parts), sum(count * work[1] for count, work in parts)


def first_work(layout: Layout, hyper: Hyper, numel: int) -> float:
    """Return the cost of one of the first steps, roots spread over all of them."""
    if layout.is_elementwise:
        return ELEMENT_COST * numel
    first = hyper.refresh.first_steps
    taken = sum(hyper.gathers(step) for step in range(1, first + 1))
    period = first / hyper.refresh.first_passes
    roots = {tile: sum(refresh_cost(tile, mode, hyper) for mode in tile.modes) / period for tile in layout.tiles}
    return sum(tile.total * (step_cost(tile, hyper, first / taken) + roots[tile]) for tile in layout.tiles)


def counted_cost(entries: Sequence[tuple[Tensor, Layout, Hyper]]) -> float:
    """Return the cost of a step, calls included, in multiply-adds of a matrix product; the same on every machine."""
    known: dict[tuple[Layout, int], float] = {}
    for _, layout, hyper in entries:
        key = (layout, id(hyper))
        if key not in known and not layout.frozen:
            known[key] = layout_work(layout, hyper, math.prod(layout.shape))[1]
    work = sum(known[layout, id(hyper)] for _, layout, hyper in entries if not layout.frozen)
    return work + CALL_COST * (STEP_CALLS + sum(calls.later for calls in call_counts(entries)))


class Calls(NamedTuple):
    """What a parameter's part of a step takes beside its work, in calls of a small product.

    Attributes:
        later: Roots spread over their period.
        first: In the first steps.
    """

    later: float
    first: float


def call_counts(entries: Sequence[tuple[Tensor, Layout, Hyper]]) -> list[Calls]:
    """Return what calls cost for each parameter; blocks that are treated together share what that costs.

    Args:
        entries: Parameters, their layouts and options.
    """
    keys = [_stack_of(*entry) for entry in entries]
    blocks: dict[object, int] = {}
    members: dict[object, int] = {}
    for key, (_, layout, _) in zip(keys, entries, strict=True):
        blocks[key] = blocks.get(key, 0) + sum(tile.total for tile in layout.tiles)
        members[key] = members.get(key, 0) + 1
    found = []
    for key, (_, layout, hyper) in zip(keys, entries, strict=True):
        if not layout.tiles:
            found.append(Calls(*[0.0 if layout.frozen else _VECTOR_CALLS] * 2))
            continue
        own = sum(tile.total * len(tile.modes) for tile in layout.tiles)
        modes = len(layout.tiles[0].modes)
        periods = hyper.refresh.period, hyper.refresh.first_steps / hyper.refresh.first_passes
        later, first = (
            _MATRIX_CALLS
            + (_STACK_CALLS + _REFRESH_CALLS * modes * min(1.0, blocks[key] / period)) / members[key]
            + _ROOT_CALLS * own / period
            for period in periods
        )
        found.append(Calls(later, first))
    return found


def _stack_of(param: Tensor, layout: Layout, hyper: Hyper) -> object:
    """Return what blocks must have in common to be treated together."""
    kinds = tuple((tile.block, tile.modes) for tile in layout.tiles)
    return kinds, factor_dtype(param), id(hyper)


def adamw_calls(parameters: int) -> float:
    """Return the same of a step of AdamW, fused, for so many parameters."""
    return _ADAMW_STEP_CALLS + _ADAMW_CALLS * parameters
