"""The paper's comparisons: a grid of cosines against the step, one column per workload or layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kronscope.errors import OptionError
from kronscope.figures import canvas
from kronscope.figures.style import styles
from kronscope.measures.results import Results
from kronscope.measures.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_columns", "comparison", "rows_for"]

Selection = list[Row]


def check_columns(columns: Mapping[str, Results]) -> None:
    """One layer per column, or a reader could not know whose line it is.

    Raises:
        OptionError: There is no column, or one with several layers.
    """
    if not columns:
        raise OptionError("A figure needs one column or more, but got none; give a dictionary of title: results.")
    for title, results in columns.items():
        if len(results.layers) > 1:
            raise OptionError(
                f"Column {title!r} must hold one layer, but has {len(results.layers)}; take one with "
                f"results.select(layer={results.layers[0]!r})."
            )


def rows_for(
    results: Results, truth: str, *, labels: Sequence[str] = ("exact", "sampled", "real"), batch_size: int | None = None
) -> Selection:
    """The rows of one truth, fitted on the first of ``labels`` that occurs, at one batch size (the smallest)."""
    rows = [row for row in results if row.truth == truth]
    for choice in labels:
        fitted = [row for row in rows if row.labels == choice]
        if fitted:
            size = min(row.batch_size for row in fitted) if batch_size is None else batch_size
            return [row for row in fitted if row.batch_size == size]
    return []


def comparison(
    lines: Mapping[str, Sequence[Selection]],
    titles: Sequence[str],
    approximations: Iterable[str],
) -> Figure:
    """Draw a grid: each line's title with its panels' rows, left to right under ``titles``.

    A line of the grid without any data is left out; a single empty panel says so.
    """
    asked = set(approximations)
    chosen = {
        name: [[row for row in panel if asked & {row.approximation, row.variant}] for panel in panels]
        for name, panels in lines.items()
    }
    chosen = {name: panels for name, panels in chosen.items() if any(panels)} or dict(list(chosen.items())[:1])
    everything = [row for panels in chosen.values() for panel in panels for row in panel]
    looks = styles(row.variant for row in everything)
    limits = canvas.cosine_limits(row.cosine for row in everything)
    columns = len(titles)
    figure = canvas.new_figure(max(2.9 * columns + 0.4, 4.2), 2.15 * len(chosen) + 0.75)
    grid = figure.subplots(len(chosen), columns, squeeze=False, sharex="col", sharey=True)
    for y, (name, panels) in enumerate(chosen.items()):
        for x, panel in enumerate(panels):
            axes = grid[y, x]
            if y == 0:
                axes.set_title(titles[x], fontsize=10)
            if all(math.isnan(row.cosine) for row in panel):
                canvas.blank(axes)
            else:
                canvas.tidy(axes)
                canvas.draw_cosines(axes, panel, looks)
                canvas.set_cosine_axis(axes, limits, label=False)
                canvas.step_axis(axes, label=y == len(chosen) - 1)
            if x == 0:
                axes.set_ylabel(f"{name}\ncosine similarity", fontsize=9, color=canvas.INK)
    canvas.legend_below(figure, rows=everything)
    return figure
