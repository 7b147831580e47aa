"""Which label columns the truth, the fits and their error bars are made of: decided here, and nowhere else.

A sample's labels come as columns, each of which gives one gradient: the exact columns of the model's own output
distribution, a few labels drawn from it, or the real one. Where the exact columns of the truth are too many, it is made
of mixed ones: the largest as they are, the others added up with random signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronscope.gradients import GradientStream, LayerPlan, Recorder
from kronscope.measures.batches import FitBatches
from kronscope.measures.estimates import FEWEST_RANDOM
from kronscope.measures.fits import Fit

if TYPE_CHECKING:
    from kronscope.measures.options import MeasureOptions

__all__ = ["TRUTHS", "CallColumns", "ColumnRequest", "FitColumns", "TruthColumns"]

# Each truth, and the labels its own atoms have.
TRUTHS = {"gauss_newton": "exact", "empirical_fisher": "real"}
# Above this many columns and multiply-adds, exact labels give way to an estimate.
_MANY_COLUMNS = 100
_MANY_OPERATIONS = 1e11
_MANY_PAIRS = 2e13
# About so many columns in all gave a standard error of one percent where many samples carry the matrix; an estimate
# starts with that, at least and at most so many of each sample, and goes on to as many of each.
_FOR_ONE_PERCENT = 180
_FIRST_COLUMNS, _MOST_COLUMNS = (FEWEST_RANDOM, 16), 256
# So many random columns are never all alike, or hardly ever.
_NOT_ALIKE = 8
# Fewer label draws than this say too little about how they vary when one is left out.
_FEW_DRAWS = 5


@dataclass(frozen=True)
class ColumnRequest:
    """Label columns to capture gradients with.

    Attributes:
        labels: ``"exact"``, ``"sampled"``, ``"mixed"`` or ``"real"``.
        draws: Random columns of each sample, for sampled and mixed labels.
        seed: Of the draws.
        fixed: Exact columns of each sample, for mixed labels.
    """

    labels: str
    draws: int = 1
    seed: int = 0
    fixed: int = 0

    @property
    def mixed(self) -> bool:
        """Whether the columns are an estimate of the exact ones."""
        return self.labels == "mixed"

    def plan(self, recorder: Recorder) -> list[LayerPlan]:
        """How each layer's atoms are captured."""
        return recorder.plan(self.labels, self.draws, fixed=self.fixed)

    def streams(self, recorder: Recorder, names: Sequence[str], *, cache: bool) -> dict[str, GradientStream]:
        """The atoms of some layers."""
        return recorder.streams(
            self.labels, draws=self.draws, names=names, cache=cache, seed=self.seed, fixed=self.fixed
        )


@dataclass(frozen=True)
class FitColumns:
    """What the rows and curves of one fit are made of.

    Attributes:
        fitted: What the approximations are fitted on; the truth's own columns where the labels are the truth's.
        batches: The batches the fit is the expectation over.
        resample: How error bars are made: None, ``"samples"`` (population), ``"columns"`` (of the truth) or
            ``"drawn fit"``.
        spare: As many other draws, for the error bar of a fit on so few that none can be left out.
    """

    fitted: ColumnRequest
    batches: FitBatches
    resample: str | None = None
    spare: ColumnRequest | None = None

    @property
    def labels(self) -> str:
        """The labels that rows and curves report; random columns stand for exact ones."""
        return "exact" if self.fitted.mixed else self.fitted.labels


@dataclass(frozen=True)
class CallColumns:
    """The columns of one call: the truth's, and from these those of every fit.

    Args:
        options: What was asked.
        truth: The columns that the truth is made of.
    """

    options: MeasureOptions
    truth: ColumnRequest

    def of(self, fit: Fit) -> FitColumns:
        """Decide what a fit is made of."""
        options = self.options
        own = TRUTHS[options.truth]
        asked = fit.labels or own
        fitted = self.truth if asked == own else ColumnRequest(asked)
        if asked == "sampled":
            # other draws than the truth's
            fitted = ColumnRequest(asked, options.draws, options.seed + 1)
        resample = None
        if fit.probes(options.seed) is None:
            drawn = "columns" if self.truth.mixed else "drawn fit" if asked == "sampled" else None
            resample = "samples" if options.population else drawn
        few = asked == "sampled" and resample in ("columns", "drawn fit") and fitted.draws < _FEW_DRAWS
        return FitColumns(
            fitted=fitted,
            # a population has no end, so that no batch has a sample twice, however it is drawn
            batches=FitBatches(fit.batch_size, options.replacement or options.population, asked),
            resample=resample,
            spare=replace(fitted, seed=options.seed + 2) if few else None,
        )

    def all(self) -> list[ColumnRequest]:
        """Everything to capture, each once: the truth's columns first, spare ones last."""
        fits = [self.of(fit) for fit in self.options.fits]
        fitted = sorted({fit.fitted for fit in fits} - {self.truth}, key=lambda columns: columns.labels)
        return [self.truth, *fitted, *{fit.spare for fit in fits if fit.spare is not None}]


class TruthColumns:
    """Chooses what the truth is made of: its own labels, or where these are too many, some of their columns.

    Args:
        options: What was asked.
        recorder: The model and the data.
        parameters: Number of the model's parameters, which a backward pass costs.
    """

    def __init__(self, options: MeasureOptions, recorder: Recorder, parameters: int) -> None:
        self._seed, self._recorder = options.seed, recorder
        self._own, self._exact = TRUTHS[options.truth], recorder.exact_columns
        many = _costly(recorder, parameters) if options.max_columns is None else self._exact > options.max_columns
        self._estimated = self._own == "exact" and many
        self._asked, self._accuracy = options.max_columns, options.accuracy
        self._samples = recorder.num_samples
        self._left: Tensor | None = None

    def first(self) -> ColumnRequest:
        """What to begin with."""
        return self.of(self._first_count()) if self._estimated else ColumnRequest(self._own)

    def _first_count(self) -> int:
        least, most = _FIRST_COLUMNS
        if self._asked is not None:
            asked = max(self._asked, 2 * FEWEST_RANDOM)
            # where no error is too large there is one round only, with all of them
            return asked if math.isinf(self._accuracy) else min(most, asked)
        in_all = _FOR_ONE_PERCENT * (0.01 / self._accuracy) ** 2
        # an even number, so that the halves are alike
        count = min(most, max(least, 2 * math.ceil(in_all / self._samples / 2)))
        # where the model is sure of itself, exact columns leave so little that more of them are worth their cost
        if count < most and most * self._variance(most) < count * self._variance(count) / 2:
            return most
        return count

    def enough(self, columns: ColumnRequest, stderr: float, accuracy: float) -> ColumnRequest:
        """As many columns as it takes for a standard error of ``accuracy``, where some have given ``stderr``."""
        now = columns.fixed + columns.draws
        if math.isinf(accuracy):
            return columns
        if math.isnan(stderr):
            needed = 4.0 * now
        else:
            needed = 1.1 * columns.draws * (stderr / accuracy) ** 2 + columns.fixed if stderr > accuracy else now
        # powers of two, so that layers share their passes over the data
        wanted = now if needed <= now else 2 ** math.ceil(math.log2(needed))
        return columns if wanted == now else self.of(min(wanted, max(_MOST_COLUMNS, now)))

    def most(self) -> ColumnRequest:
        """As many as an estimate may have."""
        return self.of(_MOST_COLUMNS)

    def of(self, count: int) -> ColumnRequest:
        """The best columns of a number: all where there are no more, else as few exact ones as leave least variance."""
        if count >= self._exact:
            return ColumnRequest("exact")
        left = self._remainders(count)
        fixed = int((left / (count - torch.arange(len(left)))).argmin())
        return ColumnRequest("mixed", count - fixed, self._seed, fixed)

    def _variance(self, count: int) -> float:
        """The variance of an estimate from so many columns, but for a factor."""
        left = self._remainders(count)
        return float((left / (count - torch.arange(len(left)))).min())

    def _remainders(self, count: int) -> Tensor:
        """What is left of the matrix without as many exact columns as there may be among ``count``, from none on.

        The remainder's variance goes with its square and with one over the number of random columns.
        """
        if self._left is None:
            self._left = self._recorder.remainders(min(_MOST_COLUMNS, self._exact))
        # where one pair of columns makes up the remainder, its random sums are two numbers, and a few of them may agree
        random = max(FEWEST_RANDOM, min(_NOT_ALIKE, count // 2), count // 4)
        most = min(count - random, len(self._left) - 1)
        return self._left[: most + 1]


def _costly(recorder: Recorder, parameters: int) -> bool:
    """Whether exact labels cost so much that an estimate is the better answer."""
    columns, samples = recorder.exact_columns, recorder.num_samples
    if columns <= _MANY_COLUMNS:
        return False
    largest = max(spec.shape[0] * spec.shape[1] for spec in recorder.specs)
    return columns * samples * parameters > _MANY_OPERATIONS or (columns * samples) ** 2 * largest > _MANY_PAIRS
