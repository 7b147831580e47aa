"""When roots are taken.

In a refresh period of k steps, each factor's root is taken once. The step of the period at which that happens is the
factor's *phase*; phases are chosen so that all steps take about equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kronscope.optim.block_state import Tensors
from kronscope.optim.blocks import Layout
from kronscope.optim.config import Adaptive, Hyper
from kronscope.optim.costs import making_cost, refresh_cost
from kronscope.optim.stacks import Stack, block_key, due_at

__all__ = ["assign_phases", "due_blocks", "residuals_to_check", "stale_blocks"]

# The blocks of a tile with more of them than this get the steps in turn: searching for the best one would take long.
_GREEDY = 256


class _Loads:
    """How much work each step of a refresh period has so far.

    Two threads can take two roots at once. So the roots of a step are put into two lanes, and the step lasts as long as
    the longer one. There are two lanes whatever the number of threads: phases decide when roots are taken, and the same
    run must give the same numbers on any machine. Only if a single lane has room for all roots (few roots, and a long
    period), there is just one, so that no step takes two of the largest.

    Args:
        period: Number of steps.
        costs: What each root costs, of all that will be added.
    """

    def __init__(self, period: int, costs: Sequence[float]) -> None:
        self._lanes = 2 if 2 * sum(costs) >= period * max(costs) else 1
        self._loads = [[0.0] * self._lanes for _ in range(period)]

    def add(self, phase: int, cost: float) -> None:
        """Put a root on the shorter lane of a step."""
        lanes = self._loads[phase]
        lanes[lanes.index(min(lanes))] += cost

    def best(self, cost: float, steps: Sequence[int]) -> int:
        """Return the one of some steps that should take one more root.

        The best steps are those that last no longer with it, because it fits into the shorter lane; of these, the one
        with the least room to spare is taken. If there is no such step, it is the one that is shortest with the root.
        """

        def rank(lanes: list[float]) -> tuple[bool, float]:
            longest, after = max(lanes), min(lanes) + cost
            return (True, after) if after > longest else (False, longest - after)

        return min(steps, key=lambda phase: rank(self._loads[phase]))


class _FirstLoads:
    """How much work each of the steps has that take the first roots.

    Args:
        period: Number of these steps.
        apart: Steps between the turns of two sides of a block.
        making: What it costs to make the state of all blocks, which the first of these steps does.
    """

    def __init__(self, period: int, apart: int, making: float) -> None:
        self._loads, self._apart = [making, *[0.0] * (period - 1)], apart

    def take(self, costs: Sequence[float], most: int) -> int:
        """Return the step, one of the first ``most``, that a block should begin with, and give it the block's roots."""

        def turns(start: int) -> list[int]:
            return [(start + self._apart * place) % len(self._loads) for place in range(len(costs))]

        def rank(start: int) -> tuple[float, float]:
            after = [self._loads[turn] + cost for turn, cost in zip(turns(start), costs, strict=True)]
            return max(after), sum(after)

        start = min(range(min(most, len(self._loads))), key=rank)
        for turn, cost in zip(turns(start), costs, strict=True):
            self._loads[turn] += cost
        return start


def assign_phases(
    everyone: Iterable[tuple[Tensors, Layout, Hyper]], newcomers: Sequence[tuple[Tensors, Layout, Hyper]]
) -> None:
    """Choose the phase of each new factor, the most costly ones first.

    In the first steps the phase of a block's first side decides for all of its sides. So it is chosen among those that
    give each of the first steps about as much work.

    Args:
        everyone: State, layout and options of all parameters that had a gradient before.
        newcomers: The same of those whose state was just made; their phases are written.
    """
    staggered = [entry for entry in newcomers if entry[2].rule.is_staggered]
    earlier, sides = list(_sides(everyone)), list(_sides(staggered))
    costs: dict[int, list[float]] = {}
    for side in earlier + sides:
        costs.setdefault(side.period, []).extend([side.cost] * side.phases.shape[0])
    loads = {period: _Loads(period, found) for period, found in costs.items() if found}
    for side in earlier:
        for phase in side.phases[:, side.mode].tolist():
            loads[side.period].add(phase % side.period, side.cost)
    first_loads = {first: _FirstLoads(*first, _making(first, sides)) for first in {side.first for side in sides}}
    # of equal costs, one mode after the other: neighbours get the same step, and the two sides of a block, which may
    # share moments, should not; and those first whose blocks have more to do
    for side in sorted(sides, key=lambda side: (-side.cost, side.mode, -sum(side.together))):
        phases, load = side.phases, loads[side.period]
        if phases.shape[0] > _GREEDY:
            phases[:, side.mode] = (torch.arange(phases.shape[0]) + side.mode) % side.period
            continue
        first, steps = first_loads[side.first], range(side.period)
        for block in range(phases.shape[0]):
            if side.together:
                steps = range(first.take(side.together, side.period), side.period, side.first[0])
            phase = load.best(side.cost, steps)
            phases[block, side.mode] = phase
            load.add(phase, side.cost)


def _making(first: tuple[int, int], sides: Sequence[_Side]) -> float:
    """Return what it costs to make the state of blocks, at most a quarter of the roots of a step.

    Nothing for a few blocks, none of which should wait for its root.
    """
    alike = [side for side in sides if side.first == first and side.together and side.phases.shape[0] <= _GREEDY]
    roots = sum(sum(side.together) * side.phases.shape[0] for side in alike)
    blocks = sum(side.phases.shape[0] for side in alike)
    making = sum(side.making * side.phases.shape[0] for side in alike)
    return min(making, 0.25 * roots / first[0]) if blocks >= 2 * first[0] else 0.0


class _Side(NamedTuple):
    """One mode of a tile.

    Attributes:
        cost: What a root costs.
        period: The refresh period.
        phases: Phases (B, modes).
        mode: The mode.
        first: The period of the first roots, and the steps between those of two sides of a block.
        together: What the roots of all sides of a block cost, if this is the first of them; otherwise empty.
        making: What it costs to make a block's state.
    """

    cost: float
    period: int
    phases: Tensor
    mode: int
    first: tuple[int, int]
    together: tuple[float, ...]
    making: float


def _sides(entries: Iterable[tuple[Tensors, Layout, Hyper]]) -> Iterator[_Side]:
    """Yield the sides whose roots are spread over steps."""
    for state, layout, hyper in entries:
        for index, tile in enumerate(layout.tiles):
            if hyper.refresh.spread:
                costs = tuple(refresh_cost(tile, mode, hyper) for mode in tile.modes)
                first = hyper.refresh.place_at(1).period, hyper.rule.apart
                phases = state[block_key(index, "phase")]
                for place, (mode, cost) in enumerate(zip(tile.modes, costs, strict=True)):
                    together = () if place else costs
                    # where the first roots come later, the state is there
                    making = making_cost(tile) if hyper.start == 1 else 0.0
                    yield _Side(cost, hyper.refresh.period, phases, mode, first, together, making)


def due_blocks(
    stack: Stack, rows: slice | Tensor, hyper: Hyper, step: int, *, anew: bool = False
) -> list[Tensor | None]:
    """Return for each mode the blocks whose root is to be taken at this step, None for no block.

    With an adaptive schedule these are only the blocks to look at; :func:`stale_blocks` finds those to refresh.

    Args:
        stack: The stack.
        rows: Which of its blocks take part.
        hyper: Options.
        step: The step these blocks are at.
        anew: Whether every root is due, whatever the schedule says.
    """
    at = hyper.schedule_step(step)
    place = hyper.refresh.place_at(at)
    count = rows.stop - rows.start if isinstance(rows, slice) else rows.numel()
    due: list[Tensor | None] = []
    for mode in range(len(stack.block)):
        if mode not in stack.modes or at < 1 or step < hyper.start:
            due.append(None)
        elif anew or place.period == 1:
            due.append(torch.arange(count))
        elif isinstance(rows, slice):
            due.append(stack.due(mode, place, rows, hyper.rule.apart))
        else:
            index = due_at(place, stack.phase[rows], mode, stack.modes, hyper.rule.apart)
            due.append(index if index.numel() else None)
    return due


def stale_blocks(state: Tensors, mode: int, index: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Return those of some blocks whose root no longer fits their factor; all, unless the schedule is adaptive."""
    residuals = residuals_to_check(state, mode, index, hyper, step)
    if residuals is None:
        return index
    assert isinstance(hyper.refresh, Adaptive)
    # NaN counts as stale: such a root must be taken anew
    return index[~(residuals <= hyper.refresh.tolerance).cpu()]


def residuals_to_check(state: Tensors, mode: int, rows: Tensor | slice, hyper: Hyper, step: int) -> Tensor | None:
    """Return how badly some blocks' roots fit their factors, where that decides; None where all of them are due."""
    schedule = hyper.refresh
    if not isinstance(schedule, Adaptive) or hyper.schedule_step(step) <= schedule.first_steps:
        return None
    return hyper.rule.residuals(state, mode, rows, hyper, step)
