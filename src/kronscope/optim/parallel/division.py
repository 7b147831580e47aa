"""The division of a run's work over processes, as numbers: who works on what, keeps what, receives what.

Nothing here communicates, so a division can be worked out for any number of processes on one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.costs import ELEMENT_COST, block_work
from kronscope.optim.parallel.assign import BlockWork, Range, Rows, assign_blocks, assign_rows
from kronscope.optim.parallel.placement import Planned, Ranges
from kronscope.optim.parallel.replicated import is_even, segments_of
from kronscope.optim.parallel.sharded import all_overlaps
from kronscope.optim.parallel.shards import Shards
from kronscope.optim.stacks import factor_dtype

__all__ = ["Division", "is_common", "tile_of"]


def is_common(name: str) -> bool:
    """Whether every process keeps all of a state tensor: steps and phases are small, and steer all of them."""
    return name == "step" or name.endswith(".phase")


def tile_of(name: str) -> int:
    """Return the tile a state tensor belongs to; 0 for elementwise parameters."""
    return int(name.split(".", 1)[0].removeprefix("tile")) if name.startswith("tile") else 0


class Division:
    """Who works on what.

    Args:
        size: Number of processes.

    Attributes:
        ranges: For each parameter, for each tile (or for the rows of a replicated elementwise one), the range of each
            process; a sharded elementwise parameter has none, because everyone works on the part it holds.
        loads: The estimated cost of each process's work in a step.
        layouts: The parameters' layouts.
        cuts: How they are cut; None for those that every process holds whole.
        views: How the views of preconditioned ones are cut.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranges: Ranges = {}
        self.loads = [0.0] * size
        self.layouts: dict[Tensor, Layout] = {}
        self.cuts: dict[Tensor, Shards | None] = {}
        self.views: dict[Tensor, Shards] = {}
        self._sent = [0] * size

    def add(
        self, entries: Sequence[Planned], cuts: Mapping[Tensor, Shards | None], ranges: Ranges | None = None
    ) -> None:
        """Divide the work on more parameters; what was divided before stays as it is.

        Args:
            entries: The parameters.
            cuts: How they are cut.
            ranges: How they were divided before; None to decide now.

        Raises:
            DistributedError: a parameter is cut in a way that is not supported.
        """
        views = {
            entry.param: cut.in_view(entry.name, entry.layout)
            for entry in entries
            if (cut := cuts[entry.param]) is not None and not entry.layout.is_elementwise
        }
        self.views.update(views)
        self.cuts.update(cuts)
        self.layouts.update({entry.param: entry.layout for entry in entries})
        if ranges is not None:
            self.ranges.update(ranges)
            return
        for entry in entries:
            self.ranges[entry.param] = []
            if entry.layout.is_elementwise and self.cuts[entry.param] is not None:
                parts = self._parts(entry.param, "")
                for rank, (start, stop) in enumerate(parts):
                    self.loads[rank] += ELEMENT_COST * entry.param.numel() * (stop - start) / max(parts[-1][1], 1)
        tiles = [(entry, tile) for entry in entries for tile in entry.layout.tiles]
        works = [_work(entry, tile) for entry, tile in tiles]
        for (entry, _), work, by_process in zip(tiles, works, assign_blocks(works, self.loads), strict=True):
            self.ranges[entry.param].append(by_process)
            if self.cuts[entry.param] is None:
                for rank, (start, stop) in enumerate(by_process):
                    self._sent[rank] += (stop - start) * work.size
        rest = [e for e in entries if e.layout.is_elementwise and self.cuts[e.param] is None]
        rows = [_rows(entry.param) for entry in rest]
        for entry, by_process in zip(rest, assign_rows(rows, self.loads, self._sent), strict=True):
            self.ranges[entry.param] = [by_process]

    def _parts(self, param: Tensor, name: str) -> list[Range]:
        """Return the rows (or columns) that each process keeps of a state tensor, of as many as the last one's stop."""
        cut = self.cuts[param]
        if cut is not None and self.layouts[param].is_elementwise:
            return list(cut.ranges)
        return self.ranges[param][tile_of(name)]

    def state_bytes(self, sizes: Mapping[Tensor, Mapping[str, int]]) -> list[int]:
        """Return the bytes of state on each process.

        Args:
            sizes: Bytes of each tensor of each parameter's whole state.
        """
        kept = [0] * self.size
        common = 0
        for param, tensors in sizes.items():
            for name, size in tensors.items():
                if is_common(name):
                    common += size
                    continue
                parts = self._parts(param, name)
                total = max(parts[-1][1], 1)
                for rank, (start, stop) in enumerate(parts):
                    if stop > start:
                        kept[rank] += size * (stop - start) // total
        return [size + common for size in kept]

    def traffic(self, least: bool = False) -> list[int]:
        """Return the bytes that each process receives from others in a step.

        Args:
            least: Count what it must receive, given who works on what, whatever the method: without padding.
        """
        received = [0] * self.size
        for overlap in all_overlaps(list(self.views), self.layouts, self.views, self.ranges):
            param, owner, holder = overlap.param, overlap.owner, overlap.holder
            if owner != holder:
                cut = self.views[param]
                numel = overlap.numel(self.layouts[param], cut.dim)
                received[holder] += numel * factor_dtype(param).itemsize
                if cut.copies[owner] == cut.copies[holder]:
                    received[owner] += numel * param.element_size()
        whole = [param for param in self.ranges if self.cuts[param] is None]
        for (dtype, _), buffers in segments_of(whole, self.layouts, self.ranges).items():
            sizes = [segments[-1].stop if segments else 0 for segments in buffers]
            padded = not least and is_even(sizes)
            for rank in range(self.size):
                numbers = max(sizes) * (self.size - 1) if padded else sum(sizes) - sizes[rank]
                received[rank] += numbers * dtype.itemsize
        return received

    def summary(self, sizes: Mapping[Tensor, Mapping[str, int]]) -> str:
        """Say who does what, keeps what and receives what."""
        kinds = ["replicated"] * any(cut is None for cut in self.cuts.values())
        kinds += ["sharded"] * any(cut is not None for cut in self.cuts.values())
        kept, moved, least = self.state_bytes(sizes), self.traffic(), self.traffic(least=True)
        mean = sum(self.loads) / self.size
        fullest = max(self.loads) / mean if mean else 1.0
        return (
            f"{' and '.join(kinds)} over {self.size} processes: each keeps {_mib(min(kept))} to {_mib(max(kept))} MiB "
            f"of state; the fullest does {fullest:.2f} times the mean work; a step brings a process {_mib(max(moved))} "
            f"MiB (at least {_mib(max(least))})"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def _work(entry: Planned, tile: Tile) -> BlockWork:
    return BlockWork(tile.total, block_work(tile, entry.hyper)[1], math.prod(tile.block) * entry.param.element_size())


def _rows(param: Tensor) -> Rows:
    count = param.shape[0] if param.ndim else 1
    each = param.numel() // max(count, 1)
    return Rows(count, ELEMENT_COST * each, each * param.element_size())
