r"""Error bars: what the cosine would be for the population the samples came from, or for exact labels.

The plug-in :math:`\|H\|_F^2` counts every sample's pair with itself and is biased up. Here it is the U-statistic over
pairs of different samples (or, for the label noise of fixed samples, of different draws), and the delete-a-group
jackknife removes the first-order bias of everything else and gives the standard error. Any approximation can be put
through it, since it only needs to be fitted again.
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

__all__ = ["Estimate", "OtherDraws", "Resampler"]

_GROUPS = 20
Fit = Callable[[GradientStream], Operator]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error."""

    value: float
    stderr: float
    note: str = ""


class Resampler:
    """Replicates of a pair of streams with one group of samples, or of label draws, left out.

    Args:
        truth: Stream of the matrix.
        fitted: Stream the approximations are fitted on; may be the same object.
        by: ``"samples"`` for the population question, ``"draws"`` for the label noise of these samples.
        fixed_truth: Keep the truth whole and only vary the draws of what is fitted: the truth is exact.
        groups: Number of groups of samples or draws.
        whole_square: For samples that are themselves drawn from a finite whole, such as every k-th step of a run: the
            sum of squares of the whole's weights (1/T for T equal ones), when those sum to one. The question is then
            the value on that whole, its pairs of a sample with itself included.

    Raises:
        DataError: there are too few samples or draws to leave any out.
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
        self._groups = torch.arange(truth.num_samples) % self.count
        self._norms = self._truth_norms()
        self._whole = (truth, fitted) if by == "draws" else self._without(-1)
        self._replicates = [self._without(group) for group in range(self.count)]

    def on_truth(self) -> Resampler:
        """Return a resampler for what is fitted on the truth itself."""
        return self if self.fitted is self.truth else Resampler(self.truth, self.truth, self.by)

    def cosine(self, fit: Fit) -> Estimate:
        """Estimate the cosine of what ``fit`` makes of the fitted stream with the truth."""
        whole = self._one(fit, *self._whole, self._norms[0])
        try:
            values = [
                self._one(fit, truth, fitted, norm)
                for (truth, fitted), norm in zip(self._replicates, self._norms[1:], strict=True)
            ]
        except ConvergenceError as error:
            if not self.fixed_truth:
                raise
            # the fit that was made stands; it is only not known how it varies
            return Estimate(whole, math.nan, f"no error bar: with some {self.by} left out, {error}")
        left_out = torch.tensor(values, dtype=torch.float64)
        count = self.count
        spread = float(((left_out - left_out.mean()) ** 2).sum())
        stderr = math.sqrt((count - 1) / count * spread)
        if self.fixed_truth:
            # the fit that was made is the one reported; only its variation is estimated
            return Estimate(whole, stderr)
        corrected = count * whole - (count - 1) * float(left_out.mean())
        if self._whole_square:
            # the whole is a sample of its own kind with this share of the bias, and this share of it was seen
            seen = min(1.0, self._whole_square / self._square)
            return Estimate(corrected + seen * (whole - corrected), stderr * math.sqrt(1 - seen))
        return Estimate(corrected, stderr)

    def _one(self, fit: Fit, truth: GradientStream, fitted: GradientStream, norm: float) -> float:
        operator = fit(fitted)
        size = operator.norm() * norm
        return SecondMoment(truth).inner(operator) / size if size > 0 else math.nan

    def _truth_norms(self) -> list[float]:
        """Norms of the truth, whole and with each group left out, without the pairs that bias them."""
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
                # E‖g‖⁴ of a sample with itself, in the proportion the whole has it
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
    r"""Error bars of what is fitted on a few label draws per sample, for these samples and an exact truth.

    Groups of samples get other draws in turn. A group's label noise :math:`e` moves the cosine by about
    :math:`a e`, other draws move it to :math:`a e'`, so half the sum of the squared differences is its variance.

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
        groups = torch.arange(fitted.num_samples) % count
        self._replicates = [fitted.mixed(spare, groups == group) for group in range(count)]
        for replicate in self._replicates:
            # many live at once: what each of them forms is not kept
            replicate.keep_bytes = 0

    def cosine(self, fit: Fit) -> Estimate:
        """Return the cosine of what ``fit`` makes of the fitted stream with the truth."""
        value = cosine(self._moment, fit(self._fitted))
        try:
            moved = [cosine(self._moment, fit(replicate)) for replicate in self._replicates]
        except ConvergenceError as error:
            # the fit that was made stands; it is only not known how it varies
            return Estimate(value, math.nan, f"no error bar: with other labels drawn, {error}")
        return Estimate(value, math.sqrt(sum((other - value) ** 2 for other in moved) / 2))


def _reweighted(stream: GradientStream, keep: Tensor) -> GradientStream:
    weights = stream.weights() * keep
    return SecondMoment(stream).reweighted(weights / weights.sum()).stream


def _fewer_draws(stream: GradientStream, group: int, groups: int) -> GradientStream:
    fewer = stream.map(partial(_drop_columns, group=group, groups=groups))
    # many replicates live at once: what each of them forms is not kept
    fewer.keep_bytes = 0
    return fewer


def _drop_columns(atoms: Atoms, group: int, groups: int) -> Atoms:
    """Leave a group of label draws out; the others stand for the mean of fewer."""
    count = atoms.columns
    keep = [index for index in range(count) if index % groups != group]
    scale = math.sqrt(count / len(keep))
    if isinstance(atoms, DenseAtoms):
        return DenseAtoms(atoms.grads[:, keep] * scale, atoms.weights, atoms.samples)
    rows, cols = atoms.row_factors, atoms.col_factors
    rows = rows[:, keep] if rows.shape[1] == count else rows
    cols = cols[:, keep] if cols.shape[1] == count else cols
    # the scale belongs on one side only, and on the one that has the columns
    if rows.shape[1] == len(keep):
        rows = rows * scale
    else:
        cols = cols * scale
    return replace(atoms, row_factors=rows, col_factors=cols)


def _draw_norms(stream: GradientStream, groups: int) -> list[float]:
    """Norms for exact labels of these samples: pairs of different samples, and different draws of one sample."""
    count = stream.columns
    norms = []
    for dropped in range(-1, groups):
        kept = stream if dropped < 0 else _fewer_draws(stream, dropped, groups)
        moment = SecondMoment(kept)
        draws = sum(index % groups != dropped for index in range(count))
        own, same = float(moment.own_sums().sum()), float(moment.own_sums(same_column=True).sum())
        # a draw's pair with itself says nothing of the mean; the other pairs of the sample stand in for it
        unbiased = moment.norm_squared() - own + (own - same) * draws / (draws - 1)
        norms.append(math.sqrt(max(unbiased, 0.0)))
    return norms
