r"""Cosines for the population that the samples came from, without fitting again for every group left out.

A fit sees its own samples again in the matrix it is compared with, and the matrix's norm has the pair of each sample
with itself; both are wrong for the population. So no sample meets itself:

* the samples are cut in halves a and b, with matrices :math:`H_a, H_b` and fits :math:`K_a, K_b`, and

  .. math:: c^2 = \frac{\langle H_b, K_a\rangle\, \langle H_a, K_b\rangle}
                       {\langle K_a, K_b\rangle\, \langle H_a, H_b\rangle},

  where :math:`\langle H_a, H_b\rangle` is the mean over pairs of samples from both halves. Taken of the same pairs as
  the other products it has the same noise, which cancels where a fit is good;
* the standard error is that of the jackknife: of the cosines with each sample left out, in which products and norm are
  exact, and the fit moves to the first order (:mod:`kronscope.measures.influence`).

Two fits are made in all. :class:`~kronscope.measures.Resampler` fits as often as it leaves out a group; it serves
approximations without a formula, and the tests compare with it.

Samples may also come from a finite whole, such as every k-th step of a run. Its matrix does have the pair of each step
with itself, so these enter the norm in the share that they have in the whole. And a fit on the whole sees its own steps
again, less than a fit on what was recorded does: what it gains by that goes with one over the number of steps, and is
known from how much more half of the records gain. What each half's fit has to do with the other half says it too; the
difference between the two is part of the standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kronscope.approx import Approximation, KfacExpand, KfacReduce, Optimal, Shampoo
from kronscope.curvature import SecondMoment
from kronscope.curvature.chunks import bounded_factors
from kronscope.curvature.middles import Spanned
from kronscope.curvature.sample_pairs import sample_pairs
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct, Operator
from kronscope.measures.influence import factor_terms, knows_influence
from kronscope.measures.partition import random_groups
from kronscope.measures.resampling import Estimate, Resampler

__all__ = ["FEWEST_RECORDED", "FEWEST_SAMPLES", "PopulationHalves", "checked_population"]

# With fewer samples halves say nothing; then each of them is left out in turn and everything fitted again.
FEWEST_SAMPLES = 8
# The same for recorded steps of a run, whose gradients shrink while it goes on: halves are less alike.
FEWEST_RECORDED = 40
# Iterations may stop here: what is left in the cosine is of the second order, far below any error bar.
_TOLERANCE = 1e-6
# What rounding may add to a cosine of one.
_ROUNDING = 1e-6
# A sample left out leaves at least this share of a sum, so that logarithms stay finite.
_LEAST_LEFT = 1e-3


class PopulationHalves:
    """Estimates for the population from one layer's samples, see the head of this module.

    Args:
        truth: Gradients of the matrix.
        fitted: Gradients that approximations are fitted on, of the same samples; may be the same stream.
        whole_square: Only for samples from a finite whole, see :class:`~kronscope.measures.Resampler`.
    """

    fixed_truth = False

    def __init__(self, truth: GradientStream, fitted: GradientStream, whole_square: float = 0.0) -> None:
        self.truth, self.fitted, self._whole_square = truth, fitted, whole_square
        self._refits: Resampler | None = None
        weights = truth.weights()
        weights = weights / weights.sum()
        self._quarters = random_groups(len(weights), 4, along_time=whole_square > 0)
        halves = self._quarters % 2
        self._kept = [halves == half for half in (0, 1)]
        self._shares = [torch.where(kept, weights, 0.0) / weights[kept].sum() for kept in self._kept]
        self._all = weights
        pairs = sample_pairs(SecondMoment(truth), halves) / truth.total_weight()
        # Σ_{i≠j} w_i w_j S_ij over Σ_{i≠j} w_i w_j
        self.square = float(weights @ pairs.sum(1)) / (1 - float(weights.square().sum()))
        # the pair that each sample makes with itself, w_i S_ii, which only a finite whole has
        self._itself = self._own_pairs() if whole_square else torch.zeros_like(weights)
        # what the finite whole's squared norm is of the square, with all samples and without each of them
        self._wider, self._wider_without = self._widening(pairs.sum(1))
        # what a sample of one half has to do with the matrix of the other
        self._crossed = [pairs[:, 1 - half] / weights[self._kept[1 - half]].sum() for half in (0, 1)]
        self._within = [pairs[:, half] / weights[self._kept[half]].sum() for half in (0, 1)]
        self._moments = [self._half(truth, kept) for kept in self._kept]
        self._sources = self._moments if fitted is truth else [self._half(fitted, kept) for kept in self._kept]

    @property
    def norm(self) -> float:
        """The norm of the population's matrix, at the scale of the truth's weights."""
        return math.sqrt(max(self.square * self._wider, 0.0)) * self.truth.total_weight()

    @property
    def refits(self) -> Resampler:
        """The same estimates by fitting again with groups of samples left out, for any approximation."""
        if self._refits is None:
            self._refits = Resampler(self.truth, self.fitted, "samples", whole_square=self._whole_square)
        return self._refits

    def knows(self, approximation: Approximation, stream: GradientStream) -> bool:
        """Whether the error bar of an approximation that is fitted on a stream follows from halves."""
        own = self.truth if approximation.fits_truth else self.fitted
        return stream is own and knows_influence(approximation, own)

    def cosine(self, approximation: Approximation) -> Estimate:
        """Estimate the cosine of an approximation that it :meth:`knows`."""
        shares = self._shares
        square = float(shares[0] @ self._crossed[0])
        if not square > 0:
            if not SecondMoment(self.truth).trace() > 0:
                return Estimate(math.nan, math.nan)
            return Estimate(math.nan, math.nan, "the halves of the samples have nothing in common; use more samples")
        sources = self._moments if approximation.fits_truth else self._sources
        factors = _fits(approximation, sources, self._quarters // 2)
        whole = SecondMoment(self.truth)
        # what each sample has to do with the fit of the other half, and the mean of that
        forms = [whole.column_forms(*factors[1 - half]).sum(1) for half in (0, 1)]
        products = [float(share @ form) for share, form in zip(shares, forms, strict=True)]
        overlaps = [float((one * two).sum()) for one, two in zip(*factors, strict=True)]
        if min(*products, *overlaps) <= 0:
            return Estimate(math.nan, math.nan, "the fits on halves of the samples have nothing in common; use more")
        value = math.sqrt(products[0] * products[1] / (overlaps[0] * overlaps[1] * square))
        # logarithms of the cosine without each sample, less that of the whole
        moved = torch.zeros_like(shares[0])
        for half, kept in enumerate(self._kept):
            share = shares[half]
            product, norm = (
                _without(share, values) for values in (forms[half] / products[half], self._crossed[half] / square)
            )
            terms = self._terms(approximation, half, sources, factors, products, overlaps)
            own = (product.log() - norm.log()) / 2 - terms * share / (1 - share)
            moved += torch.where(kept, own, 0.0)
        value /= math.sqrt(self._wider)
        moved -= (self._wider_without / self._wider).log() / 2
        left_out = value * moved.exp()
        count = len(left_out)
        stderr = math.sqrt((count - 1) / count * float((left_out - left_out.mean()).square().sum()))
        found = Estimate(value, stderr)
        return self._of_the_whole(found, approximation, sources, factors) if self._whole_square else found

    def _own_pairs(self) -> Tensor:
        weights, own = self._all, SecondMoment(self.truth).own_sums() / self.truth.total_weight() ** 2
        return torch.where(weights > 0, own / weights.clamp_min(torch.finfo(weights.dtype).tiny), 0.0)

    def _widening(self, pairs: Tensor) -> tuple[float, Tensor]:
        """What the whole's squared norm is of :attr:`square`, with all samples and without each of them."""
        weights, itself = self._all, self._itself
        together, square, share = float(weights @ pairs), float(weights.square().sum()), self._whole_square
        if not share or not together > 0:
            return 1.0, torch.ones_like(weights)
        wider = 1 - share + share * float(itself.sum()) * (1 - square) / together
        distinct = (together - 2 * weights * pairs) / ((1 - weights).square() - square + weights.square())
        without = 1 - share + share * (itself.sum() - itself) / (1 - weights) / distinct
        return wider, without.clamp_min(_LEAST_LEFT)

    def _of_the_whole(
        self,
        found: Estimate,
        approximation: Approximation,
        sources: Sequence[SecondMoment],
        factors: Sequence[tuple[Tensor, ...]],
    ) -> Estimate:
        """What was found for an infinite population, as that of the finite whole that the samples are a part of."""
        operator = approximation.fit(self.truth if approximation.fits_truth else self.fitted)
        plain = SecondMoment(self.truth).inner(operator) / (operator.norm() * self.norm)
        seen = min(1.0, self._whole_square / float(self._all.square().sum()))
        halves = []
        for half, source in enumerate(sources):
            fitted = factors[half]
            if not isinstance(approximation, Optimal):
                # not those of a power that are corrected for what it is off by: that is part of what halves gain
                fitted = _factors(approximation.fit(source.stream))
            halves.append(self._of_half(half, fitted))
        value = plain - (1 - seen) * (sum(halves) / 2 - plain)
        # where a few steps make up most of the matrix, the two ways to the same answer differ by more than either knows
        apart = found.value + seen * (plain - found.value) - value
        return Estimate(min(value, 1.0), math.hypot(found.stderr * math.sqrt(1 - seen), apart))

    def _of_half(self, half: int, factors: tuple[Tensor, ...]) -> float:
        """The cosine of a half's fit with the half that it was fitted on, by the norm that the whole would have."""
        left, right = factors
        weights, share = self._shares[half], self._whole_square
        distinct = float(weights @ self._within[half]) / (1 - float(weights.square().sum()))
        kept = self._kept[half]
        itself = float(self._itself[kept].sum() / self._all[kept].sum())
        norm = math.sqrt((1 - share) * distinct + share * itself)
        return float((self._moments[half].left(right) * left).sum()) / (float(left.norm() * right.norm()) * norm)

    def _half(self, stream: GradientStream, kept: Tensor) -> SecondMoment:
        weights = stream.weights() * kept
        return SecondMoment(stream).reweighted(weights / weights.sum())

    def _terms(
        self,
        approximation: Approximation,
        half: int,
        sources: Sequence[SecondMoment],
        factors: Sequence[tuple[Tensor, ...]],
        products: Sequence[float],
        overlaps: Sequence[float],
    ) -> Tensor:
        """How each sample of a half moves the cosine's logarithm through its half's fit (N,)."""
        other = self._moments[1 - half]
        (left, right), (other_left, other_right) = factors[half], factors[1 - half]

        def left_slope(vectors: Tensor | None = None) -> Tensor:
            return _between((other.left(right) / products[1 - half] - other_left / overlaps[0]) / 2, vectors)

        def right_slope(vectors: Tensor | None = None) -> Tensor:
            return _between((other.right(left) / products[1 - half] - other_right / overlaps[1]) / 2, vectors)

        if isinstance(approximation, (KfacReduce, KfacExpand)):
            reduce = isinstance(approximation, KfacReduce)
            return _kfac_terms(sources[half].stream, left_slope(), right_slope(), reduce=reduce)
        bases: tuple[Spanned | None, Spanned | None] = (None, None)
        if isinstance(approximation, Shampoo) and approximation.exponent != 1:
            one, two = (factor.spectrum for factor in sources[half].factors())
            bases = Spanned(one.vectors, one.values), Spanned(two.vectors, two.values)
        return factor_terms(approximation, sources[half], bases, (left_slope, right_slope)).sum(1)


def _between(matrix: Tensor, vectors: Tensor | None) -> Tensor:
    return matrix if vectors is None else vectors.T @ matrix.to(vectors) @ vectors


def _without(shares: Tensor, values: Tensor) -> Tensor:
    """A mean of values, which is one, without each of them."""
    return ((1 - shares * values) / (1 - shares)).clamp_min(_LEAST_LEFT)


def checked_population(found: Estimate, samples: int) -> Estimate:
    """An estimate that is a cosine, or NaN with what to do about it."""
    value, stderr = found.value, found.stderr
    if math.isnan(value) or math.isnan(stderr):
        return found
    if stderr >= abs(value) or value < 0 or value - 3 * stderr > 1 + _ROUNDING:
        text = f"{samples} samples say too little of their population ({value:.2g} ± {stderr:.2g}); use more samples"
        return Estimate(math.nan, stderr, text)
    return replace(found, value=min(value, 1.0))


def _fits(approximation: Approximation, moments: Sequence[SecondMoment], parts: Tensor) -> list[tuple[Tensor, ...]]:
    r"""The factors of an approximation fitted on both halves.

    A power of a mean over n samples is not the mean of a power: it is off by about 1/n. Fits on half as many samples
    are off by twice that, so the difference is taken off, factor by factor.

    Args:
        approximation: The approximation.
        moments: The matrix of each half.
        parts: Which half of its half each sample is in (N,).
    """
    found: list[tuple[Tensor, ...]] = []
    for moment in moments:
        if isinstance(approximation, Optimal):
            loose = replace(approximation, tolerance=max(approximation.tolerance, _TOLERANCE))
            operator: Operator = loose.solve(moment.stream, found[0][1] if found else None).operator
        else:
            operator = approximation.fit(moment.stream)
        factors = _factors(operator)
        if isinstance(approximation, Shampoo) and approximation.exponent != 1:
            cut = [_factors(approximation.fit(part.stream)) for part in _cut(moment, parts)]
            factors = tuple(2 * whole - (one + two) / 2 for whole, one, two in zip(factors, *cut, strict=True))
        found.append(factors)
    return found


def _factors(operator: Operator) -> tuple[Tensor, ...]:
    if isinstance(operator, KroneckerProduct):
        return operator.left.matrix.double(), operator.right.matrix.double()
    return tuple(torch.eye(size, dtype=torch.float64) for size in operator.shape)


def _cut(half: SecondMoment, parts: Tensor) -> list[SecondMoment]:
    """The two halves of a half."""
    weights = half.stream.weights()
    kept = [weights * (parts == part) for part in (0, 1)]
    return [half.reweighted(own / own.sum()) for own in kept]


def _kfac_terms(stream: GradientStream, left: Tensor, right: Tensor, *, reduce: bool) -> Tensor:
    """Of samples both sides move: the inputs, and the gradients of the outputs."""

    def forms(factors: Tensor, slope: Tensor) -> Tensor:
        wide = factors.double().sum(2, keepdim=True) if reduce else factors.double()
        return ((wide @ slope.to(wide)) * wide).sum((1, 2, 3))

    def local() -> list[tuple[Tensor, Tensor]]:
        found = []
        for chunk in stream:
            assert isinstance(chunk, FactoredAtoms)
            for atoms in bounded_factors(chunk):
                terms = forms(atoms.row_factors, left) + forms(atoms.col_factors, right)
                found.append((atoms.samples, terms))
        return found

    return stream.by_sample(local)
