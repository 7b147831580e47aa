"""Which power of L⊗R fits best, over training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kronscope.errors import OptionError
from kronscope.figures import canvas
from kronscope.figures.style import condition_label
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["exponents"]


def exponents(results: Results) -> Figure:
    r"""Draw the cosine of (L⊗R)^p against p: one line per step, with the best p of each step marked.

    Shampoo is p = ½ and Shampoo² is p = 1.

    Args:
        results: Results with details of kind ``exponents``; each layer and condition gets a panel.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    Raises:
        OptionError: there are no such details.

    >>> from kronscope.measures import Detail, Results, Row
    >>> rows = [Row("fc.weight", 10, 64, step, "gauss_newton", "exact", 1, "shampoo2", 0.9) for step in (0, 10)]
    >>> curve = {"exponent": [0.5, 1.0], "cosine": [0.8, 0.9]}
    >>> detail = Detail("fc.weight", 0, "gauss_newton", "exact", 1, "exponents", curve)
    >>> exponents(Results(rows, [detail])).axes[0].get_title()
    'fc.weight\nGauss–Newton · exact labels'
    """
    sweeps = [item for item in results.details if item.kind == "exponents"]
    if not sweeps:
        raise OptionError("This figure needs exponent sweeps, but there are none; measure with details=('exponents',).")
    panels = list(dict.fromkeys((item.layer, item.condition, item.options) for item in sweeps))
    steps = sorted({item.step for item in sweeps})
    columns = min(canvas.columns_for(len(panels)), 3)
    lines = math.ceil(len(panels) / columns)
    figure = canvas.new_figure(3.5 * columns + 1.0, 2.6 * lines + 0.4)
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    limits = canvas.cosine_limits(value for item in sweeps for value in item.series("cosine"))
    # The brightest end of the map cannot be read on white.
    scale, colors = Normalize(steps[0], steps[-1] + 0.15 * (steps[-1] - steps[0] or 1)), colormaps["viridis"]
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_visible(False)
            continue
        layer, condition, options = panels[number]
        canvas.tidy(axes)
        for item in sorted(sweeps, key=lambda item: item.step):
            if (item.layer, item.condition, item.options) == panels[number]:
                _draw_sweep(axes, item, colors(float(scale(item.step))))
        axes.set_title(f"{layer}\n{condition_label(*condition, options)}", fontsize=8.5, color=canvas.INK)
        canvas.set_cosine_axis(axes, limits, label=number % columns == 0)
        for power, name in ((0.5, "Shampoo"), (1.0, "Shampoo²")):
            axes.axvline(power, color="#999999", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            axes.text(
                power, 0.02, f" {name}", transform=axes.get_xaxis_transform(), rotation=90, fontsize=7,
                color="#777777", va="bottom", ha="right",
            )  # fmt: skip
        if number + columns >= len(panels):
            axes.set_xlabel("exponent p of (L ⊗ R)ᵖ", fontsize=9, color=canvas.INK)
    if len(steps) > 1:
        bar = figure.colorbar(ScalarMappable(scale, colors), ax=grid, fraction=0.04, pad=0.02)
        bar.set_label("step (ring: best p)", fontsize=9, color=canvas.INK)
        bar.ax.set_ylim(steps[0], steps[-1])
        bar.ax.tick_params(labelsize=8)
    return figure


def _draw_sweep(axes: Axes, sweep: Detail, color: tuple[float, float, float, float]) -> None:
    x, y = sweep.series("exponent"), sweep.series("cosine")
    axes.plot(x, y, color=color, linewidth=1.5, label=f"step {sweep.step:,}")
    if errors := sweep.series("stderr"):
        low, high = ([value + sign * error for value, error in zip(y, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    finite = [(value, place) for value, place in zip(y, x, strict=False) if not math.isnan(value)]
    if finite:
        value, place = max(finite)
        axes.plot(
            [place], [value], marker="o", markersize=6, markerfacecolor="white", markeredgecolor=color,
            markeredgewidth=1.6, linestyle="none", zorder=5,
        )  # fmt: skip
