"""The parts of a parameter that are treated alike, and how to take them out of it and put them back.

A *tile* is a region of the view cut regularly into equal blocks. A whole matrix is one tile of one block; cutting a
dimension that the block size does not divide leaves a second, smaller tile at its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronscope.optim.block_math import flattened

__all__ = ["Layout", "Tile"]


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

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks along each dimension."""
        return tuple((b - a) // s for a, b, s in zip(self.start, self.stop, self.block, strict=True))

    @cached_property
    def total(self) -> int:
        """Number of blocks, whoever works on them."""
        return math.prod(self.grid)

    @property
    def count(self) -> int:
        """Number of blocks that this process works on."""
        return self.total if self.owned is None else self.owned[1] - self.owned[0]

    @cached_property
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
            return flattened(blocks, len(self.block))
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
        limited: It was cut, or one side left out, because its roots would cost more than they gain.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    tiles: tuple[Tile, ...]
    reason: str
    frozen: bool = False
    limited: bool = False

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
