"""What rows say of the matrix itself: its size, and over how many directions it is spread."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from kronscope.curvature import SecondMoment
from kronscope.errors import ConvergenceError
from kronscope.gradients.stream import GradientStream

__all__ = ["MatrixFacts", "matrix_facts", "why_no_eigenvalue"]


@dataclass(frozen=True)
class MatrixFacts:
    r"""Numbers of a matrix H.

    Attributes:
        trace: :math:`\operatorname{tr} H`.
        norm: :math:`\|H\|_F`.
        leading_eigenvalue: :math:`\lambda_1(H)`; NaN where it was not asked for, or H is an estimate.

    >>> MatrixFacts(3.0, 1.5).effective_rank
    4.0
    """

    trace: float
    norm: float
    leading_eigenvalue: float = math.nan

    @property
    def effective_rank(self) -> float:
        r""":math:`(\operatorname{tr} H)^2 / \|H\|_F^2`: the rank of a projection, and less the less even H is."""
        return (self.trace / self.norm) ** 2 if self.norm > 0 else math.nan


def matrix_facts(truth: GradientStream, norm: float | None = None, *, eigenvalue: bool = False) -> MatrixFacts:
    """Compute the numbers of a stream's matrix, or what its random columns estimate without bias.

    Args:
        truth: The gradients.
        norm: The norm, where it is not that of the gradients as they are.
        eigenvalue: Whether to look for the leading eigenvalue, too.
    """
    moment = SecondMoment(truth)
    if truth.random_columns:
        # a column's square with itself is ‖G‖⁴; the pairs are there already for the norm
        squares = moment.column_pairs()[1].diagonal(dim1=1, dim2=2)
        trace = float(truth.weights() @ squares.sqrt().sum(1))
    else:
        trace = moment.trace()
    leading = math.nan
    if eigenvalue:
        with suppress(ConvergenceError):  # NaN, as everything that was not found
            leading = moment.leading_eigenvalue()
    return MatrixFacts(trace, moment.norm() if norm is None else norm, leading)


def why_no_eigenvalue(truth: GradientStream, *, population: bool) -> str:
    """Why a leading eigenvalue cannot be had, or should not; empty if it can."""
    if population:
        return "it is that of the samples, and too large for the population they came from"
    if truth.random_columns or truth.draws:
        return "the matrix is estimated from random columns, whose largest eigenvalue is too large on average"
    if not truth.in_memory:
        return "the gradients do not fit memory_budget, and each product would capture them anew"
    return ""
