"""Roots divided over processes that all have the factors: each takes some, and all get the rest from the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.optim.parallel.assign import BlockWork, Range, assign_blocks
from kronscope.optim.parallel.collectives import gather_flat, sum_over
from kronscope.optim.parallel.replicated import is_even
from kronscope.optim.step import Due, Portion, carry_over, solve

__all__ = ["SharedRoots"]


class SharedRoots:
    """The roots that are due in a step are divided by what they cost, and gathered.

    All processes must have the same portions. Factors are theirs, and may differ by rounding; roots are afterwards the
    same bits everywhere.

    Args:
        group: The processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def may_grow(self, portion: Portion) -> bool:
        """Whether another process may find a root due that this one does not: where numbers decide."""
        return portion.is_adaptive

    def take(self, work: Sequence[Portion]) -> int:
        """Take this process's share of the roots, and get the others'; return how many it took."""
        self._agree([portion for portion in work if portion.is_adaptive])
        due = [Due(portion, mode, index) for portion in work for mode, index in portion.due]
        own = [one for one in due if not one.portion.hyper.rule.has_separate_roots]
        solve(own)
        due = [one for one in due if one.portion.hyper.rule.has_separate_roots]
        ranges = _ranges(tuple((one.portion.root_cost(one.mode), one.blocks.numel()) for one in due), self._size)
        shared = [_Shared(one, by_process) for one, by_process in zip(due, ranges, strict=True)]
        mine = [one for one in shared if one.count(self._rank)]
        for one, bases in zip(mine, solve([one.part(self._rank) for one in mine]), strict=True):
            if bases is not None:
                one.write(self._rank, [bases])
        self._gather(shared)
        # in the same order everywhere, and as one process would
        carry_over((one.due, one.bases) for one in shared)
        return sum(one.blocks.numel() for one in own) + sum(one.count(self._rank) for one in mine)

    def _gather(self, shared: Sequence[_Shared]) -> None:
        """Send this process's roots and receive the others', one call per dtype and device."""
        for kind in dict.fromkeys(one.due.portion.kind for one in shared):
            alike = [one for one in shared if one.due.portion.kind == kind]
            sizes = [sum(one.width * one.count(rank) for one in alike) for rank in range(self._size)]
            flat = [part.reshape(-1) for one in alike for part in one.read(self._rank)]
            outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=kind[0], device=kind[1])
            arrived = gather_flat(outgoing, sizes, self._group, "gathering roots", padded=is_even(sizes))
            for rank, values in enumerate(arrived):
                start = 0
                for one in alike if rank != self._rank else ():
                    stop = start + one.width * one.count(rank)
                    one.write(rank, one.shaped(rank, values[start:stop]))
                    start = stop

    def _agree(self, work: Sequence[Portion]) -> None:
        """Make every root due that any process finds due."""
        if not work:
            return
        flags = [torch.zeros(portion.count, len(portion.block), dtype=torch.int32) for portion in work]
        for portion, flag in zip(work, flags, strict=True):
            for mode, index in portion.due:
                flag[index, mode] = 1
        flat = torch.cat([flag.view(-1) for flag in flags]).to(work[0].kind[1])
        total = sum_over(flat, self._group, "comparing which roots are due").cpu().split([f.numel() for f in flags])
        for portion, flag, counts in zip(work, flags, total, strict=True):
            columns = (counts.view_as(flag) > 0).unbind(1)
            indices = [(mode, column.nonzero().flatten()) for mode, column in enumerate(columns)]
            portion.due = [(mode, index) for mode, index in indices if index.numel()]


class _Shared:
    """Roots that are due, divided over processes: of some blocks of a portion, in one mode.

    Args:
        due: The roots.
        ranges: Which of them each process takes.

    Attributes:
        bases: Room for SOAP's new bases, which are used when all are there; None for roots, which have their place.
        width: Numbers that are sent for one root.
    """

    def __init__(self, due: Due, ranges: Sequence[Range]) -> None:
        self.due, self._ranges = due, ranges
        tensors = due.portion.root_tensors(due.mode)
        self.bases = None
        if due.portion.hyper.rule.carries:
            self.bases = tensors[0].new_empty(due.blocks.numel(), *tensors[0].shape[1:])
            tensors = [self.bases]
        self._tensors = tensors
        self.width = sum(math.prod(tensor.shape[1:]) for tensor in tensors)

    def count(self, rank: int) -> int:
        """Return how many of the roots a process takes."""
        return self._ranges[rank][1] - self._ranges[rank][0]

    def part(self, rank: int) -> Due:
        """Return the roots that a process takes."""
        return Due(self.due.portion, self.due.mode, self.due.blocks[slice(*self._ranges[rank])])

    def _rows(self, rank: int) -> Tensor:
        return torch.arange(*self._ranges[rank]) if self.bases is not None else self.part(rank).blocks

    def read(self, rank: int) -> list[Tensor]:
        """Return the roots of a process, when they are there."""
        return [tensor[self._rows(rank)] for tensor in self._tensors] if self.count(rank) else []

    def shaped(self, rank: int, flat: Tensor) -> list[Tensor]:
        """Return what a process sent as :meth:`read` gave it."""
        shapes = [(self.count(rank), *tensor.shape[1:]) for tensor in self._tensors]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def write(self, rank: int, parts: Sequence[Tensor]) -> None:
        """Keep the roots of a process."""
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor[self._rows(rank)] = part


@lru_cache(maxsize=256)
def _ranges(costs: tuple[tuple[float, int], ...], size: int) -> list[list[Range]]:
    """Divide roots, given what each costs and how many are alike; the same steps come again every period."""
    return assign_blocks([BlockWork(count, cost, 0) for cost, count in costs], [0.0] * size)
