"""How long a measurement will take, before it is made: from one forward pass, and then from measurements before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kronscope.measures.rows import Row

__all__ = ["Costs"]

# A first measurement of a small layer takes about as long as so many forward passes, twice as many as there are columns
# of all samples, and so many seconds whatever the model. Measured with one sample and 9 to 16 columns: 7 to 21 passes
# for heads of convolutional networks and transformers of widths 128 to 512, 27 to 43 for their other layers; counted
# are 28 to 42.
_PASSES, _PLAIN = 10, 0.03


@dataclass(frozen=True)
class _Taken:
    """What something took: seconds, for ``work`` columns of all samples together."""

    work: int
    seconds: float

    def scaled(self, work: int) -> float:
        """For another number of columns; fewer are not counted as cheaper."""
        return self.seconds * max(1.0, work / self.work)


@dataclass
class Costs:
    r"""Predicts the seconds of a measurement.

    A call takes what passes through the model take, which all its layers share, and then for each layer :math:`(m, n)`
    what its products take, about in proportion to :math:`mn(m + n)` where the layer is large; both at most in
    proportion to the columns of all samples together (``work``). A layer that was not measured yet is predicted from
    those that were: from the one that gives least, since a small layer's time is mostly overhead.

    Args:
        shapes: The (m, n) of each layer.

    >>> costs = Costs({"a": (4, 4), "b": (8, 8)}, forward=0.01)
    >>> round(costs.predict(["a"], work=20), 2)
    0.53
    """

    shapes: Mapping[str, tuple[int, int]]
    forward: float | None = None
    _shared: _Taken | None = field(default=None, init=False)
    _layers: dict[str, _Taken] = field(default_factory=dict, init=False)

    def operations(self, name: str) -> int:
        """In proportion to what a layer's products take."""
        m, n = self.shapes[name]
        return m * n * (m + n)

    def learn(self, names: Sequence[str], work: int, seconds: float, rows: Sequence[Row]) -> None:
        """Take in what a measurement took.

        Args:
            names: Its layers.
            work: Columns of all samples together.
            seconds: In all.
            rows: What it found, with the seconds of each.
        """
        own = dict.fromkeys(names, 0.0)
        for row in rows:
            own[row.layer] = own.get(row.layer, 0.0) + row.seconds
        self._shared = _Taken(work, max(seconds - sum(own.values()), 1e-9))
        self._layers |= {name: _Taken(work, taken) for name, taken in own.items()}

    def predict(self, names: Sequence[str], work: int) -> float:
        """Return the seconds that measuring some layers in one call will take."""
        if self._shared is None:
            return _PLAIN + (_PASSES + 2 * work) * (self.forward or 0.0)
        # part of the passes are made whatever the samples: half as many as a first measurement is counted with
        fixed = min(self._shared.seconds, (_PLAIN + _PASSES * (self.forward or 0.0)) / 2)
        passes = _Taken(self._shared.work, self._shared.seconds - fixed)
        return fixed + passes.scaled(work) + sum(self._products(name, work) for name in names)

    def _products(self, name: str, work: int) -> float:
        if name in self._layers:
            return self._layers[name].scaled(work)
        size = self.operations(name)
        return min(
            taken.scaled(work) * max(1.0, size / self.operations(other)) for other, taken in self._layers.items()
        )
