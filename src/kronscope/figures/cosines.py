"""The default figure: every cosine of the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kronscope.figures import canvas
from kronscope.figures.style import Style, condition_label
from kronscope.measures.results import Results
from kronscope.measures.rows import Row
from kronscope.support.names import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["cosines"]

_LONGEST_NAME = 42


def cosines(results: Results) -> Figure:
    """Draw every cosine: as lines over the steps where there are several, else as one dot per approximation.

    Over several steps there is a panel for each layer and each truth (with its labels and batch size). At a single step
    there is a panel for each truth, with the layers below each other; for a single layer, with the approximations.

    Args:
        results: What was measured.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    >>> from kronscope.measures import Detail, Results, Row
    >>> rows = [Row("fc.weight", 10, 64, step, "gauss_newton", "exact", 1, "shampoo2", 0.9) for step in (0, 10)]
    >>> len(cosines(Results(rows)).axes)
    1
    """
    if not results.rows:
        figure = canvas.new_figure(4, 2)
        canvas.blank(figure.add_subplot(), "nothing was measured")
        return figure
    return _lines(results) if len(results.steps) > 1 else _dots(results)


def _lines(results: Results) -> Figure:
    layers, conditions = results.layers, results.conditions
    short = dict(zip(layers, short_names(layers, _LONGEST_NAME), strict=True))
    panels = [(layer, condition) for layer in layers for condition in conditions]
    columns = len(conditions) if len(layers) > 1 and len(conditions) > 1 else canvas.columns_for(len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = canvas.new_figure(max(3.1 * columns, 4.5), 2.35 * lines + 0.9)
    looks = canvas.looks_for(results)
    limits = canvas.cosine_limits(row.cosine for row in results)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_visible(False)
            continue
        layer, condition = panels[number]
        rows = [row for row in results if row.layer == layer and row.condition == condition]
        axes.set_title(_panel_title(short[layer], condition, results), fontsize=8.5, color=canvas.INK)
        if not rows:
            canvas.blank(axes)
            continue
        canvas.tidy(axes)
        canvas.draw_cosines(axes, rows, looks)
        canvas.set_cosine_axis(axes, limits, label=number % columns == 0)
        canvas.step_axis(axes, label=number + columns >= len(panels))
    common = [short[layers[0]]] if len(layers) == 1 else []
    common += [condition_label(*conditions[0])] if len(conditions) == 1 else []
    if common:
        figure.suptitle(" · ".join(common), fontsize=10)
    canvas.legend_below(figure, rows=results)
    return figure


def _panel_title(layer: str, condition: tuple[str, str, int], results: Results) -> str:
    parts = [condition_label(*condition)] if len(results.conditions) > 1 else []
    parts += [layer] if len(results.layers) > 1 else []
    return "\n".join(parts)


def _dots(results: Results) -> Figure:
    layers, conditions = results.layers, results.conditions
    looks = canvas.looks_for(results)
    by_layer = len(layers) > 1
    height = 0.36 * len(layers) if by_layer else 0.3 * len(looks)
    columns = canvas.columns_for(len(conditions))
    lines = math.ceil(len(conditions) / columns)
    names = short_names(layers if by_layer else [look.name for look in looks.values()], _LONGEST_NAME)
    margin = 0.075 * max((len(name) for name in names), default=0)
    figure = canvas.new_figure(max(3.4 * columns + margin, 4.5), (height + 0.8) * lines + (0.8 if by_layer else 0.5))
    limits = canvas.cosine_limits(row.cosine for row in results)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for number, axes in enumerate(grid.flat):
        if number >= len(conditions):
            axes.set_visible(False)
            continue
        condition = conditions[number]
        canvas.tidy(axes)
        axes.set_title(condition_label(*condition), fontsize=9, color=canvas.INK)
        rows = [row for row in results if row.condition == condition]
        for place, (name, look) in enumerate(looks.items()):
            chosen = [row for row in rows if row.variant == name and not math.isnan(row.cosine)]
            if by_layer:
                # Side by side within a layer's band, so that equal cosines do not hide each other.
                shift = 0.5 * (place / max(len(looks) - 1, 1) - 0.5) if len(looks) > 1 else 0.0
                _scatter(axes, chosen, [layers.index(row.layer) + shift for row in chosen], look)
            else:
                _scatter(axes, chosen, [place] * len(chosen), look)
        axes.set_xlim(*limits)
        axes.set_xlabel("cosine similarity", fontsize=9, color=canvas.INK)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(False, axis="y")
        for place in range(0, len(names), 2):
            axes.axhspan(place - 0.5, place + 0.5, color="#f5f5f5", zorder=0, linewidth=0)
        axes.tick_params(axis="y", length=0, labelleft=number % columns == 0)
    step = f"step {results.steps[0]:,}"
    figure.suptitle(step if by_layer else f"{short_names(layers, _LONGEST_NAME)[0]}, {step}", fontsize=10)
    if by_layer:
        canvas.legend_below(figure, rows=results)
    elif any(math.isfinite(row.stderr) for row in results):
        figure.supxlabel(f"error bars: {canvas.ERROR_NOTE}", fontsize=8, style="italic")
    return figure


def _scatter(axes: Axes, rows: Sequence[Row], places: Sequence[float], look: Style) -> None:
    errors = [row.stderr for row in rows]
    axes.errorbar(
        [row.cosine for row in rows],
        places,
        xerr=errors if any(math.isfinite(error) for error in errors) else None,
        linestyle="none",
        marker=look.marker,
        markersize=6,
        color=look.color,
        markerfacecolor="white" if look.width > 2 else look.color,
        capsize=2,
        elinewidth=1.0,
        label=look.name,
    )
