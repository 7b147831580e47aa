"""The paper's Figure 2: why one round of power iteration from the identity is enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kronscope.errors import OptionError
from kronscope.figures import canvas
from kronscope.figures.comparison import check_columns
from kronscope.figures.style import TRUTHS, Style
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BARS", "CURVES", "figure2"]

CURVES = {
    "ratio": Style("σ₁ / ‖σ‖ (optimal)", "#2b2b2b", "#e8e8e8", "o", width=2.4),
    "left": Style("L: ⟨L, U₁⟩ / ‖L‖", "#0072b2", "#4aa8e0", "s"),
    "right": Style("R: ⟨R, V₁⟩ / ‖R‖", "#d55e00", "#ff8a3d", "^", (4, 1.5)),
}
# The traces tr Vᵢ decide how well L is met after one round, tr Uᵢ how well R is.
BARS = {
    "sigma": Style("σᵢ / σ₁", "#c9ced6", "#4a5260", ""),
    "alpha_right": Style("|αᵢ| / α₁, αᵢ = tr Vᵢ (for L)", CURVES["left"].color, CURVES["left"].dark, "s"),
    "alpha_left": Style("|αᵢ| / α₁, αᵢ = tr Uᵢ (for R)", CURVES["right"].color, CURVES["right"].dark, "^"),
}


def figure2(columns: Mapping[str, Results], leading: int = 12) -> Figure:
    r"""Draw :math:`\sigma_1/\|\sigma\|` against the one-round cosines of L and R, and the spectrum behind them.

    With :math:`\hat H = \sum_i \sigma_i u_i v_i^\top`, one round from the identity reaches the leading singular vector
    with cosine :math:`\alpha_1\sigma_1/\sqrt{\sum_i\alpha_i^2\sigma_i^2}`, where :math:`\alpha_i` is the trace of
    :math:`V_i` (for L) or :math:`U_i` (for R). The panel beside each curve shows, at the last step, the leading
    :math:`\sigma_i` and :math:`|\alpha_i|`, each divided by its first.

    Args:
        columns: The title of each column, and the results of one layer with details of kind ``spectrum``.
        leading: How many singular values to show.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    Raises:
        OptionError: there is no column, one has several layers, or none has a spectrum.

    >>> from kronscope.measures import Detail, Results, Row
    >>> rows = [Row("fc.weight", 10, 64, step, "gauss_newton", "exact", 1, "shampoo2", 0.9) for step in (0, 10)]
    >>> values = {"sigma": [3.0, 1.0], "alpha_left": [1.0, 0.1], "alpha_right": [1.0, 0.1]}
    >>> values |= {"ratio": 0.9, "left": 0.9, "right": 0.8}
    >>> detail = Detail("fc.weight", 0, "gauss_newton", "exact", 1, "spectrum", values)
    >>> len(figure2({"Digits": Results(rows, [detail])}).axes)
    2
    """
    check_columns(columns)
    lines = {
        name: [_spectra(results, truth) for results in columns.values()]
        for truth, name in TRUTHS.items()
        if any(_spectra(results, truth) for results in columns.values())
    }
    if not lines:
        raise OptionError("Figure 2 needs spectra, but there are none; measure with details=('spectrum',).")
    figure = canvas.new_figure(max(5.0 * len(columns) + 0.3, 5.6), 2.25 * len(lines) + 0.85)
    widths = [1.25, 1] * len(columns)
    grid = figure.subplots(len(lines), 2 * len(columns), squeeze=False, sharex="col", width_ratios=widths)
    values = [item.number(curve) for spectra in lines.values() for line in spectra for item in line for curve in CURVES]
    limits = canvas.cosine_limits(values)
    for y, (name, line) in enumerate(lines.items()):
        for x, spectra in enumerate(line):
            curves, bars = grid[y, 2 * x], grid[y, 2 * x + 1]
            _draw_curves(curves, spectra, limits)
            _draw_bars(bars, spectra[-1] if spectra else None, leading)
            if y == 0:
                curves.set_title(list(columns)[x], fontsize=10)
            if x == 0:
                curves.set_ylabel(f"{name}\ncosine similarity", fontsize=9, color=canvas.INK)
            if spectra:
                canvas.step_axis(curves, label=y == len(lines) - 1)
            if y == len(lines) - 1:
                bars.set_xlabel("i", fontsize=9, color=canvas.INK)
    canvas.legend_below(figure)
    return figure


def _spectra(results: Results, truth: str) -> list[Detail]:
    """The spectra of one truth by step, of the first condition that has any."""
    found = [item for item in results.details if item.kind == "spectrum" and item.truth == truth]
    first = found[0].condition if found else None
    return sorted((item for item in found if item.condition == first), key=lambda item: item.step)


def _draw_curves(axes: Axes, spectra: Sequence[Detail], limits: tuple[float, float]) -> None:
    if not spectra:
        canvas.blank(axes)
        return
    canvas.tidy(axes)
    for depth, (name, look) in enumerate(CURVES.items()):
        steps = [item.step for item in spectra]
        canvas.draw_line(axes, steps, [item.number(name) for item in spectra], look, depth=depth)
    canvas.set_cosine_axis(axes, limits, label=False)


def _draw_bars(axes: Axes, spectrum: Detail | None, leading: int) -> None:
    if spectrum is None or not spectrum.series("sigma"):
        canvas.blank(axes)
        return
    if len(spectrum.series("sigma")) == 1:  # which is one beside itself
        canvas.blank(axes, "the first singular\nvalue only")
        return
    canvas.tidy(axes)
    axes.set_title(f"spectrum at step {spectrum.step:,}", fontsize=8.5, color=canvas.INK)
    for name, look in BARS.items():
        values = relative([abs(value) for value in spectrum.series(name)[:leading]])
        places = range(1, len(values) + 1)
        if look.marker:
            axes.plot(
                places, values, linestyle="none", marker=look.marker, markersize=4.5, color=look.color, label=look.name
            )
        else:
            axes.bar(places, values, width=0.62, color=look.color, label=look.name)
    top = max([1.0, *axes.dataLim.intervaly.tolist()])
    axes.set_ylim(0, 1.05 * top)
    shown = min(leading, len(spectrum.series("sigma")))
    axes.set_xticks([place for place in ((1, 4, 8, 12, 16, 20) if shown > 5 else range(1, 6)) if place <= shown])


def relative(values: Sequence[float]) -> list[float]:
    """Divided by the first; NaN where that is zero."""
    first = values[0] if values else math.nan
    return [value / first if first else math.nan for value in values]
