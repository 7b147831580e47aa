"""What all figures share: a canvas without global state, axes, lines with error bars, legends, and saving."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronscope.errors import MissingExtraError, OptionError
from kronscope.figures.style import Style, styles
from kronscope.measures.rows import Row
from kronscope.support.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ERROR_NOTE",
    "INK",
    "blank",
    "columns_for",
    "cosine_limits",
    "draw_cosines",
    "draw_line",
    "legend_below",
    "looks_for",
    "new_figure",
    "require_matplotlib",
    "save",
    "set_cosine_axis",
    "step_axis",
    "tidy",
]

_DPI = 200
_MOST_PIXELS = 12_000
_FORMATS = ("png", "pdf", "svg")
INK = "#444444"
ERROR_NOTE = "± one standard error"


def require_matplotlib() -> None:
    """Say at once that figures cannot be drawn, before hours of work that end in one.

    Raises:
        MissingExtraError: matplotlib is not installed.

    >>> require_matplotlib()  # it is installed: nothing happens
    """
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("Figures need matplotlib; install it with: pip install 'kronscope[figures]'") from error


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that is not registered with pyplot, so nothing global changes and nothing needs closing.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a ``.png`` (200 dpi), ``.pdf`` or ``.svg`` file.

    The file appears whole or not at all, and the same results give the same file, byte for byte.

    Args:
        figure: The figure.
        path: The file; its ending decides the format.

    Returns:
        The path.

    Raises:
        OptionError: the ending is another one.
        ResultsError: the file cannot be written there.

    >>> import tempfile
    >>> from kronscope.figures import cosines
    >>> from kronscope.measures import Results, Row
    >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "exact", 1, "shampoo2", 0.9)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(cosines(Results([row])), f"{folder}/cosines.svg").name
    'cosines.svg'
    """
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in _FORMATS:
        raise OptionError(
            f"A figure's name must end in .png, .pdf or .svg, but it is {os.fspath(path)!r}; change the ending."
        )
    # A tall figure of very many layers would take gigabytes at full resolution.
    dpi = min(_DPI, _MOST_PIXELS / max(figure.get_size_inches()))
    # Without a date the same results give the same file, byte for byte.
    metadata: dict[str, Any] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    return write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=dpi, metadata=metadata))


def tidy(axes: Axes) -> None:
    """A light frame and a faint grid behind the data."""
    axes.set_facecolor("white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color="#999999", labelcolor=INK)


def blank(axes: Axes, text: str = "not measured") -> None:
    """Say that a panel has no data, rather than showing empty axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#dddddd")
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#888888", fontsize=9)


def cosine_limits(values: Iterable[float]) -> tuple[float, float]:
    """From 0 to 1, or closer when all values are near 1.

    >>> cosine_limits([0.3, 0.9])
    (0.0, 1.03)
    >>> low, high = cosine_limits([0.98, 1.0])
    >>> round(low, 3), round(high, 3)
    (0.975, 1.002)
    """
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    if low >= 0.8:
        gap = max(1.0 - low, 1e-3)
        return 1.0 - 1.25 * gap, max(1.0 + 0.1 * gap, max(finite) + 0.05 * gap)
    return low - 0.03 if low < 0 else 0.0, max(1.03, max(finite, default=1.0) + 0.03)


def set_cosine_axis(axes: Axes, limits: tuple[float, float], *, label: bool = True) -> None:
    """The vertical axis of a cosine."""
    axes.set_ylim(*limits)
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    if label:
        axes.set_ylabel("cosine similarity", fontsize=9, color=INK)


def draw_cosines(axes: Axes, rows: Sequence[Row], looks: dict[str, Style]) -> None:
    """One line per variant of an approximation against the step, with error bars where there are errors."""
    for depth, (name, look) in enumerate(looks.items()):
        points = sorted((row for row in rows if row.variant == name), key=lambda row: row.step)
        if all(math.isnan(row.cosine) for row in points):
            continue
        draw_line(
            axes,
            [row.step for row in points],
            [row.cosine for row in points],
            look,
            errors=[row.stderr for row in points],
            depth=depth,
        )


def draw_line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    look: Style,
    *,
    errors: Sequence[float] = (),
    depth: int = 0,
    label: str | None = None,
) -> None:
    """A line in one approximation's look; markers thin out where there would be too many to tell apart."""
    wide = look.width > 2
    axes.errorbar(
        x,
        y,
        yerr=errors if any(math.isfinite(error) for error in errors) else None,
        label=label or look.name,
        color=look.color,
        linestyle=(0, look.dashes) if look.dashes else "-",
        linewidth=look.width,
        marker=look.marker,
        markersize=5.8 if wide else 4.2,
        markerfacecolor="white" if wide else look.color,
        markeredgecolor=look.color,
        markeredgewidth=1.1 if wide else 0.5,
        markevery=max(1, len(x) // 15),
        elinewidth=1.0,
        capsize=2,
        alpha=0.95,
        zorder=3 + depth * 0.1,
    )


def legend_below(figure: Figure, *, rows: Iterable[Row] = ()) -> None:
    """One legend for all panels, under them, in as many columns as the figure's width has room for.

    It also says what the error bars are, if one of ``rows`` has an error.
    """
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            # An error bar's first part is its line and marker; with the bars, the legend would be full of clutter.
            entries.setdefault(label, handle[0] if isinstance(handle, tuple) else handle)
    if any(math.isfinite(row.stderr) and math.isfinite(row.cosine) for row in rows):
        entries[ERROR_NOTE] = Line2D([], [], linestyle="none", marker="|", markersize=11, color="#777777")
    if not entries:
        return
    # About 13 characters of 9 points on an inch; a symbol and the space around it take eight.
    room = figure.get_size_inches()[0] * 13
    lengths = [len(label) + 8 for label in entries]
    columns = len(entries) if sum(lengths) <= room else max(1, int(room // max(lengths)))
    # Further lines of the legend must not take their room from the panels.
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * (math.ceil(len(entries) / columns) - 1))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=2.6,
        columnspacing=1.6,
    )


def step_axis(axes: Axes, *, label: bool = True) -> None:
    """The horizontal axis of training steps: whole numbers, thousands as k."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def text(value: float, _: object) -> str:
        return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(text))
    # panels above each other share the axis, and each keeps its numbers
    axes.tick_params(labelbottom=True)
    if label:
        axes.set_xlabel("step", fontsize=9, color=INK)


def columns_for(panels: int) -> int:
    """How many panels side by side, for a shape near a page's.

    >>> [columns_for(panels) for panels in (1, 2, 3, 4, 6, 30)]
    [1, 2, 3, 2, 3, 4]
    """
    return panels if panels <= 3 else min(4, math.ceil(math.sqrt(panels)))


def looks_for(rows: Iterable[Row]) -> dict[str, Style]:
    """The looks of the variants of approximations that have a cosine somewhere in ``rows``."""
    return styles(row.variant for row in rows if not math.isnan(row.cosine))
