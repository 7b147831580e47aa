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
        columns: For each column its title and the results of one layer.
        batch_sizes: One row of panels for each.
        approximations: Which lines to draw.

    Raises:
        OptionError: There is no column, one holds several layers, or nothing was fitted on real labels.
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
