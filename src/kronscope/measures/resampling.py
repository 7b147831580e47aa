r"""Error bars: what the cosine would be for the population the samples came from, or for exact labels.

Two things are done.

First, :math:`\|H\|_F^2` is a sum over pairs of samples. For a few samples it is too large on average, since each sample
also makes a pair with itself. So it is replaced by the mean over pairs of different samples (a U-statistic). Where the
samples are fixed and only their labels are drawn, a draw's pair with itself is replaced by pairs of different draws.

Second, the measurement is repeated many times, each time with one group of samples (or draws) left out: the
delete-a-group jackknife. The spread of the repetitions gives the standard error. The difference between their mean and
the whole gives the remaining bias, which is subtracted. This works for every approximation, since all it takes is to
fit it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kronscope.curvature import SecondMoment
from kronscope.errors import ConvergenceError, DataError
from kronscope.gradients.atoms import Atoms, DenseAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Operator
from kronscope.measures.cosines import cosine
from kronscope.measures.partition import random_groups

__all__ = ["Estimate", "OtherDraws", "Resampler"]

_GROUPS = 20
Fitter = Callable[[GradientStream], Operator]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error.

    Attributes:
        value: The estimate.
        stderr: Its standard error; NaN where it is not known.
        note: What a reader must know, such as why there is no standard error.

    >>> Estimate(0.91, 0.02).stderr
    0.02
    """

    value: float
    stderr: float
    note: str = ""


class Resampler:
    """Estimates cosines with an error bar, by fitting again with one group of samples, or of label draws, left out.

    See the head of this module for the method.

    Args:
        truth: The gradients that the matrix H is made of.
        fitted: The gradients that approximations are fitted on; may be the same object.
        by: ``"samples"`` for the error bar of a population that the samples came from, ``"draws"`` for that of the
            label noise of these samples.
        fixed_truth: Whether H is exact; groups are then left out of ``fitted`` only.
        groups: Number of groups of samples or draws.
        whole_square: Only for samples from a finite whole, such as every k-th step of a run of T steps, where the
            answer is to be that of all T: the sum of the squared weights of all T, scaled so that the weights sum to
            one (1/T where they are equal). 0 is for an infinite population. It matters because the norm of H also has
            the pair that each step makes with itself.

    Raises:
        DataError: there are too few samples or draws to leave any out.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> estimate = Resampler(stream, stream, "samples").cosine(ks.approx.get("shampoo2").fit)
    >>> 0 < estimate.stderr < 0.1
    True
    """

    def __init__(
        self,
        truth: GradientStream,
        fitted: GradientStream,
        by: str,
        *,
        fixed_truth: bool = False,
        groups: int = _GROUPS,
        whole_square: float = 0.0,
    ) -> None:
        self._whole_square = whole_square
        self.truth, self.fitted, self.by, self.fixed_truth = truth, fitted, by, fixed_truth
        drawn = fitted if fixed_truth else truth
        units = truth.num_samples if by == "samples" else drawn.columns
        self.count = min(units, groups)
        if self.count < 3:
            raise DataError(f"an error bar needs at least three {by}, got {units}; use more {by}.")
        self._groups = random_groups(truth.num_samples, self.count, along_time=whole_square > 0)
        self._norms = self._truth_norms()
        self._whole = (truth, fitted) if by == "draws" else self._without(-1)
        self._replicates = [self._without(group) for group in range(self.count)]

    @property
    def norm(self) -> float:
        """The norm of the matrix that is estimated, at the scale of the truth's weights."""
        return self._norms[0] * self.truth.total_weight()

    def on_truth(self) -> Resampler:
        """Return a resampler for approximations that are fitted on the truth itself."""
        return self if self.fitted is self.truth else Resampler(self.truth, self.truth, self.by)

    def cosine(self, fit: Fitter) -> Estimate:
        """Estimate the cosine between the truth and what ``fit`` makes of the fitted gradients."""
        whole = self._one(fit, *self._whole, self._norms[0])
        try:
            values = [
                self._one(fit, truth, fitted, norm)
                for (truth, fitted), norm in zip(self._replicates, self._norms[1:], strict=True)
            ]
        except ConvergenceError as error:
            if not self.fixed_truth:
                raise
            # the fit itself is good; only its error bar is unknown
            return Estimate(whole, math.nan, f"no error bar: with some {self.by} left out, {error}")
        left_out = torch.tensor(values, dtype=torch.float64)
        count = self.count
        spread = float(((left_out - left_out.mean()) ** 2).sum())
        stderr = math.sqrt((count - 1) / count * spread)
        if self.fixed_truth:
            # this very fit is reported, so no bias is taken off
            return Estimate(whole, stderr)
        corrected = count * whole - (count - 1) * float(left_out.mean())
        if self._whole_square:
            # this share of the finite whole was seen: so much of the bias belongs to the answer and does not vary
            seen = min(1.0, self._whole_square / self._square)
            return Estimate(corrected + seen * (whole - corrected), stderr * math.sqrt(1 - seen))
        return Estimate(corrected, stderr)

    def _one(self, fit: Fitter, truth: GradientStream, fitted: GradientStream, norm: float) -> float:
        operator = fit(fitted)
        size = operator.norm() * norm
        return SecondMoment(truth).inner(operator) / size if size > 0 else math.nan

    def _truth_norms(self) -> list[float]:
        """Norms of the truth, whole and with each group left out, from pairs of different samples or draws."""
        moment = SecondMoment(self.truth)
        if self.fixed_truth:
            return [moment.norm()] * (self.count + 1)
        if self.by == "draws":
            return _draw_norms(self.truth, self.count)
        weights = self.truth.weights()
        self._square = float(weights.square().sum() / weights.sum() ** 2)
        pairs = moment.pair_sums(self._groups)
        each = moment.own_sums()  # w_i² S_ii
        itself_each = torch.where(weights > 0, each / weights.clamp_min(torch.finfo(weights.dtype).tiny), 0.0)
        own, itself, squares, masses = (
            torch.zeros(self.count, dtype=torch.float64).index_add_(0, self._groups, values)
            for values in (each, itself_each, weights.square(), weights)
        )
        norms = []
        for group in range(-1, self.count):
            keep = torch.arange(self.count) != group
            mass = float(masses[keep].sum())
            # Σ_{i≠j} w_i w_j S_ij over Σ_{i≠j} w_i w_j, for weights that sum to one
            distinct = float(pairs[keep][:, keep].sum() - own[keep].sum())
            share = mass * mass - float(squares[keep].sum())
            square = distinct / share if share > 0 else math.nan
            if self._whole_square:
                # the finite whole has this share of pairs of a sample with itself, each of mean E‖g‖⁴
                square *= 1 - self._whole_square
                square += self._whole_square * float(itself[keep].sum()) / mass
            norms.append(math.sqrt(max(square, 0.0)) if square == square else math.nan)
        return norms

    def _without(self, group: int) -> tuple[GradientStream, GradientStream]:
        if self.by == "draws":
            if self.fixed_truth:
                return self.truth, _fewer_draws(self.fitted, group, self.count)
            truth = _fewer_draws(self.truth, group, self.count)
            return truth, (truth if self.fitted is self.truth else self.fitted)
        keep = self._groups != group
        fitted = _reweighted(self.fitted, keep)
        if self.fixed_truth:
            return self.truth, fitted
        return (fitted if self.fitted is self.truth else _reweighted(self.truth, keep)), fitted


class OtherDraws:
    """Error bars of approximations that are fitted on a few label draws per sample, with an exact truth.

    One group of samples after the other gets new label draws, and the approximation is fitted again. If a group's label
    noise :math:`e` moves the cosine by :math:`a e`, then new draws with noise :math:`e'` change it by :math:`a (e' -
    e)`, whose mean square is twice the variance of :math:`a e`. So the variance of the cosine is half the sum of the
    squared changes.

    Args:
        truth: Stream of the matrix.
        fitted: Stream the approximations are fitted on.
        spare: As many other draws of the same samples.

    Raises:
        DataError: there are too few samples to see how they vary.
    """

    fixed_truth = True

    def __init__(self, truth: GradientStream, fitted: GradientStream, spare: GradientStream) -> None:
        count = min(fitted.num_samples, _GROUPS)
        if count < 3:
            raise DataError(f"an error bar needs at least three samples, got {count}; use more samples.")
        self._moment, self._fitted = SecondMoment(truth), fitted
        groups = random_groups(fitted.num_samples, count)
        self._replicates = [fitted.mixed(spare, groups == group) for group in range(count)]
        for replicate in self._replicates:
            # there are many at once, so none may keep the gradients it forms
            replicate.keep_bytes = 0

    def cosine(self, fit: Fitter) -> Estimate:
        """Return the cosine of what ``fit`` makes of the fitted stream with the truth."""
        value = cosine(self._moment, fit(self._fitted))
        try:
            moved = [cosine(self._moment, fit(replicate)) for replicate in self._replicates]
        except ConvergenceError as error:
            # the fit itself is good; only its error bar is unknown
            return Estimate(value, math.nan, f"no error bar: with other labels drawn, {error}")
        return Estimate(value, math.sqrt(sum((other - value) ** 2 for other in moved) / 2))


def _reweighted(stream: GradientStream, keep: Tensor) -> GradientStream:
    weights = stream.weights() * keep
    return SecondMoment(stream).reweighted(weights / weights.sum()).stream


def _fewer_draws(stream: GradientStream, group: int, groups: int) -> GradientStream:
    fewer = stream.map(partial(_drop_columns, group=group, groups=groups))
    # there are many at once, so none may keep the gradients it forms
    fewer.keep_bytes = 0
    return fewer


def _drop_columns(atoms: Atoms, group: int, groups: int) -> Atoms:
    """Leave a group of label draws out, and scale the others so that they are a mean again."""
    count = atoms.columns
    keep = [index for index in range(count) if index % groups != group]
    scale = math.sqrt(count / len(keep))
    if isinstance(atoms, DenseAtoms):
        return DenseAtoms(atoms.grads[:, keep] * scale, atoms.weights, atoms.samples)
    rows, cols = atoms.row_factors, atoms.col_factors
    rows = rows[:, keep] if rows.shape[1] == count else rows
    cols = cols[:, keep] if cols.shape[1] == count else cols
    # a gradient is a product of both sides, so one is scaled: the one that has the columns
    if rows.shape[1] == len(keep):
        rows = rows * scale
    else:
        cols = cols * scale
    return replace(atoms, row_factors=rows, col_factors=cols)


def _draw_norms(stream: GradientStream, groups: int) -> list[float]:
    """Norms for exact labels of these samples, from pairs of different samples and of different draws of one sample."""
    count = stream.columns
    norms = []
    for dropped in range(-1, groups):
        kept = stream if dropped < 0 else _fewer_draws(stream, dropped, groups)
        moment = SecondMoment(kept)
        draws = sum(index % groups != dropped for index in range(count))
        own, same = float(moment.own_sums().sum()), float(moment.own_sums(same_column=True).sum())
        # a draw's pair with itself is too large, so the pairs of different draws of the sample count for it too
        unbiased = moment.norm_squared() - own + (own - same) * draws / (draws - 1)
        norms.append(math.sqrt(max(unbiased, 0.0)))
    return norms
