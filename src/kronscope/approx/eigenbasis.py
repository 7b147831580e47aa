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

    .. math:: K = Q \operatorname{diag}(\Lambda) Q^\top, \quad Q = Q_L \otimes Q_R, \quad
              \Lambda_{ij} = \sum w\, (Q_L^\top G Q_R)_{ij}^2 ,

    the best fit of all operators that are diagonal in that basis.
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
    r"""CASPR: the Kronecker sum of the two one-sided roots, combined.

    .. math:: \kappa_{ij} = \Big(\tfrac12 \big(\lambda_i^{-1/4} + \mu_j^{-1/4}\big)\Big)^{-4}

    in Shampoo's eigenbasis, with the eigenvalues of L and R; zero where either is zero.
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
