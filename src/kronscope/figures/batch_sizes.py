"""How the batch size that an approximation is fitted with changes its fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kronscope.errors import OptionError
from kronscope.figures import canvas
from kronscope.figures.style import LABELS, TRUTHS, styles
from kronscope.measures.results import Results
from kronscope.measures.rows import curve_names, stderr_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["batch_sizes"]


def batch_sizes(results: Results, step: int | None = None) -> Figure:
    """Draw the cosine of each approximation against the batch size B, on a logarithmic axis.

    Args:
        results: Results with details of kind ``batch_sizes``; each layer, truth and kind of labels gets a panel.
        step: Which step to show; None takes the last.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    Raises:
        OptionError: there are no such details, or none at ``step``.

    >>> from kronscope.measures import Detail, Results, Row
    >>> rows = [Row("fc.weight", 10, 64, step, "gauss_newton", "exact", 1, "shampoo2", 0.9) for step in (0, 10)]
    >>> curve = {"batch_size": [1.0, 64.0], "shampoo2": [0.9, 0.7]}
    >>> detail = Detail("fc.weight", 0, "gauss_newton", "real", 1, "batch_sizes", curve)
    >>> batch_sizes(Results(rows, [detail])).axes[0].get_xscale()
    'log'
    """
    sweeps = [item for item in results.details if item.kind == "batch_sizes"]
    steps = sorted({item.step for item in sweeps})
    if not sweeps or (step is not None and step not in steps):
        asked = "" if step is None else f" at step {step}"
        there = (
            f"they are at steps {steps}; choose one of these"
            if steps
            else "there are none; measure with details=('batch_sizes',)"
        )
        raise OptionError(f"This figure needs batch-size sweeps{asked}, but {there}.")
    shown = steps[-1] if step is None else step
    # Results merged from several batch sizes hold the same sweep more than once.
    sweeps = list(
        {(item.layer, item.truth, item.labels, item.options): item for item in sweeps if item.step == shown}.values()
    )
    curves = [name for item in sweeps for name in curve_names(item)]
    looks = styles(curves)
    columns = min(canvas.columns_for(len(sweeps)), 3)
    lines = math.ceil(len(sweeps) / columns)
    figure = canvas.new_figure(max(3.4 * columns, 4.5), 2.5 * lines + 0.8)
    from matplotlib.ticker import FuncFormatter

    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    limits = canvas.cosine_limits(value for item in sweeps for name in looks for value in item.series(name))
    for number, axes in enumerate(grid.flat):
        if number >= len(sweeps):
            axes.set_visible(False)
            continue
        item = sweeps[number]
        canvas.tidy(axes)
        for depth, (name, look) in enumerate(looks.items()):
            if item.series(name):
                errors = item.series(stderr_of(name))
                canvas.draw_line(axes, item.series("batch_size"), item.series(name), look, errors=errors, depth=depth)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        # The sweep takes the batch size's place, so only truth and labels name the panel.
        names = [TRUTHS.get(item.truth, item.truth)]
        names += [LABELS.get(item.labels, item.labels)] if item.truth != "adagrad" else []
        names += [item.options] if item.options else []
        title = " · ".join([*names, f"step {item.step:,}"])
        axes.set_title(f"{item.layer}\n{title}", fontsize=8.5, color=canvas.INK)
        canvas.set_cosine_axis(axes, limits, label=number % columns == 0)
        if number + columns >= len(sweeps):
            axes.set_xlabel("batch size B", fontsize=9, color=canvas.INK)
    canvas.legend_below(figure)
    return figure
