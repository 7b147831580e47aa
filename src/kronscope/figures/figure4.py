"""The paper's Figure 4: the Gauss–Newton row of Figure 1 with K-FAC beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kronscope.figures.comparison import check_columns, comparison, rows_for
from kronscope.measures.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure4"]


def figure4(
    columns: Mapping[str, Results],
    approximations: Sequence[str] = ("optimal", "shampoo2", "shampoo", "kfac-reduce"),
) -> Figure:
    """Draw cosines with the Gauss–Newton matrix against the step, K-FAC included.

    Args:
        columns: For each column its title and the results of one layer.
        approximations: Which lines to draw.

    Raises:
        OptionError: There is no column, or one holds several layers.
    """
    check_columns(columns)
    lines = {"Gauss–Newton": [rows_for(results, "gauss_newton") for results in columns.values()]}
    return comparison(lines, list(columns), approximations)
