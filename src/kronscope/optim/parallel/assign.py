"""Who works on which blocks: the longest first, each to the process with the least work so far.

Everything here is a function of numbers that all processes know, so all of them come to the same answer without asking.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Range", "Rows", "BlockWork", "assign_blocks", "assign_rows", "lower_bound"]

Range = tuple[int, int]
# Moves and swaps tried after the greedy assignment; each costs one pass over the fullest process's blocks.
_ROUNDS = 200
# Elementwise work may bring a process this far above the fullest one, where that evens out the bytes.
_SLACK = 1.02


@dataclass(frozen=True)
class BlockWork:
    """Equal blocks, each of which one process must do as a whole.

    Attributes:
        count: Number of blocks.
        cost: What one of them costs.
        size: Bytes of the parameter that one of them covers.
    """

    count: int
    cost: float
    size: int


@dataclass(frozen=True)
class Rows:
    """Elementwise work, which may be cut between any two rows.

    Attributes:
        count: Number of rows.
        cost: What one of them costs.
        size: Bytes of one of them.
    """

    count: int
    cost: float
    size: int


def lower_bound(works: Sequence[BlockWork], total: float, processes: int) -> float:
    """Return a load below which no assignment can bring the fullest process.

    >>> lower_bound([BlockWork(1, 5.0, 1), BlockWork(4, 1.0, 1)], 9.0, 3)
    5.0
    """
    costs = sorted((work.cost for work in works for _ in range(work.count)), reverse=True)
    # of the first k·n + 1 blocks, k + 1 meet on some process: at least the k + 1 smallest of them
    crowded = [sum(costs[k * processes - j] for j in range(k + 1)) for k in range(1, 8) if k * processes < len(costs)]
    return max([total / processes, *costs[:1], *crowded])


def assign_blocks(works: Sequence[BlockWork], loads: list[float]) -> list[list[Range]]:
    """Give each process a range of the blocks of each work.

    Args:
        works: The work.
        loads: What each process has to do already; the new work is added.

    Returns:
        For each work and each process a range of blocks, empty where it has none.

    >>> assign_blocks([BlockWork(3, 1.0, 1), BlockWork(1, 2.0, 1)], [0.0, 0.0])
    [[(0, 1), (1, 3)], [(0, 1), (1, 1)]]
    """
    processes = len(loads)
    counts = [[0] * processes for _ in works]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in sorted(range(len(works)), key=lambda i: -works[i].cost):
        for _ in range(works[index].count):
            load, rank = heapq.heappop(heap)
            counts[index][rank] += 1
            heapq.heappush(heap, (load + works[index].cost, rank))
    for load, rank in heap:
        loads[rank] = load
    for _ in range(_ROUNDS):
        if not _improve(works, counts, loads):
            break
    # blocks of one work are equal, so each process can take a run of them
    ranges = []
    for row in counts:
        edges = [0]
        for count in row:
            edges.append(edges[-1] + count)
        ranges.append([(edges[rank], edges[rank + 1]) for rank in range(processes)])
    return ranges


def _improve(works: Sequence[BlockWork], counts: list[list[int]], loads: list[float]) -> bool:
    """Move a block away from the fullest process, or swap one for a smaller one; False if nothing helps."""

    def distinct(rank: int) -> list[int]:
        # one work of each cost: blocks that cost the same are interchangeable
        return list({works[i].cost: i for i, row in enumerate(counts) if row[rank]}.values())

    fullest = max(range(len(loads)), key=loads.__getitem__)
    if sum(row[fullest] for row in counts) < 2:
        return False
    best: tuple[float, int, int, int] | None = None
    for rank in range(len(loads)):
        gap = loads[fullest] - loads[rank]
        if rank == fullest or gap <= 0:
            continue
        for mine in distinct(fullest):
            for other in [-1, *distinct(rank)]:
                moved = works[mine].cost - (works[other].cost if other >= 0 else 0.0)
                # the larger of the two loads afterwards; a move of half the gap is the best there is
                after = max(loads[fullest] - moved, loads[rank] + moved)
                if moved > 0 and after < loads[fullest] * (1 - 1e-9) and (best is None or after < best[0]):
                    best = (after, rank, mine, other)
    if best is None:
        return False
    _, rank, mine, other = best
    moved = works[mine].cost - (works[other].cost if other >= 0 else 0.0)
    counts[mine][fullest] -= 1
    counts[mine][rank] += 1
    if other >= 0:
        counts[other][rank] -= 1
        counts[other][fullest] += 1
    loads[fullest] -= moved
    loads[rank] += moved
    return True


def assign_rows(rows: Sequence[Rows], loads: list[float], sizes: list[int]) -> list[list[Range]]:
    """Cut elementwise work so that every process sends about as many bytes, as far as its load allows.

    Gathering is over when the process with most bytes is done; the load of elementwise work is small and can be put
    anywhere below the fullest process's.

    Args:
        rows: The work.
        loads: What each process has to do already; the new work is added.
        sizes: Bytes that each process sends already; the new bytes are added.

    Returns:
        For each of ``rows`` and each process a range of rows.

    >>> assign_rows([Rows(8, 1.0, 4)], [0.0, 3.0], [0, 0])
    [[(0, 6), (6, 8)]]
    """
    processes, volume = len(loads), sum(row.count * row.size for row in rows)
    cost = sum(row.count * row.cost for row in rows)
    if not volume:
        return [[(0, row.count)] + [(row.count, row.count)] * (processes - 1) for row in rows]
    level = max((sum(loads) + cost) / processes, _SLACK * max(loads))
    room = [(level - load) * volume / cost for load in loads]
    low, high = 0.0, float(max(sizes) + volume)
    for _ in range(100):
        middle = (low + high) / 2
        filled = sum(max(0.0, min(middle - size, space)) for size, space in zip(sizes, room, strict=True))
        low, high = (middle, high) if filled < volume else (low, middle)
    wanted = [max(0.0, min(high - size, space)) for size, space in zip(sizes, room, strict=True)]
    edges, reached = [], 0.0
    for amount in wanted:
        reached += amount
        edges.append(reached * volume / sum(wanted))
    # all rows one after another, cut at the edges
    ranges, before = [], 0
    for row in rows:
        cuts = [0]
        for edge in edges[:-1]:
            cuts.append(min(max(round((edge - before) / max(row.size, 1)), cuts[-1]), row.count))
        cuts.append(row.count)
        ranges.append([(cuts[rank], cuts[rank + 1]) for rank in range(processes)])
        before += row.count * row.size
        for rank, (start, stop) in enumerate(ranges[-1]):
            loads[rank] += (stop - start) * row.cost
            sizes[rank] += (stop - start) * row.size
    return ranges
