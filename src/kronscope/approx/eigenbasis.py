"""Approximations that are diagonal in Shampoo's eigenbasis but are not Kronecker products there: SOAP and CASPR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kronscope.approx.registry import register
from kronscope.curvature import SecondMoment
from kronscope.gradients.stream import GradientStream
from kronscope.kron import EigenbasisDiagonal

__all__ = ["Caspr", "Soap"]


@register
@dataclass(frozen=True)
class Soap:
    r"""SOAP: Adam's second moment in Shampoo's eigenbasis.

    With the eigenvectors :math:`Q_L, Q_R` of Shampoo's factors,

    .. math:: K = Q \operatorname{diag}(\Lambda) Q^\top, \quad Q = Q_L \otimes Q_R, \quad
              \Lambda_{ij} = \sum w\, (Q_L^\top G Q_R)_{ij}^2 .

    No other operator that is diagonal in this basis is closer to H.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("soap").fit(stream)), 3)
    0.913
    """

    name: ClassVar[str] = "soap"
    title: ClassVar[str] = "SOAP"
    in_shampoo_basis: ClassVar[bool] = True

    def fit(self, stream: GradientStream) -> EigenbasisDiagonal:
        """Fit the operator to the stream's second moment."""
        moment = SecondMoment(stream)
        left, right = (factor.spectrum.vectors for factor in moment.factors())
        return EigenbasisDiagonal(left, right, moment.table(left, right))


@register
@dataclass(frozen=True)
class Caspr:
    r"""CASPR: the two one-sided preconditioners averaged, then inverted.

    In Shampoo's eigenbasis, with the eigenvalues :math:`\lambda_i` of L and :math:`\mu_j` of R, K has the eigenvalues

    .. math:: \kappa_{ij} = \Big(\tfrac12 \big(\lambda_i^{-1/4} + \mu_j^{-1/4}\big)\Big)^{-4} ,

    which are zero where :math:`\lambda_i` or :math:`\mu_j` is zero.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("caspr").fit(stream)), 3)
    0.902
    """

    name: ClassVar[str] = "caspr"
    title: ClassVar[str] = "CASPR"
    in_shampoo_basis: ClassVar[bool] = True

    def fit(self, stream: GradientStream) -> EigenbasisDiagonal:
        """Fit the operator to the stream's second moment."""
        left, right = (factor.spectrum for factor in SecondMoment(stream).factors())
        both = (left.values > 0)[:, None] & (right.values > 0)
        mixed = (left.powered(-0.25)[:, None] + right.powered(-0.25)) / 2
        values = torch.where(both, torch.where(both, mixed, torch.ones_like(mixed)) ** -4, torch.zeros_like(mixed))
        return EigenbasisDiagonal(left.vectors, right.vectors, values)
