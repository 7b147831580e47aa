"""The cosine between a second-moment matrix and an operator."""

from __future__ import annotations

import math

from kronscope.curvature import SecondMoment
from kronscope.kron import Operator

__all__ = ["cosine", "relative_error"]


def cosine(H: SecondMoment | Operator, K: Operator) -> float:
    r"""Return :math:`\cos(H, K) = \langle H, K\rangle_F / (\|H\|_F \|K\|_F)`, computed exactly.

    Both are seen as long vectors: the cosine is 1 if K is H up to a positive scale, and 0 if they share nothing.

    Args:
        H: The matrix, usually a :class:`~kronscope.SecondMoment`; two operators can be compared as well.
        K: An operator of the same shape.

    Returns:
        The cosine; NaN when either side is zero.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(cosine(ks.SecondMoment(stream), ks.approx.get("identity").fit(stream)), 2)
    0.88
    """
    norms = H.norm() * K.norm()
    if not norms > 0:
        return math.nan
    # rounding alone can lead past one
    return max(-1.0, min(1.0, H.inner(K) / norms))


def relative_error(value: float) -> float:
    r"""Return :math:`\min_s \|H - sK\|_F / \|H\|_F = \sqrt{1 - \cos^2}`, what is left of H at the best scale of K.

    Args:
        value: The cosine.

    Returns:
        A number between 0 and 1; NaN for NaN.

    >>> relative_error(0.6)
    0.8
    """
    return math.sqrt(max(0.0, 1.0 - value * value)) if value == value else math.nan
