"""Parameters to blocks: the matrix (or tensor) view of a parameter, its tiles, and which sides get factors.

A *tile* is a region of the view cut regularly into equal blocks. A whole matrix is one tile of one block; cutting a
dimension that the block size does not divide leaves a second, smaller tile at its end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.errors import OptionError

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
# A matrix this many times longer than wide, and at least this long, gets a factor for its short side only: the other
# would be many times larger than the matrix (LoRA: 8 x 2048 numbers, 2048 x 2048 in a factor).
SKINNY_RATIO, SKINNY_LENGTH = 16, 1024
# Below this width the short side's factor has next to nothing to say, and AdamW is better.
LEAST_WIDTH = 4
# Methods that keep one factor: which of the two sides has it.
_SIDES = {"left": (True, False), "right": (False, True)}
_BLOCK_SIZES = (4096, 2048, 1024, 512, 256, 128, 64)


@dataclass(frozen=True)
class Tile:
    """A region of a view cut into equal blocks.

    Attributes:
        start: First index in each dimension.
        stop: One past the last index in each dimension.
        block: The blocks' shape.
        factored: Which dimensions get a factor.
        owned: The range of blocks, in row-major order of the grid, that this process works on; None for all.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    block: tuple[int, ...]
    factored: tuple[bool, ...]
    owned: tuple[int, int] | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks along each dimension."""
        return tuple((b - a) // s for a, b, s in zip(self.start, self.stop, self.block, strict=True))

    @property
    def total(self) -> int:
        """Number of blocks, whoever works on them."""
        return math.prod(self.grid)

    @property
    def count(self) -> int:
        """Number of blocks that this process works on."""
        return self.total if self.owned is None else self.owned[1] - self.owned[0]

    @property
    def modes(self) -> tuple[int, ...]:
        """The dimensions that have a factor."""
        return tuple(mode for mode, has in enumerate(self.factored) if has)

    @property
    def is_whole(self) -> bool:
        """Whether the tile is a single block, so that no data has to be moved to form it."""
        return self.total == 1

    def factor_numel(self) -> int:
        """Numbers in one set of factors of all blocks."""
        return self.count * sum(self.block[mode] ** 2 for mode in self.modes)

    def extract(self, view: Tensor) -> Tensor:
        """Return the blocks (count, *block) of a view; a copy unless the tile is a single block."""
        if self.is_whole:
            return self._region(view).unsqueeze(0)[slice(*self.owned) if self.owned is not None else slice(None)]
        blocks = self._cells(view)
        if self.owned is None:
            return blocks.reshape(self.count, *self.block)
        return blocks[self._places(view.device)]

    def insert(self, view: Tensor, blocks: Tensor) -> None:
        """Write blocks (count, *block) into their region of a view, which must not need a copy to be split."""
        if self.owned is None or self.count == self.total:
            self._region(view).copy_(self.joined(blocks))
        elif self.count:
            self._cells(view)[self._places(view.device)] = blocks

    def joined(self, blocks: Tensor) -> Tensor:
        """Return all blocks (total, *block) as their region."""
        if self.is_whole:
            return blocks[0]
        dims = len(self.block)
        order = [axis for pair in zip(range(dims), range(dims, 2 * dims), strict=True) for axis in pair]
        size = [b - a for a, b in zip(self.start, self.stop, strict=True)]
        return blocks.reshape(*self.grid, *self.block).permute(order).reshape(size)

    def _region(self, view: Tensor) -> Tensor:
        return view[tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))]

    def _cells(self, view: Tensor) -> Tensor:
        """Return a view (*grid, *block) of the region."""
        split = [size for pair in zip(self.grid, self.block, strict=True) for size in pair]
        order = [*range(0, 2 * len(self.block), 2), *range(1, 2 * len(self.block), 2)]
        return self._region(view).reshape(split).permute(order)

    def _places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the grid indices of the owned blocks."""
        assert self.owned is not None
        return torch.unravel_index(torch.arange(*self.owned, device=device), self.grid)


@dataclass(frozen=True)
class Layout:
    """How one parameter is treated.

    Attributes:
        shape: The parameter's shape.
        view: The shape it is preconditioned in.
        tiles: Its tiles; none for elementwise treatment.
        reason: Why it is treated so, for people.
        frozen: It had neither a gradient nor wanted one when the plan was made; it is planned when it does.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    tiles: tuple[Tile, ...]
    reason: str
    frozen: bool = False

    @property
    def is_elementwise(self) -> bool:
        """Whether the parameter gets AdamW (or diagonal Adagrad)."""
        return not self.tiles

    @property
    def is_whole(self) -> bool:
        """Whether the view is a single block."""
        return len(self.tiles) == 1 and self.tiles[0].is_whole

    def factor_numel(self) -> int:
        """Numbers in one set of factors."""
        return sum(tile.factor_numel() for tile in self.tiles)


@dataclass(frozen=True)
class LayoutOptions:
    """What decides a layout.

    Attributes:
        method: ``"auto"``, ``"kronecker"``, ``"left"`` or ``"right"`` (a factor for the rows or the columns alone), or
            ``"adam"``.
        view: ``"matrix"`` flattens from dimension 1; ``"modes"`` gives every dimension a factor; ``"experts"`` takes
            the first of three or more dimensions as a stack of matrices, each with factors of its own.
        merge: With ``"modes"``, neighbouring dimensions are merged while their product stays within this.
        split: Number of equal row parts, or the sizes of the parts, as for a fused qkv weight.
        block_size: Longest side of a block; None leaves matrices whole where the budget allows.
        role: ``"embedding"``, ``"head"`` and their like where recognised, else empty.
    """

    method: str = "auto"
    view: str = "matrix"
    merge: int = 0
    split: int | tuple[int, ...] | None = None
    block_size: int | None = None
    role: str = ""

    def __post_init__(self) -> None:
        """Check each option."""
        if self.method not in ("auto", "kronecker", "adam", *_SIDES):
            raise OptionError(f"method must be 'auto', 'kronecker', 'left', 'right' or 'adam', got {self.method!r}.")
        if self.view not in ("matrix", "modes", "experts"):
            raise OptionError(f"view must be 'matrix', 'modes' or 'experts', got {self.view!r}.")
        for name in ("block_size", "merge"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise OptionError(f"{name} must be a whole number, got {value!r}.")
        if self.block_size is not None and self.block_size < 1:
            raise OptionError(f"block_size must be at least 1 or None, got {self.block_size}.")


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

    >>> plan_layout((64, 32, 3, 3), LayoutOptions()).view
    (64, 288)
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
        return _cut(shape, view, options, options.block_size, _SIDES[options.method], reason)
    if options.block_size is not None:
        return _cut(shape, view, options, options.block_size, (True,) * len(view), f"blocks of {options.block_size}")
    whole = _cut(shape, view, options, None, (True,) * len(view), "whole")
    if budget is None and options.method == "auto" and _is_skinny(whole):
        narrow = min(whole.tiles[0].block) >= LEAST_WIDTH
        return _one_sided(whole, options) if narrow else Layout(shape, shape, (), "too thin for factors")
    if budget is None:
        budget = default_allowance(math.prod(shape), element_size, floor)
    if (
        all(size <= MAX_SIDE for tile in whole.tiles for size in tile.block)
        and factor_bytes(whole, element_size) <= budget
    ):
        return whole
    for candidate in _cheaper(whole, options):
        sides = [tile.block[mode] for tile in candidate.tiles for mode in tile.modes]
        if all(side <= MAX_SIDE for side in sides) and factor_bytes(candidate, element_size) <= budget:
            return candidate
    return _nothing_fits(whole)


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
    every = _SIDES.get(options.method, (True,) * len(view))
    longest = max(size for tile in layout.tiles for size in tile.block)
    blocks = [_cut(shape, view, options, b, every, f"blocks of {b}") for b in _BLOCK_SIZES if b < longest]
    return found + blocks


def _one_sided(layout: Layout, options: LayoutOptions) -> Layout:
    """Return the layout with factors for the short side only."""
    rows, columns = layout.tiles[0].block
    small = 0 if rows <= columns else 1
    factored = (small == 0, small == 1)
    return _cut(layout.shape, layout.view, options, None, factored, f"one-sided (dimension {small})")


def _is_skinny(layout: Layout) -> bool:
    block = layout.tiles[0].block
    return len(block) == 2 and max(block) >= max(SKINNY_LENGTH, SKINNY_RATIO * min(block))


def _view(shape: tuple[int, ...], options: LayoutOptions) -> tuple[int, ...]:
    if len(shape) < 2:
        return (1, math.prod(shape))
    if options.view == "experts" and len(shape) > 2:
        return (shape[0] * shape[1], math.prod(shape[2:]))
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
    block_size: int | None,
    factored: tuple[bool, ...],
    reason: str,
) -> Layout:
    """Cut a view into tiles, first at the experts and row parts, then into blocks."""
    per_dim = [_segments(0, size, block_size) for size in view]
    parts = _row_parts(shape, view, options)
    per_dim[0] = _merged([segment for start, stop in parts for segment in _segments(start, stop, block_size)])
    tiles = []
    for segments in itertools.product(*per_dim):
        start, stop, block = (tuple(segment[i] for segment in segments) for i in range(3))
        tiles.append(Tile(start, stop, block, factored))
    notes = [f"split {options.split}"] if options.split else []
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


def _row_parts(shape: tuple[int, ...], view: tuple[int, ...], options: LayoutOptions) -> list[tuple[int, int]]:
    """Return the rows of each matrix that a view holds one above the other."""
    experts = shape[0] if options.view == "experts" and len(shape) > 2 else 1
    rows = view[0] // experts
    return [(rows * i + a, rows * i + b) for i in range(experts) for a, b in _parts(rows, options.split)]


def _parts(rows: int, split: int | tuple[int, ...] | None) -> list[tuple[int, int]]:
    if split is None:
        return [(0, rows)]
    sizes = (rows // split,) * split if isinstance(split, int) and split > 0 else split
    if not isinstance(sizes, tuple) or sum(sizes) != rows or any(size < 1 for size in sizes):
        raise OptionError(f"split={split!r} does not divide {rows} rows; give a number of equal parts or their sizes.")
    edges = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(edges))
