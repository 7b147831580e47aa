"""The paper's Figure 3: real labels in place of exact ones, one sample at a time and in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kronscope.errors import OptionError
from kronscope.figures.comparison import check_columns, comparison, rows_for
from kronscope.measures.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure3"]


def figure3(
    columns: Mapping[str, Results],
    batch_sizes: Sequence[int] = (1, 256),
    approximations: Sequence[str] = ("optimal", "shampoo2", "shampoo"),
) -> Figure:
    """Draw cosines with the Gauss–Newton matrix when the approximations are fitted on real labels.

    Args:
        columns: The title of each column, and the results of one layer to show in it.
        batch_sizes: The batch sizes; each gets a row of panels.
        approximations: Which lines to draw.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    Raises:
        OptionError: there is no column, one has several layers, or nothing was fitted on real labels.

    >>> from kronscope.measures import Results, Row
    >>> row = Row("fc.weight", 10, 64, 0, "gauss_newton", "real", 1, "shampoo2", 0.9)
    >>> len(figure3({"Digits": Results([row])}, batch_sizes=[1]).axes)
    1
    """
    check_columns(columns)
    lines = {
        f"Batch size {size}": [
            rows_for(results, "gauss_newton", labels=("real",), batch_size=size) for results in columns.values()
        ]
        for size in batch_sizes
    }
    if not any(any(panels) for panels in lines.values()):
        raise OptionError(
            "Figure 3 needs cosines with the Gauss–Newton matrix fitted on real labels, but there are none; measure "
            f"with labels='real' and batch_size in {tuple(batch_sizes)}."
        )
    return comparison(lines, list(columns), approximations)
