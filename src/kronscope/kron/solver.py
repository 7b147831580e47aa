r"""What a root solver is asked for, what it answers, and what it says about itself.

For every factor :math:`A` of a stack (B, d, d) the wanted matrix is

.. math:: X = \Big(\frac{A + \rho I}{\operatorname{tr}(A + \epsilon I)}\Big)^{e},
          \qquad \rho = \epsilon + \delta\,\lambda_{\max}(A) ,

with the exponent :math:`e`, the absolute :math:`\epsilon` and the relative :math:`\delta` of a :class:`Ridge`; with
:math:`\rho = 0` a pseudo-inverse power. Dividing by the trace keeps roots near one whatever the gradient's scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kronscope.errors import OptionError

__all__ = ["SOLVER_MEMBERS", "Ridge", "RootSolver", "Roots", "root_order"]


@dataclass(frozen=True)
class Ridge:
    r"""What is added to a factor's eigenvalues before a negative power.

    Attributes:
        eps: Absolute amount :math:`\epsilon`.
        damping: Amount :math:`\delta` relative to the largest eigenvalue.

    >>> Ridge(damping=0.5).regularised(torch.tensor([0.0, 4.0]))
    tensor([2., 6.])
    """

    eps: float = 0.0
    damping: float = 0.0

    def __post_init__(self) -> None:
        """Check the amounts."""
        if not (self.eps >= 0 and self.damping >= 0):
            raise OptionError(f"eps and damping must not be negative, got {self.eps} and {self.damping}.")

    @property
    def is_pseudo_inverse(self) -> bool:
        """Whether nothing is added, so that zero eigenvalues stay zero."""
        return self.eps == 0 and self.damping == 0

    def regularised(self, values: Tensor, cutoff: float = 0.0) -> Tensor:
        """Return the eigenvalues (..., d) with the ridge added.

        A ridge below ``cutoff`` times the largest eigenvalue is lost in the rounding of the matrix: it says nothing
        about directions without a gradient, so eigenvalues that are zero then stay zero.
        """
        if self.is_pseudo_inverse:
            return values
        largest = values.amax(-1, keepdim=True)
        shift = self.eps + self.damping * largest
        if self.damping > cutoff:
            return values + shift
        return torch.where((values > 0) | (shift > cutoff * largest), values + shift, values)


@dataclass(frozen=True)
class Roots:
    """What a solver found for a stack of B factors.

    Attributes:
        matrices: The roots (B, d, d).
        residuals: Relative residual of each (B,), by a random probe; NaN or large means failure.
        extremes: Largest and smallest regularised eigenvalue that is not zero (B, 2), before division by the trace;
            0 where the solver does not know it.
        vectors: Eigenvectors (B, d, d), or None.
        fresh: Which of them (B,) were taken now; the others are those of before. None: all.
    """

    matrices: Tensor
    residuals: Tensor
    extremes: Tensor
    vectors: Tensor | None = None
    fresh: Tensor | None = None


@runtime_checkable
class RootSolver(Protocol):
    """A way to take powers of a stack of factors; see :class:`Eigh`."""

    @property
    def tolerance(self) -> float:
        """The residual above which a root is not to be used."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether the solver starts from the previous eigenvectors, which must then be kept."""
        ...

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may call :meth:`solve` at once, on different factors."""
        ...

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Refuse powers that this solver cannot take.

        Raises:
            OptionError: it cannot take this one; the text says which solver can.
        """
        ...

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        """Return the roots of ``factors`` (B, d, d), each divided by its trace first."""
        ...


# What a RootSolver has.
SOLVER_MEMBERS = ("tolerance", "is_warm", "is_thread_safe", "check", "solve")


def root_order(exponent: float) -> int | None:
    """Return p where ``exponent`` is -1/p for a whole p, else None.

    >>> root_order(-0.25), root_order(-0.3)
    (4, None)
    """
    order = round(-1 / exponent) if exponent < 0 else 0
    return order if order >= 1 and abs(order * exponent + 1) < 1e-9 else None
