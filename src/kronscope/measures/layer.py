"""All cosines of one layer: what :func:`kronscope.measure` and the history share once the streams are there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kronscope.approx import Approximation, Optimal, options_of
from kronscope.curvature import SecondMoment
from kronscope.errors import ConvergenceError, DataError, NotFactoredError
from kronscope.gradients.stream import GradientStream
from kronscope.measures.batches import FitBatches
from kronscope.measures.cosines import cosine, relative_error
from kronscope.measures.estimates import RandomColumns, checked
from kronscope.measures.facts import MatrixFacts, matrix_facts, why_no_eigenvalue
from kronscope.measures.operators import Given
from kronscope.measures.population import FEWEST_RECORDED, FEWEST_SAMPLES, PopulationHalves, checked_population
from kronscope.measures.probes import Probes
from kronscope.measures.resampling import Estimate, OtherDraws, Resampler
from kronscope.measures.rows import Detail, Row

__all__ = ["Condition", "LayerStreams", "estimated_cosine", "layer_rows"]

_Resampling = Resampler | OtherDraws | RandomColumns | PopulationHalves


@dataclass(frozen=True)
class Condition:
    """What a row says about itself besides its numbers."""

    layer: str
    step: int
    truth: str
    labels: str
    batch_size: int
    samples: int

    def detail(self, kind: str, values: Mapping[str, Any], options: str = "") -> Detail:
        """A curve under this condition."""
        return Detail(self.layer, self.step, self.truth, self.labels, self.batch_size, kind, values, options)


@dataclass(frozen=True)
class LayerStreams:
    """The streams of one layer.

    Attributes:
        truth: Atoms of the matrix every cosine is taken with.
        fitted: Atoms the approximations are fitted on, of single samples.
        resample: How error bars are made: None, ``"samples"`` (population), ``"columns"`` or ``"drawn fit"``.
        note: What every row of the layer has to say, such as that the truth was drawn.
        whole_square: For a thinned history, see :class:`Resampler`.
        spare: Other label draws of the samples that are fitted on, where the draws are too few to leave some out.
        batches: The batches that a fit is the expectation over.
        eigenvalue: Whether the largest eigenvalue of the truth is wanted.
    """

    truth: GradientStream
    fitted: GradientStream
    resample: str | None = None
    note: str = ""
    whole_square: float = 0.0
    spare: GradientStream | None = None
    batches: FitBatches = field(default_factory=FitBatches)
    eigenvalue: bool = False


def layer_rows(
    streams: LayerStreams,
    condition: Condition,
    approximations: Sequence[Approximation],
    *,
    probes: Probes | None = None,
) -> Iterator[Row]:
    """Yield one row per approximation, as they are computed.

    Args:
        streams: The layer's atoms.
        condition: Names and counts for the rows.
        approximations: What to fit.
        probes: Use the paper's estimator instead of exact values.
    """
    batched = streams.batches.of(streams.fitted)
    # with two of them, one table serves all; of random columns only halves are fitted
    several = sum(approximation.in_shampoo_basis for approximation in approximations) > 1
    if several and not streams.truth.random_columns:
        for factor in SecondMoment(batched).factors():
            _ = factor.spectrum
    estimates = _Estimates(streams, probes)
    if several and isinstance(estimates.resampler, RandomColumns) and streams.fitted is streams.truth:
        estimates.resampler.decompose()
    started = time.perf_counter()
    facts = _facts(streams, estimates.truth, estimates.resampler, probes)
    for approximation in approximations:
        stream = batched if approximation.uses_batches else streams.fitted
        if approximation.fits_truth:
            stream = streams.truth
        found = estimates.of(approximation, stream)
        options = [options_of(approximation), streams.batches.options if stream is batched else ""]
        yield Row(
            layer=condition.layer,
            rows=streams.truth.shape[0],
            cols=streams.truth.shape[1],
            step=condition.step,
            truth=condition.truth,
            labels=condition.labels,
            batch_size=condition.batch_size,
            approximation=approximation.name,
            cosine=found.value,
            stderr=found.stderr,
            relative_error=relative_error(found.value),
            samples=condition.samples,
            seconds=time.perf_counter() - started,
            note="; ".join(filter(None, [*estimates.notes, found.note])),
            options=", ".join(filter(None, options)),
            trace=facts.trace,
            norm=facts.norm,
            effective_rank=facts.effective_rank,
            leading_eigenvalue=facts.leading_eigenvalue,
        )
        started = time.perf_counter()


class _Estimates:
    """A layer's cosines, each with the error bar that its streams allow.

    Args:
        streams: The layer's atoms.
        probes: Use the paper's estimator instead of exact values.

    Attributes:
        truth: The matrix.
        resampler: Where error bars come from; None for exact values.
        notes: What every row says.
    """

    def __init__(self, streams: LayerStreams, probes: Probes | None) -> None:
        self.truth = SecondMoment(streams.truth)
        self.resampler: _Resampling | None = None
        self.notes = [streams.note]
        self._streams, self._probes, self._silence = streams, probes, ""
        try:
            self.resampler = _resampler(streams)
        except DataError as error:
            if streams.whole_square:
                self._silence = str(error)  # so few recorded steps say nothing about the others
            elif streams.resample == "samples":
                raise
            else:
                self.notes.append(str(error))

    def of(self, approximation: Approximation, stream: GradientStream) -> Estimate:
        """Fit to a stream and compare; what cannot be said is NaN with a note."""
        try:
            found = self._estimate(approximation, stream)
        except (NotFactoredError, ConvergenceError, DataError) as error:
            return Estimate(math.nan, math.nan, str(error))
        if math.isnan(found.value) and not found.note:
            return replace(found, note="the truth or the fit is zero: there is no direction to compare")
        return found

    def _estimate(self, approximation: Approximation, stream: GradientStream) -> Estimate:
        streams, resampler = self._streams, self.resampler
        if self._probes is not None:
            return _probed(self._probes, streams, approximation, stream)
        if self._silence:
            return Estimate(math.nan, math.nan, self._silence)
        if isinstance(resampler, RandomColumns):
            return estimated_cosine(resampler, streams, approximation, streams.batches)
        # an operator that is given does not vary with the labels that fits are drawn on
        given = approximation.fits_truth or isinstance(approximation, Given)
        if resampler is None or (resampler.fixed_truth and given):
            return Estimate(_plain_cosine(self.truth, approximation, stream), math.nan)
        if isinstance(resampler, PopulationHalves) and resampler.knows(approximation, stream):
            found = resampler.cosine(approximation)
        else:
            refits = resampler.refits if isinstance(resampler, PopulationHalves) else resampler
            found = _resampled(refits, approximation, streams.batches)
        population = streams.resample == "samples" and not streams.whole_square
        return checked_population(found, streams.truth.num_samples) if population else found


def _facts(
    streams: LayerStreams,
    truth: SecondMoment,
    resampler: _Resampling | None,
    probes: Probes | None,
) -> MatrixFacts:
    """What rows say of the matrix; its norm is not computed for probes, and not known from few steps of a run."""
    if probes is not None or (streams.whole_square and resampler is None):
        return MatrixFacts(truth.trace(), math.nan)
    norm = None
    if isinstance(resampler, (Resampler, PopulationHalves)) and not resampler.fixed_truth:
        norm = resampler.norm
    wanted = streams.eigenvalue and not why_no_eigenvalue(streams.truth, population=norm is not None)
    try:
        return matrix_facts(streams.truth, norm, eigenvalue=wanted)
    except DataError:  # beyond the range of float64, as each row will say
        return MatrixFacts(truth.trace(), math.nan)


def _probed(probes: Probes, streams: LayerStreams, approximation: Approximation, stream: GradientStream) -> Estimate:
    """The paper's estimator; where the truth itself is estimated, its error and what a fit sees of itself count too."""
    truth, operator = SecondMoment(streams.truth), approximation.fit(stream)
    found = probes.cosine(truth, operator)
    if not streams.truth.random_columns:
        return found
    columns = RandomColumns.of(streams.truth)
    right, size = (
        estimated_cosine(columns, streams, approximation, streams.batches),
        columns.plain_norm * operator.norm(),
    )
    if math.isnan(right.value) or not size > 0:
        return replace(right, stderr=math.hypot(right.stderr, found.stderr))
    # what the probes would say without noise is the plain cosine
    share = right.value * size / truth.inner(operator)
    return checked(found.value * share, math.hypot(found.stderr * share, right.stderr))


def _plain_cosine(truth: SecondMoment, approximation: Approximation, stream: GradientStream) -> float:
    if isinstance(approximation, Optimal):
        # σ₁/‖H‖: the fit knows its inner product with the matrix already
        norm = truth.norm()
        return min(1.0, approximation.solve(stream).sigma / norm) if norm > 0 else math.nan
    return cosine(truth, approximation.fit(stream))


def _resampler(streams: LayerStreams) -> _Resampling | None:
    if streams.resample is None:
        return None
    if streams.resample == "columns":
        return RandomColumns.of(streams.truth)
    if streams.resample == "samples":
        if streams.truth.num_samples >= (FEWEST_RECORDED if streams.whole_square else FEWEST_SAMPLES):
            return PopulationHalves(streams.truth, streams.fitted, streams.whole_square)
        return Resampler(streams.truth, streams.fitted, "samples", whole_square=streams.whole_square)
    return _drawn_fit(streams)


def _drawn_fit(streams: LayerStreams) -> Resampler | OtherDraws:
    """Error bars of a fit on drawn labels, as if the truth were exact."""
    if streams.spare is not None:
        return OtherDraws(streams.truth, streams.fitted, streams.spare)
    return Resampler(streams.truth, streams.fitted, "draws", fixed_truth=True)


def estimated_cosine(
    columns: RandomColumns, streams: LayerStreams, approximation: Approximation, batches: FitBatches
) -> Estimate:
    """The cosine with a truth that is estimated from random columns.

    Args:
        columns: The truth.
        streams: The layer's atoms.
        approximation: What to fit.
        batches: The batches it is fitted on.
    """
    if isinstance(approximation, Given):
        return columns.cosine_with(approximation.fit(streams.truth))
    if approximation.fits_truth or streams.fitted is streams.truth:
        return columns.cosine(approximation)
    fitted = batches.of(streams.fitted) if approximation.uses_batches else streams.fitted
    estimate = columns.cosine_with(approximation.fit(fitted))
    if not streams.fitted.draws:
        return estimate
    own = _resampled(_drawn_fit(streams), approximation, batches)
    return checked(estimate.value, math.hypot(estimate.stderr, own.stderr))


def _resampled(
    resampler: Resampler | OtherDraws,
    approximation: Approximation,
    batches: FitBatches,
) -> Estimate:
    if approximation.fits_truth and isinstance(resampler, Resampler):
        return resampler.on_truth().cosine(approximation.fit)
    if not approximation.uses_batches:
        return resampler.cosine(approximation.fit)
    return resampler.cosine(lambda stream: approximation.fit(batches.of(stream)))
