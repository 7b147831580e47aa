"""Which label columns the truth, the fits and their error bars are made of: decided here, and nowhere else.

A sample's labels come as columns, each of which gives one gradient: the exact columns of the model's own output
distribution, a few labels drawn from it, or the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kronscope.gradients import GradientStream, LayerPlan, Recorder
from kronscope.measures.batches import Batches
from kronscope.measures.fits import Fit

if TYPE_CHECKING:
    from kronscope.measures.options import MeasureOptions

__all__ = ["PILOT_DRAWS", "TRUTHS", "CallColumns", "Columns", "FitColumns", "first_columns", "sufficient_draws"]

# Each truth, and the labels its own atoms have.
TRUTHS = {"gauss_newton": "exact", "empirical_fisher": "real"}
# Above this many columns and multiply-adds, exact labels give way to draws.
_MANY_COLUMNS = 100
_MANY_OPERATIONS = 1e11
_MANY_PAIRS = 2e13
PILOT_DRAWS, _MOST_DRAWS = 8, 128
# Fewer label draws than this say too little about how they vary when one is left out.
_FEW_DRAWS = 5


@dataclass(frozen=True)
class Columns:
    """Label columns to capture gradients with.

    Attributes:
        labels: ``"exact"``, ``"sampled"`` or ``"real"``.
        draws: Columns of each sample, for sampled labels.
        seed: Of the draws.
    """

    labels: str
    draws: int = 1
    seed: int = 0

    @property
    def drawn(self) -> bool:
        """Whether the columns are draws, which vary."""
        return self.labels == "sampled"

    def plan(self, recorder: Recorder) -> list[LayerPlan]:
        """How each layer's atoms are captured."""
        return recorder.plan(self.labels, self.draws)

    def streams(self, recorder: Recorder, names: Sequence[str], *, cache: bool) -> dict[str, GradientStream]:
        """The atoms of some layers."""
        return recorder.streams(self.labels, draws=self.draws, names=names, cache=cache, seed=self.seed)


@dataclass(frozen=True)
class FitColumns:
    """What the rows and curves of one fit are made of.

    Attributes:
        fitted: What the approximations are fitted on; the truth's own columns where the labels are the truth's.
        batches: The batches the fit is the expectation over.
        resample: How error bars are made: None, ``"samples"`` (population), ``"draws"`` (of the truth) or
            ``"drawn fit"``.
        spare: As many other draws, for the error bar of a fit on so few that none can be left out.
    """

    fitted: Columns
    batches: Batches
    resample: str | None = None
    spare: Columns | None = None

    @property
    def labels(self) -> str:
        """The labels that rows and curves report."""
        return self.fitted.labels


@dataclass(frozen=True)
class CallColumns:
    """The columns of one call: the truth's, and from these those of every fit.

    Args:
        options: What was asked.
        truth: The columns that the truth is made of.
    """

    options: MeasureOptions
    truth: Columns

    def of(self, fit: Fit) -> FitColumns:
        """Decide what a fit is made of."""
        options = self.options
        own = TRUTHS[options.truth]
        asked = fit.labels or own
        # where the truth is drawn, sampled labels are those that were drawn for it
        is_truths = asked == own or (self.truth.drawn and asked == "sampled")
        fitted = self.truth if is_truths else Columns(asked)
        if asked == "sampled" and not is_truths:
            # other draws than the truth's
            fitted = Columns(asked, options.draws, options.seed + 1)
        resample = None
        if fit.probes(options.seed) is None:
            drawn = "draws" if self.truth.drawn else "drawn fit" if asked == "sampled" else None
            resample = "samples" if options.population else drawn
        few = resample == "drawn fit" and fitted.draws < _FEW_DRAWS
        return FitColumns(
            fitted=fitted,
            # where draws stand for exact labels, the batch size means as little as with these
            batches=Batches(fit.batch_size, options.replacement, asked),
            resample=resample,
            spare=replace(fitted, seed=options.seed + 2) if few else None,
        )

    def all(self) -> list[Columns]:
        """Everything to capture, each once: the truth's columns first, spare ones last."""
        fits = [self.of(fit) for fit in self.options.fits]
        fitted = sorted({fit.fitted for fit in fits} - {self.truth}, key=lambda columns: columns.labels)
        return [self.truth, *fitted, *{fit.spare for fit in fits if fit.spare is not None}]


def first_columns(options: MeasureOptions, recorder: Recorder, parameters: int) -> Columns:
    """Choose what the truth is made of: its own labels, or a few draws of them to see how many it takes."""
    labels, exact = TRUTHS[options.truth], recorder.exact_columns
    if labels != "exact":
        return Columns(labels)
    many = _costly(recorder, parameters) if options.max_columns is None else exact > options.max_columns
    return Columns("sampled", PILOT_DRAWS, options.seed) if many else Columns(labels)


def sufficient_draws(stderr: float, accuracy: float, exact_columns: int) -> int:
    """Label draws for a standard error of ``accuracy``, from that of a few draws; no more than exact columns."""
    needed = PILOT_DRAWS * (stderr / accuracy) ** 2
    return int(min(max(PILOT_DRAWS, -(-needed // 1)), _MOST_DRAWS, max(exact_columns, PILOT_DRAWS)))


def _costly(recorder: Recorder, parameters: int) -> bool:
    """Whether exact labels cost so much that draws are the better answer."""
    columns, samples = recorder.exact_columns, recorder.num_samples
    if columns <= _MANY_COLUMNS:
        return False
    largest = max(spec.shape[0] * spec.shape[1] for spec in recorder.specs)
    return columns * samples * parameters > _MANY_OPERATIONS or (columns * samples) ** 2 * largest > _MANY_PAIRS
