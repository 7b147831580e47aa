"""The optimal Kronecker product, certified, and as the paper computed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kronscope.approx.registry import register
from kronscope.approx.svd import singular_triples
from kronscope.curvature import SecondMoment
from kronscope.errors import OptionError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct, KroneckerSum

__all__ = ["KroneckerSumFit", "Optimal", "OptimalFit", "PaperOptimal"]


@dataclass(frozen=True)
class OptimalFit:
    r"""The optimal Kronecker product with the proof that it is one: a singular triple and its residual.

    :math:`\hat H` is H rearranged so that Kronecker products become matrices of rank one.

    Attributes:
        operator: :math:`\sigma_1 U_1 \otimes V_1`.
        sigma: The largest singular value of :math:`\hat H`.
        residual: :math:`\|\hat H^\top \operatorname{vec} U_1 - \sigma_1 \operatorname{vec} V_1\| / \sigma_1`, where
            :math:`\hat H \operatorname{vec} V_1 = \sigma_1 \operatorname{vec} U_1` holds by construction.
        rounds: Rounds of power iteration spent.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> found = ks.approx.Optimal().solve(stream)
    >>> found.residual < 1e-10, abs(found.sigma - found.operator.norm()) < 1e-12
    (True, True)
    """

    operator: KroneckerProduct
    sigma: float
    residual: float
    rounds: int


@register
@dataclass(frozen=True)
class Optimal:
    r"""The Kronecker product closest to H, which no other product can beat.

    It is the first singular triple of :math:`\hat H`, the matrix H rearranged so that Kronecker products have rank one:

    .. math:: \min_{L, R} \| H - L \otimes R \|_F \;\Rightarrow\; K = \sigma_1\, U_1 \otimes V_1, \qquad
              \cos(H, K) = \sigma_1 / \|H\|_F .

    Both factors are positive semi-definite. The iteration ends when the residual of the triple is below ``tolerance``,
    so the answer is certified, whatever the number of rounds it took.

    Attributes:
        tolerance: Residual at which to stop.
        max_rounds: Rounds after which not having converged is an error.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("optimal").fit(stream)), 3)
    0.909
    """

    name: ClassVar[str] = "optimal"
    title: ClassVar[str] = "Optimal Kronecker"
    kronecker: ClassVar[bool] = True
    fits_truth: ClassVar[bool] = True

    tolerance: float = 1e-10
    max_rounds: int = 1000

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment.

        Raises:
            ConvergenceError: the residual did not reach the tolerance.
        """
        return self.solve(stream).operator

    def solve(self, stream: GradientStream, start: torch.Tensor | None = None) -> OptimalFit:
        """Fit, and return the certificate with the operator.

        The answer is computed once for each stream; later calls return it, whatever their ``start``.

        Args:
            stream: The gradients.
            start: A right factor to start from, such as that of a matrix that is close.

        Returns:
            The operator, its singular value, the residual and the number of rounds.

        Raises:
            ConvergenceError: the residual did not reach the tolerance.
        """
        key = ("optimal", self)
        if key not in stream.memo:
            triple = singular_triples(
                SecondMoment(stream),
                1,
                tolerance=self.tolerance,
                max_rounds=self.max_rounds,
                symmetric_only=True,
                start=start,
            )
            sigma = float(triple.sigma[0])
            product = KroneckerProduct(triple.left[0], triple.right[0], sigma)
            stream.memo[key] = OptimalFit(product, sigma, triple.residual, triple.rounds)
        fitted: OptimalFit = stream.memo[key]
        return fitted


@register
@dataclass(frozen=True)
class PaperOptimal:
    r"""The paper's recipe for the optimal product: a fixed number of rounds of power iteration from the identity.

    Both sides are computed from the other's previous value:

    .. math:: L_k \leftarrow \sum w\, G R_{k-1} G^\top, \qquad R_k \leftarrow \sum w\, G^\top L_{k-1} G .

    One round gives Shampoo² (Proposition 1). The paper takes five, without checking that they are enough;
    :class:`Optimal` does check.

    Attributes:
        rounds: Number of rounds.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("optimal-paper").fit(stream)), 3)
    0.909
    """

    name: ClassVar[str] = "optimal-paper"
    title: ClassVar[str] = "Power iteration (paper)"
    kronecker: ClassVar[bool] = True
    fits_truth: ClassVar[bool] = True

    rounds: int = 5

    def __post_init__(self) -> None:
        """Check the number of rounds."""
        if self.rounds < 1:
            raise OptionError(f"power iteration needs at least one round, got {self.rounds}.")

    def fit(self, stream: GradientStream) -> KroneckerProduct:
        """Fit the operator to the stream's second moment."""
        moment = SecondMoment(stream)
        left, right = moment.left(), moment.right()
        for _ in range(self.rounds - 1):
            unit_left, unit_right = _unit(left), _unit(right)
            left, right = moment.left(unit_right), moment.right(unit_left)
        left, right = _unit(left), _unit(right)
        # the best scale of this direction
        return KroneckerProduct(left, right, moment.inner(KroneckerProduct(left, right)))


@register
@dataclass(frozen=True)
class KroneckerSumFit:
    r"""The sum of ``rank`` Kronecker products closest to H.

    .. math:: K = \sum_{i \le k} \sigma_i\, U_i \otimes V_i, \qquad
              \cos(H, K) = \sqrt{\textstyle\sum_{i \le k} \sigma_i^2} \,/\, \|H\|_F .

    The first pair of factors is positive semi-definite. The others are not, and may even be antisymmetric.

    Attributes:
        rank: Number of products.
        tolerance: Residual at which to stop.
        max_rounds: Rounds after which not having converged is an error.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> round(ks.cosine(ks.SecondMoment(stream), ks.approx.get("kronecker-sum", rank=3).fit(stream)), 3)
    0.953
    """

    name: ClassVar[str] = "kronecker-sum"
    title: ClassVar[str] = "Kronecker sum"
    fits_truth: ClassVar[bool] = True

    rank: int = 2
    tolerance: float = 1e-8
    max_rounds: int = 200

    def __post_init__(self) -> None:
        """Check the rank."""
        if self.rank < 1:
            raise OptionError(f"a Kronecker sum needs rank 1 or more, got {self.rank}.")

    def fit(self, stream: GradientStream) -> KroneckerSum:
        """Fit the operator to the stream's second moment.

        Raises:
            ConvergenceError: the residual did not reach the tolerance.
        """
        triples = singular_triples(
            SecondMoment(stream), self.rank, tolerance=self.tolerance, max_rounds=self.max_rounds
        )
        return KroneckerSum(list(zip(triples.sigma.tolist(), triples.left, triples.right, strict=True)))


def _unit(matrix: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.matrix_norm(matrix)
    return matrix / norm if float(norm) > 0 else matrix
