"""What an optimizer's state looks like during a run: per layer, on request only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kronscope.kron.roots import root_residual
from kronscope.kron.triangles import stored_traces, unpack
from kronscope.optim.apply import prepared_gradient
from kronscope.optim.batched import Moments, direction
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import Hyper
from kronscope.optim.explain import table
from kronscope.optim.grafts import rescaled
from kronscope.optim.parallel import Placement
from kronscope.optim.parallel.shards import is_dtensor
from kronscope.optim.pieces import Tensors, batched_times, ridge_of
from kronscope.optim.soap_batched import soap_direction
from kronscope.optim.stacks import block_key, factor_dtype

__all__ = ["Diagnostics", "DiagnosticsRow", "diagnose"]


@dataclass(frozen=True)
class DiagnosticsRow:
    """One parameter; where it has several blocks or sides, the worst of them.

    Attributes:
        name: The parameter's name, or its place.
        step: Gradients seen.
        condition: Largest over smallest eigenvalue of a factor, ridge included, at its last refresh.
        effective_rank: The smallest ``(tr A)² / ‖A‖²`` of a factor, between 1 and its size.
        staleness: Steps since the oldest root was taken.
        residual: How far the stored roots are from those of the present factors.
        update_ratio: Norm of a step, learning rate included, over the norm of the parameter.
    """

    name: str
    step: int
    condition: float
    effective_rank: float
    staleness: int
    residual: float
    update_ratio: float


@dataclass(frozen=True)
class Diagnostics:
    """The state of a run; ``str`` gives a table.

    Attributes:
        rows: One per parameter that has had a gradient.
        skipped_steps: Steps skipped because a gradient was not finite.
    """

    rows: tuple[DiagnosticsRow, ...]
    skipped_steps: int

    def __str__(self) -> str:
        """Return a table."""
        header = ("parameter", "step", "condition", "effective rank", "staleness", "residual", "update/weight")
        lines = [
            (
                row.name,
                str(row.step),
                f"{row.condition:.3g}",
                f"{row.effective_rank:.1f}",
                str(row.staleness),
                f"{row.residual:.2g}",
                f"{row.update_ratio:.2g}",
            )
            for row in self.rows
        ]
        return table(header, lines) + f"\nskipped steps: {self.skipped_steps}"


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
) -> Diagnostics:
    """Look at every parameter that has had a gradient.

    Args:
        entries: Name, parameter, layout (of the blocks that this process works on), options and group of each.
        state: The optimizer's state.
        skipped_steps: Steps that were skipped.
        placement: The processes that share the work.
    """
    seen = [entry for entry in entries if "step" in state.get(entry[1], {})]
    parts = [_part(param, state[param], layout, hyper, group, placement) for _, param, layout, hyper, group in seen]
    everyone: list[list[_Part]] = placement.everyone(parts)
    rows = []
    for (name, param, _, _, group), shares in zip(seen, zip(*everyone, strict=True), strict=True):
        weight = math.sqrt(sum(share.weight for share in shares))
        length = math.sqrt(sum(share.update for share in shares)) * float(group["lr"])
        rows.append(
            DiagnosticsRow(
                name,
                int(state[param]["step"]),
                reduce(_worst, (share.condition for share in shares)),
                -reduce(_worst, (-share.effective_rank for share in shares)),
                max(share.staleness for share in shares),
                reduce(_worst, (share.residual for share in shares)),
                length / weight if weight > 0 else math.nan,
            )
        )
    return Diagnostics(tuple(rows), skipped_steps)


def _part(
    param: Tensor, tensors: Tensors, layout: Layout, hyper: Hyper, group: dict[str, Any], placement: Placement
) -> _Part:
    step = int(tensors["step"])
    condition, rank, staleness, residual = math.nan, math.nan, 0, math.nan
    for index, tile in enumerate(layout.tiles):
        one = _tile_tensors(tensors, index)
        for mode in tile.modes if tile.count else ():
            condition = _worst(condition, _condition(one, mode, hyper, step))
            rank = -_worst(-rank, -_effective_rank(one[f"factor{mode}"]))
            residual = _worst(residual, _residual(one, mode, hyper, step))
            staleness = max(staleness, step - int(one["refreshed"][:, mode].min()))
    squares = _squares(param, tensors, layout, hyper, group, step)
    if layout.is_elementwise and not placement.is_counted(param):
        squares = 0.0
    return _Part(condition, rank, staleness, residual, squares, placement.square_norm(param))


def _tile_tensors(tensors: Tensors, index: int) -> Tensors:
    prefix = block_key(index, "")
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    return {name: unpack(value) if name.startswith(("factor", "root")) else value for name, value in found.items()}


def _worst(first: float, second: float) -> float:
    return second if math.isnan(first) else first if math.isnan(second) else max(first, second)


def _condition(state: Tensors, mode: int, hyper: Hyper, step: int) -> float:
    if hyper.family == "soap":
        values = torch.linalg.eigvalsh(state[f"factor{mode}"].double() / hyper.correction2(step)).clamp_min(0)
        positive = torch.where(values > 0, values, values.amax(-1, keepdim=True))
        return float((values.amax(-1) / positive.amin(-1)).amax())
    largest, smallest = state["spectrum"][:, mode, 1], state["spectrum"][:, mode, 2]
    ratio = torch.where(smallest > 0, largest / smallest, torch.full_like(largest, math.nan))
    return float(ratio.nan_to_num(nan=-1.0).amax()) if bool((smallest > 0).any()) else math.nan


def _effective_rank(factors: Tensor) -> float:
    wide = factors.double()
    norms = wide.square().sum((-2, -1))
    ranks = torch.where(
        norms > 0, stored_traces(wide).square() / norms.clamp_min(torch.finfo(torch.float64).tiny), norms
    )
    return float(ranks.amin())


def _residual(state: Tensors, mode: int, hyper: Hyper, step: int) -> float:
    factors = state[f"factor{mode}"] / hyper.correction2(step)
    if hyper.family == "soap":
        basis = state[f"basis{mode}"]
        moved = factors @ basis
        rest = moved - basis * (basis * moved).sum(-2, keepdim=True)
        sizes = factors.norm(dim=(-2, -1)).clamp_min(torch.finfo(factors.dtype).tiny)
        return float((rest.norm(dim=(-2, -1)) / sizes).amax())
    if step < hyper.start:
        return math.nan
    largest = state["spectrum"][:, mode, 1]
    return float(root_residual(factors, state[f"root{mode}"], hyper.exponent(mode), ridge_of(hyper), largest).amax())


def _squares(param: Tensor, tensors: Tensors, layout: Layout, hyper: Hyper, group: dict[str, Any], step: int) -> float:
    """Squares of the update the present state would make; NaN where it needs a gradient that is not here."""
    if layout.is_elementwise:
        if hyper.is_sum:
            denominator = (tensors["exp_avg_sq"] + hyper.eps).sqrt()
        else:
            denominator = (tensors["exp_avg_sq"] / hyper.correction2(step)).sqrt() + hyper.eps
        update = tensors["exp_avg"] / (1 - hyper.beta1**step) / denominator
        return float(update.nan_to_num(nan=0.0).double().square().sum())
    squares = 0.0
    for index, tile in enumerate(layout.tiles):
        if tile.count:
            found = _peek(param, _tile_tensors(tensors, index), tile, layout, hyper, group, step)
            squares += math.nan if found is None else float(found.double().square().sum())
    return squares


def _peek(
    param: Tensor, state: Tensors, tile: Tile, layout: Layout, hyper: Hyper, group: dict[str, Any], step: int
) -> Tensor | None:
    if hyper.published and step == 1:
        return torch.zeros(1)
    if hyper.beta1 > 0:
        mean = state["exp_avg"]
    elif param.grad is not None and not is_dtensor(param):
        mean = tile.extract(prepared_gradient(param, param.grad, group).to(factor_dtype(param)).reshape(layout.view))
    else:
        return None
    if hyper.family == "soap":
        if hyper.beta1 == 0:
            for mode in tile.modes:
                mean = batched_times(state[f"basis{mode}"].mT, mean, mode)
        return rescaled(soap_direction(state, mean, tile.modes, hyper, step), hyper)
    return direction(state, Moments(mean), tile.factored, hyper, step, peek=True)
