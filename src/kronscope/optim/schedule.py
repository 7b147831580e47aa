"""When roots are taken: phases that keep step time flat, and which blocks are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kronscope.optim.block_state import Tensors
from kronscope.optim.blocks import Layout
from kronscope.optim.config import Adaptive, Hyper
from kronscope.optim.costs import refresh_cost
from kronscope.optim.stacks import Stack, block_key

__all__ = ["assign_phases", "due_blocks", "stale_blocks"]

# Tiles of more blocks than this are dealt out in turn instead of by the emptiest step.
_GREEDY = 256


class _Loads:
    """The work of each step of a refresh period, on two lanes: roots of one step can be taken side by side.

    Lanes do not follow the number of threads, since phases decide numbers. Where the largest roots are so few that
    two in one step would stand out, there is one lane.
    """

    def __init__(self, period: int, costs: Sequence[float]) -> None:
        self._lanes = 2 if 2 * sum(costs) >= period * max(costs) else 1
        self._loads = [[0.0] * self._lanes for _ in range(period)]

    def add(self, phase: int, cost: float) -> None:
        """Put a root on the emptier lane of a step."""
        lanes = self._loads[phase]
        lanes[lanes.index(min(lanes))] += cost

    def best(self, cost: float) -> int:
        """Return the step with the tightest gap beside its longer lane that holds a root, else the shortest step."""

        def rank(lanes: list[float]) -> tuple[bool, float]:
            after = min(lanes) + cost
            return after > max(lanes), after if after > max(lanes) else max(lanes) - after

        return min(range(len(self._loads)), key=lambda phase: rank(self._loads[phase]))


def assign_phases(
    everyone: Iterable[tuple[Tensors, Layout, Hyper]], newcomers: Sequence[tuple[Tensors, Layout, Hyper]]
) -> None:
    """Give each new factor a step of the refresh period, most costly ones first, so that steps take equally long.

    Args:
        everyone: State, layout and options of all parameters that had a gradient before.
        newcomers: The same of those whose state was just made; their phases are written.
    """
    staggered = [entry for entry in newcomers if entry[2].rule.is_staggered]
    earlier, sides = list(_sides(everyone)), list(_sides(staggered))
    costs: dict[int, list[float]] = {}
    for cost, period, phases, _ in earlier + sides:
        costs.setdefault(period, []).extend([cost] * phases.shape[0])
    loads = {period: _Loads(period, found) for period, found in costs.items() if found}
    for cost, period, phases, mode in earlier:
        for phase in phases[:, mode].tolist():
            loads[period].add(phase % period, cost)
    # by mode, so that neighbours, which share a step, are of different blocks: the sides of one may share its moments
    for cost, period, phases, mode in sorted(sides, key=lambda side: (-side[0], side[3])):
        if phases.shape[0] > _GREEDY:
            phases[:, mode] = torch.arange(phases.shape[0]) % period
            continue
        for block in range(phases.shape[0]):
            phase = loads[period].best(cost)
            phases[block, mode] = phase
            loads[period].add(phase, cost)


def _sides(entries: Iterable[tuple[Tensors, Layout, Hyper]]) -> Iterator[tuple[float, int, Tensor, int]]:
    """Yield the cost of a root, the refresh period, the phases (B, modes) and the mode of each staggered factor."""
    for state, layout, hyper in entries:
        for index, tile in enumerate(layout.tiles):
            for mode in tile.modes:
                if hyper.refresh.spread:
                    phases = state[block_key(index, "phase")]
                    yield refresh_cost(tile, mode, hyper), hyper.refresh.period, phases, mode


def due_blocks(
    stack: Stack, rows: slice | Tensor, hyper: Hyper, step: int, *, anew: bool = False
) -> list[Tensor | None]:
    """Return for each mode which blocks' roots the schedule wants now (or wants looked at), None for no block.

    Args:
        stack: The stack.
        rows: Which of its blocks take part.
        hyper: Options.
        step: The step these blocks are at.
        anew: Every root is due, whatever the schedule says.
    """
    at, period = hyper.schedule_step(step), hyper.refresh.period
    count = rows.stop - rows.start if isinstance(rows, slice) else rows.numel()
    due: list[Tensor | None] = []
    for mode in range(len(stack.block)):
        if mode not in stack.modes or at < 1 or step < hyper.start:
            due.append(None)
        elif anew or hyper.refresh.takes_all(at):
            due.append(torch.arange(count))
        elif isinstance(rows, slice):
            due.append(stack.due(mode, (at - 1) % period, period, rows))
        else:
            index = (stack.phase[rows, mode] % period == (at - 1) % period).nonzero().flatten()
            due.append(index if index.numel() else None)
    return due


def stale_blocks(state: Tensors, mode: int, index: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Keep those blocks whose root no longer fits their factor; only an adaptive schedule looks."""
    schedule = hyper.refresh
    if not isinstance(schedule, Adaptive) or schedule.takes_all(hyper.schedule_step(step)):
        return index
    residuals = hyper.rule.residuals(state, mode, index, hyper, step)
    return index[(residuals > schedule.tolerance).cpu()]
