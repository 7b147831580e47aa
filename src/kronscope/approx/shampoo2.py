"""Shampoo²: one round of power iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kronscope.approx.registry import register
from kronscope.curvature import SecondMoment
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct

__all__ = ["Shampoo2", "TensorNormal"]


def shampoo_squared(stream: GradientStream) -> KroneckerProduct:
    """Return L⊗R/tr L; the zero operator when every gradient is zero."""
    left, right = SecondMoment(stream).factors()
    trace = left.trace()
    return KroneckerProduct(left, right, 1.0 / trace if trace > 0 else 0.0)


@register
@dataclass(frozen=True)
class Shampoo2:
    r"""Shampoo's approximation squared, on the scale of H (Proposition 1 and Corollary 2 of the paper).

    .. math:: K = \frac{L \otimes R}{\operatorname{tr} L}, \qquad L = \sum w\, G G^\top, \quad R = \sum w\, G^\top G .

    It is one round of power iteration, from the identity, towards the optimal Kronecker product; where H is a Kronecker
    product, it is H itself.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("shampoo2").fit(stream)), 3)
    0.909
    """

    name: ClassVar[str] = "shampoo2"
    title: ClassVar[str] = "Shampoo²"
    kronecker: ClassVar[bool] = True
    in_shampoo_basis: ClassVar[bool] = True

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        return shampoo_squared(stream)


@register
@dataclass(frozen=True)
class TensorNormal:
    r"""TNT: the second moment of a tensor-normal gradient, :math:`L \otimes R / \operatorname{tr} L`.

    It assumes more about the gradients than Shampoo² does, and arrives at the same matrix.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("tnt").fit(stream)), 3)
    0.909
    """

    name: ClassVar[str] = "tnt"
    title: ClassVar[str] = "TNT"
    kronecker: ClassVar[bool] = True
    in_shampoo_basis: ClassVar[bool] = True

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        return shampoo_squared(stream)
