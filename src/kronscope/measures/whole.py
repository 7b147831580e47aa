r"""The answer for all layers together: how much of the matrix lies in each, between them, and within an approximation.

With :math:`H_{ab}` the block of the whole matrix H between layers a and b, :math:`h_a = \|H_{aa}\|_F` and :math:`c_a`
the cosine of layer a's approximation, the block-diagonal approximation of the model whose blocks have their best scales
has the cosine

.. math:: \frac{\sqrt{\sum_a c_a^2 h_a^2}}{\|H\|_F} \text{ with } H, \qquad
          \sqrt{\frac{\sum_a c_a^2 h_a^2}{\sum_a h_a^2}} \text{ with the block diagonal of } H .
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kronscope.errors import LayerError
from kronscope.gradients import LayerSpec
from kronscope.measures.rows import Detail, Row

__all__ = ["ALL_LAYERS", "WHOLE_MODEL", "WholeModel", "check_disjoint"]

# The kind of a detail that describes the whole model, and what it has in the place of a layer.
WHOLE_MODEL = "whole_model"
ALL_LAYERS = "all layers"


@dataclass(frozen=True)
class WholeModel:
    r"""What the layers measured are to the matrix H of all of them together.

    Parameters that were not measured, such as biases, are not in H.

    Attributes:
        layers: The layers.
        squares: :math:`\|H_{ab}\|_F^2` for each pair of layers, in their order.
        cosines: For each approximation the cosine of its block-diagonal operator with H, and with the block diagonal of
            H; each block at its best scale. NaN where a layer has no cosine.

    >>> model = WholeModel(("a", "b"), ((3.0, 0.5), (0.5, 1.0)), {})
    >>> model.shares, model.cross_share
    ({'a': 0.6, 'b': 0.2}, 0.2)
    """

    layers: tuple[str, ...]
    squares: tuple[tuple[float, ...], ...]
    cosines: Mapping[str, tuple[float, float]]

    @property
    def norm(self) -> float:
        r""":math:`\|H\|_F`."""
        return math.sqrt(self._square)

    @property
    def _square(self) -> float:
        return math.fsum(itertools.chain.from_iterable(self.squares))

    @property
    def shares(self) -> dict[str, float]:
        r"""The share :math:`\|H_{aa}\|_F^2 / \|H\|_F^2` of each layer."""
        whole = self._square
        own = {layer: self.squares[place][place] for place, layer in enumerate(self.layers)}
        return {layer: square / whole if whole > 0 else math.nan for layer, square in own.items()}

    @property
    def cross_share(self) -> float:
        r"""The share of :math:`\|H\|_F^2` that lies between layers, which no block-diagonal approximation sees."""
        whole = self._square
        between = math.fsum(square for a, line in enumerate(self.squares) for b, square in enumerate(line) if a != b)
        return between / whole if whole > 0 else math.nan

    def nearest(self, layer: str) -> str:
        r"""The other layer with which a layer has the largest block; empty if it is alone.

        Raises:
            LayerError: there is no such layer.
        """
        if layer not in self.layers:
            raise LayerError(f"{layer!r} is not among the layers measured: {', '.join(self.layers[:8])}.")
        place = self.layers.index(layer)
        others = [(square, other) for other, square in zip(self.layers, self.squares[place], strict=True)]
        others.pop(place)
        return max(others)[1] if others else ""

    @classmethod
    def of(cls, detail: Detail, rows: Sequence[Row]) -> WholeModel:
        """Put a detail and the rows of the same step and condition together."""
        layers = tuple(str(detail.values["layers"]).split("\n"))
        flat, count = detail.series("squares"), len(layers)
        squares = tuple(tuple(flat[at : at + count]) for at in range(0, count * count, count))
        own = {layer: squares[place][place] for place, layer in enumerate(layers)}
        whole = math.fsum(flat)
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            if (row.step, row.condition) == (detail.step, detail.condition):
                found.setdefault(row.variant, {})[row.layer] = row.cosine
        cosines = {name: _cosines(own, whole, by_layer) for name, by_layer in found.items()}
        return cls(layers, squares, cosines)

    def detail_values(self) -> dict[str, list[float] | str]:
        """What a detail keeps of it."""
        return {"layers": "\n".join(self.layers), "squares": list(itertools.chain.from_iterable(self.squares))}


def _cosines(own: Mapping[str, float], whole: float, cosines: Mapping[str, float]) -> tuple[float, float]:
    # a layer whose block is zero has no cosine, and needs none
    needed = {layer: square for layer, square in own.items() if square > 0}
    if not needed or any(math.isnan(cosines.get(layer, math.nan)) for layer in needed):
        return math.nan, math.nan
    reached = math.fsum(cosines[layer] ** 2 * square for layer, square in needed.items())
    return math.sqrt(reached / whole), math.sqrt(reached / math.fsum(needed.values()))


def check_disjoint(specs: Sequence[LayerSpec]) -> None:
    """Refuse layers that share entries: the whole would count them twice.

    Raises:
        LayerError: two of them do.
    """
    for one, two in itertools.combinations(specs, 2):
        if any(a.overlaps(b) for a, b in itertools.product(one.segments, two.segments)):
            raise LayerError(
                f"whole_model needs layers without common entries, but {one.name!r} and {two.name!r} have some; leave "
                "one of them out."
            )
