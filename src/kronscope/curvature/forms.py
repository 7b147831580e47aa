r"""Which form of the atoms is cheapest: factored as captured, or with every gradient formed once.

The two kinds of work are priced apart, in multiply-adds: the Gram matrix of the atoms (half of it, by symmetry), and
contractions with a factor, of which a layer usually needs about four.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONTRACTIONS", "FormPlan", "plan_form"]

CONTRACTIONS = 4
# Products over positions are many and small; measured, they run at about a third of the speed of one large product.
_SMALL_PRODUCTS = 3


@dataclass(frozen=True)
class FormPlan:
    r"""In which form the gradients of one layer are contracted, and the costs that decided it.

    Gradients of a linear layer come as factors (output gradients and inputs). They can be used in this *factored* form,
    or every gradient can be formed once, as a *dense* matrix.

    Attributes:
        gram: ``"factored"`` or ``"dense"``: how inner products between samples are taken.
        contraction: ``"factored"`` or ``"dense"``: how contractions with a factor are done.
        costs: Multiply-adds of (gram factored, gram dense, contractions factored, contractions dense).

    >>> print(str(plan_form((4, 5), positions=1, columns=2, num_samples=10)).replace("), ", ")\n"))
    Gram factored (factored 1e+03, dense 4.4e+03)
    contractions factored (factored 2.3e+03, dense 1.4e+04 multiply-adds)
    """

    gram: str
    contraction: str
    costs: tuple[float, float, float, float]

    def __str__(self) -> str:
        """Say the choice and the costs."""
        texts = [f"{cost:.2g}" for cost in self.costs]
        return (
            f"Gram {self.gram} (factored {texts[0]}, dense {texts[1]}), "
            f"contractions {self.contraction} (factored {texts[2]}, dense {texts[3]} multiply-adds)"
        )


def plan_form(shape: tuple[int, int], positions: int, columns: int, num_samples: int) -> FormPlan:
    """Compare the cost of working with factored gradients and with dense ones, and choose.

    Args:
        shape: The layer's (m, n).
        positions: Positions t that share the weight.
        columns: Columns c of each sample.
        num_samples: Samples N.

    Returns:
        The choice, and the costs of both forms.

    >>> plan = plan_form((512, 784), positions=1, columns=9, num_samples=1024)
    >>> plan.gram, plan.contraction
    ('factored', 'factored')
    >>> plan = plan_form((512, 512), positions=65, columns=9, num_samples=128)
    >>> plan.gram, plan.contraction
    ('dense', 'factored')
    """
    m, n = shape
    t, c, samples = positions, columns, num_samples
    pairs = samples * samples / 2
    forming = samples * c * t * m * n
    gram_factored = pairs * (t * t * (c * c * m + n) if t > 1 else c * c * m + n)
    gram_dense = pairs * c * c * m * n + forming
    contraction = t * (n * n + c * m * m) + (t * t * (n + c * m) if t > 1 else 0)
    contraction_factored = float(CONTRACTIONS * samples * contraction)
    contraction_dense = float(CONTRACTIONS * samples * c * m * n * (m + n))
    gram = "factored" if gram_factored <= gram_dense else "dense"
    slowdown = _SMALL_PRODUCTS if t > 1 else 1
    # what the Gram matrix had formed already costs the contractions nothing
    extra = 0 if gram == "dense" else forming
    return FormPlan(
        gram,
        "factored" if slowdown * contraction_factored <= contraction_dense + extra else "dense",
        (float(gram_factored), float(gram_dense), contraction_factored, contraction_dense),
    )
