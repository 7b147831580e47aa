"""The plan of an optimizer as a table, before anything has been computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.optim.blocks import Layout
from kronscope.optim.config import Hyper
from kronscope.optim.costs import layout_work
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.stacks import factor_dtype, initial_state

__all__ = ["Explanation", "ExplanationRow", "explain_plan", "table"]


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
    """The plan for all parameters; ``str`` gives a table.

    Attributes:
        rows: One per parameter.
        parallel: Who does what, keeps what and sends what; empty for one process.
    """

    rows: tuple[ExplanationRow, ...]
    parallel: str = ""

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
        return "\n".join([table(header, lines), footer, *([self.parallel] if self.parallel else [])])


def explain_plan(
    entries: Sequence[tuple[str, Tensor, Layout, Hyper]], describe: Callable[[dict[Tensor, dict[str, int]]], str]
) -> Explanation:
    """Work out bytes and FLOPs of each parameter.

    Args:
        entries: Name, parameter, layout and options.
        describe: Says how processes share the work, given the bytes of each tensor of each parameter's state.
    """
    costs, drafts, sizes = [], [], {}
    for name, param, layout, hyper in entries:
        if layout.frozen:
            costs.append(0.0)
            drafts.append((name, param, layout, hyper, 0, 0.0))
            continue
        ghost = torch.empty(param.shape, dtype=param.dtype, device="meta")
        if layout.is_elementwise:
            state = elementwise_state(ghost, factor_dtype(param))
        else:
            state = initial_state(ghost, layout, hyper)
        sizes[param] = {key: tensor.numel() * tensor.element_size() for key, tensor in state.items()}
        size = sum(sizes[param].values())
        flops, cost = layout_work(layout, hyper, param.numel())
        costs.append(cost)
        drafts.append((name, param, layout, hyper, size, flops))
    total = sum(costs) or 1.0
    rows = []
    for (name, param, layout, hyper, size, flops), cost in zip(drafts, costs, strict=True):
        tiles = layout.tiles
        plain = "Adagrad" if hyper.is_sum else "AdamW"
        rows.append(
            ExplanationRow(
                name=name,
                shape=tuple(param.shape),
                view=layout.view,
                blocks=sum(tile.count for tile in tiles),
                factors=tuple(tiles[0].block[mode] for mode in tiles[0].modes) if tiles else (),
                method="frozen" if layout.frozen else f"{hyper.rule.title if tiles else plain} ({layout.reason})",
                solver=type(hyper.solver).__name__ if tiles else "",
                refresh=str(hyper.refresh) if tiles else "",
                bytes=size,
                flops=flops,
                share=cost / total,
            )
        )
    return Explanation(tuple(rows), describe(sizes))


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


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
