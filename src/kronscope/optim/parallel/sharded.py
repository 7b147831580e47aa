"""Parameters that each process holds a part of: gradients travel to the owners of blocks, updates travel back.

The owner of a block collects its gradient from the processes that hold parts of it, all of it and not an approximation
per part; where there are several copies (HSDP) it asks its own, and sends the update to all. Work is divided over all
processes, so no copy repeats what another does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.optim.apply import prepared_gradient
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.parallel.assign import Range
from kronscope.optim.parallel.collectives import all_to_all
from kronscope.optim.parallel.placement import Apply, apply_by_group
from kronscope.optim.parallel.shards import Shards, local_gradient, local_tensor
from kronscope.optim.stacks import Member, factor_dtype

__all__ = ["Overlap", "Piece", "PieceRoutes", "ShardedExchange", "Traffic", "all_overlaps", "routes_of"]

Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Piece:
    """The part of one block that one process holds.

    Attributes:
        param: The parameter.
        tile: Index of the tile.
        numel: Its size.
        block: The block's place among its owner's blocks of the tile.
        in_block: Its place within the block.
        in_part: Its place within the holder's part of the view.
    """

    param: Tensor
    tile: int
    numel: int
    block: int
    in_block: tuple[slice, ...]
    in_part: tuple[slice, ...]


@dataclass(frozen=True)
class Traffic:
    """The pieces that this process sends to, and receives from, each process, in an order both sides know."""

    sending: tuple[list[Piece], ...]
    receiving: tuple[list[Piece], ...]


@dataclass(frozen=True)
class PieceRoutes:
    """Which pieces travel where."""

    rank: int
    params: Sequence[Tensor]
    layouts: Mapping[Tensor, Layout]
    shards: Mapping[Tensor, Shards]
    ranges: Mapping[Tensor, Sequence[Sequence[Range]]]
    gradients: Traffic
    updates: Traffic

    def part_view(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape of this process's part of a parameter's view."""
        cut, view = self.shards[param], list(self.layouts[param].view)
        view[cut.dim] = cut.ranges[self.rank][1] - cut.ranges[self.rank][0]
        return tuple(view)


def routes_of(
    params: Sequence[Tensor],
    layouts: Mapping[Tensor, Layout],
    shards: Mapping[Tensor, Shards],
    ranges: Mapping[Tensor, Sequence[Sequence[Range]]],
    rank: int,
    size: int,
) -> PieceRoutes:
    """Work out which process holds which part of which block.

    Args:
        params: The parameters that take part, in the order all processes agree on.
        layouts: Their layouts.
        shards: How their views are cut.
        ranges: For each parameter and tile, the range of blocks of each process.
        rank: This process.
        size: Number of processes.
    """
    gradients, updates = (Traffic(*(tuple([] for _ in range(size)) for _ in range(2))) for _ in range(2))
    for overlap in all_overlaps(params, layouts, shards, ranges):
        owner, holder, cut = overlap.owner, overlap.holder, shards[overlap.param]
        if rank not in (owner, holder):
            continue
        piece = _piece(overlap, layouts[overlap.param], cut)
        if owner == rank:
            updates.sending[holder].append(piece)
        if holder == rank:
            updates.receiving[owner].append(piece)
        # where there are several copies, the owner takes the gradient from its own
        if cut.copies[holder] == cut.copies[owner]:
            if holder == rank:
                gradients.sending[owner].append(piece)
            if owner == rank:
                gradients.receiving[holder].append(piece)
    return PieceRoutes(rank, params, layouts, shards, ranges, gradients, updates)


class Overlap(NamedTuple):
    """The part of a block that one process holds: a range of the dimension along which the view is cut."""

    param: Tensor
    tile: int
    owner: int
    block: int
    holder: int
    start: int
    stop: int
    low: tuple[int, ...]

    def numel(self, layout: Layout, dim: int) -> int:
        """Return its size."""
        block = layout.tiles[self.tile].block
        return math.prod(block) // block[dim] * (self.stop - self.start)


def all_overlaps(
    params: Sequence[Tensor],
    layouts: Mapping[Tensor, Layout],
    shards: Mapping[Tensor, Shards],
    ranges: Mapping[Tensor, Sequence[Sequence[Range]]],
) -> Iterator[Overlap]:
    """Go through the parts of all blocks, in an order all processes agree on; arguments as in :func:`routes_of`."""
    for param in params:
        cut = shards[param]
        for index, by_owner in enumerate(ranges[param]):
            tile = layouts[param].tiles[index]
            for owner, (first, last) in enumerate(by_owner):
                for place in range(first, last):
                    low = _corner(tile, place)
                    low_cut, high_cut = low[cut.dim], low[cut.dim] + tile.block[cut.dim]
                    for holder, (begin, end) in enumerate(cut.ranges):
                        start, stop = max(begin, low_cut), min(end, high_cut)
                        if start < stop:
                            yield Overlap(param, index, owner, place - first, holder, start, stop, low)


def _corner(tile: Tile, place: int) -> tuple[int, ...]:
    """Return the first index, in each dimension, of a block given by its place in the grid."""
    corner = []
    for start, count, size in zip(reversed(tile.start), reversed(tile.grid), reversed(tile.block), strict=True):
        corner.append(start + place % count * size)
        place //= count
    return tuple(reversed(corner))


def _piece(overlap: Overlap, layout: Layout, cut: Shards) -> Piece:
    block, dim = layout.tiles[overlap.tile].block, cut.dim
    in_block = [slice(0, size) for size in block]
    in_part = [slice(a, a + size) for a, size in zip(overlap.low, block, strict=True)]
    first = cut.ranges[overlap.holder][0]
    in_block[dim] = slice(overlap.start - overlap.low[dim], overlap.stop - overlap.low[dim])
    in_part[dim] = slice(overlap.start - first, overlap.stop - first)
    return Piece(
        param=overlap.param,
        tile=overlap.tile,
        numel=overlap.numel(layout, dim),
        block=overlap.block,
        in_block=tuple(in_block),
        in_part=tuple(in_part),
    )


class ShardedExchange:
    """A step on sharded parameters; made, it has begun to send the gradients."""

    def __init__(
        self,
        routes: PieceRoutes,
        group: dist.ProcessGroup,
        active: Mapping[Tensor, int],
        groups: Sequence[dict[str, Any]],
        apply: Apply,
    ) -> None:
        self._routes, self._group, self._active, self._groups, self._apply = routes, group, active, groups, apply
        self._grads: dict[tuple[Tensor, int], Tensor] | None = None
        self._updates: dict[tuple[Tensor, int], Tensor] = {}
        self._arrived: dict[Tensor, Tensor] = {}
        parts = {param: self._part(param) for param in routes.params}
        self._wait = self._start(
            routes.gradients,
            lambda piece: parts[piece.param][piece.in_part],
            {param: (part.dtype, part.device) for param, part in parts.items()},
            "sending gradients to the owners of blocks",
        )

    def _part(self, param: Tensor) -> Tensor:
        grad = local_gradient(param)
        assert grad is not None
        prepared = prepared_gradient(local_tensor(param), grad, self._groups[self._active[param]])
        return prepared.reshape(self._routes.part_view(param))

    def part(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return this process's part of an elementwise parameter."""
        grad, mine = local_gradient(param), local_tensor(param)
        assert grad is not None
        return (mine, grad) if mine.numel() else None

    def blocks(self, member: Member) -> Tensor:
        """Return the gradients of this process's blocks, once they have arrived."""
        if self._grads is None:
            self._grads = {}
            for piece, values in self._wait():
                key = (piece.param, piece.tile)
                if key not in self._grads:
                    start, stop = self._routes.ranges[piece.param][piece.tile][self._routes.rank]
                    shape = self._routes.layouts[piece.param].tiles[piece.tile].block
                    self._grads[key] = values.new_empty(stop - start, *shape)
                target = self._grads[key][piece.block][piece.in_block]
                target.copy_(values.view(target.shape))
        return self._grads.pop((member.param, member.tile_index))

    def put(self, updates: Sequence[tuple[Member, Tensor]]) -> None:
        """Keep the updates until all are there."""
        self._updates.update({(member.param, member.tile_index): update for member, update in updates})

    def gather(self) -> None:
        """Send the updates to where the parameters are."""
        wait = self._start(
            self._routes.updates,
            lambda piece: self._updates[piece.param, piece.tile][piece.block][piece.in_block],
            {param: (factor_dtype(param), param.device) for param in self._routes.params},
            "sending updates to the holders of parameters",
        )
        for piece, values in wait():
            if piece.param not in self._arrived:
                self._arrived[piece.param] = values.new_empty(self._routes.part_view(piece.param))
            target = self._arrived[piece.param][piece.in_part]
            target.copy_(values.view(target.shape))

    def finish(self) -> None:
        """Step with the updates that arrived."""
        parts = {param: local_tensor(param) for param in self._arrived}
        changes = [(param, part, self._arrived[param].view(part.shape)) for param, part in parts.items()]
        apply_by_group(changes, self._active, self._groups, self._apply)

    def _start(
        self, traffic: Traffic, values: Callable[[Piece], Tensor], kinds: Mapping[Tensor, Kind], what: str
    ) -> Callable[[], list[tuple[Piece, Tensor]]]:
        """Start to send pieces, one call per dtype and device."""
        waits = []
        for kind in dict.fromkeys(kinds.values()):
            sending, receiving = (
                [[piece for piece in batch if kinds[piece.param] == kind] for batch in way]
                for way in (traffic.sending, traffic.receiving)
            )
            flat = [values(piece).reshape(-1) for batch in sending for piece in batch]
            outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=kind[0], device=kind[1])
            sizes = [[sum(piece.numel for piece in batch) for batch in way] for way in (sending, receiving)]
            waits.append((receiving, all_to_all(outgoing, sizes[0], sizes[1], self._group, what)))

        def wait() -> list[tuple[Piece, Tensor]]:
            arrived = []
            for receiving, incoming in waits:
                for batch, flat in zip(receiving, incoming(), strict=True):
                    arrived += list(zip(batch, flat.split([piece.numel for piece in batch]), strict=True))
            return arrived

        return wait
