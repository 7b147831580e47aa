"""Parameters to blocks: the matrix (or tensor) view of a parameter, its tiles, and which sides get factors."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kronscope.errors import OptionError
from kronscope.optim.tiles import Layout, Tile

__all__ = [
    "Layout",
    "LayoutOptions",
    "Tile",
    "default_allowance",
    "factor_bytes",
    "fit_budget",
    "frozen_layout",
    "plan_layout",
]

# Eigendecompositions beyond this take minutes; longer sides get no factor, or are cut, unless a block size is given.
MAX_SIDE = 8192
# Without a memory budget factors and roots may take this many times the parameters' own memory ...
DEFAULT_RATIO = 16
# ... and a model whose factors all together stay below this many bytes is not cut.
DEFAULT_FLOOR = 64 * 2**20
# Where nobody asks for a block size, no side of a block is longer than this; a longer matrix that is this many times
# longer than wide gets a factor for its short side only. Other roots cost more than they gain (benchmarks/frontier.py).
DEFAULT_BLOCK, DEFAULT_RATIO_OF_SIDES = 256, 16
# Where channels alone fill a block, the positions of a kernel that has at most this many of them share their factors:
# 512 x 4608 would have 36 blocks of 256 x 256 with 72 factors, 512 x 512 x 9 has 4 blocks with 8 of the same size.
LARGEST_KERNEL = 64
# Where matrices stay whole, one this many times longer than wide, and at least this long, gets a factor for its short
# side only: the other would be many times larger than the matrix (LoRA: 8 x 2048 numbers, 2048 x 2048 in a factor).
SKINNY_RATIO, SKINNY_LENGTH = 16, 1024
# Below this width the short side's factor has next to nothing to say, and AdamW is better.
LEAST_WIDTH = 4
# Methods that keep one factor: which of the two sides has it.
_SIDES = {"left": (True, False), "right": (False, True)}
_BLOCK_SIZES = (4096, 2048, 1024, 512, 256, 128, 64)


@dataclass(frozen=True)
class LayoutOptions:
    """What decides a layout.

    Attributes:
        method: ``"auto"``, ``"kronecker"``, ``"left"`` or ``"right"`` (a factor for the rows or the columns alone), or
            ``"adam"``.
        view: ``"matrix"`` flattens from dimension 1, but for the kernels of convolutions with many channels where long
            sides are cut; ``"modes"`` gives every dimension a factor; ``"experts"`` takes
            the first of three or more dimensions as a stack of matrices, each with factors of its own.
        merge: With ``"modes"``, neighbouring dimensions are merged while their product stays within this.
        split: Number of equal row parts, or the sizes of the parts, as for a fused qkv weight.
        block_size: Longest side of a block; None decides by shape and budget, ``math.inf`` leaves matrices whole where
            the budget allows.
        cuts: Whether None cuts long sides into blocks; if not, it is as ``math.inf``.
        role: ``"embedding"``, ``"head"`` and their like where recognised, else empty.
    """

    method: str = "auto"
    view: str = "matrix"
    merge: int = 0
    split: int | tuple[int, ...] | None = None
    block_size: float | None = None
    role: str = ""
    cuts: bool = True

    @property
    def is_cut(self) -> bool:
        """Whether a block size was asked for."""
        return self.block_size is not None and self.block_size < math.inf

    @property
    def is_limited(self) -> bool:
        """Whether long sides are cut although nobody asked."""
        return self.block_size is None and self.cuts

    def __post_init__(self) -> None:
        """Check each option."""
        if self.method not in ("auto", "kronecker", "adam", *_SIDES):
            raise OptionError(f"method must be 'auto', 'kronecker', 'left', 'right' or 'adam', got {self.method!r}.")
        if self.view not in ("matrix", "modes", "experts"):
            raise OptionError(f"view must be 'matrix', 'modes' or 'experts', got {self.view!r}.")
        for name in ("block_size", "merge"):
            value = getattr(self, name)
            if name == "block_size" and (value is None or value == math.inf):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"{name} must be a whole number, got {value!r}.")
        if self.block_size is not None and self.block_size < 1:
            raise OptionError(f"block_size must be at least 1, math.inf or None, got {self.block_size}.")


def frozen_layout(shape: Sequence[int]) -> Layout:
    """Return the layout of a parameter that is not trained."""
    return Layout(tuple(shape), tuple(shape), (), "frozen", frozen=True)


def plan_layout(
    shape: Sequence[int],
    options: LayoutOptions,
    element_size: int = 8,
    budget: float | None = None,
    *,
    floor: float = DEFAULT_FLOOR,
) -> Layout:
    """Decide how a parameter of this shape is treated.

    Args:
        shape: The parameter's shape.
        options: What was asked for.
        element_size: Bytes for each number of a factor, its root and what else is kept of that size included.
        budget: Bytes for all that; None allows 16 times the parameter, or ``floor``.
        floor: Bytes that are allowed in any case.

    Raises:
        OptionError: ``split`` does not fit the number of rows.

    >>> plan_layout((64, 16, 3, 3), LayoutOptions()).view
    (64, 144)
    >>> plan_layout((64, 512, 3, 3), LayoutOptions()).view
    (64, 512, 9)
    >>> plan_layout((50000, 64), LayoutOptions()).tiles[0].factored
    (False, True)
    >>> plan_layout((8, 64, 32), LayoutOptions(view="experts")).tiles[0].block
    (64, 32)
    """
    shape = tuple(int(size) for size in shape)
    if options.method == "adam":
        return Layout(shape, shape, (), "asked for")
    if options.method == "auto" and len(shape) < 2:
        return Layout(shape, shape, (), f"{len(shape)}-D")
    if options.method == "auto" and options.role:
        return Layout(shape, shape, (), options.role)
    if math.prod(shape) == 0:
        return Layout(shape, shape, (), "empty")
    view = _view(shape, options)
    if options.method in _SIDES:
        if len(view) != 2:
            raise OptionError(f"method={options.method!r} needs a matrix, but a parameter {shape} is viewed as {view}.")
        reason = f"one-sided (dimension {list(_SIDES).index(options.method)})"
        return _cut(
            shape, view, options, options.block_size if options.is_cut else None, _SIDES[options.method], reason
        )
    if options.is_cut:
        return _cut(shape, view, options, options.block_size, (True,) * len(view), f"blocks of {options.block_size}")
    plan = _cut(shape, view, options, None, _factored(view, options), "whole")
    if options.method == "auto" and _is_long(plan, options, budget):
        if min(plan.tiles[0].block) < LEAST_WIDTH:
            return Layout(shape, shape, (), "too thin for factors")
        plan = replace(_one_sided(plan, options), limited=options.is_limited)
    elif options.is_limited:
        plan = _in_equal_blocks(plan, options)
    if budget is None:
        budget = default_allowance(math.prod(shape), element_size, floor)
    for candidate in (plan, *_cheaper(plan, options)):
        sides = [tile.block[mode] for tile in candidate.tiles for mode in tile.modes]
        if all(side <= MAX_SIDE for side in sides) and factor_bytes(candidate, element_size) <= budget:
            return candidate
    return _nothing_fits(plan)


def fit_budget(
    layouts: Sequence[Layout], options: Sequence[LayoutOptions], budget: float, element_size: int | Sequence[int] = 8
) -> list[Layout]:
    """Make the most expensive layouts cheaper until all factors and roots together fit ``budget`` bytes."""
    sizes = [element_size] * len(layouts) if isinstance(element_size, int) else list(element_size)
    chosen = list(layouts)
    total = sum(factor_bytes(layout, size) for layout, size in zip(chosen, sizes, strict=True))
    heap = [(-layout.factor_numel(), place) for place, layout in enumerate(chosen)]
    heapq.heapify(heap)
    while total > budget:
        _, place = heapq.heappop(heap)
        now = chosen[place]
        smaller = (c for c in _cheaper(now, options[place]) if c.factor_numel() < now.factor_numel())
        chosen[place] = next(smaller, _nothing_fits(now))
        total += factor_bytes(chosen[place], sizes[place]) - factor_bytes(now, sizes[place])
        heapq.heappush(heap, (-chosen[place].factor_numel(), place))
    return chosen


def default_allowance(numel: int, element_size: int, floor: float = DEFAULT_FLOOR) -> float:
    """Return the bytes that the factors of some parameters may have where no budget was given."""
    return max(DEFAULT_RATIO * numel * element_size / 2, floor)


def factor_bytes(layout: Layout, element_size: int) -> int:
    """Bytes of factors and what is kept beside them."""
    return layout.factor_numel() * element_size


def _nothing_fits(layout: Layout) -> Layout:
    return Layout(layout.shape, layout.shape, (), "no blocks fit the memory budget")


def _cheaper(layout: Layout, options: LayoutOptions) -> list[Layout]:
    """Cheaper treatments of the same parameter, best first: one-sided, then ever smaller blocks."""
    shape, view = layout.shape, layout.view
    found = [_one_sided(layout, options)] if len(view) == 2 and layout.reason.startswith("whole") else []
    every = _SIDES.get(options.method, _factored(view, options))
    longest = max(size for tile in layout.tiles for size in tile.block)
    blocks = [_cut(shape, view, options, b, every, f"blocks of {b}") for b in _BLOCK_SIZES if b < longest]
    return found + blocks


def _one_sided(layout: Layout, options: LayoutOptions) -> Layout:
    """Return the layout with factors for the short side only."""
    rows, columns = layout.tiles[0].block
    small = 0 if rows <= columns else 1
    factored = (small == 0, small == 1)
    limit = DEFAULT_BLOCK if options.is_limited else None
    limits = (limit if small == 0 else None, limit if small == 1 else None)
    return _cut(layout.shape, layout.view, options, limits, factored, f"one-sided (dimension {small})")


def _in_equal_blocks(layout: Layout, options: LayoutOptions) -> Layout:
    """Return the layout with sides of at most :data:`DEFAULT_BLOCK`, cut into equal parts where they can be."""
    limits = (DEFAULT_BLOCK,) * len(layout.view)
    found = _cut(layout.shape, layout.view, options, limits, _factored(layout.view, options), "whole")
    if {tile.block for tile in found.tiles} == {tile.block for tile in layout.tiles}:
        return replace(layout, limited=_is_apart(layout.view, options))
    reason = layout.reason.replace("whole", f"blocks of {'x'.join(map(str, found.tiles[0].block))}")
    return replace(found, reason=reason, limited=True)


def _is_long(layout: Layout, options: LayoutOptions, budget: float | None) -> bool:
    """Whether a matrix is so long that the factor of its long side is left out."""
    block = layout.tiles[0].block
    if len(block) != 2:
        return False
    if options.is_limited:
        return max(block) >= DEFAULT_RATIO_OF_SIDES * min(block) and max(block) > DEFAULT_BLOCK
    return budget is None and max(block) >= max(SKINNY_LENGTH, SKINNY_RATIO * min(block))


def _keeps_kernel_apart(shape: tuple[int, ...], options: LayoutOptions) -> bool:
    """Whether the positions of a convolution's kernel share factors, instead of being flattened with the channels."""
    if not options.is_limited or options.view != "matrix" or options.method in _SIDES or len(shape) < 3:
        return False
    return shape[1] >= DEFAULT_BLOCK and 1 < math.prod(shape[2:]) <= LARGEST_KERNEL


def _is_apart(view: tuple[int, ...], options: LayoutOptions) -> bool:
    return options.view == "matrix" and len(view) == 3


def _factored(view: tuple[int, ...], options: LayoutOptions) -> tuple[bool, ...]:
    """Return which dimensions of a view get a factor: all but the positions of a kernel that is kept apart."""
    return (True, True, False) if _is_apart(view, options) else (True,) * len(view)


def _view(shape: tuple[int, ...], options: LayoutOptions) -> tuple[int, ...]:
    if len(shape) < 2:
        return (1, math.prod(shape))
    if options.view == "experts" and len(shape) > 2:
        return (shape[0] * shape[1], math.prod(shape[2:]))
    if _keeps_kernel_apart(shape, options):
        return (shape[0], shape[1], math.prod(shape[2:]))
    if options.view != "modes":
        return (shape[0], math.prod(shape[1:]))
    # from the last dimension on, so that a kernel's height and width come together first
    merged: list[int] = []
    for size in reversed(shape):
        if size == 1:
            continue
        if merged and merged[0] * size <= options.merge:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return tuple(merged) if len(merged) > 1 else (1, *merged, *([1] * (1 - len(merged))))


def _cut(
    shape: tuple[int, ...],
    view: tuple[int, ...],
    options: LayoutOptions,
    block_size: float | Sequence[int | None] | None,
    factored: tuple[bool, ...],
    reason: str,
) -> Layout:
    """Cut a view into tiles, first at the experts and row parts, then into blocks.

    Args:
        shape: The parameter's shape.
        view: The view.
        options: Gives the parts.
        block_size: The blocks' size, with smaller ones at the ends; or for each dimension the longest that is allowed,
            of equal size where they can be; None for whole ones.
        factored: Which dimensions get a factor.
        reason: The layout's.
    """

    def segments(start: int, stop: int, mode: int) -> list[tuple[int, int, int]]:
        if isinstance(block_size, Sequence):
            limit = block_size[mode]
            return _segments(start, stop, None if limit is None else _equal_size(stop - start, limit))
        return _segments(start, stop, None if block_size is None else int(block_size))

    per_dim = [segments(0, size, mode) for mode, size in enumerate(view)]
    parts = _row_parts(shape, view, options)
    per_dim[0] = _merged([segment for start, stop in parts for segment in segments(start, stop, 0)])
    tiles = []
    for cell in itertools.product(*per_dim):
        start, stop, block = (tuple(segment[i] for segment in cell) for i in range(3))
        tiles.append(Tile(start, stop, block, factored))
    notes = [f"split {options.split}"] if options.split else []
    notes += ["kernel apart"] if _is_apart(view, options) else []
    notes += [f"{shape[0]} experts"] if options.view == "experts" and len(shape) > 2 else []
    return Layout(shape, view, tuple(tiles), ", ".join([reason, *notes]))


def _merged(segments: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring segments of equal blocks, as experts and the equal parts of a fused weight make."""
    out: list[tuple[int, int, int]] = []
    for start, stop, block in segments:
        if out and out[-1][1:] == (start, block):
            out[-1] = (out[-1][0], stop, block)
        else:
            out.append((start, stop, block))
    return out


def _segments(start: int, stop: int, block_size: int | None) -> list[tuple[int, int, int]]:
    """Split [start, stop) into (start, stop, block) with at most one shorter block at the end."""
    size = stop - start
    if block_size is None or size <= block_size:
        return [(start, stop, size)]
    edge = start + size // block_size * block_size
    return [(start, edge, block_size)] + ([(edge, stop, stop - edge)] if edge < stop else [])


def _equal_size(size: int, limit: int) -> int:
    """Return the size of the fewest equal parts of at most ``limit`` each; nearly equal ones if those are too small."""
    least = -(-size // limit)
    equal = next((count for count in range(least, 2 * least + 1) if size % count == 0), None)
    return size // equal if equal else -(-size // least)


def _row_parts(shape: tuple[int, ...], view: tuple[int, ...], options: LayoutOptions) -> list[tuple[int, int]]:
    """Return the rows of each matrix that a view holds one above the other."""
    experts = shape[0] if options.view == "experts" and len(shape) > 2 else 1
    rows = view[0] // experts
    return [(rows * i + a, rows * i + b) for i in range(experts) for a, b in _parts(rows, options.split)]


def _parts(rows: int, split: int | tuple[int, ...] | None) -> list[tuple[int, int]]:
    if split is None:
        return [(0, rows)]
    sizes = (rows // split,) * split if isinstance(split, int) and split > 0 else split
    are_sizes = isinstance(sizes, tuple) and {type(size) for size in sizes} == {int}
    if not isinstance(sizes, tuple) or not are_sizes or sum(sizes) != rows or min(sizes) < 1:
        raise OptionError(f"split={split!r} does not divide {rows} rows; give a number of equal parts or their sizes.")
    edges = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(edges))
