"""Curves where the truth is estimated from random columns: the same values and error bars as the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kronscope.approx import Approximation, get
from kronscope.curvature import SecondMoment
from kronscope.errors import KronscopeError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct
from kronscope.measures.batches import FitBatches
from kronscope.measures.curves import EXPONENTS, default_batch_sizes
from kronscope.measures.estimates import RandomColumns
from kronscope.measures.resampling import Estimate
from kronscope.measures.rows import stderr_of, variants

__all__ = ["estimated_batch_sizes", "estimated_exponents"]

# Error bars change slowly along the curve; they are computed here, and in between interpolated.
_BARS_AT = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


def estimated_exponents(columns: RandomColumns, fitted: GradientStream) -> dict[str, list[float]]:
    r"""Return the cosine of :math:`(L \otimes R)^p` with the truth for many p, and its standard error.

    Args:
        columns: The truth.
        fitted: What the factors are made of: the truth's own stream, or one without its random columns.
    """
    if fitted is columns.truth:
        values = columns.powers(EXPONENTS)
        bars = [columns.cosine(get("shampoo", exponent=exponent)).stderr for exponent in _BARS_AT]
    else:
        base = KroneckerProduct(*SecondMoment(fitted).factors())
        values = [columns.cosine_with(base.power(exponent)).value for exponent in EXPONENTS]
        bars = [columns.cosine_with(base.power(exponent)).stderr for exponent in _BARS_AT]
    between = np.interp(EXPONENTS, _BARS_AT, bars).tolist()
    return {"exponent": list(EXPONENTS), "cosine": values, "stderr": between}


def estimated_batch_sizes(
    fitted: GradientStream,
    approximations: Sequence[Approximation],
    estimate: Callable[[Approximation, FitBatches], Estimate],
    batches: FitBatches,
) -> dict[str, list[float]]:
    """Return each approximation's cosine as the batch it is fitted on grows, and its standard error.

    Args:
        fitted: Atoms of single samples.
        approximations: What is fitted.
        estimate: Gives the estimate of a row, for batches.
        batches: Labels and replacement of the batches.
    """
    sizes = default_batch_sizes(fitted.num_samples)
    curves: dict[str, list[float]] = {"batch_size": [float(size) for size in sizes]}
    for approximation in approximations:
        if approximation.fits_truth or not approximation.uses_batches:
            continue
        found: list[Estimate] = []
        for size in sizes:
            if found and batches.labels != "real":  # the model's own labels: the size changes nothing
                found.append(found[0])
                continue
            try:
                found.append(estimate(approximation, FitBatches(size, batches.replacement, batches.labels)))
            except KronscopeError:
                found.append(Estimate(math.nan, math.nan))
        name = variants([approximation])[0]
        curves[name] = [each.value for each in found]
        curves[stderr_of(name)] = [each.stderr for each in found]
    return curves
