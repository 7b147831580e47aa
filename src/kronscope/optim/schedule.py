"""When roots are taken: phases that keep step time flat, and which blocks are due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kronscope.kron.roots import root_residual
from kronscope.kron.triangles import unpack
from kronscope.optim.blocks import Layout
from kronscope.optim.config import Adaptive, Hyper
from kronscope.optim.pieces import Tensors, ridge_of
from kronscope.optim.stacks import Stack, block_key

__all__ = ["assign_phases", "due_blocks", "stale_blocks"]

# Tiles of more blocks than this are dealt out in turn instead of by the emptiest step.
_GREEDY = 256


def assign_phases(
    everyone: Iterable[tuple[Tensors, Layout, Hyper]], newcomers: Sequence[tuple[Tensors, Layout, Hyper]]
) -> None:
    """Give each new factor the step of the refresh period that has the least work so far, most costly ones first.

    Args:
        everyone: State, layout and options of all parameters that had a gradient before.
        newcomers: The same of those whose state was just made; their phases are written.
    """
    loads: dict[int, list[float]] = {}
    for state, layout, hyper in everyone:
        load = loads.setdefault(hyper.refresh.period, [0.0] * hyper.refresh.period)
        for index, tile in enumerate(layout.tiles):
            for mode in tile.modes:
                counts = torch.bincount(state[block_key(index, "phase")][:, mode], minlength=len(load))
                for phase, count in enumerate(counts.tolist()[: len(load)]):
                    load[phase] += count * float(tile.block[mode]) ** 3
    sides = [
        (float(tile.block[mode]) ** 3, hyper.refresh.period, state[block_key(index, "phase")], mode)
        for state, layout, hyper in newcomers
        for index, tile in enumerate(layout.tiles)
        for mode in tile.modes
        if hyper.refresh.spread
    ]
    for cost, period, phases, mode in sorted(sides, key=lambda side: -side[0]):
        load = loads.setdefault(period, [0.0] * period)
        if phases.shape[0] > _GREEDY:
            phases[:, mode] = torch.arange(phases.shape[0]) % period
            continue
        for block in range(phases.shape[0]):
            phase = min(range(period), key=load.__getitem__)
            phases[block, mode] = phase
            load[phase] += cost


def due_blocks(stack: Stack, rows: Tensor | None, hyper: Hyper, step: int) -> list[Tensor | None]:
    """Return for each mode which blocks' roots the schedule wants now (or wants looked at), None for no block.

    Args:
        stack: The stack.
        rows: Which of its blocks take part; None for all.
        hyper: Options.
        step: The step these blocks are at.
    """
    at = hyper.schedule_step(step)
    count = stack.count if rows is None else rows.numel()
    due: list[Tensor | None] = []
    for mode, has_factor in enumerate(stack.factored):
        if not has_factor or at < 1 or (hyper.family != "soap" and step < hyper.start):
            due.append(None)
        elif hyper.refresh.takes_all(at):
            due.append(torch.arange(count))
        elif rows is None:
            due.append(stack.due(mode, (at - 1) % hyper.refresh.period))
        else:
            index = (stack.phase[rows, mode] == (at - 1) % hyper.refresh.period).nonzero().flatten()
            due.append(index if index.numel() else None)
    return due


def stale_blocks(state: Tensors, mode: int, index: Tensor, hyper: Hyper, step: int) -> Tensor:
    """Keep those blocks whose root no longer fits their factor; only an adaptive schedule looks."""
    schedule = hyper.refresh
    if not isinstance(schedule, Adaptive) or schedule.takes_all(hyper.schedule_step(step)):
        return index
    factors = unpack(state[f"factor{mode}"][index]) / hyper.correction2(step)
    if hyper.family == "soap":
        basis = state[f"basis{mode}"][index]
        moved = factors @ basis
        rest = moved - basis * (basis * moved).sum(-2, keepdim=True)
        tiny = torch.finfo(factors.dtype).tiny
        residuals = rest.norm(dim=(-2, -1)) / factors.norm(dim=(-2, -1)).clamp_min(tiny)
    else:
        largest = state["spectrum"][index, mode, 1]
        roots = unpack(state[f"root{mode}"][index])
        residuals = root_residual(factors, roots, hyper.exponent(mode), ridge_of(hyper), largest)
    return index[(residuals > schedule.tolerance).cpu()]
