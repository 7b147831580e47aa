r"""How the cosine with a Kronecker product moves when one column of the gradients moves, without fitting again.

With :math:`c = h / (\sqrt q\, \|A\| \|B\|)`, :math:`h = \langle H, A \otimes B\rangle`, :math:`q = \|H\|_F^2`, a column
:math:`g = \operatorname{vec} G` of weight w contributes to the first order

.. math:: c\,w \Big[ \frac{\langle G, A G B\rangle}{h} - \frac{g^\top H g}{q}
          + \langle \nabla_A, \mathrm d A\rangle + \langle \nabla_B, \mathrm d B\rangle \Big], \qquad
          \nabla_A = \frac{M_A}{h} - \frac{A}{\|A\|^2}, \quad M_A = \sum w\, G B G^\top ,

and likewise for B. The last two terms are what this module is about; they vanish for the optimal product (the envelope
theorem) and for fits on other gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kronscope.approx import (
    Approximation,
    IdentityFit,
    KfacExpand,
    KfacReduce,
    OneSided,
    Optimal,
    Shampoo,
    Shampoo2,
    TensorNormal,
)
from kronscope.curvature import SecondMoment
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import PsdFactor

__all__ = ["factor_terms", "knows_influence"]


def knows_influence(approximation: Approximation, stream: GradientStream) -> bool:
    """Whether the terms of an approximation's factors are known, so that it need not be fitted again."""
    if isinstance(approximation, (KfacReduce, KfacExpand)):
        return all(isinstance(atoms, FactoredAtoms) and not atoms.row_inputs for atoms in stream)
    return _powers(approximation, stream.shape) is not None or isinstance(approximation, (Optimal, IdentityFit))


def factor_terms(
    approximation: Approximation,
    moment: SecondMoment,
    left_slope: Callable[[], Tensor],
    right_slope: Callable[[], Tensor],
) -> Tensor:
    """Return what each column does through the factors (N, c), in the order of samples and columns.

    Args:
        approximation: What was fitted.
        moment: The matrix it was fitted on.
        left_slope: Gives the slope of the cosine's logarithm in the left factor (m, m).
        right_slope: The same in the right factor (n, n).
    """
    stream = moment.stream
    if isinstance(approximation, (KfacReduce, KfacExpand)):
        return _kfac_terms(stream, left_slope(), right_slope(), reduce=isinstance(approximation, KfacReduce))
    terms = torch.zeros(stream.num_samples, stream.columns, dtype=torch.float64)
    powers = _powers(approximation, stream.shape)
    if powers is None:
        return terms
    factors = moment.factors()
    if powers[0]:
        terms += moment.column_forms(_through_power(factors[0], left_slope(), powers[0]), None)
    if powers[1]:
        terms += moment.column_forms(None, _through_power(factors[1], right_slope(), powers[1]))
    return terms


def _powers(approximation: Approximation, shape: tuple[int, int]) -> tuple[float, float] | None:
    """The powers p and q where the fit is proportional to L^p ⊗ R^q."""
    if isinstance(approximation, (Shampoo2, TensorNormal)):
        return 1.0, 1.0
    if isinstance(approximation, Shampoo):
        return approximation.exponent, approximation.exponent
    if isinstance(approximation, OneSided):
        return (1.0, 0.0) if shape[0] <= shape[1] else (0.0, 1.0)
    return None


def _through_power(factor: PsdFactor, gradient: Tensor, power: float) -> Tensor:
    r"""Pull a gradient with respect to :math:`F^p` back to F: divided differences in the eigenbasis."""
    if power == 1.0:
        return gradient
    # for an error bar float32 is enough, and its products take half the time
    values, vectors = factor.spectrum.values.double(), factor.spectrum.vectors.float()
    # directions without gradients take no part; a floor keeps their divided differences finite
    values = values.clamp_min(float(values.max()) * 1e-7)
    raised = values**power
    gaps = values[:, None] - values
    equal = gaps.abs() <= 1e-8 * values[:, None]
    slopes = torch.where(
        equal,
        power * values[:, None] ** (power - 1),
        (raised[:, None] - raised) / torch.where(equal, 1.0, gaps),
    )
    size = float(gradient.abs().max()) or 1.0
    inner = slopes * (vectors.T @ (gradient / size).float() @ vectors)
    return size * (vectors @ inner.float() @ vectors.T).double()


def _kfac_terms(stream: GradientStream, grad_left: Tensor, grad_right: Tensor, *, reduce: bool) -> Tensor:
    """The side that is an input has no columns, and does not move with them."""

    def forms(factors: Tensor, gradient: Tensor) -> Tensor:
        wide = factors.double().sum(2, keepdim=True) if reduce else factors.double()
        return ((wide @ gradient) * wide).sum((2, 3))

    def local() -> list[tuple[Tensor, Tensor]]:
        found = []
        for atoms in stream:
            assert isinstance(atoms, FactoredAtoms)
            total = torch.zeros(len(atoms.weights), atoms.columns, dtype=torch.float64, device=atoms.weights.device)
            for factors, gradient in ((atoms.row_factors, grad_left), (atoms.col_factors, grad_right)):
                if factors.shape[1] > 1:
                    total += forms(factors, gradient.to(total))
            found.append((atoms.samples, total))
        return found

    return stream.by_column(local)
