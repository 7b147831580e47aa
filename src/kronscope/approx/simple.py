"""The plain members of the family: one-sided Shampoo, the diagonal, and a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kronscope.approx.registry import register
from kronscope.curvature import SecondMoment
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Diagonal, Identity, KroneckerProduct

__all__ = ["DiagonalFit", "IdentityFit", "OneSided"]


@register
@dataclass(frozen=True)
class OneSided:
    r"""One-sided Shampoo, which keeps only the smaller of the two factors.

    .. math:: K = L \otimes I/n \;\text{ if } m \le n, \qquad K = I \otimes R/m \;\text{ otherwise.}

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("one-sided").fit(stream)), 3)
    0.893
    """

    name: ClassVar[str] = "one-sided"
    title: ClassVar[str] = "One-sided"
    kronecker: ClassVar[bool] = True

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        moment = SecondMoment(stream)
        m, n = moment.shape
        if m <= n:
            left = moment.left()
            return KroneckerProduct(left, torch.eye(n, dtype=left.dtype, device=left.device), 1.0 / n)
        right = moment.right()
        return KroneckerProduct(torch.eye(m, dtype=right.dtype, device=right.device), right, 1.0 / m)


@register
@dataclass(frozen=True)
class DiagonalFit:
    r"""The diagonal of H, :math:`\sum w\, G \circ G`, as Adagrad and Adam keep it.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("diagonal").fit(stream)), 3)
    0.912
    """

    name: ClassVar[str] = "diagonal"
    title: ClassVar[str] = "Diagonal"

    def fit(self, stream: GradientStream) -> Diagonal:
        """Fit the operator to the stream's second moment."""
        return Diagonal(SecondMoment(stream).table(None, None))


@register
@dataclass(frozen=True)
class IdentityFit:
    r"""The multiple of the identity closest to H, :math:`\operatorname{tr}(H)/(mn)\, I`.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("identity").fit(stream)), 3)
    0.883
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "Identity"
    kronecker: ClassVar[bool] = True

    def fit(self, stream: GradientStream) -> Identity:
        """Fit the operator to the stream's second moment."""
        moment = SecondMoment(stream)
        m, n = moment.shape
        return Identity((m, n), moment.trace() / (m * n))
