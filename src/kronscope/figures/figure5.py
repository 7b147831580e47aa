"""The paper's Figure 5: Figure 1 for several layers of one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kronscope.figures.figure1 import figure1
from kronscope.measures.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure5"]


def figure5(
    results: Results,
    layers: Mapping[str, str] | None = None,
    approximations: Sequence[str] = ("optimal", "shampoo2", "shampoo"),
) -> Figure:
    """Draw cosines with the Gauss–Newton matrix (top) and Adagrad's (bottom), one column per layer.

    Args:
        results: Several layers of one network.
        layers: The title of each column, and the layer to show in it; None shows every layer under its own name.
        approximations: Which lines to draw.

    Returns:
        A matplotlib figure; :func:`kronscope.figures.save` writes it to a file.

    Raises:
        OptionError: a layer is not in the results.

    >>> from kronscope.measures import Detail, Results, Row
    >>> rows = [Row("fc.weight", 10, 64, step, "gauss_newton", "exact", 1, "shampoo2", 0.9) for step in (0, 10)]
    >>> len(figure5(Results(rows)).axes)
    1
    """
    chosen = layers or {name: name for name in results.layers}
    return figure1({title: results.select(layer=name) for title, name in chosen.items()}, approximations)
