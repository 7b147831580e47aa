"""Cosines, spectra and error bars, and the results that hold them."""

from __future__ import annotations

from kronscope.measures.adagrad import measure_history
from kronscope.measures.batches import batch_stream
from kronscope.measures.cosines import cosine, relative_error
from kronscope.measures.curves import batch_size_curve, exponent_curve, kronecker_spectrum
from kronscope.measures.fits import Fit
from kronscope.measures.measure import measure, measure_fits, second_moment
from kronscope.measures.probes import Probes
from kronscope.measures.resampling import Estimate, Resampler
from kronscope.measures.results import Results
from kronscope.measures.rows import Detail, Row
from kronscope.measures.steps import StepQuality, step_quality
from kronscope.measures.whole import WholeModel

__all__ = [
    "Detail",
    "Estimate",
    "Fit",
    "Probes",
    "Resampler",
    "Results",
    "Row",
    "StepQuality",
    "WholeModel",
    "batch_size_curve",
    "batch_stream",
    "cosine",
    "exponent_curve",
    "kronecker_spectrum",
    "measure",
    "measure_fits",
    "measure_history",
    "relative_error",
    "second_moment",
    "step_quality",
]
