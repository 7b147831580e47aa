"""The Kronecker product that is closest in Kullback–Leibler divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kronscope.approx.registry import register
from kronscope.curvature import SecondMoment
from kronscope.errors import ConvergenceError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct, PsdFactor

__all__ = ["KlOptimal"]


# Rounds without a tenth of progress after which it is clear that there will be none.
_PATIENCE = 25


@register
@dataclass(frozen=True)
class KlOptimal:
    r"""The Kronecker product that KL-Shampoo estimates: the closest in Kullback–Leibler divergence.

    Of all Gaussians whose covariance is a Kronecker product, take the one that is closest to a Gaussian with covariance
    H. Its factors satisfy

    .. math:: L = \tfrac1n \sum w\, G R^{-1} G^\top, \qquad R = \tfrac1m \sum w\, G^\top L^{-1} G ,

    and are found by computing each from the other in turn, starting from Shampoo's R. Where L or R is singular, the
    inverses are pseudo-inverses, and n and m are replaced by the ranks.

    With too few gradients there is no solution, and :meth:`fit` raises. With barely enough there can be several; the
    result is then the one reached from Shampoo's R.

    Attributes:
        tolerance: Relative change of the normalised factors at which to stop.
        max_rounds: Rounds after which not having converged is an error.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("kl").fit(stream)), 3)
    0.908
    """

    name: ClassVar[str] = "kl"
    title: ClassVar[str] = "KL-optimal"
    kronecker: ClassVar[bool] = True

    tolerance: float = 1e-10
    max_rounds: int = 500

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment.

        Raises:
            ConvergenceError: there is no fixed point, or it was not reached.
        """
        moment = SecondMoment(stream)
        left, right = moment.factors()
        if left.trace() == 0:
            return KroneckerProduct(left, right, 0.0)
        if 1 in moment.shape:
            # H is a Kronecker product with a number, and its own closest one
            return KroneckerProduct(left, right, 1.0 / left.trace())
        ranks = left.spectrum.rank, right.spectrum.rank
        right = PsdFactor(right.matrix / right.norm())
        change = mark = float("inf")
        waited = 0
        for _ in range(self.max_rounds):
            new_left = PsdFactor(moment.left(right.power(-1).matrix) / ranks[1])
            self._check_rank(new_left, ranks[0])
            new_right = PsdFactor(moment.right(new_left.power(-1).matrix) / ranks[0])
            new_right = PsdFactor(new_right.matrix / new_right.norm())
            self._check_rank(new_right, ranks[1])
            change = max(
                float(torch.linalg.matrix_norm(new_right.matrix - right.matrix)),
                float(torch.linalg.matrix_norm(new_left.matrix - left.matrix)) / new_left.norm(),
            )
            left, right = new_left, new_right
            if change <= self.tolerance:
                return KroneckerProduct(left, right)
            if change < 0.9 * mark:
                mark, waited = change, 0
            elif (waited := waited + 1) > _PATIENCE:
                break
        raise ConvergenceError(
            f"the KL-optimal factors still change by {change:.1e} a round ({self.tolerance:.0e} asked for) and do not "
            "settle; with so few gradients they may not exist: use more samples, or raise max_rounds or tolerance."
        )

    def _check_rank(self, factor: PsdFactor, expected: int) -> None:
        if factor.spectrum.rank != expected:
            raise ConvergenceError(
                f"the KL-optimal factors degenerate (rank {factor.spectrum.rank} of {expected} left): there are too "
                "few gradients for them to exist; use more samples."
            )
