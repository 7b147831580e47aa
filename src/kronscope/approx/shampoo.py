"""Shampoo as published: an upper bound of H up to the rank of the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kronscope.approx.registry import register
from kronscope.curvature import SecondMoment
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct

__all__ = ["Shampoo"]


@register
@dataclass(frozen=True)
class Shampoo:
    r"""The original Shampoo, :math:`K = L^{1/2} \otimes R^{1/2}`.

    With :math:`L = \sum w\, G G^\top` and :math:`R = \sum w\, G^\top G`. If no gradient has a rank above r, then
    :math:`H \preceq r\,K` (Lemmas 2 and 3 of the paper). ``exponent`` generalises it to :math:`L^p \otimes R^p`.

    Attributes:
        exponent: The power p of each factor; ½ is Shampoo.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("shampoo").fit(stream)), 3)
    0.902
    """

    name: ClassVar[str] = "shampoo"
    title: ClassVar[str] = "Shampoo"
    kronecker: ClassVar[bool] = True
    in_shampoo_basis: ClassVar[bool] = True

    exponent: float = 0.5

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        left, right = SecondMoment(stream).factors()
        return KroneckerProduct(left, right).power(self.exponent)
