"""What an optimizer's state looks like during a run: per layer, on request only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kronscope.kron.devices import wide
from kronscope.kron.triangles import stored_traces, unpack
from kronscope.optim.apply import prepared_gradient
from kronscope.optim.block_state import Tensors
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper
from kronscope.optim.elementwise import elementwise_directions
from kronscope.optim.explain import table
from kronscope.optim.parallel import Placement
from kronscope.optim.parallel.shards import is_dtensor
from kronscope.optim.stacks import block_key, factor_dtype

__all__ = ["Diagnostics", "DiagnosticsRow", "diagnose", "fresh_products"]


@dataclass(frozen=True)
class DiagnosticsRow:
    """One parameter; where it has several blocks or sides, the worst of them.

    Attributes:
        name: The parameter's name, or its place.
        step: Gradients seen.
        condition: Largest over smallest eigenvalue of a factor, without damping, at its last refresh; of a singular one
            the inverse of the rounding error, 8e6 in float32.
        effective_rank: The smallest ``(tr A)² / ‖A‖²`` of a factor, between 1 and its size.
        staleness: Steps since the oldest root was taken.
        residual: How far the stored roots are from those of the present factors.
        update_ratio: Norm of the last step, its learning rate included, over the norm of the parameter.

    What does not exist is None: the first three numbers of a parameter without factors, the residual before the first
    root, the ratio where it was not asked for, of a parameter that is zero, whose update needs a gradient that is gone,
    or of which this process has a part only.
    """

    name: str
    step: int
    condition: float | None
    effective_rank: float | None
    staleness: int
    residual: float | None
    update_ratio: float | None


@dataclass(frozen=True)
class Diagnostics:
    """The state of a run; ``str`` gives a table.

    Attributes:
        rows: One per parameter that has had a gradient, and of which this process has a part (or any has, if all were
            asked).
        skipped_steps: Steps skipped because a gradient was not finite.
        fallbacks: Roots (for SOAP: eigenbases) that this process failed to take at the first attempt, since the
            optimizer was made.
        lost_roots: Those of them that no attempt could take: the root before, or the identity, was used instead.
    """

    rows: tuple[DiagnosticsRow, ...]
    skipped_steps: int
    fallbacks: int = 0
    lost_roots: int = 0

    def __str__(self) -> str:
        """Return a table."""
        header = ("parameter", "step", "condition", "effective rank", "staleness", "residual", "update/weight")
        lines = [
            (
                row.name,
                str(row.step),
                _written(row.condition, ".3g"),
                _written(row.effective_rank, ".1f"),
                str(row.staleness) if row.effective_rank is not None else "-",
                _written(row.residual, ".2g"),
                _written(row.update_ratio, ".2g"),
            )
            for row in self.rows
        ]
        failed = f"; roots taken at a second attempt: {self.fallbacks - self.lost_roots}, lost: {self.lost_roots}"
        return table(header, lines) + f"\nskipped steps: {self.skipped_steps}" + (failed if self.fallbacks else "")


class _Part(NamedTuple):
    """What one process knows of a parameter."""

    condition: float
    effective_rank: float
    staleness: int
    residual: float
    update: float
    weight: float


@torch.no_grad()
def diagnose(
    entries: Sequence[tuple[str, Tensor, Layout, Hyper, dict[str, Any]]],
    state: Mapping[Tensor, Tensors],
    skipped_steps: int,
    placement: Placement,
    *,
    gather: bool,
    quick: bool = False,
) -> Diagnostics:
    """Look at every parameter that has had a gradient.

    Args:
        entries: Name, parameter, layout (of the blocks that this process works on), options and group of each.
        state: The optimizer's state.
        skipped_steps: Steps that were skipped.
        placement: The processes that share the work.
        gather: Ask all of them; else this one alone, for the parameters it has a part of.
        quick: Leave out the update ratio, which takes forming the updates again; conditions may be lower bounds.
    """
    seen = [entry for entry in entries if "step" in state.get(entry[1], {})]
    if not gather:
        seen = [entry for entry in seen if _is_here(entry[1], entry[2], placement)]
    parts = [
        _part(param, state[param], layout, hyper, group, placement, gather=gather, quick=quick)
        for _, param, layout, hyper, group in seen
    ]
    everyone: list[list[_Part]] = placement.everyone(parts) if gather else [parts]
    rows = []
    for (name, param, _, _, group), shares in zip(seen, zip(*everyone, strict=True), strict=True):
        weight = math.sqrt(sum(share.weight for share in shares))
        length = math.sqrt(sum(share.update for share in shares)) * float(group["lr"])
        rows.append(
            DiagnosticsRow(
                name,
                int(state[param]["step"]),
                _known(reduce(_worst, (share.condition for share in shares))),
                _known(-reduce(_worst, (-share.effective_rank for share in shares))),
                max(share.staleness for share in shares),
                _known(reduce(_worst, (share.residual for share in shares))),
                _known(length / weight if weight > 0 else math.nan),
            )
        )
    return Diagnostics(tuple(rows), skipped_steps)


@torch.no_grad()
def fresh_products(
    param: Tensor, tensors: Tensors, layout: Layout, hyper: Hyper, group: dict[str, Any]
) -> tuple[float, float, float]:
    r"""Compare a parameter's update :math:`u` with the :math:`v` that roots taken now would give.

    It takes every root of the parameter once, and changes nothing.

    Args:
        param: The parameter.
        tensors: Its state.
        layout: Its blocks that this process works on.
        hyper: Options.
        group: Its group.

    Returns:
        :math:`\langle u, v\rangle`, :math:`\|u\|^2` and :math:`\|v\|^2`, of the blocks of this process; zeros where it
        has none, or where an update needs a gradient that is gone.
    """
    inner = stored = fresh = 0.0
    step = int(tensors["step"])
    for index, tile in enumerate(layout.tiles):
        if not tile.count or step < hyper.start:
            continue
        one = {name: value.clone() for name, value in _tile_tensors(tensors, index).items()}
        before = _peek(param, one, tile, layout, hyper, group, step)
        if before is None:
            continue
        before = wide(before).clone()
        for mode in tile.modes:
            found = hyper.rule.refresh(one, mode, slice(None), hyper, step)
            if found is not None:
                hyper.rule.carry(one, mode, slice(None), found, hyper, step)
        after = _peek(param, one, tile, layout, hyper, group, step)
        assert after is not None
        after = wide(after)
        inner += float((before * after).sum())
        stored += float(before.square().sum())
        fresh += float(after.square().sum())
    return inner, stored, fresh


def _is_here(param: Tensor, layout: Layout, placement: Placement) -> bool:
    """Whether this process keeps a part of a parameter's state."""
    return any(tile.count for tile in layout.tiles) if layout.tiles else placement.held(param).numel() > 0


def _part(
    param: Tensor,
    tensors: Tensors,
    layout: Layout,
    hyper: Hyper,
    group: dict[str, Any],
    placement: Placement,
    *,
    gather: bool,
    quick: bool,
) -> _Part:
    step = int(tensors["step"])
    condition, rank, staleness, residual = math.nan, math.nan, 0, math.nan
    for index, tile in enumerate(layout.tiles):
        one = _tile_tensors(tensors, index)
        for mode in tile.modes if tile.count else ():
            condition = _worst(condition, _largest(hyper.rule.conditions(one, mode, hyper, step, quick=quick)))
            rank = -_worst(-rank, -_effective_rank(one[f"factor{mode}"]))
            if step >= hyper.start:
                residual = _worst(residual, float(hyper.rule.residuals(one, mode, slice(None), hyper, step).amax()))
            staleness = max(staleness, step - int(one["refreshed"][:, mode].min()))
    squares = _squares(param, tensors, layout, hyper, group, step) if not quick else math.nan
    if layout.is_elementwise and gather and not placement.is_counted(param):
        squares = 0.0
    return _Part(condition, rank, staleness, residual, squares, placement.square_norm(param, alone=not gather))


def _tile_tensors(tensors: Tensors, index: int) -> Tensors:
    prefix = block_key(index, "")
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return {name: unpack(value) if name.startswith(("factor", "root")) else value for name, value in found.items()}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _written(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _worst(first: float, second: float) -> float:
    return second if math.isnan(first) else first if math.isnan(second) else max(first, second)


def _largest(values: Tensor) -> float:
    """Return the largest number that is known, NaN if none is."""
    known = values[~values.isnan()]
    return float(known.amax()) if known.numel() else math.nan


def _effective_rank(factors: Tensor) -> float:
    factors = wide(factors)
    norms = factors.square().sum((-2, -1))
    ranks = torch.where(
        norms > 0, stored_traces(factors).square() / norms.clamp_min(torch.finfo(torch.float64).tiny), norms
    )
    return float(ranks.amin())


def _squares(param: Tensor, tensors: Tensors, layout: Layout, hyper: Hyper, group: dict[str, Any], step: int) -> float:
    """Squares of the update the present state would make; NaN where it needs a gradient that is not here."""
    if layout.is_elementwise:
        (update,) = elementwise_directions([tensors["exp_avg"]], [tensors["exp_avg_sq"]], hyper, step)
        return float(wide(update.nan_to_num(nan=0.0)).square().sum())
    squares = 0.0
    for index, tile in enumerate(layout.tiles):
        if tile.count:
            found = _peek(param, _tile_tensors(tensors, index), tile, layout, hyper, group, step)
            squares += math.nan if found is None else float(wide(found).square().sum())
    return squares


def _peek(
    param: Tensor, state: Tensors, tile: Tile, layout: Layout, hyper: Hyper, group: dict[str, Any], step: int
) -> Tensor | None:
    if hyper.beta1 > 0:
        mean = state["exp_avg"]
    elif param.grad is not None and not is_dtensor(param):
        mean = tile.extract(prepared_gradient(param, param.grad, group).to(factor_dtype(param)).reshape(layout.view))
    else:
        return None
    return hyper.rule.preview(state, mean, tile.modes, hyper, step)
