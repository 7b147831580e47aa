"""The paper's Figure 1: Shampoo² follows the optimal Kronecker product, Shampoo does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kronscope.figures.comparison import check_columns, comparison, rows_for
from kronscope.measures.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure1"]


def figure1(
    columns: Mapping[str, Results], approximations: Sequence[str] = ("optimal", "shampoo2", "shampoo")
) -> Figure:
    """Draw cosines with the Gauss–Newton matrix (top) and with Adagrad's (bottom) against the step.

    Args:
        columns: The title of each column, and the results of one layer to show in it. The Gauss–Newton row shows what
            was fitted on exact labels, or else on sampled or real ones.
        approximations: Which lines to draw.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    Raises:
        OptionError: there is no column, or one has several layers.

    >>> from kronscope.measures import Detail, Results, Row
    >>> rows = [Row("fc.weight", 10, 64, step, "gauss_newton", "exact", 1, "shampoo2", 0.9) for step in (0, 10)]
    >>> len(figure1({"Digits": Results(rows)}).axes)
    1
    """
    check_columns(columns)
    lines = {
        "Gauss–Newton": [rows_for(results, "gauss_newton") for results in columns.values()],
        "Adagrad": [rows_for(results, "adagrad") for results in columns.values()],
    }
    return comparison(lines, list(columns), approximations)
