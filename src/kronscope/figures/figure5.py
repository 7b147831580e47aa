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
        layers: For each column its title and the layer's name; every layer under its own name if left out.
        approximations: Which lines to draw.

    Raises:
        OptionError: A layer is not in the results.
    """
    chosen = layers or {name: name for name in results.layers}
    return figure1({title: results.select(layer=name) for title, name in chosen.items()}, approximations)
