"""Parameters that every process holds whole: each changes its share of them, and gathers the rest.

What is gathered is the changed parameters, not the updates: they have the parameter's dtype, and all processes end with
the same bits. Nothing is written to a parameter before everything has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.optim.apply import prepared_gradient
from kronscope.optim.blocks import Layout
from kronscope.optim.parallel.assign import Range
from kronscope.optim.parallel.collectives import gather_flat
from kronscope.optim.parallel.placement import Apply, apply_by_group
from kronscope.optim.parallel.shards import local_gradient, local_tensor
from kronscope.optim.stacks import Member

__all__ = ["ReplicatedExchange", "Segment", "is_even", "segments_of"]

Kind = tuple[torch.dtype, torch.device]
# Padding every piece to the longest may cost this fraction more bytes than one broadcast per process would.
_PADDING = 0.125


def is_even(sizes: Sequence[int]) -> bool:
    """Whether pieces of these sizes are gathered padded to the longest, in one call, and not each by a broadcast."""
    return max(sizes) * len(sizes) <= (1 + _PADDING) * sum(sizes)


@dataclass(frozen=True)
class Segment:
    """A run of blocks of one tile, or of rows of an elementwise parameter, in a process's flat buffer."""

    param: Tensor
    layout: Layout
    tile: int | None
    rows: Range
    start: int
    stop: int

    def shaped(self, flat: Tensor) -> Tensor:
        """Return its part of a flat buffer, as blocks or rows."""
        piece = flat[self.start : self.stop]
        if self.tile is not None:
            return piece.view(-1, *self.layout.tiles[self.tile].block)
        return piece.view(self.rows[1] - self.rows[0], *self.param.shape[1:]) if self.param.ndim else piece.view(())

    def read(self, tensor: Tensor) -> Tensor:
        """Return the same blocks or rows of a tensor of the parameter's shape."""
        if self.tile is not None:
            tile = replace(self.layout.tiles[self.tile], owned=self.rows)
            return tile.extract(tensor.reshape(self.layout.view))
        return tensor[slice(*self.rows)] if tensor.ndim else tensor

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write blocks or rows into a tensor of the parameter's shape."""
        if self.tile is None:
            self.read(tensor).copy_(values)
            return
        tile = replace(self.layout.tiles[self.tile], owned=self.rows)
        if tensor.is_contiguous():
            tile.insert(tensor.view(self.layout.view), values)
        else:
            dense = tensor.contiguous()
            tile.insert(dense.view(self.layout.view), values)
            tensor.copy_(dense)


def segments_of(
    params: Sequence[Tensor], layouts: Mapping[Tensor, Layout], ranges: Mapping[Tensor, Sequence[Sequence[Range]]]
) -> dict[Kind, list[list[Segment]]]:
    """Lay out the flat buffers: for each dtype and device, and each process, its segments in order.

    Args:
        params: The parameters that take part, in the order all processes agree on.
        layouts: Their layouts.
        ranges: For each parameter and tile (or for its rows), the range of each process.
    """
    found: dict[Kind, list[list[Segment]]] = {}
    for param in params:
        layout = layouts[param]
        for tile, by_process in enumerate(ranges[param]):
            buffers = found.setdefault((param.dtype, param.device), [[] for _ in by_process])
            for buffer, rows in zip(buffers, by_process, strict=True):
                if layout.is_elementwise:
                    size = param.numel() // max(param.shape[0], 1) if param.ndim else 1
                else:
                    size = math.prod(layout.tiles[tile].block)
                start = buffer[-1].stop if buffer else 0
                stop = start + size * (rows[1] - rows[0])
                if stop > start:
                    index = None if layout.is_elementwise else tile
                    buffer.append(Segment(param, layout, index, rows, start, stop))
    return found


class ReplicatedExchange:
    """A step on replicated parameters."""

    def __init__(
        self,
        buffers: Mapping[Kind, list[list[Segment]]],
        group: dist.ProcessGroup,
        active: Mapping[Tensor, int],
        groups: Sequence[dict[str, Any]],
        apply: Apply,
    ) -> None:
        self._buffers, self._group, self._active, self._groups, self._apply = buffers, group, active, groups, apply
        self._rank = dist.get_rank(group)
        self._mine: dict[Kind, Tensor] = {}
        self._work: dict[tuple[Tensor, int | None], tuple[Tensor, Tensor]] = {}
        self._updates: list[tuple[Tensor, Tensor, Tensor]] = []
        self._arrived: list[tuple[Segment, Tensor]] = []
        for (dtype, device), by_process in buffers.items():
            segments = by_process[self._rank]
            flat = torch.empty(segments[-1].stop if segments else 0, dtype=dtype, device=device)
            self._mine[dtype, device] = flat
            for segment in segments:
                grad = local_gradient(segment.param)
                assert grad is not None
                work = segment.shaped(flat)
                work.copy_(segment.read(local_tensor(segment.param)))
                self._work[segment.param, segment.tile] = work, segment.read(grad)

    def part(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a copy of this process's rows, in the buffer that will be sent, and their gradient."""
        return self._work.get((param, None))

    def blocks(self, member: Member) -> Tensor:
        """Return the gradients of this process's blocks."""
        work, grads = self._work[member.param, member.tile_index]
        return prepared_gradient(work, grads, self._groups[self._active[member.param]])

    def put(self, updates: Sequence[tuple[Member, Tensor]]) -> None:
        """Keep the updates until all are there; on a CPU step in the buffer at once."""
        changes = [(m.param, self._work[m.param, m.tile_index][0], update) for m, update in updates]
        now = [change for change in changes if change[1].device.type == "cpu"]
        self._updates += [change for change in changes if change[1].device.type != "cpu"]
        apply_by_group(now, self._active, self._groups, self._apply)

    def gather(self) -> None:
        """Step in the buffer, and gather what the others did."""
        apply_by_group(self._updates, self._active, self._groups, self._apply)
        for kind, by_process in self._buffers.items():
            sizes = [segments[-1].stop if segments else 0 for segments in by_process]
            what = "gathering the changed parameters"
            flats = gather_flat(self._mine[kind], sizes, self._group, what, padded=is_even(sizes))
            for flat, segments in zip(flats, by_process, strict=True):
                self._arrived += [(segment, flat) for segment in segments]

    def finish(self) -> None:
        """Write what was gathered."""
        for segment, flat in self._arrived:
            segment.write(local_tensor(segment.param), segment.shaped(flat))
