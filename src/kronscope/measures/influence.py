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

from typing import Protocol

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
from kronscope.approx.kfac import summed_positions
from kronscope.curvature import SecondMoment
from kronscope.curvature.chunks import bounded_factors
from kronscope.curvature.middles import Matrix, Spanned
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import PsdFactor

__all__ = ["Slope", "factor_terms", "knows_influence", "reduced_factors"]


class Slope(Protocol):
    """The slope of the cosine's logarithm in one factor of a fit."""

    def __call__(self, vectors: Tensor | None = None) -> Tensor:
        """The slope (d, d), or what it is between vectors (d, r): (r, r)."""
        ...


def knows_influence(approximation: Approximation, stream: GradientStream) -> bool:
    """Whether the terms of an approximation's factors are known, so that it need not be fitted again."""
    if isinstance(approximation, (KfacReduce, KfacExpand)):
        return all(isinstance(atoms, FactoredAtoms) and not atoms.row_inputs for atoms in stream)
    return _powers(approximation, stream.shape) is not None or isinstance(approximation, (Optimal, IdentityFit))


def factor_terms(
    approximation: Approximation,
    moment: SecondMoment,
    fitted: tuple[Matrix | None, Matrix | None],
    slopes: tuple[Slope, Slope],
) -> Tensor:
    """Return what each column does through the factors (N, c), in the order of samples and columns.

    Args:
        approximation: What was fitted.
        moment: The matrix it was fitted on.
        fitted: Its factors.
        slopes: The slopes in its left factor and its right one.
    """
    stream = moment.stream
    if isinstance(approximation, KfacReduce) and isinstance(fitted[0], Spanned) and isinstance(fitted[1], Spanned):
        return _reduced_terms(stream, (fitted[0], fitted[1]), slopes)
    if isinstance(approximation, (KfacReduce, KfacExpand)):
        return _kfac_terms(stream, slopes[0](), slopes[1](), reduce=isinstance(approximation, KfacReduce))
    terms = torch.zeros(stream.num_samples, stream.columns, dtype=torch.float64)
    powers = _powers(approximation, stream.shape)
    if powers is None:
        return terms
    factors = moment.factors()
    if powers[0]:
        terms += moment.column_forms(_through_power(factors[0], fitted[0], slopes[0], powers[0]), None)
    if powers[1]:
        terms += moment.column_forms(None, _through_power(factors[1], fitted[1], slopes[1], powers[1]))
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


def _through_power(factor: PsdFactor, fitted: Matrix | None, slope: Slope, power: float) -> Tensor:
    r"""Pull a slope with respect to :math:`F^p` back to F: divided differences in the eigenbasis."""
    if power == 1.0:
        return slope()
    assert isinstance(fitted, Spanned)
    values, vectors = factor.spectrum.values.double(), fitted.vectors
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
    inner = slopes * slope(vectors)
    # scaled, so that small numbers do not underflow in float32
    size = float(inner.abs().max()) or 1.0
    return size * (vectors @ (inner / size).to(vectors) @ vectors.T).double()


def reduced_factors(stream: GradientStream) -> tuple[Spanned, Spanned] | None:
    """The factors of K-FAC *reduce* up to their scales, by their few vectors; None where these are not here, or many.

    Args:
        stream: Gradients as factors.
    """
    if not stream.in_memory or stream.processes.world_size > 1:
        return None
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    weights: tuple[list[Tensor], list[Tensor]] = ([], [])
    for chunk in stream:
        assert isinstance(chunk, FactoredAtoms)
        for atoms in bounded_factors(chunk):
            for factors, vectors, values in zip((atoms.row_factors, atoms.col_factors), sides, weights, strict=True):
                summed = summed_positions(factors).squeeze(2)
                vectors.append(summed.flatten(0, 1).to(factors.dtype))
                values.append(atoms.weights.repeat_interleave(summed.shape[1]))
    found = [Spanned(torch.cat(v).T.contiguous(), torch.cat(w)) for v, w in zip(sides, weights, strict=True)]
    if any(2 * len(each.values) > size for each, size in zip(found, stream.shape, strict=True)):
        return None
    return found[0], found[1]


def _reduced_terms(stream: GradientStream, fitted: tuple[Spanned, Spanned], slopes: tuple[Slope, Slope]) -> Tensor:
    """What :func:`_kfac_terms` returns, from the slopes between the vectors that the factors consist of."""
    numbers = torch.cat([atoms.samples for atoms in stream])
    terms = torch.zeros(stream.num_samples, stream.columns, dtype=torch.float64)
    for factor, slope in zip(fitted, slopes, strict=True):
        columns = len(factor.values) // len(numbers)
        if columns > 1:
            terms[numbers.cpu()] += slope(factor.vectors).diagonal().view(-1, columns).double().cpu()
    return terms


def _kfac_terms(stream: GradientStream, grad_left: Tensor, grad_right: Tensor, *, reduce: bool) -> Tensor:
    """The side that is an input has no columns, and does not move with them."""

    def forms(factors: Tensor, gradient: Tensor) -> Tensor:
        wide = factors.double().sum(2, keepdim=True) if reduce else factors.double()
        return ((wide @ gradient) * wide).sum((2, 3))

    def local() -> list[tuple[Tensor, Tensor]]:
        found = []
        for chunk in stream:
            assert isinstance(chunk, FactoredAtoms)
            for atoms in bounded_factors(chunk):
                total = torch.zeros(len(atoms.weights), atoms.columns, dtype=torch.float64, device=atoms.weights.device)
                for factors, gradient in ((atoms.row_factors, grad_left), (atoms.col_factors, grad_right)):
                    if factors.shape[1] > 1:
                        total += forms(factors, gradient.to(total))
                found.append((atoms.samples, total))
        return found

    return stream.by_column(local)
