"""The collective calls on tensors of a step, each with pieces of any sizes, and with an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kronscope.support.processes import explained

__all__ = ["all_to_all", "gather_flat", "sum_over"]


def sum_over(tensor: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """Return the sum over all processes, in place."""
    with explained(what):
        dist.all_reduce(tensor, group=group)
    return tensor


def gather_flat(
    mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, what: str, *, padded: bool = False
) -> list[Tensor]:
    """Return the flat tensors of all processes.

    Args:
        mine: That of this process.
        sizes: How long each process's is.
        group: The processes.
        what: What is gathered, for errors.
        padded: Pad all to the longest and make one call, rather than one broadcast for each.
    """
    rank, count = dist.get_rank(group), len(sizes)
    if count == 1 or not any(sizes):
        return [mine] * count
    with explained(what):
        if padded:
            longest = max(sizes)
            filled = mine if len(mine) == longest else torch.cat([mine, mine.new_zeros(longest - len(mine))])
            gathered = mine.new_empty(count * longest)
            _all_gather()(gathered, filled, group=group)
            return [gathered[r * longest : r * longest + size] for r, size in enumerate(sizes)]
        pieces = [mine if r == rank else mine.new_empty(size) for r, size in enumerate(sizes)]
        sources = dist.get_process_group_ranks(group)
        handles = [
            dist.broadcast(piece, src=source, group=group, async_op=True)
            for piece, source in zip(pieces, sources, strict=True)
            if len(piece)
        ]
        for handle in handles:
            if handle is not None:
                handle.wait()
        return pieces


def all_to_all(
    outgoing: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, what: str
) -> Callable[[], list[Tensor]]:
    """Start to send each process its piece; the result waits and returns what each process sent.

    Args:
        outgoing: The pieces, one after another.
        send: How long the piece for each process is.
        receive: How long the piece from each process is.
        group: The processes.
        what: What is exchanged, for errors.
    """
    incoming = outgoing.new_empty(sum(receive))
    handle: Any = None
    if len(send) == 1:
        incoming.copy_(outgoing)
    else:
        with explained(what):
            handle = dist.all_to_all_single(incoming, outgoing, list(receive), list(send), group=group, async_op=True)

    # the result keeps the outgoing pieces alive until they have been sent
    def wait(sent: Tensor = outgoing) -> list[Tensor]:
        if handle is not None:
            with explained(what):
                handle.wait()
        edges = [0, *accumulate(receive)]
        return [incoming[a:b] for a, b in pairwise(edges)]

    return wait


def _all_gather() -> Any:
    # the older name warns since torch 2.13
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
