"""The plan of an optimizer as a table, before anything has been computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.kron.triangles import is_packed
from kronscope.optim.blocks import Layout
from kronscope.optim.config import Hyper
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.stacks import factor_dtype, initial_state

__all__ = ["Explanation", "ExplanationRow", "explain_plan", "table"]

# An eigendecomposition with vectors and the two products that form a root take about as long as this many d³
# multiply-adds of a matrix product (measured at d = 256 ... 1024 with one thread).
_ROOT_COST = 30.0
# Elementwise work is bound by memory: one entry costs about as much as this many multiply-adds.
_ELEMENT_COST = 60.0


@dataclass(frozen=True)
class ExplanationRow:
    """The plan for one parameter.

    Attributes:
        name: The parameter's name, or its place.
        shape: Its shape.
        view: The shape it is preconditioned in.
        blocks: Number of blocks.
        factors: Sizes of the factors of the first block; empty for AdamW.
        method: Which update it gets, and why.
        solver: How roots are taken.
        refresh: When roots are taken.
        bytes: Bytes of its state.
        flops: Multiply-adds of a step, roots spread over their period.
        share: Fraction of the step's estimated cost.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    blocks: int
    factors: tuple[int, ...]
    method: str
    solver: str
    refresh: str
    bytes: int
    flops: float
    share: float


@dataclass(frozen=True)
class Explanation:
    """The plan for all parameters; ``str`` gives a table."""

    rows: tuple[ExplanationRow, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        """Return a table."""
        header = (
            "parameter",
            "shape",
            "view",
            "blocks",
            "factors",
            "method",
            "solver",
            "refresh",
            "MiB",
            "MFLOP",
            "share",
        )
        lines = [
            (
                row.name,
                _times(row.shape),
                _times(row.view),
                str(row.blocks),
                "+".join(map(str, row.factors)),
                row.method,
                row.solver,
                row.refresh,
                f"{row.bytes / 2**20:.2f}",
                f"{row.flops / 1e6:.1f}",
                f"{100 * row.share:.1f} %",
            )
            for row in self.rows
        ]
        footer = f"state: {self.total_bytes / 2**20:.1f} MiB; a step: {sum(r.flops for r in self.rows) / 1e9:.2f} GFLOP"
        return table(header, lines) + "\n" + footer


def explain_plan(entries: Sequence[tuple[str, Tensor, Layout, Hyper]]) -> Explanation:
    """Work out bytes and FLOPs of each parameter.

    Args:
        entries: Name, parameter, layout and options.
    """
    costs, drafts = [], []
    for name, param, layout, hyper in entries:
        ghost = torch.empty_like(param, device="meta")
        if layout.is_elementwise:
            state = elementwise_state(ghost, factor_dtype(param))
        else:
            state = initial_state(ghost, layout, hyper)
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        flops, cost = _work(layout, hyper, param.numel())
        costs.append(cost)
        drafts.append((name, param, layout, hyper, size, flops))
    total = sum(costs) or 1.0
    rows = []
    for (name, param, layout, hyper, size, flops), cost in zip(drafts, costs, strict=True):
        tiles = layout.tiles
        kind = {"shampoo": "Shampoo", "soap": "SOAP", "kl": "KL-Shampoo"}[hyper.family]
        plain = "Adagrad" if hyper.is_sum else "AdamW"
        rows.append(
            ExplanationRow(
                name=name,
                shape=tuple(param.shape),
                view=layout.view,
                blocks=sum(tile.count for tile in tiles),
                factors=tuple(tiles[0].block[mode] for mode in tiles[0].modes) if tiles else (),
                method=f"{kind} ({layout.reason})" if tiles else f"{plain} ({layout.reason})",
                solver=type(hyper.solver).__name__ if tiles else "",
                refresh=str(hyper.refresh) if tiles else "",
                bytes=size,
                flops=flops,
                share=cost / total,
            )
        )
    return Explanation(tuple(rows))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Align columns of text.

    >>> print(table(("a", "b"), [("1", "22")]))
    a  b
    1  22
    """
    widths = [max(len(row[column]) for row in (header, *lines)) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *lines)
    )


def _work(layout: Layout, hyper: Hyper, numel: int) -> tuple[float, float]:
    """Return multiply-adds of a step and its cost in the same unit, memory-bound work included."""
    if layout.is_elementwise:
        return 10.0 * numel, _ELEMENT_COST * numel
    products = roots = 0.0
    # one Gram matrix and one multiplication by the root, or two turns of SOAP's bases
    passes = 3 if hyper.family == "soap" else 2 + (hyper.family == "kl") + (hyper.power_rounds - 1)
    for tile in layout.tiles:
        entries = tile.count
        for size in tile.block:
            entries *= size
        for mode in tile.modes:
            # of a Gram matrix that is kept as a triangle only the lower panels are formed
            saved = 0.4 if is_packed(tile.block[mode]) and not hyper.published and hyper.power_rounds == 1 else 0.0
            products += (passes - saved) * tile.block[mode] * entries
            roots += tile.count * _ROOT_COST * tile.block[mode] ** 3 / hyper.refresh.period
    flops = products + roots + 15.0 * numel
    return flops, products + roots + 1.5 * _ELEMENT_COST * numel


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
