"""Results as pictures. Nothing is computed here: every number drawn is one that the results hold.

Each function returns a matplotlib figure of its own, without touching global settings; :func:`save` writes it.
"""

from __future__ import annotations

from kronscope.figures.batch_sizes import batch_sizes
from kronscope.figures.canvas import require_matplotlib, save
from kronscope.figures.cosines import cosines
from kronscope.figures.exponents import exponents
from kronscope.figures.figure1 import figure1
from kronscope.figures.figure2 import figure2
from kronscope.figures.figure3 import figure3
from kronscope.figures.figure4 import figure4
from kronscope.figures.figure5 import figure5

__all__ = [
    "batch_sizes",
    "cosines",
    "exponents",
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "require_matplotlib",
    "save",
]
