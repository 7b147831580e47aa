"""The plan of an optimizer as a table, before anything has been computed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.optim.blocks import DEFAULT_BLOCK, DEFAULT_RATIO_OF_SIDES, Layout
from kronscope.optim.config import EARLY_STEPS, Hyper
from kronscope.optim.costs import (
    CALL_COST,
    ELEMENT_COST,
    STEP_CALLS,
    Calls,
    adamw_calls,
    call_counts,
    first_work,
    layout_work,
)
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.stacks import factor_dtype, in_form_for, initial_state

__all__ = ["Explanation", "ExplanationRow", "explain_plan", "table"]

FROZEN = "frozen"
_LIMITED = (
    f"where roots would cost more than they gain, sides are cut into at most {DEFAULT_BLOCK}, one "
    f"{DEFAULT_RATIO_OF_SIDES} times as long as the other has no factor, and a kernel's positions share the factors of "
    f"its channels; block_size=math.inf leaves matrices whole"
)
_PRODUCT_SIZE = 384
_SMALL_SIZE = 8
# What is at least as wide in its last two dimensions is more often a stack of matrices than a convolution.
_WIDEST_KERNEL = 32


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
        statistics: After the first steps, every so manieth gradient is taken into the factors; 0 without any.
        bytes: Bytes of its state.
        flops: Multiply-adds of a step, roots spread over their period.
        share: Fraction of the step's estimated cost.
        cost: That cost, in multiply-adds of a matrix product that take as long.
        first_cost: The same of one of the first steps.
        calls: What small layers take beside it, in calls of a small product: later on, and in the first steps.
        limited: It was cut, or has no factor for one side, because its roots would cost more than they gain.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    blocks: int
    factors: tuple[int, ...]
    method: str
    solver: str
    refresh: str
    statistics: int
    bytes: int
    flops: float
    share: float
    cost: float
    first_cost: float
    calls: Calls
    limited: bool = False


@dataclass(frozen=True)
class Explanation:
    """The plan for all parameters; ``str`` gives a summary, or a table with a row for each.

    Attributes:
        rows: One per parameter.
        adamw_bytes: Bytes that AdamW's state would have for the parameters that are trained.
        adamw_cost: What a step of AdamW with ``fused=True`` would cost, in the unit of the rows' costs.
        call_cost: What the call of a small product costs, in the same unit: measured, where ``rate`` is.
        first_steps: Number of steps at the beginning that take roots more often.
        first_passes: How often each root is taken in these steps.
        rate: Multiply-adds of a matrix product in a second, measured; None where it says nothing: with several
            processes, which divide the work.
        parallel: Who does what, keeps what and sends what; empty for one process.
        as_rows: Whether ``str`` gives the rows.
        step_seconds: Seconds of a forward and backward pass, as the caller said.
        budgets: What became of each :class:`~kronscope.Budget`, in words.
    """

    rows: tuple[ExplanationRow, ...]
    adamw_bytes: int = 0
    adamw_cost: float = 0.0
    call_cost: float = 0.0
    first_steps: int = 1
    first_passes: float = 1.0
    rate: float | None = None
    parallel: str = ""
    as_rows: bool = False
    step_seconds: float | None = None
    budgets: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        """Return a summary, or a table of all rows where that was asked for."""
        return "\n".join(
            [*(self._table() if self.as_rows else self._summary()), *([self.parallel] * bool(self.parallel))]
        )

    def _summary(self) -> list[str]:
        trained = [row for row in self.rows if row.method != FROZEN]
        if not trained:
            return [f"nothing to train: {len(self.rows)} parameters, all frozen"]
        numbers = sum(math.prod(row.shape) for row in trained)
        flops = sum(row.flops for row in trained) / 1e9
        first, later = (self._time(self._step_cost(first=first)) for first in (True, False))
        schedules = list(dict.fromkeys(row.refresh for row in trained if row.refresh))
        seldom = sorted({row.statistics for row in trained if row.statistics > 1})
        return [
            f"{len(trained)} parameters of {numbers / 1e6:.2f} million numbers",
            f"state: {_mib(self.total_bytes)} MiB, AdamW's: {_mib(self.adamw_bytes)} MiB",
            f"a step: {later} ({flops:.2f} GFLOP), fused AdamW's: {self._time(self.adamw_cost)}",
            f"{self._first()}: {first}{' each' * (self.first_steps > 1)}",
            *self._shares(),
            f"refresh of the roots: {', '.join(schedules) or 'none, nothing has factors'}",
            *(f"after {EARLY_STEPS} steps, factors take one gradient in {every}" for every in seldom),
            *self.budgets,
            *([_LIMITED] * any(row.limited for row in trained)),
            *_stacked(trained),
            "",
            self._groups(trained),
            *([f"frozen: {len(self.rows) - len(trained)} parameters"] if len(trained) < len(self.rows) else []),
            "estimates; explain(rows=True) has a row for each parameter",
        ]

    def _groups(self, rows: Sequence[ExplanationRow]) -> str:
        """Return a table of equal parameters, the most costly first."""
        kinds: dict[tuple[object, ...], list[ExplanationRow]] = {}
        for row in rows:
            shape = row.shape if row.factors else ()
            kinds.setdefault((row.method, shape, row.factors), []).append(row)
        lines = []
        for found in sorted(kinds.values(), key=lambda found: -self._cost(found, first=False)):
            row = found[0]
            lines.append(
                (
                    str(len(found)),
                    _times(row.shape) if len({row.shape for row in found}) == 1 else "various",
                    row.method,
                    "+".join(map(str, row.factors)) + (f" ({row.blocks} blocks)" if row.blocks > 1 else ""),
                    _mib(sum(row.bytes for row in found)),
                    self._time(self._cost(found, first=True)),
                    self._time(self._cost(found, first=False)),
                )
            )
        return table(("number", "shape", "treated as", "factors", "MiB", "first steps", "later steps"), lines)

    def _first(self) -> str:
        if self.first_steps == 1:
            return "the first step, which takes every root"
        each = self.first_passes == self.first_steps
        roots = "every root" if each else f"each root {self.first_passes:.3g} times"
        return f"the first {self.first_steps} steps, which take {roots}"

    def _shares(self) -> list[str]:
        if self.step_seconds is None:
            return []
        beside = f"beside a forward and backward of {1e3 * self.step_seconds:.3g} ms"
        later, first = self.share(), self.share(first=True)
        if later is None or first is None or self.rate is None:
            return [f"share of a step, {beside}: not known where processes divide the work"]
        plain = self.adamw_cost / self.rate
        adamw = 100 * plain / (plain + self.step_seconds)
        own = f"{100 * later:.1f} %, at first {100 * first:.1f} %"
        return [f"share of a step, {beside}: {own}, fused AdamW's: {adamw:.1f} %"]

    def milliseconds(self, *, first: bool = False) -> float | None:
        """Return the estimate of a step's time; None where the work is divided over processes.

        Args:
            first: Of one of the first steps, which take roots more often.
        """
        return None if self.rate is None else 1e3 * self._step_cost(first=first) / self.rate

    def share(self, *, first: bool = False) -> float | None:
        """Return the expected share of a step's time, forward and backward included; None where a time is not known.

        Args:
            first: Of one of the first steps, which take roots more often.
        """
        milliseconds = self.milliseconds(first=first)
        if milliseconds is None or self.step_seconds is None:
            return None
        return milliseconds / (milliseconds + 1e3 * self.step_seconds)

    def _step_cost(self, *, first: bool) -> float:
        return self._cost(self.rows, first=first) + self.call_cost * STEP_CALLS

    def row_cost(self, row: ExplanationRow, *, first: bool = False) -> float:
        """Return what a step takes for a parameter, its calls included, in multiply-adds.

        Args:
            row: The parameter's.
            first: Of one of the first steps, which take roots more often.
        """
        if first:
            return row.first_cost + self.call_cost * row.calls.first
        return row.cost + self.call_cost * row.calls.later

    def _cost(self, rows: Sequence[ExplanationRow], *, first: bool) -> float:
        return sum(self.row_cost(row, first=first) for row in rows)

    def _time(self, cost: float) -> str:
        if self.rate is not None:
            milliseconds = 1e3 * cost / self.rate
            return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
        return f"{cost / self.adamw_cost:.3g} x AdamW" if self.adamw_cost else "nothing"

    def _table(self) -> list[str]:
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
        return [table(header, lines), footer, *_stacked([row for row in self.rows if row.method != FROZEN])]


def _stacked(rows: Sequence[ExplanationRow]) -> list[str]:
    """Say which parameters may be several matrices, and are treated as one: too wide for the kernel of a layer."""

    def is_one(row: ExplanationRow) -> bool:
        count, *shape = row.shape
        flat = row.view == (count, math.prod(shape)) or "kernel apart" in row.method
        return bool(row.factors) and count > 1 and flat and min(shape) >= _WIDEST_KERNEL

    found = [row for row in rows if len(row.shape) == 3 and is_one(row)]
    if not found:
        return []
    row, several = found[0], len(found) > 1
    text = (
        f"{row.name}{f' (and {len(found) - 1} more)' * several} of {_times(row.shape)} is treated as one matrix of "
        f"{row.shape[0]} rows; if it is {row.shape[0]} matrices of {_times(row.shape[1:])}, such as experts, "
        f"view='experts' in its group gives each of them factors of its own"
    )
    return [text]


class _Counts(NamedTuple):
    """What a parameter needs: bytes of each tensor of its state, multiply-adds, costs."""

    sizes: dict[str, int]
    flops: float
    cost: float
    first_cost: float


def explain_plan(
    entries: Sequence[tuple[str, Tensor, Layout, Hyper]],
    describe: Callable[[dict[Tensor, dict[str, int]]], str],
    *,
    rows: bool = False,
    step_seconds: float | None = None,
    budgets: tuple[str, ...] = (),
) -> Explanation:
    """Work out bytes and FLOPs of each parameter.

    Args:
        entries: Name, parameter, layout and options.
        describe: Says how processes share the work, given the bytes of each tensor of each parameter's state.
        rows: Whether ``str`` gives all rows.
        step_seconds: Seconds of a forward and backward pass.
        budgets: What became of each budget, in words.

    Raises:
        OptionError: ``step_seconds`` is not a positive number.
    """
    given: object = step_seconds
    if given is not None and not (isinstance(given, int | float) and 0 < given < math.inf):
        raise OptionError(f"step_seconds must be the seconds of a forward and backward pass, got {step_seconds!r}.")
    known: dict[tuple[object, ...], _Counts] = {}
    counts = []
    for _, param, layout, hyper in entries:
        # equal parameters need the same; a group's options are one object
        key = (layout, param.dtype, param.device.type, id(hyper))
        if key not in known:
            known[key] = _counted(param, layout, hyper)
        counts.append(known[key])
    total = sum(found.cost for found in counts) or 1.0
    calls = call_counts([entry[1:] for entry in entries])
    made = tuple(
        _row(name, param, layout, hyper, found, total, own)
        for (name, param, layout, hyper), found, own in zip(entries, counts, calls, strict=True)
    )
    trained = [(param, hyper) for _, param, layout, hyper in entries if not layout.frozen]
    parallel = describe({e[1]: found.sizes for e, found in zip(entries, counts, strict=True) if not e[2].frozen})
    device = trained[0][0].device.type if trained else "cpu"
    # shapes without data are timed as on a CPU, by the same measurement
    device = "cpu" if device == "meta" else device
    rate = None if parallel or not trained else product_rate(device)
    call_cost = CALL_COST if rate is None else rate * call_seconds(device)
    return Explanation(
        rows=made,
        adamw_bytes=sum(2 * param.numel() * factor_dtype(param).itemsize for param, _ in trained),
        adamw_cost=sum(ELEMENT_COST * param.numel() for param, _ in trained) + call_cost * adamw_calls(len(trained)),
        call_cost=call_cost,
        first_steps=max((hyper.refresh.first_steps for _, hyper in trained), default=1),
        first_passes=max((hyper.refresh.first_passes for _, hyper in trained), default=1.0),
        rate=rate,
        parallel=parallel,
        as_rows=rows,
        step_seconds=step_seconds,
        budgets=budgets,
    )


def _counted(param: Tensor, layout: Layout, hyper: Hyper) -> _Counts:
    if layout.frozen:
        return _Counts({}, 0.0, 0.0, 0.0)
    ghost = torch.empty(param.shape, dtype=param.dtype, device="meta")
    if layout.is_elementwise:
        state = elementwise_state(ghost, factor_dtype(param))
    else:
        state = in_form_for(param.device, initial_state(ghost, layout, hyper), layout, hyper)
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in state.items()}
    flops, cost = layout_work(layout, hyper, param.numel())
    return _Counts(sizes, flops, cost, first_work(layout, hyper, param.numel()))


def _row(
    name: str, param: Tensor, layout: Layout, hyper: Hyper, counts: _Counts, total: float, calls: Calls
) -> ExplanationRow:
    tiles = layout.tiles
    plain = "Adagrad" if hyper.is_sum else "AdamW"
    return ExplanationRow(
        name=name,
        shape=tuple(param.shape),
        view=layout.view,
        blocks=sum(tile.count for tile in tiles),
        factors=tuple(tiles[0].block[mode] for mode in tiles[0].modes) if tiles else (),
        method=FROZEN if layout.frozen else f"{hyper.rule.title if tiles else plain} ({layout.reason})",
        solver=type(hyper.solver).__name__ if tiles else "",
        refresh=str(hyper.refresh) if tiles else "",
        statistics=hyper.statistics if tiles else 0,
        bytes=sum(counts.sizes.values()),
        flops=counts.flops,
        share=counts.cost / total,
        cost=counts.cost,
        first_cost=counts.first_cost,
        calls=calls,
        limited=layout.limited,
    )


@functools.cache
def product_rate(device: str) -> float:
    """Measure multiply-adds of a float32 matrix product in a second."""
    matrix = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        # reading a number waits for the device
        float((matrix @ matrix)[0, 0])
        seconds.append(time.perf_counter() - start)
    return _PRODUCT_SIZE**3 / min(seconds)


@functools.cache
def call_seconds(device: str) -> float:
    """Measure how long the call of a small product takes."""
    matrix = torch.ones(_SMALL_SIZE, _SMALL_SIZE, device=device)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(50):
            found = matrix @ matrix
        float(found[0, 0])
        seconds.append((time.perf_counter() - start) / 50)
    return min(seconds)


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


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
