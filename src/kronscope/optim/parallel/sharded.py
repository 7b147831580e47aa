"""Parameters that each process holds a part of: gradients travel to the owners of blocks, updates travel back.

The owner of a block collects its gradient from the processes that hold parts of it, all of it and not an approximation
per part; where there are several copies (HSDP) it asks its own, and sends the update to all. Work is divided over all
processes, so no copy repeats what another does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.optim.apply import prepared_gradient
from kronscope.optim.blocks import Layout
from kronscope.optim.parallel.assign import Range
from kronscope.optim.parallel.collectives import all_to_all
from kronscope.optim.parallel.placement import Apply
from kronscope.optim.parallel.shards import Shards, local_gradient, local_tensor
from kronscope.optim.stacks import Member, factor_dtype

__all__ = ["Piece", "Routes", "ShardedExchange", "Traffic", "all_pieces", "routes_of"]

Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Piece:
    """The part of one block that one process holds.

    Attributes:
        param: The parameter.
        tile: Index of the tile.
        owner: The process that works on the block.
        holder: The process that holds the part.
        is_source: Whether the owner takes the gradient from this holder, and not from another copy.
        numel: Its size.
        block: The block's place among its owner's blocks of the tile.
        in_block: Its place within the block.
        in_part: Its place within the holder's part of the view.
    """

    param: Tensor
    tile: int
    owner: int
    holder: int
    is_source: bool
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
class Routes:
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
) -> Routes:
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
    for piece in all_pieces(params, layouts, shards, ranges):
        if piece.owner == rank:
            updates.sending[piece.holder].append(piece)
        if piece.holder == rank:
            updates.receiving[piece.owner].append(piece)
        if piece.holder == rank and piece.is_source:
            gradients.sending[piece.owner].append(piece)
        if piece.owner == rank and piece.is_source:
            gradients.receiving[piece.holder].append(piece)
    return Routes(rank, params, layouts, shards, ranges, gradients, updates)


def all_pieces(
    params: Sequence[Tensor],
    layouts: Mapping[Tensor, Layout],
    shards: Mapping[Tensor, Shards],
    ranges: Mapping[Tensor, Sequence[Sequence[Range]]],
) -> Iterator[Piece]:
    """Go through the pieces of all blocks, in an order all processes agree on; arguments as in :func:`routes_of`."""
    for param in params:
        for index, by_owner in enumerate(ranges[param]):
            for owner, (start, stop) in enumerate(by_owner):
                for place in range(start, stop):
                    yield from _pieces(param, layouts[param], index, shards[param], owner, place, place - start)


def _pieces(param: Tensor, layout: Layout, index: int, cut: Shards, owner: int, place: int, block: int) -> list[Piece]:
    tile, found = layout.tiles[index], []
    grid = [int(i) for i in torch.unravel_index(torch.tensor(place), tile.grid)]
    low = [s + i * b for s, i, b in zip(tile.start, grid, tile.block, strict=True)]
    high = [a + b for a, b in zip(low, tile.block, strict=True)]
    for holder, (first, last) in enumerate(cut.ranges):
        start, stop = max(first, low[cut.dim]), min(last, high[cut.dim])
        if start >= stop:
            continue
        in_block = [slice(0, size) for size in tile.block]
        in_part = [slice(a, b) for a, b in zip(low, high, strict=True)]
        in_block[cut.dim] = slice(start - low[cut.dim], stop - low[cut.dim])
        in_part[cut.dim] = slice(start - first, stop - first)
        numel = stop - start
        for dim, size in enumerate(tile.block):
            numel *= 1 if dim == cut.dim else size
        found.append(
            Piece(
                param,
                index,
                owner,
                holder,
                cut.copies[holder] == cut.copies[owner],
                numel,
                block,
                tuple(in_block),
                tuple(in_part),
            )
        )
    return found


class ShardedExchange:
    """A step on sharded parameters; made, it has begun to send the gradients."""

    def __init__(
        self,
        routes: Routes,
        group: dist.ProcessGroup,
        active: Mapping[Tensor, int],
        groups: Sequence[dict[str, Any]],
        apply: Apply,
    ) -> None:
        self._routes, self._group, self._active, self._groups, self._apply = routes, group, active, groups, apply
        self._grads: dict[tuple[Tensor, int], Tensor] | None = None
        self._updates: dict[tuple[Tensor, int], Tensor] = {}
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

    def put(self, member: Member, update: Tensor) -> None:
        """Keep the updates until all are there."""
        self._updates[member.param, member.tile_index] = update

    def finish(self) -> None:
        """Send the updates to where the parameters are, and step."""
        wait = self._start(
            self._routes.updates,
            lambda piece: self._updates[piece.param, piece.tile][piece.block][piece.in_block],
            {param: (factor_dtype(param), param.device) for param in self._routes.params},
            "sending updates to the holders of parameters",
        )
        updates: dict[Tensor, Tensor] = {}
        for piece, values in wait():
            if piece.param not in updates:
                updates[piece.param] = values.new_empty(self._routes.part_view(piece.param))
            target = updates[piece.param][piece.in_part]
            target.copy_(values.view(target.shape))
        for index, group in enumerate(self._groups):
            mine = [param for param in updates if self._active[param] == index]
            if mine:
                parts = [local_tensor(param) for param in mine]
                shaped = [updates[param].view(part.shape) for param, part in zip(mine, parts, strict=True)]
                self._apply(mine, parts, shaped, group)

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
