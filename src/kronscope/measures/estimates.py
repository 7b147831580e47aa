r"""Cosines with a matrix that is itself estimated from random columns, for exactly the samples given.

Exact labels need a column for every class of every token. Where these are too many, the largest ones are taken as they
are and the others are summed up with random signs, D times (see :mod:`kronscope.gradients.losses`). A fit made of
random columns sees their noise in the matrix it is compared with: with fewer of them than the matrix has directions,
the plain cosine is far above one. So a column never meets itself:

* the random columns are cut in halves a and b, with matrices :math:`H_a, H_b` and fits :math:`K_a, K_b`, and

  .. math:: c^2 = \frac{\langle H_b, K_a\rangle\, \langle H_a, K_b\rangle}{\langle K_a, K_b\rangle\, \|H\|_F^2},

  in which the noise of one half meets that of the other, on average zero; scales of the fits cancel;
* :math:`\|H\|_F^2` counts pairs of different columns; those of a random column with itself are replaced by the mean
  over the pairs of different random columns of its sample;
* the standard error follows from how much each random column moves the cosine (:mod:`kronscope.measures.influence`);
  for approximations without such a formula, from fits with groups of columns left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronscope.approx import Approximation, KfacReduce, Optimal
from kronscope.curvature import SecondMoment
from kronscope.curvature.middles import Matrix, Spanned
from kronscope.errors import DataError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Identity, KroneckerProduct, Operator, PsdFactor
from kronscope.measures.influence import Slope, factor_terms, knows_influence, reduced_factors
from kronscope.measures.optimum import independent_optimum
from kronscope.measures.resampling import Estimate

__all__ = ["FEWEST_RANDOM", "RandomColumns"]

# With fewer random columns their variance within half of them is not known.
FEWEST_RANDOM = 4
# What stopping the search for the optimum early may change in the cosine: at most, and as a share of how far the halves
# have their factors apart, which is of the size of the error bar or larger.
_MOST_INEXACT, _INEXACT_SHARE, _LEAST_INEXACT = 3e-4, 0.01, 1e-12
# At most so accurate are other iterations.
_TOLERANCE = 1e-4
# Groups of each half that are left out in turn.
_GROUPS = 4
# Multiply-adds of a contraction above which one half's columns give the error bar, where they have at least so many
# degrees of freedom. Variances of one degree each, as two columns give, count a third of theirs.
_COSTLY, _ENOUGH_FREEDOM = 1e10, 8.0
# From this size on bases are kept in float32.
_LARGE = 128


_Factors = tuple[Matrix | None, Matrix | None]
# Variances (N,) that the columns of each sample add, and the degrees of freedom these are known with.
_Variances = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Half:
    """Some of the random columns, with all fixed ones: their numbers, stream and matrix."""

    numbers: Sequence[int]
    stream: GradientStream
    moment: SecondMoment


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
        sums = self._moment.distinct_sums()
        self._random_sums = sums[:, -count:]
        self.square = self._moment.norm_squared()
        self._halves = [self._part(range(start, count, 2)) for start in (0, 1)]
        self._bases = _Bases()

    @classmethod
    def of(cls, truth: GradientStream) -> RandomColumns:
        """The estimates of a stream, made once."""
        if "random columns" not in truth.memo:
            truth.memo["random columns"] = cls(truth)
        found: RandomColumns = truth.memo["random columns"]
        return found

    @property
    def norm(self) -> float:
        """The matrix's Frobenius norm, without the pairs that would make it too large."""
        return math.sqrt(max(self.square, 0.0))

    @property
    def plain_norm(self) -> float:
        """The Frobenius norm of the columns as they are, pairs with themselves included."""
        return math.sqrt(float(self._weights @ self._moment.column_pairs()[0].sum(1)))

    def decompose(self) -> None:
        """Decompose Shampoo's factors: with two approximations in their bases, products with these serve both."""
        for half in self._halves:
            for factor in half.moment.factors():
                _ = factor.spectrum

    def cosine(self, approximation: Approximation) -> Estimate:
        """Estimate the cosine of an approximation that is fitted on the truth's own columns."""
        if not self.square > 0:
            return Estimate(math.nan, math.nan)
        inexact = 0.0
        approximation = _loosened(approximation)
        if isinstance(approximation, Optimal):
            fits, inexact = _optima(self._halves)
        else:
            fits = [approximation.fit(half.stream) for half in self._halves]
        if knows_influence(approximation, self.truth):
            found = self._by_influence(approximation, fits)
        else:
            found = self._by_leaving_out(approximation.fit, fits)
        return checked(found.value, math.hypot(found.stderr, inexact))

    def cosine_with(self, operator: Operator) -> Estimate:
        """Estimate the cosine with an operator that was not made from the truth's random columns."""
        if not self.square > 0:
            return Estimate(math.nan, math.nan)
        size = operator.norm() * self.norm
        if not size > 0:
            return Estimate(math.nan, math.nan)
        if not isinstance(operator, (KroneckerProduct, Identity)):
            found = self._by_leaving_out(lambda _: operator, [operator, operator])
            return checked(found.value, found.stderr)
        forms = self._moment.column_forms(*self._factors(operator))
        h = float((self._weights[:, None] * forms).sum())
        value = abs(operator.scale) * h / size
        terms = forms[:, -self.truth.random_columns :] / h if h else forms[:, -self.truth.random_columns :]
        return checked(value, _stderr([self._variances(value, terms, range(self.truth.random_columns))]))

    def powers(self, exponents: Sequence[float]) -> list[float]:
        r"""Estimate the cosines of :math:`(L \otimes R)^p` for many p, from one table for each half."""
        if not self.square > 0:
            return [math.nan] * len(exponents)
        sides = [half.moment.factors() for half in self._halves]
        spectra = [[factor.spectrum for factor in factors] for factors in sides]
        tables = [
            half.moment.table(other[0].vectors, other[1].vectors)
            for half, other in zip(self._halves, spectra[::-1], strict=True)
        ]
        turns = [(one.vectors.T @ two.vectors).square() for one, two in zip(*spectra, strict=True)]
        found = []
        for exponent in exponents:
            values = [[spectrum.powered(exponent).double() for spectrum in half] for half in spectra]
            products = [float(left @ table @ right) for (left, right), table in zip(values[::-1], tables, strict=True)]
            overlaps = [
                float(one @ turn.double() @ two) for one, turn, two in zip(values[0], turns, values[1], strict=True)
            ]
            size = overlaps[0] * overlaps[1] * self.square
            value = math.sqrt(products[0] * products[1] / size) if size > 0 and min(products) > 0 else math.nan
            found.append(min(value, 1.0))
        return found

    # ------------------------------------------------------------------ pieces

    def _part(self, numbers: Sequence[int]) -> _Half:
        stream = self.truth.with_random_columns(numbers).in_one_piece()
        return _Half(numbers, stream, SecondMoment(stream))

    def _by_influence(self, approximation: Approximation, fits: Sequence[Operator]) -> Estimate:
        """The cosine, and how far each random column moves it through its own half's matrix and fit."""
        factors = [self._factors(fit) for fit in fits]
        if isinstance(approximation, KfacReduce):
            reduced = [reduced_factors(half.stream) for half in self._halves]
            factors = [few or whole for few, whole in zip(reduced, factors, strict=True)]
        # each half's forms with the fit of the other
        forms = [half.moment.column_forms(*other) for half, other in zip(self._halves, factors[::-1], strict=True)]
        products = [float((self._weights[:, None] * form).sum()) for form in forms]
        overlaps = [self._bases.overlap(one, two) for one, two in zip(*factors, strict=True)]
        if min(*products, *overlaps) <= 0:
            return Estimate(math.nan, math.nan)
        size = overlaps[0] * overlaps[1]
        if factors[0][0] is None:
            size = float(self.truth.shape[0] * self.truth.shape[1])
        value = math.sqrt(products[0] * products[1] / size) / self.norm
        variances = []
        for number, half in enumerate(self._halves):
            moved = forms[number] / (2 * products[number])
            slopes = self._slopes(number, factors, products[1 - number], overlaps)
            if slopes is not None:
                moved = moved + factor_terms(approximation, half.moment, factors[number], slopes)
            variances.append(self._variances(value, moved[:, -len(half.numbers) :], half.numbers))
            # both halves vary alike: one of them says it where that costs much, if many samples have a part in it
            if half.moment.passes.contraction_cost() > _COSTLY and _freedom(variances) >= _ENOUGH_FREEDOM:
                break
        return Estimate(value, _stderr(variances, len(self._halves) / len(variances)))

    def _slopes(
        self, number: int, factors: Sequence[_Factors], product: float, overlaps: Sequence[float]
    ) -> tuple[Slope, Slope] | None:
        """Slopes of the cosine's logarithm in the factors of one half's fit; None for multiples of the identity.

        Args:
            number: Which half.
            factors: The factors of both fits.
            product: The inner product of its fit with the other half's matrix.
            overlaps: The inner products of both fits' left factors, and of their right factors.
        """
        mine, others = factors[number], factors[1 - number]
        moment = self._halves[1 - number].moment

        def slope(side: int) -> Slope:
            facing, same = mine[1 - side], others[side]
            assert facing is not None
            assert same is not None

            def at(vectors: Tensor | None = None) -> Tensor:
                if vectors is None:
                    whole = moment.left(facing) if side == 0 else moment.right(facing)
                else:
                    whole = moment.within(side, vectors, facing)
                return (whole / product - self._bases.within(same, vectors).to(whole) / overlaps[side]) / 2

            return at

        return None if mine[0] is None or mine[1] is None else (slope(0), slope(1))

    def _factors(self, operator: Operator) -> _Factors:
        """The factors of a product, by their eigenvectors where these are known; none for multiples of the identity."""
        if isinstance(operator, KroneckerProduct):
            return self._bases.factor(operator.left), self._bases.factor(operator.right)
        return None, None

    def _variances(self, value: float, terms: Tensor, numbers: Sequence[int]) -> _Variances:
        """What independent columns that move the cosine by ``value · w · (terms − share of ‖H‖²)`` do to its variance.

        Args:
            value: The cosine.
            terms: What some of the random columns do (N, d) but for the norm of the matrix.
            numbers: Their numbers.
        """
        moved = value * self._weights[:, None] * (terms - self._random_sums[:, list(numbers)] / self.square)
        variance = len(numbers) * moved.var(1)
        return variance, torch.full_like(variance, len(numbers) - 1.0)

    def _by_leaving_out(self, fit: Callable[[GradientStream], Operator], fits: Sequence[Operator]) -> Estimate:
        """The cosine, and its standard error from leaving out a group of one half's columns, for all groups."""
        products = [half.moment.inner(other) for half, other in zip(self._halves, fits[::-1], strict=True)]
        value = _combined(products, fits, self.square)
        variance, freedom = 0.0, 0
        for number, half in enumerate(self._halves):
            groups = min(_GROUPS, len(half.numbers))
            values = []
            for group in range(groups):
                kept = [each for index, each in enumerate(half.numbers) if index % groups != group]
                part = self._part(kept)
                part.stream.keep_bytes = 0
                mine, other = fit(part.stream), fits[1 - number]
                taken = torch.ones(self.truth.random_columns, dtype=torch.float64)
                taken[list(half.numbers)] = 0
                taken[kept] = len(half.numbers) / len(kept)
                moved = float((self._weights[:, None] * self._random_sums * (taken - 1)).sum())
                left_out = [part.moment.inner(other), self._halves[1 - number].moment.inner(mine)]
                values.append(_combined(left_out, [mine, other], max(self.square + 2 * moved, 1e-300)))
            spread = torch.tensor(values, dtype=torch.float64)
            variance += (groups - 1) / groups * float(((spread - spread.mean()) ** 2).sum())
            freedom += groups - 1
        return Estimate(value, math.sqrt(variance) * _widened(freedom))


def _freedom(parts: Sequence[_Variances]) -> float:
    """The degrees of freedom of a sum of variances (Welch and Satterthwaite)."""
    variance, freedom = (torch.cat(each) for each in zip(*parts, strict=True))
    total = float(variance.sum())
    # of shares, which do not underflow
    return 1 / float(((variance / total).square() / freedom).sum()) if total > 0 else math.inf


def _stderr(parts: Sequence[_Variances], times: float = 1.0) -> float:
    """The standard error of a sum that all columns have a part in.

    Args:
        parts: The variances of some of the columns, sample by sample, and their degrees of freedom.
        times: How many times as many columns there are in all.
    """
    total = times * sum(float(variance.sum()) for variance, _ in parts)
    return math.sqrt(total) * _widened(_freedom(parts)) if total > 0 else 0.0


def _loosened(approximation: Approximation) -> Approximation:
    """An iteration on random columns need not, and in float32 cannot, go on to the last digit."""
    tolerance = getattr(approximation, "tolerance", None)
    if tolerance is None or tolerance >= _TOLERANCE:
        return approximation
    return replace(approximation, tolerance=_TOLERANCE)  # type: ignore[type-var]


def _optima(halves: Sequence[_Half]) -> tuple[list[Operator], float]:
    """The optimal products of both halves, and what their being inexact may change in the cosine."""
    factors = [(half.moment.left(), half.moment.right()) for half in halves]
    agreement = [_alike(one, two) for one, two in zip(*factors, strict=True)]
    side = 0 if agreement[0] >= agreement[1] else 1
    start = factors[0][side] + factors[1][side]
    tolerance = max(_LEAST_INEXACT, min(_MOST_INEXACT, _INEXACT_SHARE * (1 - min(agreement))))
    found: list[Operator] = []
    for half in halves:
        count = len(half.numbers)
        cuts = [half.stream.with_random_columns(range(first, count, 2)) for first in (0, 1)]
        parts = [SecondMoment(cut.in_one_piece()) for cut in cuts]
        product = independent_optimum(parts, start, side, tolerance)
        start = (product.left, product.right)[side].matrix
        found.append(product)
    return found, tolerance


def _alike(one: Tensor, two: Tensor) -> float:
    size = float(one.norm() * two.norm())
    return float((one * two).sum()) / size if size > 0 else 0.0


def _combined(products: Sequence[float], fits: Sequence[Operator], square: float) -> float:
    size = fits[0].inner(fits[1]) * square
    if size <= 0 or min(products) <= 0:
        return math.nan
    return math.sqrt(products[0] * products[1] / size)


def _widened(freedom: float) -> float:
    """By how much two standard errors of few degrees of freedom must grow to cover as often as a normal variable's.

    Student's quantile over the normal one at two standard errors, by the expansion of Cornish and Fisher.
    """
    return 1 + 1.25 / freedom + 1.53 / freedom**2


def checked(value: float, stderr: float) -> Estimate:
    """An estimate that is a cosine, or NaN with what to do about it."""
    if math.isnan(value):
        return Estimate(value, stderr)
    if math.isnan(stderr):  # without an error bar it would be taken for exact
        return Estimate(math.nan, stderr, "the random columns give no error bar; use more samples, or more accuracy")
    if stderr >= abs(value) or value < 0 or value - 3 * stderr > 1:
        return Estimate(
            math.nan,
            stderr,
            f"the random columns say too little ({value:.2g} ± {stderr:.2g}); use more samples, or a smaller accuracy",
        )
    return Estimate(min(value, 1.0), stderr)


class _Bases:
    """Factors by their eigenvectors, in float32, and how these lie to each other; each is made once.

    Rounding at 1e-7 is nothing beside random columns, and float32 products take half the time.
    """

    def __init__(self) -> None:
        # what is known of a tensor is kept with it, so that its id stays its own
        self._narrow: dict[int, tuple[Tensor, Tensor]] = {}
        self._turns: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def factor(self, factor: PsdFactor) -> Matrix:
        """The factor as it is, or by its eigenvectors if it is decomposed."""
        if not factor.is_decomposed:
            return factor.matrix.double()
        spectrum = factor.spectrum
        key = id(spectrum.vectors)
        if key not in self._narrow:
            vectors = spectrum.vectors
            self._narrow[key] = (vectors, vectors.float() if vectors.shape[0] >= _LARGE else vectors)
        return Spanned(self._narrow[key][1], spectrum.values.double())

    def overlap(self, one: Matrix | None, two: Matrix | None) -> float:
        """The inner product of two factors; one for identities."""
        if one is None or two is None:
            return 1.0
        if isinstance(one, Spanned) and isinstance(two, Spanned):
            turn = self._turn(one.vectors, two.vectors).square().double()
            return float(one.values @ turn @ two.values)
        whole = [each.matrix() if isinstance(each, Spanned) else each for each in (one, two)]
        return float((whole[0] * whole[1]).sum())

    def within(self, matrix: Matrix, vectors: Tensor | None) -> Tensor:
        """A matrix between vectors; None is the identity."""
        if vectors is None:
            return matrix.matrix() if isinstance(matrix, Spanned) else matrix
        if isinstance(matrix, Spanned):
            turn = self._turn(vectors, matrix.vectors)
            return (turn * matrix.values.to(turn)) @ turn.T
        wide = vectors.to(matrix)
        return wide.T @ matrix @ wide

    def _turn(self, one: Tensor, two: Tensor) -> Tensor:
        key = (id(one), id(two))
        if key not in self._turns:
            self._turns[key] = (one, two, one.T @ two)
            self._turns[id(two), id(one)] = (two, one, self._turns[key][2].T)
        return self._turns[key][2]
