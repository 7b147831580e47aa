r"""Cosines with a matrix that is itself estimated from random columns, for exactly the samples given.

Exact labels need a column for every class of every token. Where these are too many, the largest ones are taken as they
are and the others are summed up with random signs, D times (see :mod:`kronscope.gradients.losses`). Then

* the plug-in :math:`\|H\|_F^2` counts each random column's pair with itself; that is left out, and the pairs of
  different random columns of a sample stand in for it;
* a fit sees its own noise in the matrix it is compared with, so that the plug-in cosine is too large by about 1/D of
  something: cut in halves, it is too large by twice as much, and :math:`2c - (c_a + c_b)/2` is free of it;
* the standard error follows from how much each random column moves the cosine (:mod:`kronscope.measures.influence`);
  for approximations without such a formula, from fits with groups of columns left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kronscope.approx import Approximation, Optimal
from kronscope.curvature import SecondMoment
from kronscope.errors import DataError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Identity, KroneckerProduct, Operator
from kronscope.measures.influence import factor_terms, knows_influence
from kronscope.measures.resampling import Estimate

__all__ = ["FEWEST_RANDOM", "RandomColumns"]

# With fewer random columns their variance within a sample is not known.
FEWEST_RANDOM = 4
_GROUPS = 8
# Under an error bar of some percent the optimum need not be exact: its residual moves the cosine by its square.
_OPTIMAL_TOLERANCE = 1e-3
# What the correction of the bias may itself be wrong by, as a share of it.
_CORRECTION_ERROR = 1 / 3


class RandomColumns:
    """Estimates from one layer's stream with random columns.

    Args:
        truth: The stream of the matrix.

    Raises:
        DataError: there are too few random columns for an error bar.
    """

    def __init__(self, truth: GradientStream) -> None:
        count = truth.random_columns
        if count < FEWEST_RANDOM:
            raise DataError(f"an error bar needs at least {FEWEST_RANDOM} random columns, got {count}.")
        self.truth = truth
        self._moment = SecondMoment(truth)
        self._weights = truth.weights()
        fixed = truth.columns - count
        grams = self._moment.own_grams()[:, fixed:, fixed:].square()
        own = grams.sum(2)
        others = (own - grams.diagonal(dim1=1, dim2=2)) * count / (count - 1)
        sums = self._moment.column_sums()
        # Σ_d over a sample's random columns with a column's pair with itself replaced by the mean of the others
        self._random_sums = sums[:, fixed:] + self._weights[:, None] * (others - own)
        self.square = float(self._weights @ (sums[:, :fixed].sum(1) + self._random_sums.sum(1)))
        self._halves: list[GradientStream] | None = None

    @property
    def norm(self) -> float:
        """The matrix's Frobenius norm, without the pairs that would make it too large."""
        return math.sqrt(max(self.square, 0.0))

    def cosine(self, approximation: Approximation) -> Estimate:
        """Estimate the cosine of an approximation that is fitted on the truth's own columns."""
        if not self.square > 0:
            return Estimate(math.nan, math.nan)
        if isinstance(approximation, Optimal):
            approximation = replace(approximation, tolerance=max(approximation.tolerance, _OPTIMAL_TOLERANCE))
        operator = approximation.fit(self.truth)
        whole = self._plain(self._moment, operator)
        parts = [self._plain(SecondMoment(half), _refit(approximation, half, operator)) for half in self._cut()]
        correction = whole - sum(parts) / len(parts)
        inexact = _OPTIMAL_TOLERANCE**2 if isinstance(approximation, Optimal) else 0.0
        if knows_influence(approximation, self.truth):
            stderr = self._by_influence(approximation, operator)
        else:
            stderr = self._by_leaving_out(approximation.fit)
        return checked(whole + correction, math.hypot(stderr, _CORRECTION_ERROR * correction, inexact))

    def cosine_with(self, operator: Operator) -> Estimate:
        """Estimate the cosine with an operator that was not made from the truth's random columns."""
        if not self.square > 0:
            return Estimate(math.nan, math.nan)
        if not isinstance(operator, (KroneckerProduct, Identity)):
            return checked(self._plain(self._moment, operator), self._by_leaving_out(lambda _: operator))
        left, right = _factors(operator)
        forms = self._moment.column_forms(left, right)
        h = float((self._weights[:, None] * forms).sum())
        value = self._plain(self._moment, operator)
        return checked(value, self._stderr(value, self._random(forms) / h if h else forms))

    # ------------------------------------------------------------------ pieces

    def debiased(self, curve: Callable[[GradientStream, float], list[float]]) -> list[float]:
        """Take the bias out of plug-in cosines that ``curve`` makes of a stream and the norm of the matrix."""
        whole = curve(self.truth, self.norm)
        halves = [curve(half, self.norm) for half in self._cut()]
        return [2 * value - sum(parts) / 2 for value, *parts in zip(whole, *halves, strict=True)]

    def _plain(self, moment: SecondMoment, operator: Operator) -> float:
        size = operator.norm() * self.norm
        return moment.inner(operator) / size if size > 0 else math.nan

    def _cut(self) -> list[GradientStream]:
        if self._halves is None:
            count = self.truth.random_columns
            self._halves = [self.truth.with_random_columns(range(start, count, 2)) for start in (0, 1)]
        return self._halves

    def _random(self, values: Tensor) -> Tensor:
        """The part (N, D) that belongs to the random columns."""
        return values[:, -self.truth.random_columns :]

    def _by_influence(self, approximation: Approximation, operator: Operator) -> float:
        left, right = _factors(operator)
        forms = self._moment.column_forms(left, right)
        h = float((self._weights[:, None] * forms).sum())
        value = self._plain(self._moment, operator)
        if h == 0:
            return math.nan
        terms = forms / h
        if left is not None and right is not None:
            terms = terms + factor_terms(approximation, self._moment, left, right, h)
        return self._stderr(value, self._random(terms))

    def _stderr(self, value: float, terms: Tensor) -> float:
        """Standard error of independent columns that move the cosine by ``value · w · (terms − share of ‖H‖²)``."""
        count = self.truth.random_columns
        moved = value * self._weights[:, None] * (terms - self._random_sums / self.square)
        variances = count * moved.var(1)
        total = float(variances.sum())
        if total == 0:
            return 0.0
        # the degrees of freedom of a sum of variances (Welch and Satterthwaite), of shares that do not underflow
        freedom = (count - 1) / float((variances / total).square().sum())
        return math.sqrt(total) * _widened(freedom)

    def _by_leaving_out(self, fit: Callable[[GradientStream], Operator]) -> float:
        count = self.truth.random_columns
        groups = min(_GROUPS, count)
        values = []
        for group in range(groups):
            kept = [number for number in range(count) if number % groups != group]
            part = self.truth.with_random_columns(kept)
            operator = fit(part)
            left = torch.zeros(count, dtype=torch.float64)
            left[kept] = count / len(kept)
            moved = float((self._weights[:, None] * self._random_sums * (left - 1)).sum())
            size = operator.norm() * math.sqrt(max(self.square + 2 * moved, 1e-300))
            values.append(SecondMoment(part).inner(operator) / size if size > 0 else math.nan)
        spread = torch.tensor(values, dtype=torch.float64)
        return math.sqrt((groups - 1) / groups * float(((spread - spread.mean()) ** 2).sum())) * _widened(groups - 1)


def _refit(approximation: Approximation, half: GradientStream, whole: Operator) -> Operator:
    """Fit a half; an optimum is searched from that of the whole, which is near."""
    if isinstance(approximation, Optimal) and isinstance(whole, KroneckerProduct):
        return approximation.solve(half, start=whole.right.matrix).operator
    return approximation.fit(half)


def _widened(freedom: float) -> float:
    """By how much two standard errors of few degrees of freedom must grow to cover as often as a normal variable's.

    Student's quantile over the normal one at two standard errors, by the expansion of Cornish and Fisher.
    """
    return 1 + 1.25 / freedom + 1.53 / freedom**2


def checked(value: float, stderr: float) -> Estimate:
    """An estimate that is a cosine, or NaN with what to do about it."""
    if math.isnan(value) or math.isnan(stderr):
        return Estimate(value, stderr)
    if stderr >= abs(value) or value < 0 or value - 2 * stderr > 1:
        return Estimate(
            math.nan,
            stderr,
            f"the random columns say too little ({value:.2g} ± {stderr:.2g}); use more samples, or a smaller accuracy",
        )
    return Estimate(min(value, 1.0), stderr)


def _factors(operator: Operator) -> tuple[Tensor | None, Tensor | None]:
    """The factors of a product; none for a multiple of the identity."""
    if isinstance(operator, KroneckerProduct):
        return operator.left.matrix.double(), operator.right.matrix.double()
    return None, None
