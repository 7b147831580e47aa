r"""Which form of the atoms is cheapest: factored as captured, or with every gradient formed once.

The counts are multiply-adds for the usual work on a layer: the Gram matrix of its atoms (half of it, by symmetry) and
about four contractions with a factor.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FormPlan", "plan_form"]

_CONTRACTIONS = 4


@dataclass(frozen=True)
class FormPlan:
    """The choice for one layer, and what it was based on.

    Attributes:
        form: ``"factored"`` or ``"dense"``.
        factored_cost: Multiply-adds when the factors are used as they are.
        dense_cost: Multiply-adds when each gradient is formed first.
    """

    form: str
    factored_cost: float
    dense_cost: float

    def __str__(self) -> str:
        """Say the choice and both costs."""
        return f"{self.form} (factored {self.factored_cost:.2g}, dense {self.dense_cost:.2g} multiply-adds)"


def plan_form(shape: tuple[int, int], positions: int, columns: int, num_samples: int) -> FormPlan:
    """Compare both forms.

    Args:
        shape: The layer's (m, n).
        positions: Positions t that share the weight.
        columns: Columns c of each sample.
        num_samples: Samples N.

    >>> plan_form((512, 784), positions=1, columns=9, num_samples=1024).form
    'factored'
    >>> plan_form((64, 576), positions=256, columns=9, num_samples=256).form
    'dense'
    """
    m, n = shape
    t, c, samples = positions, columns, num_samples
    pairs = samples * samples / 2
    dense = pairs * c * c * m * n + _CONTRACTIONS * samples * c * m * n * (m + n) + samples * c * t * m * n
    gram = t * t * (c * c * m + n) if t > 1 else c * c * m + n
    contraction = t * (n * n + c * m * m) + (t * t * (n + c * m) if t > 1 else 0)
    factored = pairs * gram + _CONTRACTIONS * samples * contraction
    return FormPlan("factored" if factored <= dense else "dense", float(factored), float(dense))
